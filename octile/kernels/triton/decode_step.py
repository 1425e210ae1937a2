# mypy: allow-untyped-defs
"""Numbers of decode steps, as `octile.ops.decode_step` specifies them: a program computes some requests."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases

BLOCK = 128  # rows or requests of a program


def launch_continued(
    numbers: Tensor, last: Tensor, advance: Tensor, fields: int, drafts_at: int, temperature_at: int, no_draft: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """numbers [fields + k, B], last [R, m], advance [R] → tokens [B, k], first positions, ends, temperatures [B]."""
    b, k = numbers.shape[1], numbers.shape[0] - fields
    tokens, first, end = numbers.new_empty(b, k), numbers.new_empty(b), numbers.new_empty(b)
    temperature = numbers.new_empty(b, dtype=torch.float32)
    if b:
        with torch.cuda.device_of(numbers):
            continued_tokens[(triton.cdiv(b, BLOCK),)](
                numbers, last, advance, tokens, first, end, temperature, b, numbers.stride(0), last.stride(0),
                FIELDS=fields, DRAFTS=drafts_at, TEMPERATURE=temperature_at, NO_DRAFT=no_draft, K=k, BLOCK=BLOCK,
            )  # fmt: skip
    return tokens, first, end, temperature


def launch_rows(
    tokens: Tensor, first: Tensor, end: Tensor, pages: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [B, k], first and end [B], pages [B, M] → tokens, positions, slots, lengths [B · k]."""
    b, k = tokens.shape
    row_tokens, positions, slots = (tokens.new_empty(b * k) for _ in range(3))
    lengths = tokens.new_empty(b * k, dtype=torch.int32)
    if b * k:
        with torch.cuda.device_of(tokens):
            text_rows[(triton.cdiv(b * k, BLOCK),)](
                tokens, first, end, pages, row_tokens, positions, slots, lengths, b * k, tokens.stride(0),
                first.stride(0), end.stride(0), pages.stride(0), K=k, PAGE=page_size, BLOCK=BLOCK,
            )  # fmt: skip
    return row_tokens, positions, slots, lengths


