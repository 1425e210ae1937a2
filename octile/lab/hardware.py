"""What the authors' suggestions to hardware makers would bring on a captured run: in error, and in bytes moved.

    cast fused with the load     TMA casts BF16 to FP8 while it loads; or memory does, as the values leave it
    transposed reads             wgrad reads the tiles that fprop kept; today x is cast again along the tokens, because
                                 a tensor core that does not scale can only take scales that hold along the sum
    scaling in the tensor core   MX: 1×32 tiles with UE8M0 scales, as sm_100 multiplies them
    longer accumulation          13 fraction bits become 14, 15 … 25, with one scale a tensor and no promotion

The errors are computed on the captured tensors, the bytes are counted from their shapes (`hardware_bytes`).
Source: DeepSeek-V3 (arXiv 2412.19437) §3.5.2. Its §3.5.1, communication off the SMs, is nothing that a capture sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from octile.formats import FP32
from octile.lab.capture import CapturedGemm
from octile.lab.hardware_bytes import Bytes, cast_near_memory, fused_cast, transposed_reads, whole_sums
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.variants import BLOCKS, PUBLISHED, Variant, cast
from octile.lab.what_if import SAMPLE, Error, SampledGemm, sampled, values
from octile.scaled import ScaledTensor

FRACTION_BITS = tuple(range(13, 26))  # Hopper's, up to what holds an FP32 sum
TENSOR = Variant("e4m3", "tensor", "float32", None, "sm_90")  # whose scale lets a sum stay in the tensor core
MX = Variant("mx", "1x32", "up", None, "sm_100")
HBM, CORE = "HBM", "out of the tensor core"


@dataclass(frozen=True)
class Accumulator:
    """A tensor core that keeps so many fraction bits, never promoted: mean noise of the sums, and in all."""

    fraction_bits: int
    accumulation: float
    total: float


@dataclass(frozen=True)
class Suggestion:
    """One of them.

    Attributes:
        name: in a few words. moved: what the bytes cross. formula: of the bytes, today → then, with s for the bytes of
            a value in FP8 with its share of a scale.
        bytes: over all products of the capture.
        noise: mean noise over signal of the products it concerns, (today, then); None where no value changes.
    """

    name: str
    moved: str
    formula: str
    bytes: Bytes
    noise: tuple[float, float] | None = None


@dataclass(frozen=True)
class Hardware:
    """What was found.

    Attributes:
        suggestions: what each would bring.
        accumulators: by fraction bits.
        promoted, cast: the same casts on Hopper promoted every 128, and without any sum: mean noise.
        longest: products in the longest sum.
        products: how many were measured.
    """

    suggestions: Sequence[Suggestion]
    accumulators: Sequence[Accumulator]
    promoted: float
    cast: float
    longest: int
    products: int


def hardware(
    everything: Sequence[CapturedGemm], measured: Iterable[CapturedGemm], sample: int = SAMPLE, seed: int = 0
) -> Hardware:
    """Measures and counts.

    Args:
        everything: the products whose bytes are counted.
        measured: those whose errors are computed: all of them, or what `octile.lab.what_if.chosen` leaves of experts.
        sample, seed: as in `octile.lab.what_if.what_if`.

    Raises:
        ValueError: an operand is not finite; every product is all zeros.
    """
    drawn = [at for at in (SampledGemm.of(p, sample, seed) for p in measured) if at.exact.any()]
    if not drawn:
        raise ValueError("there is nothing to measure: every product is all zeros, or none was asked for")
    today = [at.row(PUBLISHED).total.noise for at in drawn]
    mx = [at.row(MX).total.noise for at in drawn]
    tensor = [at.row(replace(TENSOR, promote=128)) for at in drawn]
    accumulators = [accumulator(drawn, bits) for bits in FRACTION_BITS]
    wgrads = [at for at in drawn if at.captured.product == "wgrad"]
    twice, once = ([way(at).noise for at in wgrads] for way in (x_cast_twice, x_cast_once))
    sums = whole_sums(everything)
    suggestions = [
        Suggestion("cast fused with the load", HBM, "2 + s + s → 2 a value", fused_cast(everything)),
        Suggestion("cast near memory", HBM, "2 + s + s → s a value", cast_near_memory(everything)),
        Suggestion(
            "transposed reads",
            HBM,
            "s + s + s → s a value of wgrad's x",
            transposed_reads(everything),
            (_mean(twice), _mean(once)) if wgrads else None,
        ),
        Suggestion("scaling in the tensor core", CORE, "4·M·N·⌈K/128⌉ → 4·M·N", sums, (_mean(today), _mean(mx))),
        Suggestion(
            "longer accumulation",
            CORE,
            "4·M·N·⌈K/128⌉ → 4·M·N",
            sums,
            (_mean(row.total.noise for row in tensor), accumulators[-1].total),
        ),
    ]
    promoted, casts = (_mean(getattr(row, part).noise for row in tensor) for part in ("accumulation", "quantization"))
    longest = max(at.captured.a.shape[1] for at in drawn)
    return Hardware(suggestions, accumulators, promoted, casts, longest, len(drawn))


def accumulator(drawn: Sequence[SampledGemm], fraction_bits: int) -> Accumulator:
    """Hopper's FP8 instruction with other fraction bits, on E4M3 with one scale a tensor."""
    row = find_instruction("sm_90", torch.float8_e4m3fn, torch.float8_e4m3fn)
    row = replace(row, fraction_bits=fraction_bits, output_bits=min(fraction_bits, FP32.mantissa_bits))
    sums_noise, total_noise = [], []
    for at in drawn:
        made = at.casts_for(TENSOR)
        a, b = made.a, made.b
        sums = tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, row, None).double()
        sums_noise.append(Error.between(sums, made.quantized).noise)
        total_noise.append(Error.between(sums, at.exact).noise)
    return Accumulator(fraction_bits, _mean(sums_noise), _mean(total_noise))


def x_cast_twice(at: SampledGemm) -> Error:
    """wgrad as it is today: x is kept in 1×128 tiles with power-of-two scales, and cast again along the tokens."""
    kept = cast(at.captured.b.mT, "e4m3", BLOCKS["1x128"], "up").dequantize()
    return _wgrad(at, cast(kept.mT, "e4m3", BLOCKS["1x128"], "up"))


def x_cast_once(at: SampledGemm) -> Error:
    """wgrad of the tiles that fprop kept, read transposed."""
    return _wgrad(at, cast(at.captured.b.mT, "e4m3", BLOCKS["1x128"], "up").mT)


def _wgrad(at: SampledGemm, x: ScaledTensor) -> Error:
    dy = sampled(cast(at.captured.a, "e4m3", BLOCKS["1x128"], "float32"), at.rows_a)
    return Error.between(values(dy) @ values(sampled(x, at.rows_b)).mT, at.exact)


def _mean(noise: Iterable[float]) -> float:
    every = list(noise)
    return math.fsum(every) / len(every)
