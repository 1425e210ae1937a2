"""Variants of a GEMM in few bits: format, block, scale rule, promotion interval and tensor core.

format   e4m3, e5m2, e5m6 (multiplied as FP16, which holds it exactly), int8,
         mx (E4M3 with 1×32 UE8M0 scales: OCP Microscaling Formats v1.0),
         nvfp4 (E2M1 with 1×16 E4M3 scales and one FP32 scale per tensor: NVIDIA's 4-bit format)
block    tensor, row, 1x128, 128x128 (for weights; other operands have 1x128), 1x32; the second number is along K
scale    float32     amax / max
         up          the next power of two at or above it: nothing saturates
         nearest     the nearest power of two: the largest values of a block may saturate
         down        the next power of two at or below it: values up to twice the format's maximum saturate
         ocp         2^(⌊log₂ amax⌋ − ⌊log₂ max⌋), the rule of MX (§6.3): between `up` and `nearest` for E4M3
promote  the number of products after which the accumulator is promoted to FP32; None for never
arch     a tensor core of `octile.lab.tensor_core.architectures`, fp32 (octile's reference), or exact (unrounded sums)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as every_combination

import torch
from torch import Tensor

from octile.formats import BLOCK, E2M1, E4M3, E5M2, E5M6, INT8, TILE, UE8M0, FloatFormat, IntFormat
from octile.lab.tensor_core.architectures import ARCHITECTURES, find_instruction
from octile.ops.quantize import SMALLEST_SCALE, round_up_to_power_of_2, split_into_blocks
from octile.recipe import Extent, GemmFormats, GemmName
from octile.scaled import ScaledTensor, resolve

FORMATS: dict[str, FloatFormat | IntFormat] = {
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e5m6": E5M6,
    "int8": INT8,
    "mx": E4M3,
    "nvfp4": E2M1,
}
STORAGE_DTYPE: dict[str, torch.dtype] = {  # a dtype that holds the format exactly and can be multiplied
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
REFERENCES = ("fp32", "exact")
FIXED_BLOCK = {"mx": "1x32", "nvfp4": "1x16"}
FIXED_SCALES: dict[str, tuple[str, ...]] = {"mx": POWERS_OF_2, "nvfp4": ("e4m3",)}


@dataclass(frozen=True)
class Variant:
    """One combination; see the docstring of this module. `promote` is None for the archs fp32 and exact."""

    fmt: str
    block: str
    scale: str
    promote: int | None
    arch: str

    def __str__(self) -> str:
        promoted = (
            ""
            if self.arch in REFERENCES
            else f", promoted every {self.promote}"
            if self.promote
            else ", never promoted"
        )
        return f"{self.fmt} {self.block} {self.scale} on {self.arch}{promoted}"


PUBLISHED = Variant(
    "e4m3", "128x128", "float32", 128, "sm_90"
)  # DeepSeek-V3's, except for its power-of-two scales of attention inputs


@dataclass(frozen=True)
class SearchSpace:
    """The values to combine. mx and nvfp4 have fixed blocks, and nvfp4 a fixed scale rule.

    Raises:
        ValueError: a format, block, scale rule or architecture is unknown; an interval is below 1.
    """

    formats: Sequence[str] = tuple(FORMATS)
    blocks: Sequence[str] = ("tensor", "row", "1x128", "128x128", "1x32")
    scales: Sequence[str] = SCALES
    promote: Sequence[int | None] = (32, 128, None)
    archs: Sequence[str] = ("sm_90", "exact")

    def __post_init__(self) -> None:
        known: dict[str, tuple[Sequence[str], Iterable[str]]] = {
            "formats": (self.formats, FORMATS),
            "blocks": (self.blocks, [block for block in BLOCKS if block != "1x16"]),
            "scales": (self.scales, SCALES),
            "arch": (self.archs, [*ARCHITECTURES, *REFERENCES]),
        }
        for name, (requested, allowed) in known.items():
            for word in requested:
                if word not in allowed:
                    raise ValueError(f"{name} must be some of {', '.join(allowed)}, not {word!r}")
        for interval in self.promote:
            if interval is not None and interval < 1:
                raise ValueError(f"promote must be at least 1 or never, not {interval}")

    def combinations(self) -> Iterator[Variant]:
        """Yield all combinations, whether they apply or not; fp32 and exact have no promotion interval."""
        for fmt in dict.fromkeys(self.formats):
            blocks = [FIXED_BLOCK[fmt]] if fmt in FIXED_BLOCK else dict.fromkeys(self.blocks)
            scales = FIXED_SCALES["nvfp4"] if fmt == "nvfp4" else dict.fromkeys(self.scales)
            for block, scale, arch in every_combination(blocks, scales, dict.fromkeys(self.archs)):
                for promote in [None] if arch in REFERENCES else dict.fromkeys(self.promote):
                    yield Variant(fmt, block, scale, promote, arch)


def why_not_applicable(v: Variant) -> str | None:
    """Return the reason why a combination does not apply; None if it does."""
    if v.scale not in FIXED_SCALES.get(v.fmt, SCALES):
        return f"{v.fmt} has power-of-two scales, so {v.scale} does not apply"
    if v.fmt == "e4m3" and v.block == "1x32" and v.scale in POWERS_OF_2:
        return "e4m3 in 1x32 blocks with power-of-two scales is mx"
    if v.arch in REFERENCES:
        return None
    if v.fmt == "int8":
        return "tensor cores sum INT8 as exact integers: use exact"
    if v.fmt == "nvfp4":
        return "the model has no instruction for NVFP4: use exact or fp32"
    try:
        instruction = find_instruction(
            v.arch, STORAGE_DTYPE[v.fmt], STORAGE_DTYPE[v.fmt], scaled=scales_in_tensor_core(v)
        )
    except TypeError as error:
        return f"{error}".replace(str(torch.float16), "e5m6, held as FP16,") if v.fmt == "e5m6" else str(error)
    if v.promote is None:
        return None
    if instruction.promotes_every:
        return f"{v.arch}'s {instruction.name} itself promotes every {instruction.promotes_every}: only never applies"
    if v.promote % instruction.terms:
        return f"{v.arch}'s {instruction.name} sums {instruction.terms} products a step; {v.promote} is not a multiple"
    extent = BLOCKS["1x128" if v.block == "128x128" else v.block][1]
    if extent is not None and not scales_in_tensor_core(v) and math.gcd(extent, v.promote) != v.promote:
        return f"{v.block} has a new scale every {extent} products, so every {v.promote} is every {extent}"
    return None


def scales_in_tensor_core(v: Variant) -> bool:
    """Whether the tensor core applies the scales: MX on an architecture with a block-scaled instruction."""
    return v.fmt == "mx" and any(instruction.scaled for instruction in ARCHITECTURES.get(v.arch, ()))


def operands_of(formats: GemmFormats) -> tuple[str, str, str] | None:
    """Return the format, block and scale rule of the combinations with a recipe's w and dy; None: there are none.

    A combination has one rule for the scales of all operands, and wgrad's operands along the tokens in the same blocks.
    x of the recipe may have scales by another rule, and its wgrad other blocks.
    """
    x, w, dy = formats.x, formats.w, formats.dy
    blocks = {(own, own, own): name for name, own in BLOCKS.items()} | {(TILE, BLOCK, TILE): "128x128"}
    block = blocks.get((x.block, w.block, dy.block))
    has_one_format = x.fmt == w.fmt == dy.fmt == FORMATS.get(w.fmt.name)
    is_current = all(operand.amax == "current" for operand in (x, w, dy))
    if block is None or not has_one_format or not is_current or w.scale != dy.scale:
        return None
    scale = "up" if w.scale == "power_of_2" else "float32"
    fmt = "mx" if (w.fmt, block, scale) == (E4M3, "1x32", "up") else w.fmt.name
    return fmt, block, scale


def operand_blocks(v: Variant, gemm: GemmName) -> tuple[tuple[Extent, Extent], tuple[Extent, Extent]]:
    """Return the blocks of a and b. Only weights have 128×128 blocks: b of fprop and of dgrad."""
    block = BLOCKS[v.block]
    if v.block != "128x128":
        return block, block
    return BLOCKS["1x128"], BLOCKS["1x128"] if gemm == "wgrad" else block


def quantize_as(x: Tensor, fmt: str, block: tuple[Extent, Extent], scale: str) -> ScaledTensor:
    """Quantize a matrix with any scale rule; with "float32" and "up" the result is that of `octile.quantize`.

    Args:
        x: [M, K], finite.
        fmt, scale: see the docstring of this module; nvfp4 has the scale rule "e4m3".
        block: rows and columns of a block.

    Returns:
        data [M, K] in STORAGE_DTYPE[fmt], and one float32 scale per block. For nvfp4 the scale is float64, the exact
        product of its two scales.
    """
    rows, cols = resolve(block, x.shape)
    blocks = split_into_blocks(x.float(), rows, cols)
    amax = blocks.abs().amax(dim=(1, 3))
    scales = _nvfp4_scales(amax) if fmt == "nvfp4" else _scales(amax, FORMATS[fmt], scale)
    divisor = torch.where(scales == 0, 1.0, scales).float()[:, None, :, None]  # a block with scale 0 becomes 0
    limit = FORMATS[fmt].max
    scaled = (blocks / divisor).clamp_(-limit, limit).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    rounded = FORMATS[fmt].round(scaled) if fmt in ("e5m6", "int8", "nvfp4") else scaled
    return ScaledTensor(rounded.to(STORAGE_DTYPE[fmt]).contiguous(), scales, (rows, cols))


def _scales(amax: Tensor, fmt: FloatFormat | IntFormat, rule: str) -> Tensor:
    exact = (amax / fmt.max).clamp_(min=SMALLEST_SCALE)
    if rule == "up":
        exact = round_up_to_power_of_2(exact)
    elif rule == "nearest":
        exact = UE8M0.round(exact)
    elif rule == "down":
        exact = (exact.view(torch.int32) & 0x7F800000).view(torch.float32)
    elif rule == "ocp":
        largest = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two at or below amax
        exact = (largest / 2.0 ** math.floor(math.log2(fmt.max))).clamp_(min=SMALLEST_SCALE)
    return torch.where(amax == 0, 1.0, exact)


def _nvfp4_scales(amax: Tensor) -> Tensor:
    """Return E4M3 scales times one FP32 scale, chosen so that the largest is 448; small blocks may get scale 0."""
    per_tensor = amax.max().div(E2M1.max * E4M3.max).clamp(min=SMALLEST_SCALE)
    return E4M3.round(amax / E2M1.max / per_tensor).double() * per_tensor.double()


def bits_per_value(v: Variant, *operands: ScaledTensor) -> float:
    """Return the bits per value of the operands, with scales of 8 bits (UE8M0, E4M3) or 32 bits (FP32)."""
    width = 8 if v.fmt in FIXED_SCALES else 32
    scales, values = sum(q.scale.numel() for q in operands), sum(q.data.numel() for q in operands)
    return FORMATS[v.fmt].bits + width * scales / max(values, 1)
