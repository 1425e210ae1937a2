"""tools/measure_long_load.py where a package is missing."""

import pytest

from octile import extras
from octile.exit_codes import run_and_exit
from tools import measure_long_load


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("fastapi", 'octile: octile\'s server needs fastapi: pip install "octile[serve]"\n'),
        ("llguidance", 'octile: octile\'s server needs llguidance: pip install "octile[serve]"\n'),
        ("httpx", 'octile: octile\'s tests and the tools that send requests need httpx: pip install "octile[test]"\n'),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, missing, line):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr("sys.argv", ["measure_long_load", "tiny", "1"])
    with pytest.raises(SystemExit, match="2"):
        run_and_exit(measure_long_load.main)
    assert capsys.readouterr().err == line
