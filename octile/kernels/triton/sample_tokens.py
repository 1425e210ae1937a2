# mypy: allow-untyped-defs
"""Sampling of the next tokens, as `octile.ops.sample_tokens` specifies but for the last bits of logarithms.

A row is divided into parts, so that few rows use all SMs:

    row_maxima       a program finds the largest logit of a part, NaN if there is one
    best_of_parts    a program finds the largest of logit / temperature + noise in a part, and its token
    best_of_rows     a program chooses the token of a row among its parts'

A row of one part takes the second kernel alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.launch_config import EXACT, SAMPLE_TOKENS


def launch(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> Tensor:
    """Choose a token per row of logits [L, V] → int64 [L]."""
    rows, vocabulary = logits.shape
    tokens = seeds.new_empty(rows)
    if not rows:
        return tokens
    block = min(triton.next_power_of_2(vocabulary), SAMPLE_TOKENS["BLOCK"])
    blocks = triton.cdiv(vocabulary, block)
    wanted = triton.cdiv(SAMPLE_TOKENS["PROGRAMS"] * device_properties(logits.device).num_sms, rows)
    part = triton.cdiv(blocks, min(blocks, wanted, SAMPLE_TOKENS["MAX_PARTS"])) * block
    parts = triton.cdiv(vocabulary, part)
    sizes = {"BLOCK": block, "PARTS": triton.next_power_of_2(parts), "num_warps": SAMPLE_TOKENS["num_warps"]}
    maxima, best = (logits.new_empty(rows, parts, dtype=torch.float32) for _ in range(2))
    part_best = tokens if parts == 1 else seeds.new_empty(rows, parts)
    numbers = seeds, positions, temperature, seeds.stride(0), positions.stride(0), temperature.stride(0)
    with torch.cuda.device_of(logits):
        if parts > 1:
            row_maxima[(rows, parts)](logits, maxima, vocabulary, logits.stride(0), part, parts, **sizes)
        best_of_parts[(rows, parts)](
            logits, maxima, *numbers, best, part_best, vocabulary, logits.stride(0), part, parts, **sizes, **EXACT
        )
        if parts > 1:
            best_of_rows[(rows,)](best, part_best, tokens, parts, PARTS=sizes["PARTS"], num_warps=1)
    return tokens


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def sampled(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
        seeds, temperature = cases.empty(rows, dtype=torch.int64), cases.empty(rows, dtype=cases.FP32)
        launch(cases.empty(rows, vocabulary, dtype=dtype), seeds, seeds, temperature)

    return {
        "sampling": lambda: sampled(256, 102400, cases.BF16),
        "sampling outside of graphs": lambda: sampled(256, 102400, cases.FP32),
        "sampling of a small vocabulary": lambda: sampled(1, 4096, cases.BF16),
    }


@triton.jit(do_not_specialize=["part", "parts"])
def row_maxima(
    logits, maxima, vocabulary, row_step, part, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Write the largest logit of a part, NaN if there is one."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(maxima + row * parts + tl.program_id(1), _maximum(logits + row * row_step, vocabulary, part, BLOCK))


@triton.jit(do_not_specialize=["part", "parts"])
def best_of_parts(
    logits, maxima, seeds, positions, temperature, seed_step, position_step, temperature_step, best, tokens,
    vocabulary, row_step, part, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the largest of logit / temperature + noise of a part, and its token, or why the row has none."""
    row = tl.program_id(0).to(tl.int64)
    at = row * parts + tl.program_id(1)
    if PARTS == 1:
        highest = _maximum(logits + row * row_step, vocabulary, part, BLOCK)
    else:
        p = tl.arange(0, PARTS)
        part_best = tl.load(maxima + row * parts + p, mask=p < parts, other=float("-inf"))
        highest = tl.max(part_best, axis=0)
        highest = tl.where(tl.max((part_best != part_best).to(tl.int32), axis=0) > 0, float("nan"), highest)
    heat = tl.load(temperature + row * temperature_step)
    is_greedy = heat == 0
    heat = tl.where(is_greedy, 1.0, heat)
    # SplitMix64 of seed and position
    x = _splitmix(tl.load(seeds + row * seed_step).to(tl.uint64, bitcast=True), 0)
    x = _splitmix(x, tl.load(positions + row * position_step).to(tl.uint64, bitcast=True))
    first_key = (x & 0xFFFFFFFF).to(tl.uint32)
    second_key = (x >> 32).to(tl.uint32)
    begin = tl.program_id(1) * part
    block = tl.arange(0, BLOCK)
    largest = float("-inf")
    token = begin
    for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
        v = start + block
        logit = tl.load(logits + row * row_step + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        if is_greedy:
            score = logit
        else:
            score = tl.div_rn(logit - highest, heat + tl.zeros_like(logit)) + _gumbel(v, first_key, second_key)
            score = tl.where(score == score, score, float("inf"))  # NaN: the row has no token, whatever is the largest
        score = tl.where(v < vocabulary, score, float("-inf"))
        value, i = tl.max(score, axis=0, return_indices=True)  # the first of equal ones
        is_larger = value > largest
        token = tl.where(is_larger, start + i, token)
        largest = tl.where(is_larger, value, largest)
    if PARTS > 1:
        tl.store(best + at, largest)
    token = tl.where(highest == highest, token, -1)  # NOT_A_NUMBER
    token = tl.where(highest == float("inf"), -2, token)  # POSITIVE_INFINITY
    token = tl.where(highest == float("-inf"), -3, token)  # ALL_MASKED
    tl.store(tokens + at, token.to(tl.int64))


@triton.jit(do_not_specialize=["parts"])
def best_of_rows(best, part_best, tokens, parts, PARTS: tl.constexpr):
    """Write the token of the part with the largest sum, the first of equal ones."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    value = tl.load(best + row * parts + p, mask=p < parts, other=float("-inf"))
    _, part = tl.max(value, axis=0, return_indices=True)
    tl.store(tokens + row, tl.load(part_best + row * parts + part))


@triton.jit
def _maximum(row, vocabulary, part, BLOCK: tl.constexpr):
    """The largest logit of a part of a row, NaN if there is one."""
    begin = tl.program_id(1) * part
    block = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
        logit = tl.load(row + start + block, mask=start + block < vocabulary, other=float("-inf")).to(tl.float32)
        has_nan |= (logit != logit).to(tl.int32)
        highest = tl.maximum(highest, logit)
    return tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), tl.max(highest, axis=0))


@triton.jit
def _splitmix(x, y):
    """The finalizer of SplitMix64, of 64 bits and a number that is added first."""
    x = x + (tl.cast(y, tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(v, first_key, second_key):
    """Gumbel noise of tokens v, with the finalizer of MurmurHash3."""
    x = (v.to(tl.uint32) * 2654435769) ^ first_key
    x ^= x >> 16
    x *= 2246822507
    x += second_key
    x ^= x >> 13
    x *= 3266489909
    x ^= x >> 16
    uniform = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31
    # log(1 − uniform) with all digits of a small number: w − 1 is what of it is in w (Kahan)
    w = 1.0 - uniform
    exponential = tl.where(w == 1.0, uniform, tl.div_rn(tl.log(w) * uniform, w - 1.0))
    return -tl.log(exponential)
