"""The kernel that chooses experts equals the reference."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import top_experts as kernel
from octile.ops.top_experts import top_experts

pytestmark = pytest.mark.usefixtures("gpu")
SETTINGS = [(2, 1, 1, 1), (4, 4, 2, 2), (6, 4, 3, 1), (12, 3, 3, 2), (3, 3, 1, 2)]  # of 12 experts
every_setting = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def _scores(t: int, e: int) -> Tensor:
    return torch.randn(t, e, generator=torch.Generator().manual_seed(0))


@every_setting
@pytest.mark.parametrize("t", [0, 1, 300])
def test_it_chooses_what_the_reference_chooses(settings: tuple[int, int, int, int], t: int):
    scores = _scores(t, 12)
    assert torch.equal(kernel.launch(scores, *settings), top_experts(scores, *settings))


@every_setting
def test_ties_infinities_and_zeros_are_ordered_alike(settings: tuple[int, int, int, int]):
    scores = _scores(200, 12).mul(2).round()
    scores[::3] *= -0.0
    scores[1::7] = float("-inf")
    scores[2::5, ::2] = float("inf")
    assert torch.equal(kernel.launch(scores, *settings), top_experts(scores, *settings))


def test_nan_is_the_highest_score_and_every_index_exists():
    scores = _scores(64, 12)
    scores[::2, 5] = float("nan")
    found = kernel.launch(scores, 3, 1, 1, 1)
    assert torch.equal(found, top_experts(scores, 3, 1, 1, 1))
    assert found[0, 0] == 5


def test_v3s_gate():
    scores = _scores(40, 256).sigmoid()
    assert torch.equal(kernel.launch(scores, 8, 8, 4, 2), top_experts(scores, 8, 8, 4, 2))


def test_strides_do_not_matter():
    scores = _scores(12, 30).mT
    assert torch.equal(kernel.launch(scores, 4, 4, 2, 2), top_experts(scores, 4, 4, 2, 2))
