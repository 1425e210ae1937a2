"""Tests of formatting numbers and of colors that follow the reader's theme."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from octile.report.page import format_bytes, format_duration, format_flops, format_percent, format_quantity
from octile.report.style import PALETTE, drawing, label_ends, thin
from octile.report.svg import to_svg


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512, "512"),
        (9_999, "9,999"),
        (12_345, "12.3k"),
        (8_131_072, "8.13M"),
        (671e9, "671B"),
        (1.33e12, "1.33T"),
        (999e12, "999T"),
        (2.0**54, "1.80·10¹⁶"),
    ],
)
def test_amounts(value, text):
    assert format_quantity(value) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (0.25e9, "0.2 GFLOP/s"),
        (23.4e9, "23.4 GFLOP/s"),
        (999.96e9, "1.0 TFLOP/s"),
        (1.5e12, "1.5 TFLOP/s"),
        (18.014e15, "18.0 PFLOP/s"),
        (2.5e18, "2.5 EFLOP/s"),
    ],
)
def test_speeds(per_second, text):
    assert format_flops(per_second) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1_240_000, "1.24 MB"), (700e9, "700 GB")])
def test_byte_sizes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.44, "1.4 s"), (192.4, "3 min 12 s"), (3599.7, "1 h 0 min"), (90_000, "1 d 1 h")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_percentage_has_a_sign():
    assert (format_percent(0.00113), format_percent(-0.0025)) == ("+0.11%", "−0.25%")


def test_every_light_color_is_unique():
    assert len({light for light, _ in PALETTE.values()}) == len(PALETTE)


def test_colors_of_the_palette_become_css_variables():
    with drawing(100, 100) as figure:
        figure.subplots().plot([0, 1], color=PALETTE["blue"][0])
        svg = to_svg(figure, "name", "a & b")
    assert "stroke: var(--blue)" in svg
    assert PALETTE["blue"][0] not in svg


def test_a_thinned_series_keeps_its_peaks():
    y = np.zeros(100_000)
    y[[777, 55_555]] = [9, -9]
    x, thinned = thin(np.arange(100_000.0), y)
    assert len(x) <= 1200
    assert {9.0, -9.0} <= set(thinned)


def test_labels_at_one_height_do_not_overlap():
    with drawing(300, 200) as figure:
        axes = figure.subplots()
        label_ends(figure, axes, [(0.99, "a", "black"), (1.0, "b", "black"), (1.0, "c", "black")])
        figure.draw_without_rendering()
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 for below, above in pairwise(boxes))


def test_importing_the_reports_loads_no_drawing_library():
    check = "import sys, octile.report; sys.exit(bool({'matplotlib', 'jinja2', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
