"""Tests of when a run began to memorize: held-out loss must rise while training loss falls."""

from dataclasses import replace

import pytest

from octile.report.run.memorization import find_memorization
from octile.report.run.metrics import Run
from tests.report.conftest import training, validation


def run(held_out: list[float], training_loss: list[float]) -> Run:
    """A run with a validation every second step, and the training loss of these two steps."""
    steps = range(2, 2 * len(held_out) + 1, 2)
    lines = [training(s - 1 + n, main_loss=loss) for s, loss in zip(steps, training_loss, strict=True) for n in (0, 1)]
    validations = tuple(validation(s, loss) for s, loss in zip(steps, held_out, strict=True))
    return Run({}, {}, None, tuple(lines), validations, (), (), (), (), (), {})


def test_a_run_memorizes_after_its_lowest_held_out_loss():
    found = find_memorization(run([5.0, 3.88, 4.5, 6.5], [5.1, 3.9, 2.0, 0.005]))
    assert str(found) == (
        "after step 4 the run memorized its training text: held-out loss rose from 3.880 to 6.500, while training loss "
        "fell from 3.900 to 0.005"
    )


def test_the_loss_before_the_first_step_is_not_the_lowest_of_training():
    after = run([5.0, 3.88, 4.5, 6.5], [5.1, 3.9, 2.0, 0.005])
    begun = replace(after, validation=(validation(0, 1.0), *after.validation))
    assert find_memorization(begun) == find_memorization(after)


@pytest.mark.parametrize(
    ("held_out", "training_loss"),
    [
        ([5.0, 4.0, 3.0, 2.0], [5.0, 4.0, 3.0, 2.0]),  # it learns
        ([5.0, 4.0, 4.001, 4.002], [5.0, 4.0, 3.0, 2.0]),  # noise
        ([5.0, 4.0, 4.5, 5.0], [5.0, 4.0, 4.5, 5.0]),  # it diverges
        ([5.0, 4.0, 3.0, 3.5], [5.0, 4.0, 3.0, 2.0]),  # one validation is too few
        ([5.0, float("nan"), 6.0, 7.0], [5.0, float("nan"), 6.0, 7.0]),
        ([], []),
    ],
)
def test_no_other_run_memorizes(held_out, training_loss):
    assert find_memorization(run(held_out, training_loss)) is None
