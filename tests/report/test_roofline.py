"""Tests of the roofline: its points from benchmark rows, and its figure."""

import json

import pytest

from octile.report.roofline import Point, points, save_roofline


def row(what, value, unit, peer=None):
    against = {"peer": peer, "value": 800.0, "ratio": value / 800} if peer else None
    return {"case": "1×2×3", "what": what, "value": value, "unit": unit, "against": against}


ROWS = [
    row("FP8", 1000.0, "TFLOP/s", "BF16"),
    row("FP8", 1000.0, "TFLOP/s", "DeepGEMM"),
    row("FP8", 2000.0, "GB/s"),
    row("FP8, wgrad +=", 10.0, "TFLOP/s", "BF16"),
    row("FP8, wgrad +=", 500.0, "GB/s"),
]


def write(path, gpu):
    path.write_text(json.dumps({"machine": {"gpu": gpu, "date": "2026-11-20"}, "rows": ROWS}))
    return path


def test_intensity_is_operations_per_byte():
    assert points(ROWS) == [
        Point("FP8", "1×2×3", 500.0, 1000.0, 800.0),
        Point("FP8, wgrad", "1×2×3", 20.0, 10.0, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_roofline_is_drawn_from_a_file(tmp_path, suffix):
    picture = save_roofline(write(tmp_path / "gemm.json", "NVIDIA H200"), tmp_path / f"roof{suffix}")
    assert picture.stat().st_size > 5000


def test_the_figure_contains_its_description(tmp_path):
    text = save_roofline(write(tmp_path / "gemm.json", "NVIDIA H200"), tmp_path / "roof.svg").read_text()
    for words in ("NVIDIA H200, 2026-11-20", "dot: octile, circle: DeepGEMM", "1×128 with 128×128", "4.8 TB/s"):
        assert words in text


@pytest.mark.parametrize("gpu", [None, "NVIDIA A100"])
def test_a_chip_without_known_limits_is_refused(tmp_path, gpu):
    with pytest.raises(ValueError, match="limits are known"):
        save_roofline(write(tmp_path / "gemm.json", gpu), tmp_path / "roof.svg")
