"""Tests of the balance within sequences against torch's autograd, bit for bit, and of what is refused."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.gate import top_experts
from octile.ops.sequence_balance import sequence_balance, sequence_balance_backward
from tests.ops.operators import assert_fake_is_true, assert_well_formed

functions = pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -200.0, 200.0]


class SigmoidShares(torch.autograd.Function):
    """s / Σ s of sigmoids, with a gradient that saves the logits alone."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return F.logsigmoid(logits).softmax(-1)

    @staticmethod
    def backward(ctx, d: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        shares = F.logsigmoid(logits).softmax(-1)
        return shares * (d - (d * shares).sum(-1, keepdim=True)) * (-logits).sigmoid()


def formula(logits: Tensor, counted: Tensor, batch: int, scoring_func: str) -> tuple[Tensor, Tensor]:
    """The loss and f, as torch's functions compute them from logits that require a gradient."""
    e = logits.shape[1]
    counts = F.one_hot(counted, e).view(batch, -1, e).sum(1)
    f = counts * e / counts.sum(1, keepdim=True)
    shares = SigmoidShares.apply(logits) if scoring_func == "sigmoid" else logits.softmax(-1)
    return (f * shares.unflatten(0, (batch, -1)).mean(1)).sum(1).mean(), f


@functions
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_the_loss_and_its_gradient_equal_autograd(
    scoring_func: str, batch: int, length: int, e: int, given_experts: bool, special: bool, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch * length, e, generator=generator)
    if special:
        where, which = (torch.randint(n, logits.shape, generator=generator) for n in (5, len(SPECIAL)))
        logits = torch.where(where == 0, torch.tensor(SPECIAL)[which], logits)
    k = 1 + seed % e
    highest = top_experts(logits, k, 1, 1, 1)
    counted = torch.rand(logits.shape, generator=generator).topk(k).indices if given_experts else highest
    leaf = logits.clone().requires_grad_()
    loss, f = formula(leaf, counted, batch, scoring_func)
    found, found_f = sequence_balance(logits, counted if given_experts else None, k, batch, scoring_func)
    assert torch.equal(found_f, f)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=0, equal_nan=True)

    dloss = torch.tensor(0.0117)
    (expected,) = torch.autograd.grad(loss, leaf, dloss)
    dlogits = sequence_balance_backward(dloss, logits, f, scoring_func)
    torch.testing.assert_close(dlogits, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.one_case
@functions
def test_the_operators_are_well_formed(scoring_func: str):
    logits = torch.randn(6, 4)
    f = sequence_balance(logits, None, 3, 2, scoring_func)[1]
    for arguments in ((logits, None, 3, 2, scoring_func), (logits, torch.ones(6, 3).long(), 3, 2, scoring_func)):
        assert_well_formed(sequence_balance, arguments)
        assert_fake_is_true(sequence_balance, arguments)
    arguments = (torch.tensor(0.5), logits, f, scoring_func)
    assert_well_formed(sequence_balance_backward, arguments)
    assert_fake_is_true(sequence_balance_backward, arguments)


LOGITS = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((LOGITS.double(), None, 2, 2, "sigmoid"), TypeError, "logits must be float32, not torch.float64"),
        ((LOGITS[:0], None, 2, 2, "sigmoid"), ValueError, r"with T of at least 1, not \(0, 4\)"),
        ((LOGITS, None, 2, 4, "sigmoid"), ValueError, "batch must divide the 6 tokens of logits, not be 4"),
        ((LOGITS, None, 5, 2, "sigmoid"), ValueError, "n_chosen must be from 1 to 4, not 5"),
        ((LOGITS, None, 2, 2, "tanh"), ValueError, "scoring_func must be sigmoid or softmax, not 'tanh'"),
        ((LOGITS, torch.zeros(6, 2), 2, 2, "sigmoid"), TypeError, "experts must be int64, not torch.float32"),
        ((LOGITS, torch.zeros(6, 3).long(), 2, 2, "sigmoid"), ValueError, r"experts must be \(6, 2\), not \(6, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message: str):
    with pytest.raises(error, match=message):
        sequence_balance(*arguments)


@pytest.mark.parametrize(
    ("dloss", "f", "error", "message"),
    [
        (torch.ones(1), torch.ones(2, 4), ValueError, r"dloss must be a scalar, not \(1,\)"),
        (torch.tensor(1), torch.ones(2, 4), TypeError, "dloss must be float32, not torch.int64"),
        (torch.tensor(1.0), torch.ones(2, 3), ValueError, r"f must be \[B, 4\], not \(2, 3\)"),
        (torch.tensor(1.0), torch.ones(4, 4), ValueError, "batch must divide the 6 tokens of logits, not be 4"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(dloss: Tensor, f: Tensor, error, message: str):
    with pytest.raises(error, match=message):
        sequence_balance_backward(dloss, LOGITS, f, "sigmoid")
