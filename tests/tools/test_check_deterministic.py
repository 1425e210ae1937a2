"""Tests of tools/check_deterministic.py: it compares the weights of pairs of runs, also on a CPU."""

import re

import pytest

from tests.train.conftest import micro


@pytest.fixture
def deterministic(script, monkeypatch):
    module = script("check_deterministic")
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "EMA_STEPS", 2)
    monkeypatch.setattr(module, "ROUNDS", 1)
    return module


@pytest.mark.slow
def test_on_a_cpu_every_pair_is_bit_identical(deterministic, tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(" ".join(str(n**3) for n in range(500 * i, 500 * (i + 1))))
    deterministic.main(tmp_path, micro(data=str(text)))
    kept = (tmp_path / "deterministic.txt").read_text()
    assert capsys.readouterr().out.endswith(kept)
    ran = r"\('[0-9a-f]{12}', \d+\.\d+, \d+\)"
    patterns = [
        f"{recipe} {mode} same bits {ran} {ran}"
        for recipe in ("deepseek_v3", "bf16")
        for mode in ("usual", "deterministic")
    ]
    patterns += [r"ema 0\.0 \d+", r"ema 0\.999 \d+"]
    for line, pattern in zip(kept.split("\n\n")[1].splitlines(), patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_runs_of_other_weights_differ(deterministic):
    a, b = deterministic.Ran("0" * 12, 1.5, 7), deterministic.Ran("1" * 12, 1.5, 7)
    assert deterministic.compared("bf16", False, a, b) == (
        "bf16 usual DIFFER ('000000000000', 1.5, 7) ('111111111111', 1.5, 7)"
    )
