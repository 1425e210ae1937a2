"""`octile bench step` at toy size: every value that only a GPU gives."""

import time

import pytest
import torch

from octile.bench import goals, step
from octile.bench.step.models import Sizes
from octile.bench.step.profile import Peak, measured_peak
from octile.models.config import ModelConfig

SIZES = Sizes(layers=2, hidden=512, intermediate=1024, heads=4, batch=2, sequence=256)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "compiled", lambda work: work)
    monkeypatch.setattr(step, "ROUNDS", 1)
    monkeypatch.setattr(step.profile, "measured_peak", lambda: Peak(1e15, 5e14, 4e12))


def test_a_dense_decoder_has_all_its_figures(capsys: pytest.CaptureFixture[str]):
    rows = list(step.dense(SIZES, "cuda", time.monotonic()))
    found = {row.what for row in rows if row.case == goals.DENSE}
    expected = {goals.STEP, goals.OPTIMIZED, goals.SAVED, goals.OUTSIDE}
    expected |= {f"{what}, octile{step.IN_A_GRAPH}" for what in (goals.STEP, goals.OPTIMIZED)}
    assert found >= expected | {"allocated, octile", "cached FP8, of a parameter", "octile: the GPU idles"}
    assert "left out: profile" not in capsys.readouterr().err


def test_a_rank_slice_has_all_its_figures(capsys: pytest.CaptureFixture[str]):
    rows = list(step.mixture(ModelConfig.tiny(), 4, 256, "cuda", time.monotonic()))
    found = {row.what for row in rows if row.case == goals.SLICE}
    assert found >= {goals.STEP, goals.OUTSIDE, "allocated, octile"}
    assert "left out" not in capsys.readouterr().err


def test_a_quantized_weight_takes_two_bytes_and_its_scales():
    rows = list(step.dense(SIZES, "cuda", time.monotonic()))
    (cached,) = (row.value for row in rows if row.what == "cached FP8, of a parameter")
    assert 2.0 <= cached <= 2.1


def test_a_peak_is_measured_for_each_kind_of_work():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"needs a GPU with FP8, not {torch.cuda.get_device_name()}")
    assert all(speed > 0 for speed in measured_peak(side=1024, bytes=2**24))
