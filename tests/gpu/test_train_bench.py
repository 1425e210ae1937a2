"""`octile bench train` at toy size: the figures that only a GPU gives."""

import pytest

from octile.bench import goals, train
from octile.bench.train import Case
from tests.train.conftest import micro


def test_octile_has_all_its_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "ROUNDS", 1)
    monkeypatch.setattr(train.torchtitan_trainer, "why_not", lambda converters: "not measured here")
    rows = list(train.measure_case(Case("small", 5, 2, True, 200.0), micro(batch_size=8, device="cuda", steps=100)))
    found = {(row.case, row.what) for row in rows}
    for shape in ("", goals.WITHOUT_MTP):
        for name in (goals.FP8_TRAINER, goals.PLAIN_BF16):
            assert {("small", f"{goals.IDLE}, {name}{shape}"), ("small", f"peak memory, {name}{shape}")} <= found
        assert ("small", f"train {goals.FP8_TRAINER}{shape}") in found
    assert all(0 <= row.value < 100 for row in rows if row.what.startswith(goals.IDLE))
    assert all(row.value > 0 for row in rows if row.what.startswith("peak memory"))
