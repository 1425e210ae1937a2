"""The picture of a planned step."""

import pytest

from octile.parallel.schedules import Costs, make_schedule, simulate
from octile.report.plan import save_plan

SIMULATION = simulate(make_schedule("dualpipe", 4, 8), Costs())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step.svg", "step.png"])
def test_a_step_is_drawn_as_svg_or_png(tmp_path, name):
    path = save_plan(tmp_path / "new" / name, "a step", SIMULATION, {"GEMMs": 2.0, "bubble": 1.0}, {"weights": 3e9})
    assert path.stat().st_size > 1000


def test_the_bars_name_their_parts(tmp_path):
    path = save_plan(tmp_path / "step.svg", "a step", SIMULATION, {"GEMMs": 2.0, "tiny": 0.01}, {"weights": 3e9})
    text = path.read_text(encoding="utf-8")
    assert all(word in text for word in ("a step", "GEMMs", "tiny 0.01", "weights", "DualPipe"))
