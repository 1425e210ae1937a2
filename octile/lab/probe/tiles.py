"""Draw operands that expose a wrong tensor core model: cancellation, subnormal numbers, extreme exponents.

Each row of a matrix is of one kind, so the product of two matrices combines every kind with every kind.
"""

import math

import torch
from torch import Tensor

from octile.formats import FP16, FP32
from octile.lab.tensor_core.operand import FORMATS

KINDS = ("normal", "any code", "any exponent", "both ends", "sparse", "cancelling")


def operand(dtype: torch.dtype, rows: int, k: int, generator: torch.Generator, opposite: bool, special: bool) -> Tensor:
    """Draw an operand [rows, k] whose row i is of kind i modulo the number of kinds.

    Args:
        opposite: whether canceling rows are pairs (x, −x) instead of (x, x); a and b differ in this.
        special: whether one value in 64 is NaN or Inf.
    """
    shape, device = (rows, k), generator.device
    encoded = _random_bits(dtype, shape, generator)
    finite = torch.where(encoded.float().isfinite(), encoded.float(), 1.0)
    fmt = FORMATS[dtype]
    least, greatest = 1 - fmt.bias - fmt.mantissa_bits, math.frexp(fmt.max)[1] - 1
    sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2.0 - 1.0
    exponent = torch.randint(least, greatest + 1, shape, generator=generator, device=device)
    ends = torch.where(_chance(0.5, shape, generator), finite.sign() * fmt.max, sign * 2.0**least)
    first = finite[:, : k // 2]
    pairs = torch.stack((first, -first if opposite else first), dim=2).flatten(1)
    by_kind = torch.stack(
        (
            torch.randn(shape, generator=generator, device=device) * min(fmt.max, 2.0**10) / 16,
            finite,
            sign * torch.exp2(exponent.double()).float(),
            ends,
            torch.where(_chance(0.9, shape, generator), 0.0, finite),
            torch.where(_chance(0.1, shape, generator), sign * 2.0 ** (least + 2), pairs),
        )
    )
    x = by_kind[torch.arange(rows, device=device) % len(KINDS), torch.arange(rows, device=device)].to(dtype)
    if not special:
        return x
    unusual = torch.where(_chance(0.5, shape, generator), torch.nan, sign * torch.inf).to(dtype)
    return torch.where(_chance(1 / 64, shape, generator), unusual, x)


def accumulator(
    a: Tensor, b: Tensor, generator: torch.Generator, special: bool, fp16_accumulator: bool = False
) -> Tensor:
    """Draw accumulators [M, N]: zeros, random bits, values as large as the result, and values that cancel it.

    float32, or float16 with fp16_accumulator.
    """
    shape, device, fmt = (len(a), len(b)), generator.device, FP16 if fp16_accumulator else FP32
    dtype = torch.float16 if fp16_accumulator else torch.float32
    any_code = _random_bits(dtype, shape, generator).float()
    product = torch.nan_to_num(a.float() @ b.float().T).clamp(-fmt.max, fmt.max)
    nearby = product * torch.randn(shape, generator=generator, device=device)
    kind = torch.randint(0, 5, shape, generator=generator, device=device)
    c = torch.where(kind == 0, 0.0, torch.where(kind == 1, any_code, torch.where(kind == 2, -product, nearby)))
    return (c if special else torch.nan_to_num(c).clamp(-fmt.max, fmt.max)).to(dtype)


def _random_bits(dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw uniformly distributed bits."""
    size = (*shape, dtype.itemsize)
    encoded = torch.randint(0, 256, size, generator=generator, device=generator.device, dtype=torch.uint8)
    return encoded.view(dtype).squeeze(2)


def _chance(p: float, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) < p
