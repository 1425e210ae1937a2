# mypy: allow-untyped-defs
"""Sampling of the next tokens, as `octile.ops.sample_tokens` specifies but for the last bits of functions.

A row is divided into parts, so that few rows use all SMs:

    row_maxima       a program finds the largest logit of a part, NaN if there is one
    least_weights    a program finds which tokens top_k, top_p and min_p leave of a row, if they leave some out
    best_of_parts    a program finds the largest of logit / temperature + noise in a part, and its token
    best_of_rows     a program chooses the token of a row among its parts'

A row of one part takes the second and third kernel alone.

The tokens that a row leaves are the first ones in the order of weights and tokens. So the last of them says which they
are. It is found without sorting: the weights that are neither 0 nor below that of min_p, mostly few, are copied to a
list, where bisection finds the least one that is left. Then the row's tokens of this weight are counted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.launch_config import EXACT, SAMPLE_TOKENS


def launch(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    fixed_point: int,
) -> Tensor:
    """Choose a token per row of logits [L, V] → int64 [L]; the most likely token weighs fixed_point, below 2**31."""
    rows, vocabulary = logits.shape
    tokens = seeds.new_empty(rows)
    if not rows:
        return tokens
    block = min(max(triton.next_power_of_2(vocabulary), 2), SAMPLE_TOKENS["BLOCK"])
    blocks = triton.cdiv(vocabulary, block)
    wanted = triton.cdiv(SAMPLE_TOKENS["PROGRAMS"] * device_properties(logits.device).num_sms, rows)
    part = triton.cdiv(blocks, min(blocks, wanted, SAMPLE_TOKENS["MAX_PARTS"])) * block
    parts = triton.cdiv(vocabulary, part)
    sizes = {"BLOCK": block, "PARTS": triton.next_power_of_2(parts)}
    weight = {"FIXED_POINT": fixed_point, **EXACT}
    warps, list_warps = SAMPLE_TOKENS["num_warps"], SAMPLE_TOKENS["list_warps"]
    maxima, best = (logits.new_empty(rows, parts, dtype=torch.float32) for _ in range(2))
    part_best = tokens if parts == 1 else seeds.new_empty(rows, parts)
    weights = logits.new_empty(rows, vocabulary, dtype=torch.int32)
    border = logits.new_empty(2, rows, dtype=torch.int32)
    limits = temperature, top_k, top_p, min_p, *(t.stride(0) for t in (temperature, top_k, top_p, min_p))
    noise = seeds, positions, temperature, *(t.stride(0) for t in (seeds, positions, temperature))
    shape = vocabulary, logits.stride(0), part, parts
    with torch.cuda.device_of(logits):
        if parts > 1:
            row_maxima[(rows, parts)](logits, maxima, *shape, **sizes, num_warps=warps)
        least_weights[(rows,)](
            logits, maxima, *limits, weights, *border, *shape, **sizes, **weight, num_warps=list_warps
        )
        best_of_parts[(rows, parts)](
            logits, maxima, *noise, *border, best, part_best, *shape, **sizes, **weight, num_warps=warps
        )
        if parts > 1:
            best_of_rows[(rows,)](best, part_best, tokens, parts, PARTS=sizes["PARTS"], num_warps=1)
    return tokens


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def sampled(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
        seeds, temperature = cases.empty(rows, dtype=torch.int64), cases.empty(rows, dtype=cases.FP32)
        share = cases.empty(rows, dtype=torch.float64)
        launch(cases.empty(rows, vocabulary, dtype=dtype), seeds, seeds, temperature, seeds, share, share, 2**30)

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
def least_weights(
    logits, maxima, temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step,
    weights, least, last, vocabulary, row_step, part, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FIXED_POINT: tl.constexpr,
):  # fmt: skip
    """Write the least weight of the tokens that a row leaves, and the last token that has it; 0 if all are left."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row * temperature_step)
    k = tl.load(top_k + row * top_k_step)
    share = tl.load(top_p + row * top_p_step)
    least_share = tl.load(min_p + row * min_p_step)
    has_k = (k > 0) & (k < vocabulary)
    least_weight, last_token = 0, 0
    if (heat != 0) & (has_k | (share < 1) | (least_share > 0)):
        highest = _row_maximum(logits, maxima, row, vocabulary, row_step, part, parts, BLOCK, PARTS)
        if tl.abs(highest) < float("inf"):  # otherwise the row has no token
            block = tl.arange(0, BLOCK)
            listed = weights + row * vocabulary
            floor = tl.maximum((least_share * FIXED_POINT).to(tl.int32), 1)
            n = 0
            sums = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocabulary, BLOCK):
                v = start + block
                weight = _weight(_scaled(_logit(logits + row * row_step, v, vocabulary), highest, heat), FIXED_POINT)
                is_listed = weight >= floor
                place = n + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
                tl.store(listed + place, weight, mask=is_listed)
                n += tl.sum(is_listed.to(tl.int32), axis=0)
                sums += tl.where(is_listed, weight, 0)
            total = tl.sum(sums, axis=0)
            tl.debug_barrier()  # other threads read the list
            if has_k & (k < n):
                kth = _least_weight(listed, n, floor, k, FIXED_POINT, True, BLOCK)
                n_above, above = _from(listed, n, kth + 1, True, BLOCK), _from(listed, n, kth + 1, False, BLOCK)
                total = above + (k - n_above) * kth
            wanted = share * total.to(tl.float64)
            sum_wanted = wanted.to(tl.int64)
            sum_wanted += (sum_wanted.to(tl.float64) < wanted).to(tl.int64)  # rounded up
            least_weight = _least_weight(listed, n, floor, sum_wanted, FIXED_POINT, False, BLOCK)
            missing = sum_wanted - _from(listed, n, least_weight + 1, False, BLOCK)
            n_before, start = tl.cast(0, tl.int64), 0
            while (n_before * least_weight < missing) & (start < vocabulary):
                v = start + block
                weight = _weight(_scaled(_logit(logits + row * row_step, v, vocabulary), highest, heat), FIXED_POINT)
                is_least = weight == least_weight
                before = n_before + tl.cumsum(is_least.to(tl.int32), axis=0) - 1
                is_last = is_least & (before * least_weight < missing)
                last_token = tl.maximum(last_token, tl.max(tl.where(is_last, v, 0), axis=0))
                n_before += tl.sum(is_least.to(tl.int32), axis=0)
                start += BLOCK
    tl.store(least + row, least_weight)
    tl.store(last + row, last_token)


