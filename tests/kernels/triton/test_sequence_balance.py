"""The kernels of the balance within sequences equal the reference: counts exactly, sums closely."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import launch_config
from octile.kernels.triton import sequence_balance as kernel
from octile.ops.sequence_balance import sequence_balance, sequence_balance_backward
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
functions = pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])


def _logits(t: int, e: int, ties: bool = False) -> Tensor:
    drawn = torch.randn(t, e, generator=torch.Generator().manual_seed(t))
    return drawn.round() * -1.0 if ties else 3 * drawn


def _experts(t: int, e: int, k: int) -> Tensor:
    return torch.rand(t, e, generator=torch.Generator().manual_seed(e)).topk(k).indices


@pytest.mark.one_case
@pytest.mark.each_pair
@functions
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 12, 4), (1, 1, 1, 1), (2, 40, 64, 6), (1, 5, 300, 3)], ids=str)
def test_loss_and_counts(shape: tuple[int, int, int, int], given: bool, scoring_func: str, monkeypatch):
    monkeypatch.setitem(launch_config.SEQUENCE_BALANCE, "elements", 256)  # several programs per sequence
    monkeypatch.setitem(launch_config.SEQUENCE_BALANCE, "max_programs", 6)  # and several steps per program
    monkeypatch.setitem(launch_config.SEQUENCE_BALANCE_SUM, "elements", 128)
    batch, length, e, k = shape
    logits = _logits(batch * length, e)
    experts = _experts(batch * length, e, k) if given else None
    loss, f = kernel.launch(logits, experts, k, batch, scoring_func)
    expected_loss, expected_f = sequence_balance(logits, experts, k, batch, scoring_func)
    assert torch.equal(f, expected_f)
    torch.testing.assert_close(loss, expected_loss, rtol=2.0**-20, atol=0)


def test_ties_are_counted_by_the_lower_index():
    logits = _logits(60, 12, ties=True)
    assert torch.equal(
        kernel.launch(logits, None, 5, 3, "sigmoid")[1], sequence_balance(logits, None, 5, 3, "sigmoid")[1]
    )


@functions
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 12), (2, 40, 64), (1, 5, 300)], ids=str)
def test_gradients(shape: tuple[int, int, int], scoring_func: str):
    batch, length, e = shape
    logits, dloss = _logits(batch * length, e), torch.tensor(0.37)
    f = 2 * torch.rand(batch, e, generator=torch.Generator().manual_seed(0))
    found = kernel.launch_backward(dloss, logits, f, scoring_func)
    expected = sequence_balance_backward(dloss, logits, f, scoring_func)
    torch.testing.assert_close(found, expected, rtol=2.0**-14, atol=2.0**-26)


@functions
def test_extreme_logits(scoring_func: str):
    """Sigmoids may all be 0 in FP32; their shares are not."""
    logits = _logits(12, 8) - 300.0
    logits[1, 2], logits[2, 3], logits[3] = float("-inf"), float("nan"), float("-inf")
    logits[5] = 300.0
    loss, f = kernel.launch(logits[4:], None, 2, 2, scoring_func)
    expected, expected_f = sequence_balance(logits[4:], None, 2, 2, scoring_func)
    assert torch.equal(f, expected_f)
    torch.testing.assert_close(loss, expected, rtol=2.0**-18, atol=0)
    found = kernel.launch_backward(torch.tensor(1.0), logits, torch.ones(3, 8), scoring_func)
    expected = sequence_balance_backward(torch.tensor(1.0), logits, torch.ones(3, 8), scoring_func)
    torch.testing.assert_close(found, expected, rtol=2.0**-14, atol=2.0**-26, equal_nan=True)


def test_strides_do_not_matter():
    logits, experts = _logits(8, 12).mT, _experts(12, 8, 3).mT.contiguous().mT
    found = kernel.launch(logits, experts, 3, 2, "sigmoid")
    expected = kernel.launch(logits.contiguous(), experts.contiguous(), 3, 2, "sigmoid")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    gradients = [
        kernel.launch_backward(torch.tensor(1.0), x, found[1], "sigmoid") for x in (logits, logits.contiguous())
    ]
    assert torch.equal(*gradients)
