"""Ways to make a product in few bits: format, block, scale rule, promotion, tensor core. And how each casts a matrix.

format   e4m3, e5m2, e5m6 (multiplied as FP16, which holds it exactly), int8,
         mx (E4M3 with 1×32 UE8M0 scales: OCP Microscaling Formats v1.0),
         nvfp4 (E2M1 with 1×16 E4M3 scales and one FP32 scale a tensor: NVIDIA's 4 bits)
block    tensor, row, 1x128, 128x128 (weights only, everything else is 1x128), 1x32; along K, which is summed
scale    float32     amax / max
         up          the power of two at or above it: nothing saturates
         nearest     the nearest power of two; the largest values of a block may saturate
         down        the power of two at or below it; they may be twice as large as what the format holds
         ocp         2^(⌊log₂ amax⌋ − ⌊log₂ max⌋), MX's own rule (§6.3): between `up` and `nearest` for E4M3
promote  every so many products the tensor core's sum moves to FP32; None is never
arch     a tensor core of `octile.lab.tensor_core.architectures`; or fp32, octile's references, or exact, which rounds
             no sum
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as every_combination

import torch
from torch import Tensor

from octile.formats import E2M1, E4M3, E5M2, E5M6, INT8, UE8M0, FloatFormat, IntFormat
from octile.lab.tensor_core.architectures import ARCHITECTURES, find_instruction
from octile.ops.quantize import SMALLEST_SCALE, round_up_to_power_of_2, split_into_blocks
from octile.recipe import Extent, GemmName
from octile.scaled import ScaledTensor, resolve

FORMATS: dict[str, FloatFormat | IntFormat] = {
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e5m6": E5M6,
    "int8": INT8,
    "mx": E4M3,
    "nvfp4": E2M1,
}
STORED: dict[str, torch.dtype] = {  # what holds a format's numbers exactly and can be multiplied
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e5m6": torch.float16,
    "int8": torch.int8,
    "mx": torch.float8_e4m3fn,
    "nvfp4": torch.float8_e4m3fn,
}
BLOCKS: dict[str, tuple[Extent, Extent]] = {
    "tensor": (None, None),
    "row": (1, None),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "1x16": (1, 16),
}
POWERS_OF_2 = ("up", "nearest", "down", "ocp")
SCALES = ("float32", *POWERS_OF_2)
CONTROLS = ("fp32", "exact")
OWN_BLOCK = {"mx": "1x32", "nvfp4": "1x16"}
OWN_SCALES: dict[str, tuple[str, ...]] = {"mx": POWERS_OF_2, "nvfp4": ("e4m3",)}


@dataclass(frozen=True)
class Variant:
    """One combination; see the head of this file. `promote` is None where a control sums."""

    fmt: str
    block: str
    scale: str
    promote: int | None
    arch: str

    def __str__(self) -> str:
        promoted = (
            "" if self.arch in CONTROLS else f", promoted every {self.promote}" if self.promote else ", never promoted"
        )
        return f"{self.fmt} {self.block} {self.scale} on {self.arch}{promoted}"


PUBLISHED = Variant("e4m3", "128x128", "float32", 128, "sm_90")  # DeepSeek-V3's, but for its power-of-two inputs


@dataclass(frozen=True)
class Choice:
    """What is to be combined. mx and nvfp4 bring their own block, nvfp4 its own scales as well.

    Raises:
        ValueError: there is no such format, block, scale rule or architecture; an interval is below 1.
    """

    formats: Sequence[str] = tuple(FORMATS)
    blocks: Sequence[str] = ("tensor", "row", "1x128", "128x128", "1x32")
    scales: Sequence[str] = SCALES
    promote: Sequence[int | None] = (32, 128, None)
    archs: Sequence[str] = ("sm_90", "exact")

    def __post_init__(self) -> None:
        known: dict[str, tuple[Sequence[str], Iterable[str]]] = {
            "format": (self.formats, FORMATS),
            "block": (self.blocks, [block for block in BLOCKS if block != "1x16"]),
            "scale": (self.scales, SCALES),
            "arch": (self.archs, [*ARCHITECTURES, *CONTROLS]),
        }
        for name, (asked, there_are) in known.items():
            for word in asked:
                if word not in there_are:
                    raise ValueError(f"{name} must be one of {', '.join(there_are)}, not {word!r}")
        for interval in self.promote:
            if interval is not None and interval < 1:
                raise ValueError(f"promote must be at least 1 or never, not {interval}")

    def combinations(self) -> Iterator[Variant]:
        """All combinations, applicable or not (`why_not_applicable`); fp32 and exact have no promotion interval."""
        for fmt in dict.fromkeys(self.formats):
            blocks = [OWN_BLOCK[fmt]] if fmt in OWN_BLOCK else dict.fromkeys(self.blocks)
            scales = OWN_SCALES["nvfp4"] if fmt == "nvfp4" else dict.fromkeys(self.scales)
            for block, scale, arch in every_combination(blocks, scales, dict.fromkeys(self.archs)):
                for promote in [None] if arch in CONTROLS else dict.fromkeys(self.promote):
                    yield Variant(fmt, block, scale, promote, arch)


def why_not_applicable(v: Variant) -> str | None:
    """Why a combination does not apply, in words; None where it does."""
    if v.scale not in OWN_SCALES.get(v.fmt, SCALES):
        return f"{v.fmt} has scales that are powers of two, so no {v.scale} ones"
    if v.fmt == "e4m3" and v.block == "1x32" and v.scale in POWERS_OF_2:
        return "e4m3 in 1x32 blocks with power-of-two scales is mx"
    if v.arch in CONTROLS:
        return None
    if v.fmt == "int8":
        return "tensor cores sum INT8 as exact integers: exact says it all"
    if v.fmt == "nvfp4":
        return "the instruction that multiplies NVFP4 is not among the modeled ones: exact and fp32 apply"
    try:
        row = find_instruction(v.arch, STORED[v.fmt], STORED[v.fmt], scaled=scales_in_tensor_core(v))
    except TypeError as error:
        return f"{error}".replace(str(torch.float16), "e5m6, held as FP16,") if v.fmt == "e5m6" else str(error)
    if v.promote is None:
        return None
    if row.promotes_every:
        return f"{v.arch}'s {row.name} promotes every {row.promotes_every} products by itself: never applies"
    if v.promote % row.terms:
        return f"{v.arch}'s {row.name} sums {row.terms} products a step, and {v.promote} is no multiple of it"
    extent = BLOCKS["1x128" if v.block == "128x128" else v.block][1]
    if extent is not None and not scales_in_tensor_core(v) and math.gcd(extent, v.promote) != v.promote:
        return f"{v.block} has a new scale every {extent} products, so every {v.promote} is every {extent}"
    return None


def scales_in_tensor_core(v: Variant) -> bool:
    """Whether the tensor core itself multiplies by the scales: MX on an architecture that has such an instruction."""
    return v.fmt == "mx" and any(row.scaled for row in ARCHITECTURES.get(v.arch, ()))


def blocks_of(v: Variant, product: GemmName) -> tuple[tuple[Extent, Extent], tuple[Extent, Extent]]:
    """Of a and b: with 128x128 only the weight has such blocks, which is b of fprop and dgrad; wgrad has none."""
    block = BLOCKS[v.block]
    if v.block != "128x128":
        return block, block
    return BLOCKS["1x128"], BLOCKS["1x128"] if product == "wgrad" else block


def cast(x: Tensor, fmt: str, block: tuple[Extent, Extent], scale: str) -> ScaledTensor:
    """A matrix in a format, its scales by any rule; for "float32" and "up" what `octile.quantize` gives.

    Args:
        x: [M, K], finite.
        fmt, scale: of the head of this file; nvfp4 comes with "e4m3".

    Returns:
        data [M, K] in STORED[fmt]; scale float32 (nvfp4: float64, the exact products of its two) a block.
    """
    rows, cols = resolve(block, x.shape)
    blocks = split_into_blocks(x.float(), rows, cols)
    amax = blocks.abs().amax(dim=(1, 3))
    scales = _nvfp4_scales(amax) if fmt == "nvfp4" else _scales(amax, FORMATS[fmt], scale)
    divisor = torch.where(scales == 0, 1.0, scales).float()[:, None, :, None]  # a block that is left with 0 is 0
    limit = FORMATS[fmt].max
    scaled = (blocks / divisor).clamp_(-limit, limit).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    rounded = FORMATS[fmt].round(scaled) if fmt in ("e5m6", "int8", "nvfp4") else scaled
    return ScaledTensor(rounded.to(STORED[fmt]).contiguous(), scales, (rows, cols))


def _scales(amax: Tensor, fmt: FloatFormat | IntFormat, rule: str) -> Tensor:
    exact = (amax / fmt.max).clamp_(min=SMALLEST_SCALE)
    if rule == "up":
        exact = round_up_to_power_of_2(exact)
    elif rule == "nearest":
        exact = UE8M0.round(exact)
    elif rule == "down":
        exact = (exact.view(torch.int32) & 0x7F800000).view(torch.float32)
    elif rule == "ocp":
        largest = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two at or below it
        exact = (largest / 2.0 ** math.floor(math.log2(fmt.max))).clamp_(min=SMALLEST_SCALE)
    return torch.where(amax == 0, 1.0, exact)


def _nvfp4_scales(amax: Tensor) -> Tensor:
    """E4M3 scales in units of one FP32 scale, which makes the largest of them 448; a block may be left with 0."""
    whole = amax.max().div(E2M1.max * E4M3.max).clamp(min=SMALLEST_SCALE)
    return E4M3.round(amax / E2M1.max / whole).double() * whole.double()


def bits_per_value(v: Variant, *operands: ScaledTensor) -> float:
    """Bits a value of the operands with its share of the scales: 8 of a UE8M0 or E4M3 scale, 32 of an FP32 one."""
    width = 8 if v.fmt in OWN_SCALES else 32
    scales, numbers = sum(q.scale.numel() for q in operands), sum(q.data.numel() for q in operands)
    return FORMATS[v.fmt].bits + width * scales / max(numbers, 1)
