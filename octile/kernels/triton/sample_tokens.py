# mypy: allow-untyped-defs
"""Sampling of the next tokens, as `octile.ops.sample_tokens` specifies but for the last bits of functions.

A row is divided into parts, so that few rows use all SMs:

    row_maxima       a program finds the largest logit of a part, NaN if there is one
    count_weights    a program counts a part's tokens by the leading bits of their weights
    list_tokens      a program lists the tokens of a part of which the counts do not say whether they are left
    find_borders     a program finds which tokens top_k, top_p and min_p leave of a row
    best_of_parts    a program finds the largest of logit / temperature + noise in a part, and its token
    best_of_rows     a program chooses the token of a row among its parts'

The second to the fourth do nothing for a row that asks for neither top_k nor top_p.

The tokens that a row leaves are the first ones in the order of weights and tokens. This is the order of a key, an
integer of both, so the key of the last of them says which they are: the border. Counts of leading bits bound it. The
few tokens in between are listed, in any order, and the border is searched among them: sums of integers have no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.launch_config import EXACT, SAMPLE_TOKENS, SEARCH_OF_SAMPLE_TOKENS

# arguments that are read one number at a time: rows of one tensor, aligned or not as the number of rows is even or odd
OF_ROWS = ["seeds", "positions", "temperature", "top_k", "top_p", "min_p"]
BINS = tl.constexpr(256)  # of weights up to 2**30: for each exponent 8, by the first 3 bits after the leading one


def launch(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    fixed_point: int,
    truncates: bool = True,
) -> Tensor:
    """Choose a token per row of logits [L, V] → int64 [L]; the most likely token weighs fixed_point, at most 2**30."""
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
    key = {"TOKEN_BITS": (vocabulary - 1).bit_length(), **weight}
    search = {"PARTS": sizes["PARTS"], **key, **SEARCH_OF_SAMPLE_TOKENS}
    warps = SAMPLE_TOKENS["num_warps"]
    maxima, best = (logits.new_empty(rows, parts, dtype=torch.float32) for _ in range(2))
    part_best = tokens if parts == 1 else seeds.new_empty(rows, parts)
    counts = logits.new_empty(rows, BINS.value, dtype=torch.int32)
    tally = seeds.new_empty(rows, 4)
    borders = tally  # zeros: each row leaves all tokens
    limits = temperature, top_k, top_p, min_p, *(t.stride(0) for t in (temperature, top_k, top_p, min_p))
    noise = seeds, positions, temperature, *(t.stride(0) for t in (seeds, positions, temperature))
    shape = vocabulary, logits.stride(0), part, parts
    with torch.cuda.device_of(logits):
        row_maxima[(rows, parts)](logits, maxima, counts, tally, *shape, **sizes, num_warps=warps)
        if truncates:
            keys, borders = seeds.new_empty(rows, vocabulary), seeds.new_empty(rows)
            given = logits, maxima, *limits, counts, tally
            count_weights[(rows, parts)](*given, *shape, **sizes, **weight, num_warps=warps)
            list_tokens[(rows, parts)](*given, keys, *shape, **sizes, **key, num_warps=warps)
            find_borders[(rows,)](maxima, *limits, counts, tally, keys, borders, vocabulary, parts, **search)
        best_of_parts[(rows, parts)](
            logits, maxima, *noise, borders, best, part_best, *shape, **sizes, **key, num_warps=warps
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
    logits, maxima, counts, tally, vocabulary, row_step, part, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Write the largest logit of a part, NaN if there is one; a row's first program sets its counts to 0, too."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        tl.store(counts + row * BINS + tl.arange(0, BINS), 0)
        tl.store(tally + row * 4 + tl.arange(0, 4), 0)
    begin = tl.program_id(1) * part
    block = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
        logit = _logit(logits + row * row_step, start + block, vocabulary)
        has_nan |= (logit != logit).to(tl.int32)
        highest = tl.maximum(highest, logit)
    highest = tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), tl.max(highest, axis=0))
    tl.store(maxima + row * parts + tl.program_id(1), highest)


@triton.jit(do_not_specialize=["part", "parts"], do_not_specialize_on_alignment=OF_ROWS)
def count_weights(
    logits, maxima, temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step,
    counts, tally, vocabulary, row_step, part, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FIXED_POINT: tl.constexpr,
):  # fmt: skip
    """Add a part's tokens to the counts of its row by bin, and the sum of their weights to the tally."""
    row = tl.program_id(0).to(tl.int64)
    heat, k, share, floor = _limits(
        temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step, FIXED_POINT
    )
    highest = _row_maximum(maxima, row, parts, PARTS)
    if _has_border(heat, k, share, highest, vocabulary):
        begin = tl.program_id(1) * part
        block = tl.arange(0, BLOCK)
        found = tl.zeros([BINS], tl.int32)
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
            logit = _logit(logits + row * row_step, start + block, vocabulary)
            weight = _weight(_scaled(logit, highest, heat), FIXED_POINT)
            is_counted = weight >= floor
            found += tl.histogram(_bin(weight), BINS, mask=is_counted)
            total += tl.where(is_counted, weight, 0)
        bins = tl.arange(0, BINS)
        tl.atomic_add(counts + row * BINS + bins, found, mask=found > 0, sem="relaxed")
        tl.atomic_add(tally + row * 4, tl.sum(total, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["part", "parts"], do_not_specialize_on_alignment=OF_ROWS)
def list_tokens(
    logits, maxima, temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step,
    counts, tally, keys, vocabulary, row_step, part, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FIXED_POINT: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """List the keys of a part's tokens whose weights are in the bounds of the border; add those above to the tally."""
    row = tl.program_id(0).to(tl.int64)
    heat, k, share, floor = _limits(
        temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step, FIXED_POINT
    )
    highest = _row_maximum(maxima, row, parts, PARTS)
    if _has_border(heat, k, share, highest, vocabulary):
        low, beyond, _ = _bounds(counts + row * BINS, tl.load(tally + row * 4), k, share)
        low = tl.maximum(low, floor)
        begin = tl.program_id(1) * part
        half: tl.constexpr = BLOCK // 2  # at a time, since it takes more registers
        block = tl.arange(0, half)
        n_above = tl.zeros([half], tl.int32)
        above = tl.zeros([half], tl.int64)
        for start in range(begin, tl.minimum(begin + part, vocabulary), half):
            v = start + block
            weight = _weight(_scaled(_logit(logits + row * row_step, v, vocabulary), highest, heat), FIXED_POINT)
            is_above = weight >= beyond
            n_above += is_above.to(tl.int32)
            above += tl.where(is_above, weight, 0)
            is_listed = (weight >= low) & (weight < beyond)
            n = tl.sum(is_listed.to(tl.int32), axis=0)
            if n > 0:
                place = tl.atomic_add(tally + row * 4 + 1, n.to(tl.int64), sem="relaxed")
                place += tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
                tl.store(keys + row * vocabulary + place, _key(weight, v, TOKEN_BITS), mask=is_listed)
        tl.atomic_add(tally + row * 4 + 2, tl.sum(n_above, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(tally + row * 4 + 3, tl.sum(above, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=OF_ROWS)
def find_borders(
    maxima, temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step,
    counts, tally, keys, borders, vocabulary, parts,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, PARTS: tl.constexpr, FIXED_POINT: tl.constexpr,
    TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """Write the least key of the tokens that a row leaves; 0 if all are left."""
    row = tl.program_id(0).to(tl.int64)
    heat, k, share, floor = _limits(
        temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step, FIXED_POINT
    )
    highest = _row_maximum(maxima, row, parts, PARTS)
    border = tl.cast(0, tl.int64)
    if (heat != 0) & (tl.load(min_p + row * min_p_step) > 0):
        border = _least_key(floor, TOKEN_BITS)
    if _has_border(heat, k, share, highest, vocabulary):
        total = tl.load(tally + row * 4)
        n = tl.load(tally + row * 4 + 1)
        n_above = tl.load(tally + row * 4 + 2)
        above = tl.load(tally + row * 4 + 3)
        listed = keys + row * vocabulary
        low_weight, beyond_weight, has_k = _bounds(counts + row * BINS, total, k, share)
        low = _least_key(tl.maximum(low_weight, floor), TOKEN_BITS)
        beyond = _least_key(beyond_weight, TOKEN_BITS)
        if has_k:
            low = _border(listed, n, n_above, low, beyond, k, True, TOKEN_BITS, BLOCK, WAYS)
            total = above + tl.sum(_from(listed, n, low + tl.zeros([1], tl.int64), False, TOKEN_BITS, BLOCK), axis=0)
        if share < 1:
            low = _border(listed, n, above, low, beyond, _share_of(total, share), False, TOKEN_BITS, BLOCK, WAYS)
        border = low
    tl.store(borders + row, border)


@triton.jit(do_not_specialize=["part", "parts"], do_not_specialize_on_alignment=OF_ROWS)
def best_of_parts(
    logits, maxima, seeds, positions, temperature, seed_step, position_step, temperature_step, borders, best,
    tokens, vocabulary, row_step, part, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FIXED_POINT: tl.constexpr, TOKEN_BITS: tl.constexpr,
):  # fmt: skip
    """Write the largest of logit / temperature + noise of a part, and its token, or why the row has none."""
    row = tl.program_id(0).to(tl.int64)
    at = row * parts + tl.program_id(1)
    highest = _row_maximum(maxima, row, parts, PARTS)
    border = tl.load(borders + row)
    heat = tl.load(temperature + row * temperature_step)
    is_greedy = heat == 0
    heat = tl.where(is_greedy, 1.0, heat)
    # SplitMix64 of seed and position
    x = _splitmix(tl.load(seeds + row * seed_step).to(tl.uint64, bitcast=True), 0)
    x = _splitmix(x, tl.load(positions + row * position_step).to(tl.uint64, bitcast=True))
    first_key = (x & 0xFFFFFFFF).to(tl.uint32)
    second_key = (x >> 32).to(tl.uint32)
    scored = logits + row * row_step, vocabulary, part, highest, heat, is_greedy, first_key, second_key
    if border > 0:
        # half as many at a time, since it takes more registers
        largest, token = _best(*scored, border, FIXED_POINT, TOKEN_BITS, True, BLOCK // 2)
    else:
        largest, token = _best(*scored, border, FIXED_POINT, TOKEN_BITS, False, BLOCK)
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
    logits, vocabulary, part, highest, heat, is_greedy, first_key, second_key, border,
    FIXED_POINT: tl.constexpr, TOKEN_BITS: tl.constexpr, TRUNCATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of logit / temperature + noise of a part, and its token."""
    begin = tl.program_id(1) * part
    block = tl.arange(0, BLOCK)
    highest_scores = tl.full([BLOCK], float("-inf"), tl.float32)  # of tokens i, i + BLOCK, …
    tokens = begin + block
    for start in range(begin, tl.minimum(begin + part, vocabulary), BLOCK):
        v = start + block
        logit = _logit(logits, v, vocabulary)
        if is_greedy:
            score = logit
        else:
            z = _scaled(logit, highest, heat)
            if TRUNCATES:
                z = tl.where(_key(_weight(z, FIXED_POINT), v, TOKEN_BITS) >= border, z, float("-inf"))
            score = z + _gumbel(v, first_key, second_key)
            score = tl.where(score == score, score, float("inf"))  # NaN: the row has no token, whatever is the largest
        score = tl.where(v < vocabulary, score, float("-inf"))
        is_higher = score > highest_scores
        tokens = tl.where(is_higher, v, tokens)
        highest_scores = tl.where(is_higher, score, highest_scores)
    largest = tl.max(highest_scores, axis=0)
    token = tl.min(tl.where(highest_scores == largest, tokens, vocabulary), axis=0)  # the first of equal ones
    return largest, token


@triton.jit
def _limits(
    temperature, top_k, top_p, min_p, temperature_step, top_k_step, top_p_step, min_p_step, FIXED_POINT: tl.constexpr
):  # fmt: skip
    """Temperature, top_k and top_p of this program's row, and the least weight that min_p leaves."""
    row = tl.program_id(0).to(tl.int64)
    floor = (tl.load(min_p + row * min_p_step) * FIXED_POINT).to(tl.int32)
    return (
        tl.load(temperature + row * temperature_step),
        tl.load(top_k + row * top_k_step),
        tl.load(top_p + row * top_p_step),
        tl.maximum(floor, 1),
    )


@triton.jit
def _has_border(heat, k, share, highest, vocabulary):
    """Whether it takes a search to say which tokens are left of a row that has a token."""
    return (heat != 0) & (((k > 0) & (k < vocabulary)) | (share < 1)) & (tl.abs(highest) < float("inf"))


@triton.jit
def _row_maximum(maxima, row, parts, PARTS: tl.constexpr):
    """The largest logit of a row, NaN if there is one."""
    p = tl.arange(0, PARTS)
    largest = tl.load(maxima + row * parts + p, mask=p < parts, other=float("-inf"))
    has_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
    return tl.where(has_nan, float("nan"), tl.max(largest, axis=0))


@triton.jit
def _bin(weight):
    """The bin of weights from 1 on: exponent and first 3 bits of the float32."""
    # no more bits than float32 has, so that none is rounded up to the next bin
    short = tl.where(weight >= 2**23, weight & ~127, weight)
    return (short.to(tl.float32).to(tl.int32, bitcast=True) >> 20) - 127 * 8


@triton.jit
def _least_of_bin(b):
    """The least weight of bins b."""
    return tl.ceil(((b + 127 * 8) << 20).to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def _bounds(counts, total, k, share):
    """The least weight that the border can have, a weight that it does not reach, and whether top_k leaves tokens out.

    k: top_k, whose own border is above the least weight, too. share: top_p. total: the sum of all weights.
    """
    b = tl.arange(0, BINS)
    n = tl.load(counts + b).to(tl.int64)
    least_of_bin, most_of_bin = _least_of_bin(b).to(tl.int64), _least_of_bin(b + 1).to(tl.int64) - 1
    n_from = tl.cumsum(n, axis=0, reverse=True)
    least = tl.cumsum(n * least_of_bin, axis=0, reverse=True)  # bounds of the sum of this bin and those above
    most = tl.cumsum(n * most_of_bin, axis=0, reverse=True)
    least_total, most_total = total, total
    low, beyond = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    has_k = (k > 0) & (k < tl.sum(n, axis=0))
    if has_k:
        low = tl.sum((n_from >= k).to(tl.int32), axis=0) - 1  # the bin of the k-th token
        is_kth = b == low
        n_left = k - tl.sum(tl.where(is_kth, n_from - n, 0), axis=0)
        least_total = tl.sum(tl.where(is_kth, least + (n_left - n) * least_of_bin, 0), axis=0)
        most_total = tl.sum(tl.where(is_kth, most + (n_left - n) * most_of_bin, 0), axis=0)
        beyond = low + 1
    if share < 1:
        beyond = tl.sum((most >= _share_of(least_total, share)).to(tl.int32), axis=0)
        if not has_k:
            low = tl.maximum(tl.sum((least >= _share_of(most_total, share)).to(tl.int32), axis=0) - 1, 0)
    return _least_of_bin(low), _least_of_bin(beyond), has_k


@triton.jit
def _share_of(total, share):
    """The least sum of weights that has a share of the total."""
    wanted = share * total.to(tl.float64)
    rounded = wanted.to(tl.int64)
    return rounded + (rounded.to(tl.float64) < wanted).to(tl.int64)


@triton.jit
def _key(weight, v, TOKEN_BITS: tl.constexpr):
    """The places of tokens v in the order of weights and tokens, higher for the more likely ones."""
    return (weight.to(tl.int64) << TOKEN_BITS) + ((1 << TOKEN_BITS) - 1 - v)


@triton.jit
def _least_key(weight, TOKEN_BITS: tl.constexpr):
    """The least key of a weight."""
    return weight.to(tl.int64) << TOKEN_BITS


@triton.jit
def _border(
    listed, n, above, low, beyond, wanted,
    COUNTS: tl.constexpr, TOKEN_BITS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The largest key from low on, below beyond, from which on there are as many tokens or as much weight as wanted."""
    way = tl.arange(0, WAYS) + 1
    while beyond - low > 1:
        step = (beyond - low + WAYS - 1) // WAYS
        has_wanted = above + _from(listed, n, low + way * step, COUNTS, TOKEN_BITS, BLOCK) >= wanted
        low += tl.sum((has_wanted & (low + way * step < beyond)).to(tl.int64), axis=0) * step
        beyond = tl.minimum(beyond, low + step)
    return low


@triton.jit
def _from(listed, n, least, COUNTS: tl.constexpr, TOKEN_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The number or the weight of the listed tokens from each of several keys on."""
    block = tl.arange(0, BLOCK)
    measured = tl.zeros([BLOCK, least.shape[0]], tl.int64)
    for start in range(0, n, BLOCK):
        key = tl.load(listed + start + block, mask=start + block < n, other=0)
        measure = tl.full([BLOCK], 1, tl.int64) if COUNTS else key >> TOKEN_BITS
        measured += tl.where(key[:, None] >= least[None, :], measure[:, None], 0)
    return tl.sum(measured, axis=0)


@triton.jit
def _logit(row, v, vocabulary):
    """Logits of tokens v, -Inf beyond the vocabulary."""
    return tl.load(row + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _scaled(logit, highest, heat):
    """Logits over temperature, of which the largest is 0."""
    z = logit - highest
    if heat != 1:
        z = tl.div_rn(z, heat + tl.zeros_like(z))
    return z


@triton.jit
def _weight(z, FIXED_POINT: tl.constexpr):
    """Weights of tokens whose logits over temperature are z, in fixed point."""
    return (tl.exp(z) * FIXED_POINT).to(tl.int32)


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
    uniform = tl.minimum(((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    # log(1 − uniform) with all digits of a small number: w − 1 is what of it is in w (Kahan)
    w = 1.0 - uniform
    exponential = tl.where(w == 1.0, uniform, tl.log(w) * uniform / (w - 1.0))  # need not be exact
    return -tl.log(exponential)
