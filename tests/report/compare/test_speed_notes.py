"""Tests of the notes that a speed was affected by the machine, not by the recipe."""

from dataclasses import replace

import pytest

from octile.report.compare.summary import speed_notes
from tests.report.compare.test_compare import compared, curve


def with_speeds(quartiles=None, yardstick_s=None):
    steady = {"speed_quartiles": (900.0, 1000.0), "yardstick_s": 0.002}
    result = compared(curve("a", 3.0, **steady | {"speed_quartiles": quartiles, "yardstick_s": yardstick_s}))
    bf16, other = replace(result.bf16, **steady), replace(result.bf16_other_seed, **steady)
    return replace(result, bf16=bf16, bf16_other_seed=other)


@pytest.mark.parametrize("quartiles", [None, (500.0, 990.0), (900.0, 950.0)])
def test_steady_speeds_have_no_note(quartiles):
    assert speed_notes(with_speeds(quartiles, 0.0025)) == []


def test_a_speed_that_varied_within_a_run_is_noted():
    (note,) = speed_notes(with_speeds((300.0, 960.0)))
    assert "3.2× in a, seed 0" in note
    assert "do not compare the tokens per second" in note


def test_a_machine_that_was_busy_during_a_whole_run_is_noted():
    (note,) = speed_notes(with_speeds((90.0, 100.0), 0.020))
    assert "took 10.0 times as long during a, seed 0 as during bf16, seed 0" in note


def test_files_without_these_measurements_have_no_note():
    assert speed_notes(compared(curve("a", 3.0))) == []
