"""AdamW's Triton kernel equals the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import adamw as kernel
from octile.ops.adamw import adamw
from tests.kernels.triton.comparison import assert_same, extreme

pytestmark = pytest.mark.usefixtures("gpu")
SETTINGS = (0.9, 0.95, 1e-8)
CORRECTIONS = (0.02, 0.3, 0.9997)


def _both(w: Tensor, g: Tensor, m: Tensor, v: Tensor, corrections: Tensor) -> None:
    found, expected = ([t.clone() for t in (w, m, v)] for _ in range(2))
    kernel.launch(found[0], g, *found[1:], corrections, *SETTINGS)
    adamw(expected[0], g, *expected[1:], corrections, *SETTINGS)
    assert_same(found, expected)


@pytest.mark.parametrize("shape", [(1,), (7, 300), (5000,), (0, 3)], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_any_shape_and_dtype(shape: tuple[int, ...], moments: torch.dtype, gradient: torch.dtype):
    torch.manual_seed(0)
    w, g, m, v = torch.randn(shape), torch.randn(shape) * 1e-2, torch.randn(shape) * 1e-2, torch.rand(shape) * 1e-4
    _both(w, g.to(gradient), m.to(moments), v.to(moments), torch.tensor(CORRECTIONS))


def test_all_magnitudes():
    """All normal FP32 magnitudes; a GPU may round roots and quotients of subnormal ones differently."""
    w, g, m = (extreme(3000).clamp(-1e18, 1e18) for _ in range(3))
    g, m = (torch.where(t.abs() < 1e-18, 0.0, t) for t in (g, m))
    _both(w, g, m, (g * g * 3).clamp(max=1e37), torch.tensor(CORRECTIONS))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_breaks_its_own_weight_and_no_other(bad: float):
    w, g, m, v = torch.ones(300), torch.ones(300), torch.zeros(300), torch.zeros(300)
    g[7] = bad
    kernel.launch(w, g, m, v, torch.tensor(CORRECTIONS), *SETTINGS)
    assert (~w.isfinite()).nonzero().tolist() == [[7]]


def test_corrections_may_be_strided():
    w, g, m, v = (torch.rand(300) for _ in range(4))
    _both(w, g, m, v, torch.tensor([[x, 9.0] for x in CORRECTIONS])[:, 0])


@pytest.mark.parametrize("skip", [False, True])
def test_a_flag_on_the_device_skips_the_update(skip: bool):
    w, g, m, v = (torch.rand(300) for _ in range(4))
    found, expected = ([t.clone() for t in (w, m, v)] for _ in range(2))
    for update, tensors in ((kernel.launch, found), (adamw, expected)):
        update(tensors[0], g, *tensors[1:], torch.tensor(CORRECTIONS), *SETTINGS, torch.tensor(skip))
    assert_same(found, expected)
    assert torch.equal(found[0], w) == skip
