"""Estimate what DeepSeek-V3's suggestions to hardware makers would bring to a captured run, in error and in bytes.

    cast fused with the load     TMA quantizes BF16 to FP8 while it loads; or memory does, as it sends the values
    transposed reads             wgrad reads the tiles that fprop saved. Today x is requantized along the tokens,
                                 because a tensor core without scaling needs scales that are constant along the sum
    scaling in the tensor core   MX: 1×32 tiles with UE8M0 scales, as sm_100 multiplies them
    longer accumulation          14 to 25 fraction bits instead of 13, with per-tensor scaling and no promotion

Errors are computed on the captured tensors, and bytes are counted from their shapes. Each tensor counts once for every
kernel that reads or writes it (repeated reads hit the cache), with 2 bytes per BF16 value, 1 byte per FP8 value, and 4
bytes for the scale of each 1×128 tile, whole or partial.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.5.2. Communication off the SMs, its §3.5.1, cannot be seen in a capture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from octile.formats import FP32
from octile.lab.capture import CapturedGemm
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.variants import BLOCKS, PUBLISHED, Variant, quantize_as
from octile.lab.what_if import SAMPLE, Error, SampledGemm, sample_rows, values
from octile.scaled import ScaledTensor

FRACTION_BITS = tuple(range(13, 26))  # from Hopper's to those of an FP32 sum
PER_TENSOR = Variant("e4m3", "tensor", "float32", None, "sm_90")  # its scale allows sums to stay in the tensor core
MX = Variant("mx", "1x32", "up", None, "sm_100")
HBM, CORE = "HBM", "out of the tensor core"
TILE, BF16_BYTES, FP8_BYTES, FP32_BYTES = 128, 2, 1, 4


@dataclass(frozen=True)
class Traffic:
    """Bytes moved today, and then, with the suggested hardware."""

    today: int
    then: int

    @property
    def saved(self) -> float:
        """The saving as a share of today's bytes; 0 if nothing moves."""
        return 1 - self.then / self.today if self.today else 0.0


@dataclass(frozen=True)
class Accumulator:
    """Mean noise of a tensor core without promotion, by its fraction bits: of the sums alone, and in total."""

    fraction_bits: int
    accumulation: float
    total: float


@dataclass(frozen=True)
class Suggestion:
    """One suggestion.

    Attributes:
        name: a short name.
        moved: where the bytes move, `HBM` or `CORE`.
        formula: the bytes, today → then; s is the bytes of an FP8 value with its share of a scale.
        bytes: over all GEMMs of the capture.
        noise: mean noise over signal of the GEMMs concerned, (today, then); None if no value changes.
    """

    name: str
    moved: str
    formula: str
    bytes: Traffic
    noise: tuple[float, float] | None = None


@dataclass(frozen=True)
class Hardware:
    """The results of `hardware`.

    Attributes:
        suggestions: what each suggestion would bring.
        accumulators: noise by fraction bits.
        promoted: mean noise of the sums on Hopper, promoted every 128, with the same quantization.
        cast: mean noise of that quantization alone.
        longest: the number of products in the longest sum.
        gemms: the number of measured GEMMs.
    """

    suggestions: Sequence[Suggestion]
    accumulators: Sequence[Accumulator]
    promoted: float
    cast: float
    longest: int
    gemms: int


def hardware(
    counted: Sequence[CapturedGemm], measured: Iterable[CapturedGemm], sample: int = SAMPLE, seed: int = 0
) -> Hardware:
    """Measure errors and count bytes for every suggestion.

    Args:
        counted: the GEMMs whose bytes are counted.
        measured: the GEMMs whose errors are measured: all, or those of `octile.lab.what_if.select_gemms`.
        sample, seed: as in `octile.lab.what_if.what_if`.

    Raises:
        ValueError: an operand is not finite, or all GEMMs are zero.
    """
    sampled = [gemm for gemm in (SampledGemm.draw(g, sample, seed) for g in measured) if gemm.exact.any()]
    if not sampled:
        raise ValueError("there is nothing to measure: every GEMM is all zeros, or none was selected")
    published = [gemm.row(PUBLISHED).total.noise for gemm in sampled]
    mx = [gemm.row(MX).total.noise for gemm in sampled]
    per_tensor = [gemm.row(replace(PER_TENSOR, promote=128)) for gemm in sampled]
    accumulators = [accumulator(sampled, bits) for bits in FRACTION_BITS]
    wgrads = [gemm for gemm in sampled if gemm.captured.gemm == "wgrad"]
    transposed_noise = None
    if wgrads:
        transposed_noise = (
            _mean(wgrad_requantized(gemm).noise for gemm in wgrads),
            _mean(wgrad_transposed(gemm).noise for gemm in wgrads),
        )
    in_core = unpromoted_sums(counted)
    longer_noise = _mean(row.total.noise for row in per_tensor), accumulators[-1].total
    suggestions = [
        Suggestion("cast fused with the load", HBM, "2 + s + s → 2 a value", fused_cast(counted)),
        Suggestion("cast near memory", HBM, "2 + s + s → s a value", cast_near_memory(counted)),
        Suggestion(
            "transposed reads",
            HBM,
            "s + s + s → s a value of wgrad's x",
            transposed_reads(counted),
            transposed_noise,
        ),
        Suggestion("scaling in the tensor core", CORE, "4·M·N·⌈K/128⌉ → 4·M·N", in_core, (_mean(published), _mean(mx))),
        Suggestion("longer accumulation", CORE, "4·M·N·⌈K/128⌉ → 4·M·N", in_core, longer_noise),
    ]
    return Hardware(
        suggestions,
        accumulators,
        _mean(row.accumulation.noise for row in per_tensor),
        _mean(row.quantization.noise for row in per_tensor),
        max(gemm.captured.a.shape[1] for gemm in sampled),
        len(sampled),
    )


