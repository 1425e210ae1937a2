"""Test helpers: values that are hard to quantize, and bit-for-bit comparisons."""

from collections.abc import Sequence

import torch
from torch import Tensor


def extreme(*shape: int) -> Tensor:
    """Magnitudes from FP32's subnormals up to its largest values, zeros and ties."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randint(-149, 128, shape).float())
    x[torch.rand(shape) < 0.1] = 0.0
    return x.clamp(-3e38, 3e38)


def finite(*shape: int) -> Tensor:
    """Rows of very different size, a few zeros among them."""
    torch.manual_seed(1)
    x = torch.randn(shape) * torch.exp2(torch.randn(*shape[:-1], 1) * 8)
    return x.masked_fill_(torch.rand(shape) < 0.05, 0.0)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check for the same bits (any NaN equals any other), dtypes, shapes and strides (where they matter)."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert _strides(ours) == _strides(theirs)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
        number = ~theirs.float().isnan()
        assert torch.equal(ours.float().signbit()[number], theirs.float().signbit()[number]), "the sign of a zero"


def assert_close_data(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare data and scales of values that differ by 2⁻¹⁶ at most.

    Scales may differ by as much, and few encoded values by one step. A power-of-two scale may round to its neighbor,
    and then all encoded values of its block differ; these blocks are not compared.
    """
    (data, scale), (expected_data, expected_scale) = found, expected
    assert (data.dtype, data.shape, data.stride()) == (
        expected_data.dtype,
        expected_data.shape,
        expected_data.stride(),
    )
    same = (scale - expected_scale).abs() <= 2.0**-16 * expected_scale
    assert same.float().mean() > 0.98 or same.numel() == 0
    same = same.repeat_interleave(128, 1)[:, : data.shape[1]]
    ours, theirs = data.view(torch.int8).int()[same], expected_data.view(torch.int8).int()[same]
    ours, theirs = (torch.where(t < 0, -128 - t, t) if data.dtype != torch.int8 else t for t in (ours, theirs))
    assert ((ours - theirs).abs() <= 1).all(), "an encoded value is off by more than one step"
    assert (ours != theirs).float().mean() < 1e-3 or same.numel() == 0


def _strides(t: Tensor) -> list[int]:
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]