def launch_accepted(chosen: Tensor, tokens: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """chosen, tokens [B, k], first [B] → tokens [B · k], positions [B], rows [B]."""
    b, k = chosen.shape
    next_tokens, positions, rows = chosen.new_empty(b * k), chosen.new_empty(b), chosen.new_empty(b)
    if b:
        with torch.cuda.device_of(chosen):
            accepted_rows[(triton.cdiv(b, BLOCK),)](
                chosen, tokens, first, next_tokens, positions, rows, b, K=k, BLOCK=BLOCK
            )
    return next_tokens, positions, rows


def launch_choices(
    chosen: Tensor, tokens: Tensor, drafts: Tensor, last: Tensor, advance: Tensor, results: Tensor
) -> None:
    """chosen, tokens [B, k], drafts [B, k − 1] → last [B, k], advance [B], results [B, 2k]."""
    b, k = chosen.shape
    if b:
        with torch.cuda.device_of(chosen):
            record_choices[(triton.cdiv(b, BLOCK),)](
                chosen, tokens, drafts, last, advance, results, b, last.stride(0), K=k, BLOCK=BLOCK
            )


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def step(requests: int, drafts: int) -> None:
        k = 1 + drafts
        tokens, last, results = (cases.empty(requests, width, dtype=torch.int64) for width in (k, k, 2 * k))
        rows, pages = cases.empty(requests, dtype=torch.int64), cases.empty(requests, 64, dtype=torch.int32)
        launch_continued(cases.empty(9 + k, requests, dtype=torch.int64), last, rows, 9, 5, 6, -4)
        launch_rows(tokens, rows, rows, pages, 64)
        launch_accepted(tokens, tokens, rows)
        launch_choices(tokens, tokens, cases.empty(requests, drafts, dtype=torch.int64), last, rows, results)

    return {
        "numbers of a decode step": lambda: step(256, 0),
        "numbers of a decode step with drafts": lambda: step(256, 2),
    }


@triton.jit(do_not_specialize=["B"])
def continued_tokens(
    numbers, last, advance, tokens, first, end, temperature, B, step, last_step, FIELDS: tl.constexpr,
    DRAFTS: tl.constexpr, TEMPERATURE: tl.constexpr, NO_DRAFT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Requests of a program: their tokens, first positions, ends and temperatures."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    source = tl.load(numbers + b, mask=inside, other=-1)
    is_given = source < 0
    before = tl.where(is_given, 0, source)
    position = tl.load(numbers + step + b, mask=inside, other=0)
    advanced = tl.load(advance + before, mask=inside & (source >= 0), other=0)
    tl.store(first + b, position + advanced, mask=inside)
    drafts = tl.load(numbers + DRAFTS * step + b, mask=inside, other=0)
    text_end = tl.load(numbers + 2 * step + b, mask=inside, other=0)
    tl.store(end + b, tl.minimum(text_end, position + advanced + 1 + drafts), mask=inside)
    heat = tl.load(numbers + TEMPERATURE * step + b, mask=inside, other=0).to(tl.float64, bitcast=True)
    tl.store(temperature + b, heat.to(tl.float32), mask=inside)
    for j in tl.static_range(K):
        given = tl.load(numbers + (FIELDS + j) * step + b, mask=inside, other=0)
        left = tl.load(last + before * last_step + j, mask=inside & (source >= 0), other=0)
        token = tl.where(is_given, given, left)
        tl.store(tokens + b * K + j, tl.where(j > drafts, NO_DRAFT, token), mask=inside)


@triton.jit(do_not_specialize=["T"])
def text_rows(
    tokens, first, end, pages, row_tokens, positions, slots, lengths, T, tokens_step, first_step, end_step, pages_step,
    K: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of a program: token, position, slot and length."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < T
    b = (t // K).to(tl.int64)
    token = tl.load(tokens + b * tokens_step + t % K, mask=inside, other=0)
    position = tl.load(first + b * first_step, mask=inside, other=0) + t % K
    last = tl.load(end + b * end_step, mask=inside, other=0) - 1
    is_inside = position <= last
    at = tl.maximum(tl.minimum(position, last), 0)
    page = tl.load(pages + b * pages_step + at // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(row_tokens + t, tl.maximum(token, 0), mask=inside)
    tl.store(positions + t, at, mask=inside)
    tl.store(slots + t, tl.where(is_inside, page * PAGE + at % PAGE, -1), mask=inside)
    tl.store(lengths + t, tl.where(is_inside, at + 1, 0).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["B"])
def accepted_rows(
    chosen, tokens, first, next_tokens, positions, rows, B, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Requests of a program: their choices as tokens, and the last row that counts."""
    b = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = b < B
    for j in tl.static_range(K):
        choice = tl.load(chosen + b * K + j, mask=inside, other=0)
        tl.store(next_tokens + b * K + j, tl.maximum(choice, 0), mask=inside)
    accepted = _count_accepted(chosen, tokens, b, inside, K, BLOCK)
    tl.store(positions + b, tl.load(first + b, mask=inside, other=0) + accepted, mask=inside)
    tl.store(rows + b, b * K + accepted, mask=inside)


@triton.jit(do_not_specialize=["B"])
def record_choices(
    chosen, tokens, drafts, last, advance, results, B, last_step, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Requests of a program: what they leave to the next step and to the host."""
    b = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = b < B
    accepted = _count_accepted(chosen, tokens, b, inside, K, BLOCK)
    for j in tl.static_range(K):
        choice = tl.load(chosen + b * K + j, mask=inside, other=0)
        tl.store(results + b * 2 * K + j, choice, mask=inside)
    for j in tl.static_range(1, K):
        draft = tl.load(drafts + b * (K - 1) + j - 1, mask=inside, other=0)
        tl.store(results + b * 2 * K + K + j, draft, mask=inside)
        tl.store(last + b * last_step + j, draft, mask=inside)
    tl.store(results + b * 2 * K + K, accepted, mask=inside)
    tl.store(last + b * last_step, tl.load(chosen + b * K + accepted, mask=inside, other=0), mask=inside)
    tl.store(advance + b, accepted + 1, mask=inside)


@triton.jit
def _count_accepted(chosen, tokens, b, inside, K: tl.constexpr, BLOCK: tl.constexpr):
    """The drafts of requests b before the first that is not what the row before it has chosen."""
    counts = inside  # whether all drafts so far are accepted
    accepted = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(1, K):
        choice = tl.load(chosen + b * K + j - 1, mask=inside, other=0)
        counts = counts & (choice == tl.load(tokens + b * K + j, mask=inside, other=0))
        accepted += counts.to(tl.int64)
    return accepted
