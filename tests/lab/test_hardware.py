"""Tests of the hardware estimates: bytes against a count per tensor, errors against exact arithmetic."""

from fractions import Fraction
from itertools import product as every_combination

import pytest
import torch

from octile.lab.capture import CapturedGemm, load
from octile.lab.hardware import (
    FRACTION_BITS,
    PER_TENSOR,
    Traffic,
    accumulator,
    cast_near_memory,
    fused_cast,
    hardware,
    transposed_reads,
    unpromoted_sums,
    wgrad_requantized,
    wgrad_transposed,
)
from octile.lab.tensor_core import reference
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.tensor_core.operand import FORMATS
from octile.lab.variants import quantize_as
from octile.lab.what_if import SampledGemm, select_gemms
from octile.ops.quantize import dequantize
from octile.scaled import quantize
from tests.lab.captures import write_capture
from tests.lab.test_what_if import assert_error, captured, exactly, expanded_scale, slow_error

T, K, N = 200, 130, 140  # each a tile of 128 and a partial one


def layer(t=T, k=K, n=N) -> list[CapturedGemm]:
    """The three GEMMs of a linear layer."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((t, k), (n, k), (t, n)))
    return [
        CapturedGemm("layer", "fprop", x, w),
        CapturedGemm("layer", "dgrad", dy, w.mT),
        CapturedGemm("layer", "wgrad", dy.mT, x.mT),
    ]


def stored(rows, columns):
    """Traffic of a real tensor in 1×128 tiles."""
    return quantize(torch.zeros(rows, columns), (1, 128)).nbytes


def bf16_bytes(rows, columns):
    return torch.zeros(rows, columns, dtype=torch.bfloat16).nbytes


def test_bytes_of_a_quantization():
    operands = [(T, K), (T, N), (N, T)]  # x of fprop, dy of dgrad, dy of wgrad
    read, eight = (sum(size(*shape) for shape in operands) for size in (bf16_bytes, stored))
    assert fused_cast(layer()) == Traffic(read + 2 * eight, read)
    assert cast_near_memory(layer()) == Traffic(read + 2 * eight, eight)


def test_bytes_of_transposed_reads():
    kept, along_tokens = stored(T, K), stored(K, T)
    assert transposed_reads(layer()) == Traffic(kept + 2 * along_tokens, kept)
    assert transposed_reads(layer()[:2]) == Traffic(0, 0)


def test_bytes_of_unpromoted_accumulation():
    today = 4 * (T * N * 2 + T * K * 2 + N * K * 2)  # every K, N and T is two intervals of 128
    assert unpromoted_sums(layer()) == Traffic(today, today // 2)


def test_what_is_saved():
    assert Traffic(4, 1).saved == 0.75
    assert Traffic(0, 0).saved == 0


@pytest.mark.one_case
@pytest.mark.parametrize("bits", [13, 14, 20, 23, 24, 25])
def test_an_accumulator_of_other_bits_equals_the_specification(bits):
    p = captured(k=96)
    row = find_instruction("sm_90", torch.float8_e4m3fn, torch.float8_e4m3fn)
    row = row.__class__(**{**vars(row), "fraction_bits": bits, "output_bits": min(bits, 23)})
    a, b = (quantize_as(t, "e4m3", (None, None), "float32") for t in (p.a, p.b))
    fmt = FORMATS[torch.float8_e4m3fn]
    sums = torch.zeros(5, 4)
    for m, n in every_combination(range(5), range(4)):
        total = 0.0
        for k in range(0, 96, 32):
            x, y = (q.data[i, k : k + 32].float().tolist() for q, i in ((a, m), (b, n)))
            total = reference.step(x, y, total, fmt, fmt, row)
        sums[m, n] = total
    scaled = [[Fraction(x) for x in line] for line in (sums * (a.scale * b.scale)).tolist()]
    found = accumulator([SampledGemm.draw(p, 32, 0)], bits)
    quantized = exactly(a.data.double() * a.scale.double(), b.data.double() * b.scale.double())
    assert found.accumulation == pytest.approx(slow_error(scaled, quantized)[0], rel=1e-9, abs=1e-18)
    assert found.total == pytest.approx(slow_error(scaled, exactly(p.a, p.b))[0], rel=1e-9)


def test_thirteen_bits_are_hoppers():
    at = SampledGemm.draw(captured(), 32, 0)
    assert accumulator([at], 13).accumulation == at.row(PER_TENSOR).accumulation.noise


@pytest.mark.parametrize("way", ["once", "twice"])
def test_wgrads_x_quantized_once_or_twice(way):
    fprop, dgrad, wgrad = layer(t=140, k=6, n=5)
    at, x, dy = SampledGemm.draw(wgrad, 200, 0), fprop.a, dgrad.a
    kept = quantize(x, (1, 128), scale="power_of_2")
    if way == "twice":
        kept = quantize(kept.dequantize(), (128, 1), scale="power_of_2")
    values = dequantize(kept.data, kept.scale, *kept.block, torch.float32)
    casted = quantize(dy, (128, 1))
    slow = slow_error(exactly((casted.data.double() * expanded_scale(casted, 5)).mT, values.mT), exactly(dy.mT, x.mT))
    assert_error((wgrad_requantized if way == "twice" else wgrad_transposed)(at), slow)


def test_everything_together(tmp_path):
    capture = load(write_capture(tmp_path / "c.safetensors"))
    found = hardware(capture.gemms, select_gemms(capture))
    assert [a.fraction_bits for a in found.accumulators] == list(FRACTION_BITS)
    assert found.gemms == 12
    assert found.longest == 160
    by_name = {s.name: s for s in found.suggestions}
    assert by_name["cast near memory"].bytes == cast_near_memory(capture.gemms)
    assert by_name["cast near memory"].noise is None
    today = [SampledGemm.draw(p, 32, 0) for p in select_gemms(capture) if p.gemm == "wgrad"]
    twice = by_name["transposed reads"].noise
    assert twice is not None
    assert twice[0] == pytest.approx(sum(wgrad_requantized(at).noise for at in today) / len(today))


def test_zeros_are_refused():
    zero = CapturedGemm("layer", "fprop", torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="there is nothing to measure"):
        hardware([zero], [zero])
