"""When tokens a second say more of the machine than of a recipe: the runs came one after another on a busy machine."""

from __future__ import annotations

from octile.report.compare.result import CompareResult, Curve

UNEVEN = 2.0  # upper over lower quartile of the steps' speeds, within a run
OTHER_MACHINE = 1.5  # longest over shortest time that the same piece of work took, between runs


def speed_notes(result: CompareResult) -> list[str]:
    """What a reader of the speeds must know; nothing where they can be compared."""
    notes = []
    uneven = [(_evenness(curve), curve) for curve in result.curves]
    worst, curve = max(uneven, key=lambda pair: pair[0])
    if worst > UNEVEN:
        notes.append(
            f"The speed within a run varied (upper over lower quartile of the steps: {worst:.1f}× in {_name(curve)}):"
            " the machine was busy with other things, so do not compare the tokens a second."
        )
    timed = [curve for curve in result.curves if curve.yardstick_s]
    if timed:
        slow, fast = max(timed, key=lambda c: c.yardstick_s or 0), min(timed, key=lambda c: c.yardstick_s or 0)
        ratio = (slow.yardstick_s or 0) / (fast.yardstick_s or 1)
        if ratio > OTHER_MACHINE:
            notes.append(
                f"The same piece of work took {ratio:.1f} times as long during {_name(slow)} as during {_name(fast)}:"
                " the machine was not equally free, so do not compare the tokens a second."
            )
    return notes


def _evenness(curve: Curve) -> float:
    if curve.speed_quartiles is None or curve.speed_quartiles[0] <= 0:
        return 1.0
    return curve.speed_quartiles[1] / curve.speed_quartiles[0]


def _name(curve: Curve) -> str:
    return f"{curve.recipe}, seed {curve.seed}"
