"""Tests of figures, whose colors follow the reader's theme."""

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from octile.report.style import PALETTE, drawing, label_ends, thin
from octile.report.svg import to_svg


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


@pytest.mark.slow
def test_a_figure_is_drawn_where_a_notebook_names_a_backend_that_is_missing(tmp_path):
    program = "import sys; from pathlib import Path; from octile.report.style import save_drawing; "
    program += "save_drawing(Path(sys.argv[1]), 10, 10, lambda figure: None)"
    environment = {**os.environ, "MPLBACKEND": "module://no_such_backend"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "x.png")], env=environment, check=True)
    assert (tmp_path / "x.png").exists()
