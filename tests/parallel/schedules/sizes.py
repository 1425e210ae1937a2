"""Schedules, sizes and costs for hypothesis."""

from hypothesis import strategies as st

from octile.parallel.schedules import SCHEDULES, Costs, Schedule, make_schedule

TIME = st.integers(1, 12)  # whole, so that sums are exact


@st.composite
def sizes(draw: st.DrawFn, name: str) -> tuple[int, int]:
    """Stages and micro-batches that a schedule accepts."""
    if name in ("gpipe", "1f1b", "zb1p"):
        stages = draw(st.integers(1, 7))
        least = stages if name == "zb1p" else 1
        return stages, draw(st.integers(least, least + 12))
    stages = 2 * draw(st.integers(1, 4))
    if name == "chimera":
        return stages, stages * draw(st.integers(1, 3))
    if name == "dualpipe":
        return stages, 2 * draw(st.integers(stages, stages + 6))
    return stages, draw(st.integers(stages, stages + 10))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of a size that it accepts."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    return make_schedule(name, *draw(sizes(name)))


@st.composite
def costs(draw: st.DrawFn, max_communication: int = 0) -> Costs:
    """Costs, in whole numbers."""
    forward, input_gradient, weight_gradient = draw(TIME), draw(TIME), draw(TIME)
    in_turn = forward + input_gradient + weight_gradient
    return Costs(
        forward,
        input_gradient,
        weight_gradient,
        pair=draw(st.none() | st.integers(-(-in_turn // 2), in_turn + 12)),
        communication=draw(st.integers(0, max_communication)),
    )
