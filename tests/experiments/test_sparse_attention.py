import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "experiments" / "sparse_attention"


@pytest.fixture(scope="module")
def agreement():
    return runpy.run_path(str(FOLDER / "measure.py"))["agreement"]


def weights() -> torch.Tensor:
    """Attention's weights of four queries: the last two see more than two keys."""
    return torch.tensor([[[1.0, 0, 0, 0], [0.4, 0.6, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]]])


@pytest.mark.parametrize(
    ("chosen", "recall", "mass"),
    [
        ([[2, 1], [3, 2]], 1.0, (0.8 + 0.7) / 2),
        ([[0, 1], [0, 1]], 0.25, (0.5 + 0.3) / 2),
        ([[2, 0], [3, 0]], 0.5, (0.7 + 0.5) / 2),
    ],
)
def test_recall_and_mass_are_of_queries_that_see_more_than_is_chosen(agreement, chosen, recall, mass):
    chosen = torch.tensor([[[0, -1], [0, 1], *chosen]], dtype=torch.int32)
    assert agreement(chosen, weights()) == pytest.approx((recall, mass))
