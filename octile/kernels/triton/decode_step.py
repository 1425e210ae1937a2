# mypy: allow-untyped-defs
"""Numbers of decode steps, as `octile.ops.decode_step` specifies them: a program computes some requests."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases

BLOCK = 128  # rows or requests of a program


def launch_continued(
    host: Tensor, parity: Tensor, last: Tensor, advance: Tensor, fields: int, drafts_at: int, temperature_at: int,
    no_draft: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """host [2, fields + k, B], last [R, m] → tokens [B, k], first positions, ends, temperatures [B], fields [·, B]."""
    b, k = host.shape[2], host.shape[1] - fields
    tokens, first, end, numbers = (last.new_empty(shape) for shape in ((b, k), (b,), (b,), (fields, b)))
    temperature = last.new_empty(b, dtype=torch.float32)
    with torch.cuda.device_of(last):
        continued_tokens[(max(triton.cdiv(b, BLOCK), 1),)](
            host, parity, last, advance, tokens, first, end, temperature, numbers, b, host.stride(0), host.stride(1),
            last.stride(0), FIELDS=fields, ROWS=triton.next_power_of_2(fields), DRAFTS=drafts_at,
            TEMPERATURE=temperature_at, NO_DRAFT=no_draft, K=k, COLS=triton.next_power_of_2(k), BLOCK=BLOCK,
        )  # fmt: skip
    return tokens, first, end, temperature, numbers


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
    chosen: Tensor, tokens: Tensor, drafts: Tensor, parity: Tensor, last: Tensor, advance: Tensor, results: Tensor
) -> None:
    """chosen, tokens [B, k], drafts [B, k − 1], parity [2] → last [B, k], advance [B], results [2, B, 2k]."""
    b, k = chosen.shape
    with torch.cuda.device_of(chosen):
        record_choices[(max(triton.cdiv(b, BLOCK), 1),)](
            chosen, tokens, drafts, parity, last, advance, results, b, last.stride(0), results.stride(0), K=k,
            BLOCK=BLOCK,
        )  # fmt: skip


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def step(requests: int, drafts: int) -> None:
        k = 1 + drafts
        host, parity, results = (
            cases.empty(*shape, dtype=torch.int64) for shape in ((2, 9 + k, requests), (2,), (2, requests, 2 * k))
        )
        tokens, last = (cases.empty(requests, k, dtype=torch.int64) for _ in range(2))
        rows, pages = cases.empty(requests, dtype=torch.int64), cases.empty(requests, 64, dtype=torch.int32)
        launch_continued(host, parity, last, rows, 9, 5, 6, -4)
        launch_rows(tokens, rows, rows, pages, 64)
        launch_accepted(tokens, tokens, rows)
        drafted = cases.empty(requests, drafts, dtype=torch.int64)
        launch_choices(tokens, tokens, drafted, parity, last, rows, results)

    return {
        "numbers of a decode step": lambda: step(256, 0),
        "numbers of a decode step with drafts": lambda: step(256, 2),
    }


@triton.jit(do_not_specialize=["B"])
def continued_tokens(
    host, parity, last, advance, tokens, first, end, temperature, numbers, B, host_buffer, host_row, last_row,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr, TEMPERATURE: tl.constexpr, NO_DRAFT: tl.constexpr,
    K: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Requests of a program: their tokens, first positions, ends, temperatures and other numbers.

    All of the host's memory is loaded before anything is stored, so that the program waits for it once.
    """
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < B
    current = tl.load(parity)
    read = host + current * host_buffer + b
    source = tl.load(read, mask=inside, other=-1, volatile=True)  # the host may have written it since
    position = tl.load(read + host_row, mask=inside, other=0, volatile=True)
    text_end = tl.load(read + 2 * host_row, mask=inside, other=0, volatile=True)
    drafts = tl.load(read + DRAFTS * host_row, mask=inside, other=0, volatile=True)
    heat = tl.load(read + TEMPERATURE * host_row, mask=inside, other=0, volatile=True)
    row, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[:, None]
    is_field, is_token = (row < FIELDS) & inside[None, :], (j < K) & inside[None, :]
    fields = tl.load(read[None, :] + row * host_row, mask=is_field, other=0, volatile=True)
    given = tl.load(read[None, :] + (FIELDS + j) * host_row, mask=is_token, other=0, volatile=True)
    is_given = source < 0
    before = tl.where(is_given, 0, source)
    advanced = tl.load(advance + before, mask=inside & (source >= 0), other=0)
    left = tl.load(last + before[None, :] * last_row + j, mask=is_token & (source >= 0)[None, :], other=0)
    token = tl.where(is_given[None, :], given, left)
    tl.store(tokens + b[None, :] * K + j, tl.where(j > drafts[None, :], NO_DRAFT, token), mask=is_token)
    tl.store(first + b, position + advanced, mask=inside)
    tl.store(end + b, tl.minimum(text_end, position + advanced + 1 + drafts), mask=inside)
    tl.store(temperature + b, heat.to(tl.float64, bitcast=True).to(tl.float32), mask=inside)
    tl.store(numbers + row * B + b[None, :], fields, mask=is_field)
    tl.store(parity + 1, 1 - current)  # all programs store the same


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
    chosen, tokens, drafts, parity, last, advance, results, B, last_row, results_buffer,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Requests of a program: what they leave to the next step and to the host."""
    b = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = b < B
    following = tl.load(parity + 1)
    to_host = results + (1 - following) * results_buffer + b * 2 * K
    accepted = _count_accepted(chosen, tokens, b, inside, K, BLOCK)
    for j in tl.static_range(K):
        choice = tl.load(chosen + b * K + j, mask=inside, other=0)
        tl.store(to_host + j, choice, mask=inside)
    for j in tl.static_range(1, K):
        draft = tl.load(drafts + b * (K - 1) + j - 1, mask=inside, other=0)
        tl.store(to_host + K + j, draft, mask=inside)
        tl.store(last + b * last_row + j, draft, mask=inside)
    tl.store(to_host + K, accepted, mask=inside)
    tl.store(last + b * last_row, tl.load(chosen + b * K + accepted, mask=inside, other=0), mask=inside)
    tl.store(advance + b, accepted + 1, mask=inside)
    tl.store(parity, following)


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