@triton.jit(do_not_specialize=["part", "parts"])
def best_of_parts(
    logits, maxima, seeds, positions, temperature, seed_step, position_step, temperature_step, least, last, best,
    tokens, vocabulary, row_step, part, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr, FIXED_POINT: tl.constexpr,
):  # fmt: skip
    """Write the largest of logit / temperature + noise of a part, and its token, or why the row has none."""
    row = tl.program_id(0).to(tl.int64)
    at = row * parts + tl.program_id(1)
    highest = _row_maximum(logits, maxima, row, vocabulary, row_step, part, parts, BLOCK, PARTS)
    least_weight = tl.load(least + row)
    last_token = tl.load(last + row)
    heat = tl.load(temperature + row * temperature_step)
    is_greedy = heat == 0
    heat = tl.where(is_greedy, 1.0, heat)
    # SplitMix64 of seed and position
    x = _splitmix(tl.load(seeds + row * seed_step).to(tl.uint64, bitcast=True), 0)
    x = _splitmix(x, tl.load(positions + row * position_step).to(tl.uint64, bitcast=True))
    first_key = (x & 0xFFFFFFFF).to(tl.uint32)
    second_key = (x >> 32).to(tl.uint32)
    scored = logits + row * row_step, vocabulary, part, highest, heat, is_greedy, first_key, second_key
    if least_weight > 0:
        # half as many at a time, since it takes more registers
        largest, token = _best(*scored, least_weight, last_token, FIXED_POINT, True, BLOCK // 2)
    else:
        largest, token = _best(*scored, least_weight, last_token, FIXED_POINT, False, BLOCK)
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
def _best(
    logits, vocabulary, part, highest, heat, is_greedy, first_key, second_key, least_weight, last_token,
    FIXED_POINT: tl.constexpr, TRUNCATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of logit / temperature + noise of a part, and its token."""
    begin = tl.program_id(1) * part
    block = tl.arange(0, BLOCK)
    largest = float("-inf")
    token = begin
    for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
        v = start + block
        logit = _logit(logits, v, vocabulary)
        if is_greedy:
            score = logit
        else:
            z = _scaled(logit, highest, heat)
            if TRUNCATES:
                weight = _weight(z, FIXED_POINT)
                is_candidate = (weight > least_weight) | ((weight == least_weight) & (v <= last_token))
                z = tl.where(is_candidate, z, float("-inf"))
            score = z + _gumbel(v, first_key, second_key)
            score = tl.where(score == score, score, float("inf"))  # NaN: the row has no token, whatever is the largest
        score = tl.where(v < vocabulary, score, float("-inf"))
        value, i = tl.max(score, axis=0, return_indices=True)  # the first of equal ones
        is_larger = value > largest
        token = tl.where(is_larger, start + i, token)
        largest = tl.where(is_larger, value, largest)
    return largest, token


@triton.jit
def _row_maximum(
    logits, maxima, row, vocabulary, row_step, part, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The largest logit of a row, NaN if there is one; of several parts that of `row_maxima`."""
    if PARTS == 1:
        highest = _maximum(logits + row * row_step, vocabulary, part, BLOCK)
    else:
        p = tl.arange(0, PARTS)
        part_best = tl.load(maxima + row * parts + p, mask=p < parts, other=float("-inf"))
        highest = tl.max(part_best, axis=0)
        highest = tl.where(tl.max((part_best != part_best).to(tl.int32), axis=0) > 0, float("nan"), highest)
    return highest


@triton.jit
def _maximum(row, vocabulary, part, BLOCK: tl.constexpr):
    """The largest logit of a part of a row, NaN if there is one."""
    begin = tl.program_id(1) * part
    block = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
        logit = _logit(row, start + block, vocabulary)
        has_nan |= (logit != logit).to(tl.int32)
        highest = tl.maximum(highest, logit)
    return tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), tl.max(highest, axis=0))


