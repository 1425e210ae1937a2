"""Tests of the timing of interleaved candidates."""

from functools import partial

import pytest
import torch

from octile.bench import timing


def test_candidates_are_interleaved_and_every_other_round_has_the_reverse_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    called: list[str] = []
    timing.seconds({name: partial(called.append, name) for name in "abc"}, rounds=3, warm_up=1)
    assert "".join(called) == "abc" + "abc" + "cba" + "abc"


def test_a_time_is_the_median(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    took = iter([3.0, 1.0, 7.0])
    monkeypatch.setattr(timing, "_cpu_seconds", lambda candidate: next(took))
    assert timing.seconds({"a": lambda: None}, rounds=3) == {"a": 3.0}
