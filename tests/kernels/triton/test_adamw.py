"""AdamW's Triton kernel equals the reference bit for bit."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import adamw as kernel
from octile.ops.adamw import adamw
from tests.kernels.triton.comparison import assert_same, extreme
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
SETTINGS = (0.9, 0.95, 1e-8)
CORRECTIONS = (0.02, 0.3, 0.9997)


def _tensors(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Weight, gradient and moments."""
    torch.manual_seed(seed)
    return [torch.randn(shape), torch.randn(shape) * 1e-2, torch.randn(shape) * 1e-2, torch.rand(shape) * 1e-4]


def _both(
    each: Sequence[Sequence[Tensor]], copies: Sequence[Tensor] = (), others: tuple[Tensor | None, ...] = ()
) -> list[Tensor]:
    """Update with the kernel and with the reference, compare all that they write, and return it."""
    corrections = torch.tensor([[(1 + i) * x for x in CORRECTIONS] for i in range(len(each))])
    results = []
    for update in (kernel.launch, adamw):
        w, g, m, v = ([t.clone() for t in tensors] for tensors in zip(*each, strict=True))
        rounded = [t.clone() for t in copies]
        update(w, g, m, v, rounded, corrections, *SETTINGS, *others)
        results.append([*w, *m, *v, *rounded])
    assert_same(*results)
    return results[0]


@pytest.mark.parametrize("shape", [(1,), (7, 300), (1024,), (5000,), (0, 3)], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_any_shape_and_dtype(shape: tuple[int, ...], moments: torch.dtype, gradient: torch.dtype):
    w, g, m, v = _tensors(shape)
    _both([(w, g.to(gradient), m.to(moments), v.to(moments))])


@pytest.mark.parametrize("sizes", [[1], [3000, 1], [0, 5, 0, 2048, 1025, 7, 0], [*range(20)]], ids=len)
def test_any_number_of_tensors(sizes: list[int]):
    _both([_tensors((size,), seed) for seed, size in enumerate(sizes)])


def test_tensors_of_several_dtypes():
    dtypes = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
    each = [_tensors((1500,), seed) for seed in range(3)]
    _both([(w, g.to(a), m.to(b), v.to(b)) for (w, g, m, v), (a, b) in zip(each, dtypes, strict=True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_the_rounded_weights(dtype: torch.dtype):
    each = [_tensors((size,)) for size in (1500, 3)]
    _both(each, [torch.zeros(size, dtype=dtype) for size in (1500, 3)])


def test_tensors_whose_addresses_are_not_aligned():
    each = [[t[i:] for t in _tensors((1500,))] for i in range(3)]
    *_, last = _both(each)
    assert len(last) == 1498


def test_the_scale_multiplies_the_gradient():
    scaled = _both([_tensors((1500,))], others=(None, torch.tensor(0.3)))
    assert not torch.equal(scaled[1], _both([_tensors((1500,))])[1])


def test_all_magnitudes():
    """All normal FP32 magnitudes; a GPU may round roots and quotients of subnormal ones differently."""
    w, g, m = (extreme(3000).clamp(-1e18, 1e18) for _ in range(3))
    g, m = (torch.where(t.abs() < 1e-18, 0.0, t) for t in (g, m))
    _both([(w, g, m, (g * g * 3).clamp(max=1e37))])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_breaks_its_own_weight_and_no_other(bad: float):
    w, g, m, v = torch.ones(300), torch.ones(300), torch.zeros(300), torch.zeros(300)
    g[7] = bad
    kernel.launch([w], [g], [m], [v], [], torch.tensor([CORRECTIONS]), *SETTINGS)
    assert (~w.isfinite()).nonzero().tolist() == [[7]]


@pytest.mark.parametrize("skip", [False, True])
def test_a_flag_on_the_device_skips_the_update(skip: bool):
    before = _tensors((1500,))
    after = _both([before], others=(torch.tensor(skip),))
    assert torch.equal(after[0], before[0]) == skip