def accumulator(sampled: Sequence[SampledGemm], fraction_bits: int) -> Accumulator:
    """Measure Hopper's FP8 instruction with other fraction bits, on E4M3 with per-tensor scaling."""
    instruction = find_instruction("sm_90", torch.float8_e4m3fn, torch.float8_e4m3fn)
    output_bits = min(fraction_bits, FP32.mantissa_bits)
    instruction = replace(instruction, fraction_bits=fraction_bits, output_bits=output_bits)
    accumulation, total = [], []
    for gemm in sampled:
        q = gemm.quantized(PER_TENSOR)
        sums = tensor_core_scaled_matmul(
            q.a.data, q.a.scale, q.a.block, q.b.data, q.b.scale, q.b.block, instruction, None
        ).double()
        accumulation.append(Error.between(sums, q.quantized).noise)
        total.append(Error.between(sums, gemm.exact).noise)
    return Accumulator(fraction_bits, _mean(accumulation), _mean(total))


def wgrad_requantized(gemm: SampledGemm) -> Error:
    """Measure wgrad today: x is saved in 1×128 tiles with power-of-two scales, and requantized along the tokens."""
    saved = quantize_as(gemm.captured.b.mT, "e4m3", BLOCKS["1x128"], "up").dequantize()
    return _wgrad_error(gemm, quantize_as(saved.mT, "e4m3", BLOCKS["1x128"], "up"))


def wgrad_transposed(gemm: SampledGemm) -> Error:
    """Measure wgrad with the tiles that fprop saved, read transposed."""
    return _wgrad_error(gemm, quantize_as(gemm.captured.b.mT, "e4m3", BLOCKS["1x128"], "up").mT)


def _wgrad_error(gemm: SampledGemm, x: ScaledTensor) -> Error:
    dy = sample_rows(quantize_as(gemm.captured.a, "e4m3", BLOCKS["1x128"], "float32"), gemm.rows_a)
    return Error.between(values(dy) @ values(sample_rows(x, gemm.rows_b)).mT, gemm.exact)


def bf16_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a BF16 matrix."""
    return BF16_BYTES * rows * columns


def fp8_bytes(rows: int, columns: int) -> int:
    """Return the bytes of an FP8 matrix with 1×128 tiles along its columns."""
    return FP8_BYTES * rows * columns + FP32_BYTES * rows * -(-columns // TILE)


def fused_cast(gemms: Iterable[CapturedGemm]) -> Traffic:
    """Count operand a, x or dy. Today: read in BF16, written in FP8, read in FP8. Then: read in BF16 by the GEMM."""
    return _add(Traffic(_cast_today(g), bf16_bytes(*g.a.shape)) for g in gemms)


def cast_near_memory(gemms: Iterable[CapturedGemm]) -> Traffic:
    """Count operand a as in `fused_cast`; then the GEMM reads FP8 from a memory that quantizes."""
    return _add(Traffic(_cast_today(g), fp8_bytes(*g.a.shape)) for g in gemms)


def transposed_reads(gemms: Iterable[CapturedGemm]) -> Traffic:
    """Count wgrad's x. Today: saved tiles read, requantized along the tokens, written, read. Then: saved tiles read."""
    wgrads = [g for g in gemms if g.gemm == "wgrad"]
    return _add(Traffic(fp8_bytes(*g.b.mT.shape) + 2 * fp8_bytes(*g.b.shape), fp8_bytes(*g.b.mT.shape)) for g in wgrads)


def unpromoted_sums(gemms: Iterable[CapturedGemm]) -> Traffic:
    """Count accumulators that leave the tensor core. Today: every 128 products. Then: once, at the end."""
    return _add(
        Traffic(FP32_BYTES * len(g.a) * len(g.b) * -(-g.a.shape[1] // TILE), FP32_BYTES * len(g.a) * len(g.b))
        for g in gemms
    )


def _cast_today(g: CapturedGemm) -> int:
    return bf16_bytes(*g.a.shape) + 2 * fp8_bytes(*g.a.shape)


def _add(counts: Iterable[Traffic]) -> Traffic:
    counts = list(counts)
    return Traffic(sum(c.today for c in counts), sum(c.then for c in counts))


def _mean(noise: Iterable[float]) -> float:
    noise = list(noise)
    return math.fsum(noise) / len(noise)
