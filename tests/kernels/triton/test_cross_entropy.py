"""The kernels of the cross-entropy agree with the reference."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import cross_entropy as kernel
from octile.kernels.triton import launch_config
from octile.ops.cross_entropy import IGNORED, cross_entropy, cross_entropy_backward
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]

COLS = launch_config.CROSS_ENTROPY["cols"]
SHAPES = [(5, 97), (3, COLS), (4, COLS + 1), (2, 3 * COLS - 64), (7, 1), (0, 128)]


def inputs(m: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(v, (m,))
    labels[1:2] = IGNORED
    return (5 * torch.randn(m, v)).to(dtype), labels


def check(logits: Tensor, labels: Tensor, dlosses: Tensor) -> None:
    """Compare both passes with the reference, given its lse, within the errors that it allows."""
    losses, lse = kernel.launch(logits, labels, IGNORED)
    expected, expected_lse = cross_entropy(logits, labels)
    torch.testing.assert_close(lse, expected_lse, rtol=2.0**-20, atol=2.0**-20, equal_nan=True)
    size = 1 + expected_lse.abs() + expected.abs()
    finite = expected.isfinite() & expected_lse.isfinite()
    assert ((losses - expected).abs() <= 2.0**-20 * size)[finite].all()
    torch.testing.assert_close(losses[~finite], expected[~finite], equal_nan=True)

    dlogits = kernel.launch_backward(dlosses, logits, labels, expected_lse, IGNORED, logits.dtype)
    gradient = cross_entropy_backward(dlosses, logits, labels, expected_lse)
    assert (dlogits.dtype, dlogits.stride()) == (gradient.dtype, gradient.stride())
    assert torch.equal(dlogits.isnan(), gradient.isnan())
    distance = (logits.float() - expected_lse[:, None]).abs().nan_to_num(0, 0, 0)
    spacing = torch.finfo(logits.dtype).eps * gradient.float().abs()
    bound = (8 + distance) * 2.0**-23 * dlosses.abs()[:, None] + spacing
    assert ((dlogits.float() - gradient.float()).abs() <= bound)[~gradient.isnan()].all()


@pytest.mark.one_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_vocabulary(shape: tuple[int, int], dtype: torch.dtype):
    check(*inputs(*shape, dtype), torch.randn(shape[0]))


def test_any_strides():
    logits, labels = inputs(40, 300, torch.bfloat16)
    strided = torch.cat((logits, logits), 1)[:, ::2].mT.contiguous().mT
    check(strided, torch.stack((labels, labels), 1)[:, 0], torch.tensor(0.01).expand(40))


@pytest.mark.one_case
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["a logit", "the first columns", "the last columns", "the row"])
def test_nan_and_inf_stay_in_their_row(bad: str, where: str):
    logits, labels = inputs(4, 2 * COLS + 30)
    columns = {"a logit": slice(70, 71), "the first columns": slice(COLS), "the last columns": slice(COLS, None)}
    logits[2, columns.get(where, slice(None))] = float(bad)
    check(logits, labels, torch.ones(4))
    assert kernel.launch(logits, labels, IGNORED)[0][[0, 1, 3]].isfinite().all()


def test_a_larger_logit_in_later_columns_rescales_the_sum():
    logits, labels = inputs(2, 3 * COLS)
    logits[:, -1] = 1e4
    check(logits, labels, torch.ones(2))


def test_a_label_without_probability_has_an_infinite_loss():
    logits, labels = inputs(3, 200)
    logits[0, labels[0]] = -float("inf")
    check(logits, labels, torch.ones(3))


@pytest.mark.parametrize("label", [200, -1, 2**32])
def test_a_label_out_of_range_makes_its_row_nan(label: int):
    logits, labels = inputs(3, 200)
    labels[2] = label
    losses, lse = kernel.launch(logits, labels, IGNORED)
    dlogits = kernel.launch_backward(torch.ones(3), logits, labels, lse, IGNORED, logits.dtype)
    assert losses.isnan().tolist() == dlogits.isnan().all(1).tolist() == [False, False, True]
    assert dlogits[:2].isfinite().all()


def test_an_ignored_row_has_neither_loss_nor_gradient():
    logits, labels = inputs(3, 200)
    logits[1] = float("nan")
    losses, lse = kernel.launch(logits, labels, IGNORED)
    dlogits = kernel.launch_backward(torch.full((3,), float("inf")), logits, labels, lse, IGNORED, logits.dtype)
    assert losses[1] == 0
    assert not dlogits[1].any()