@triton.jit
def _logit(row, v, vocabulary):
    """Logits of tokens v, -Inf beyond the vocabulary."""
    return tl.load(row + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _scaled(logit, highest, heat):
    """Logits over temperature, of which the largest is 0."""
    return tl.div_rn(logit - highest, heat + tl.zeros_like(logit))


@triton.jit
def _weight(z, FIXED_POINT: tl.constexpr):
    """Weights of tokens whose logits over temperature are z, in fixed point."""
    return (tl.exp(z) * FIXED_POINT).to(tl.int32)


@triton.jit
def _least_weight(
    listed, n, floor, wanted, FIXED_POINT: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest weight from which on the listed ones, all from floor on, are as many or as much as is wanted."""
    low, beyond = floor, FIXED_POINT + 1
    while beyond - low > 1:
        middle = low + (beyond - low) // 2
        has_wanted = _from(listed, n, middle, COUNTS, BLOCK) >= wanted
        low = tl.where(has_wanted, middle, low)
        beyond = tl.where(has_wanted, beyond, middle)
    return low


@triton.jit
def _from(listed, n, least, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The number or the sum of the listed weights from a least one on."""
    block = tl.arange(0, BLOCK)
    measured = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        weight = tl.load(listed + start + block, mask=start + block < n, other=0)
        measure = 1 if COUNTS else weight
        measured += tl.where(weight >= least, measure, 0)
    return tl.sum(measured, axis=0)


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
