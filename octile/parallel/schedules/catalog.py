"""All schedules, with what is published about them in closed form.

In formulas PP is the number of stages and M that of micro-batches; F is the time of a forward pass, B of a full
backward pass, W of a weight gradient, F&B of an overlapped pair. Bubbles are those of the rank that idles longest, and
leave out communication.

Source: DeepSeek-V3 (arXiv 2412.19437) table 2; the exact conditions and Chimera's bubble are what our simulation gives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octile.parallel.schedules.chimera import chimera
from octile.parallel.schedules.dualpipe import dualpipe, dualpipev
from octile.parallel.schedules.one_direction import gpipe, one_f_one_b, zb1p
from octile.parallel.schedules.schedule import Schedule
from octile.parallel.schedules.simulation import Costs


@dataclass(frozen=True)
class ScheduleKind:
    """A kind of schedule: how it is made, what it needs and what its formulas say.

    Attributes:
        title: its name in print.
        make: makes it for a number of stages and of micro-batches; refuses others by a ValueError.
        constraints: what `make` accepts.
        bubble_formula: the bubble as text, and
        bubble: its value for a number of stages.
        condition: when the bubble is exactly that, as text; empty if always; and
        is_exact: whether it is, for stages, micro-batches and costs without communication.
        activations_formula: the most activations of a rank as text, and
        activations: their number for stages and micro-batches.
        copies: parameters of a rank, in units of one stage's.
    """

    title: str
    make: Callable[[int, int], Schedule]
    constraints: str
    bubble_formula: str
    bubble: Callable[[int, Costs], float]
    activations_formula: str
    activations: Callable[[int, int], int]
    copies: int = 1
    condition: str = ""
    is_exact: Callable[[int, int, Costs], bool] = lambda stages, micro_batches, costs: True


def _dualpipe_bubble(stages: int, c: Costs) -> float:
    return (stages // 2 - 1) * (c.overlapped + c.backward - 3 * c.weight_gradient)


def _is_dualpipe_exact(stages: int, micro_batches: int, c: Costs) -> bool:
    return c.weight_gradient <= c.input_gradient == c.forward and c.backward <= c.overlapped <= c.forward + c.backward


def _dualpipe(title: str, make: Callable[[int, int], Schedule], constraints: str) -> ScheduleKind:
    return ScheduleKind(
        title=title,
        make=make,
        constraints=constraints,
        bubble_formula="(PP/2−1)(F&B+B−3W)",
        bubble=_dualpipe_bubble,
        activations_formula="PP+1",
        activations=lambda stages, micro_batches: stages + 1,
        copies=2,
        condition="W ≤ F = B−W and B ≤ F&B ≤ F+B",
        is_exact=_is_dualpipe_exact,
    )


SCHEDULES: Mapping[str, ScheduleKind] = {
    "gpipe": ScheduleKind(
        title="GPipe",
        make=gpipe,
        constraints="any",
        bubble_formula="(PP−1)(F+B)",
        bubble=lambda stages, c: (stages - 1) * (c.forward + c.backward),
        activations_formula="M",
        activations=lambda stages, micro_batches: micro_batches,
    ),
    "1f1b": ScheduleKind(
        title="1F1B",
        make=one_f_one_b,
        constraints="any",
        bubble_formula="(PP−1)(F+B)",
        bubble=lambda stages, c: (stages - 1) * (c.forward + c.backward),
        activations_formula="min(PP, M)",
        activations=min,
    ),
    "zb1p": ScheduleKind(
        title="ZB1P",
        make=zb1p,
        constraints="M ≥ PP",
        bubble_formula="(PP−1)(F+B−2W)",
        bubble=lambda stages, c: (stages - 1) * (c.forward + c.backward - 2 * c.weight_gradient),
        activations_formula="PP",
        activations=lambda stages, micro_batches: stages,
        condition="W ≤ F and 2W ≤ B",
        is_exact=lambda stages, micro_batches, c: c.weight_gradient <= min(c.forward, c.input_gradient),
    ),
    "dualpipe": _dualpipe("DualPipe", dualpipe, "PP even, M even and ≥ 2·PP"),
    "dualpipev": _dualpipe("DualPipeV", dualpipev, "PP even, M ≥ PP"),
    "chimera": ScheduleKind(
        title="Chimera",
        make=chimera,
        constraints="PP even, M a multiple of PP",
        bubble_formula="(PP−2)·max(F, B)",
        bubble=lambda stages, c: (stages - 2) * max(c.forward, c.backward),
        activations_formula="PP",
        activations=lambda stages, micro_batches: stages,
        copies=2,
        condition="M = PP",
        is_exact=lambda stages, micro_batches, c: micro_batches == stages,
    ),
}


def make_schedule(name: str, n_stages: int, n_micro_batches: int) -> Schedule:
    """Make a schedule by its name in `SCHEDULES`.

    Raises:
        ValueError: the name is unknown, or the schedule refuses the sizes.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name].make(n_stages, n_micro_batches)
