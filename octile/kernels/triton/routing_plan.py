# mypy: allow-untyped-defs
"""The counting sort of rows by expert, bit for bit as `octile.ops.permute` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import COUNT_TOKENS, ROUTING_PLAN, ROUTING_PLAN_SCAN


def launch_count(experts: Tensor, n_experts: int, batch: int) -> Tensor:
    """Count experts [T, K], any strides, in each of `batch` sequences → int64 [batch, E]."""
    t, k = experts.shape
    counts = torch.zeros(batch, n_experts, dtype=torch.int64, device=experts.device)
    if t:
        programs = triton.cdiv(t // batch * k, COUNT_TOKENS["ROWS"])
        with torch.cuda.device_of(experts):
            count_tokens[(batch * programs,)](
                experts.contiguous(),
                counts,
                t // batch * k,
                programs,
                E=n_experts,
                BINS=_bins(n_experts),
                **COUNT_TOKENS,
            )
    return counts


def launch(experts: Tensor, load: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the entries of experts [T, K], any strides, with load [E] → row_ids [T, K], order [T·K], offs [E], int32."""
    (t, k), n_experts, device = experts.shape, load.shape[0], experts.device
    rows, experts = t * k, experts.contiguous()
    row_ids = torch.empty(t, k, dtype=torch.int32, device=device)
    order = torch.empty(rows, dtype=torch.int32, device=device)
    offs = torch.empty(n_experts, dtype=torch.int32, device=device)
    blocks = triton.cdiv(rows, ROUTING_PLAN["ROWS"])
    starts = torch.empty(blocks, n_experts, dtype=torch.int32, device=device)
    scanned = min(triton.next_power_of_2(max(blocks, 1)), ROUTING_PLAN_SCAN["blocks"])
    columns = min(triton.next_power_of_2(n_experts), max(ROUTING_PLAN_SCAN["elements"] // scanned, 1))
    with torch.cuda.device_of(experts):
        if rows:
            count_blocks[(blocks,)](experts, starts, rows, E=n_experts, BINS=_bins(n_experts), **ROUTING_PLAN)
        sum_blocks[(triton.cdiv(n_experts, columns),)](
            load, load.stride(0), starts, offs, blocks, E=n_experts, EXPERTS=triton.next_power_of_2(n_experts),
            COLUMNS=columns, BLOCKS=scanned, num_warps=ROUTING_PLAN_SCAN["num_warps"],
        )  # fmt: skip
        if rows:
            place_rows[(blocks,)](experts, starts, row_ids, order, rows, E=n_experts, **ROUTING_PLAN)
    return row_ids, order, offs


def _bins(n_experts: int) -> int:
    return max(triton.next_power_of_2(n_experts), 32)


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    experts = cases.empty(cases.T, 8, dtype=torch.int64)
    return {
        "counts of tokens": lambda: launch_count(experts, 256, 2),
        "routing plan": lambda: launch(experts, cases.empty(256, dtype=torch.int64)),
        "routing plan of many experts": lambda: launch(experts, cases.empty(4096, dtype=torch.int64)),
    }


@triton.jit(do_not_specialize=["R", "PROGRAMS"])
def count_tokens(experts, counts, R, PROGRAMS, E: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """A program counts ROWS of the R entries of a sequence."""
    sequence = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    entry = tl.program_id(0) % PROGRAMS * ROWS + tl.arange(0, ROWS)
    count = tl.histogram(_expert(experts + sequence * R, entry, R, E), BINS, entry < R)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + sequence * E + bins, count.to(tl.int64), mask=(bins < E) & (count > 0))


@triton.jit(do_not_specialize=["R"])
def count_blocks(experts, counts, R, E: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """A program counts the experts of a block of ROWS entries."""
    block = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.histogram(_expert(experts, entry, R, E), BINS, entry < R)
    bins = tl.arange(0, BINS)
    tl.store(counts + block * E + bins, count, mask=bins < E)


@triton.jit(do_not_specialize=["blocks"])
def sum_blocks(
    load, load_step, starts, offs, blocks,
    E: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program replaces the counts of COLUMNS experts by the first row of each block, and stores where they end."""
    first = tl.program_id(0) * COLUMNS
    expert = first + tl.arange(0, COLUMNS)
    every = tl.arange(0, EXPERTS)
    before = tl.sum(tl.load(load + every * load_step, mask=every < first, other=0).to(tl.int32), axis=0)
    own = tl.load(load + expert * load_step, mask=expert < E, other=0).to(tl.int32)
    end = before + tl.cumsum(own, axis=0)
    tl.store(offs + expert, end, mask=expert < E)
    start = end - own
    for first_block in range(0, blocks, BLOCKS):
        block = first_block + tl.arange(0, BLOCKS)
        at = starts + block.to(tl.int64)[:, None] * E + expert[None, :]
        inside = (block < blocks)[:, None] & (expert < E)[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, start[None, :] + tl.cumsum(count, axis=0) - count, mask=inside)
        start += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=["R"])
def place_rows(experts, starts, row_ids, order, R, E: tl.constexpr, ROWS: tl.constexpr):
    """A program finds the rows of a block of ROWS entries: it counts the equal experts before each of them.

    Rows are clamped: the host cannot check `load`, and nothing may be written outside of the results.
    """
    first = tl.program_id(0) * ROWS
    index = tl.arange(0, ROWS)
    inside = first + index < R
    expert = _expert(experts, first + index, R, E)
    # an equal expert before the entry has a difference from 0 to index − 1, all others have larger ones as unsigned
    difference = (expert * ROWS + index)[:, None] - (expert * ROWS)[None, :]
    rank = tl.sum((difference.to(tl.uint32) < index.to(tl.uint32)[None, :]).to(tl.int32), axis=0)
    row = tl.load(starts + tl.program_id(0).to(tl.int64) * E + expert, mask=inside, other=0) + rank
    row = tl.minimum(tl.maximum(row, 0), R - 1)
    tl.store(row_ids + first + index, row, mask=inside)
    tl.store(order + row, first + index, mask=inside)


@triton.jit
def _expert(experts, entry, R, E: tl.constexpr):
    """Load the experts of entries, int32 from 0 to E − 1."""
    return tl.minimum(tl.maximum(tl.load(experts + entry, mask=entry < R, other=0), 0), E - 1).to(tl.int32)
