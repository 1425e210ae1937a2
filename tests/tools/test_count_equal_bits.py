"""tools/count_equal_bits.py fails if no text was preempted though its cache has another size than usual."""

import pytest


@pytest.mark.slow
def test_a_count_without_a_preemption_fails(script, monkeypatch, capsys):
    options = ["tiny", "--device", "cpu", "--texts", "2", "--new-tokens", "2", "--pages", "20"]
    monkeypatch.setattr("sys.argv", ["count_equal_bits", *options])
    module = script("count_equal_bits")
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code
    stats, failure, counts = capsys.readouterr().out.splitlines()
    assert "preemptions=0" in stats
    assert failure == "tiny: no text was preempted"
    assert "decoded 4 of 4;" in counts
