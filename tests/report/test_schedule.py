"""The figure of a pipeline schedule."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from octile.parallel.schedules import ActionType, Costs, Simulation, make_schedule, simulate
from octile.parallel.schedules.actions import parts
from octile.report.schedule import cells, describe, figure_size, save_schedule
from octile.report.style import WIDE


def simulated(name: str, stages: int = 4, micro_batches: int = 8, costs: Costs | None = None) -> Simulation:
    return simulate(make_schedule(name, stages, micro_batches), costs)


def texts(path) -> list[str]:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev", "chimera"])
def test_every_pass_is_a_cell(name):
    simulation = simulated(name)
    passes = [part for spans in simulation.spans for span in spans for part in parts(span.action)]
    assert [cell.action for cell in cells(simulation)] == passes


def test_cells_do_not_overlap():
    drawn = list(cells(simulated("dualpipe", costs=Costs(2, 3, 1, pair=5))))
    for first, second in pairwise(drawn):
        assert second.rank > first.rank or second.start >= first.start + first.width - 1e-9


def test_a_pair_is_divided_as_f_is_to_b():
    simulation = simulated("dualpipe", costs=Costs(pair=2.4))
    pair = next(span.action for span in simulation.spans[0] if span.action.sub_actions)
    widths = [cell.width for cell in cells(simulation) if cell.action in pair.sub_actions]
    assert widths == pytest.approx([0.8, 1.6])


@pytest.mark.parametrize(("name", "pale"), [("dualpipe", {4, 5, 6, 7}), ("chimera", {4, 5, 6, 7}), ("1f1b", set())])
def test_micro_batches_from_the_last_rank_are_pale(name, pale):
    assert {cell.action.microbatch_index for cell in cells(simulated(name)) if cell.is_pale} == pale


def test_the_second_stage_of_a_rank_is_pale():
    assert {cell.action.stage_index for cell in cells(simulated("dualpipev")) if cell.is_pale} == {2, 3}


def test_the_figure_shows_the_number_of_every_cell(tmp_path):
    simulation = simulated("zb1p")
    numbers = [text for text in texts(save_schedule(tmp_path / "new" / "zb1p.svg", simulation)) if text.isdigit()]
    ticks = int(simulation.makespan) + 2  # at most
    drawn = len(list(cells(simulation)))
    assert drawn <= len(numbers) <= drawn + ticks


@pytest.mark.slow
def test_the_legend_names_what_the_figure_contains(tmp_path):
    dualpipe = texts(save_schedule(tmp_path / "dualpipe.svg", simulated("dualpipe")))
    gpipe = texts(save_schedule(tmp_path / "gpipe.svg", simulated("gpipe")))
    everywhere = {"forward F", "full backward B"}
    further = {"input gradient B−W", "weight gradient W", "overlapped pair F&B"}
    further.add("pale: micro-batches that enter at the last rank")
    assert everywhere | further <= set(dualpipe)
    assert everywhere <= set(gpipe)
    assert not further & set(gpipe)


@pytest.mark.slow
def test_the_figure_compares_bubble_and_activations_with_the_formulas(tmp_path):
    lines = describe(simulated("dualpipe", 8, 20))
    assert lines == (
        "DualPipe: 8 stages on 8 ranks, 20 micro-batches, half of them from each end; F = 1, B = 2, W = 1, F&B = 3",
        "bubble: 6 = (PP/2−1)(F&B+B−3W), idle for 9.1% of 66",
        "activations on a rank: 9 = PP+1 (unit: one stage, one micro-batch); parameters: 2×",
    )
    assert set(lines) <= set(texts(save_schedule(tmp_path / "dualpipe.svg", simulated("dualpipe", 8, 20))))


def test_a_bubble_that_differs_from_its_formula_is_shown_with_both():
    line = describe(simulated("dualpipe", 4, 8, Costs(2, 3, 1)))[1]
    assert line.startswith("bubble: 6 (formula: (PP/2−1)(F&B+B−3W) = 7),")


def test_a_long_schedule_is_wider():
    assert figure_size(simulated("1f1b", 2, 2))[0] == WIDE
    assert figure_size(simulated("1f1b", 2, 200))[0] > 600 * 20


def test_weight_gradients_are_cells_of_their_own():
    kinds = [cell.action.computation_type for cell in cells(simulated("zb1p"))]
    assert kinds.count(ActionType.BACKWARD_WEIGHT) == kinds.count(ActionType.BACKWARD_INPUT) == 4 * 8
