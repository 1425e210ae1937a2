"""Launcher of Hopper's routing kernels: counts of experts, the plan of the rows, and the balance of sequences.

    count_experts   entries of each expert, of blocks of entries or of sequences
    place_rows      the row of each entry, from the counts of the blocks before its own; alone, from its own counts
    balance_parts   what each part of a sequence contributes to the balance
    balance_sums    the sums over the parts, and the loss

Triton cannot express what makes them fast: lanes of equal experts find each other (match.any), and a lane holds 16
logits of a token, so that a maximum over its experts takes few shuffles. Integers and rows are those of Triton's
kernels, bit for bit; floating-point sums are in another order, always the same on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit.launch import launch, overlaps

MAX_EXPERTS = 512  # whose counts fit into shared memory for each warp
MAX_ENTRIES = 2**31 - 2**16
COUNT = {"warps": 8, "rounds": 4}  # warps of a block, and entries of a thread
SORT = {"warps": 16, "rounds": 2}
MAX_ENTRIES_ALONE = 2048  # that one block sorts, at most four a thread
BALANCE = {"warps": 4, "blocks": 4}  # warps of a block, and blocks that must fit on an SM; at most so many are launched
SUM_WARPS, SUM_COLUMNS = 16, 32  # warps of a block, and experts
LANE_EXPERTS = 16  # of a token in a lane


def why_not_entries(experts: Tensor, n_experts: int) -> str | None:
    """Return why these kernels do not take the experts [T, K] of tokens; None: they do."""
    if n_experts > MAX_EXPERTS:
        return f"{n_experts} experts are more than {MAX_EXPERTS}"
    if not 0 < experts.numel() <= MAX_ENTRIES:
        return f"there are {experts.numel()} entries, not from 1 to {MAX_ENTRIES}"
    return request.why_not_on(experts.device)


def why_not_plan(experts: Tensor, load: Tensor) -> str | None:
    """Return why `routing_plan` does not support a call; None: it does."""
    return why_not_entries(experts, len(load))


def why_not_weighted_plan(experts: Tensor, n_experts: int) -> str | None:
    """Return why `weighted_routing_plan` does not support a call; None: it does."""
    if experts.numel() > MAX_ENTRIES_ALONE:
        return f"there are {experts.numel()} entries, and one block sorts {MAX_ENTRIES_ALONE} at most"
    return why_not_entries(experts, n_experts)


def why_not_balance(logits: Tensor, experts: Tensor | None, *_: Any) -> str | None:
    """Return why `sequence_balance` does not support a call; None: it does."""
    n_experts = logits.shape[1]
    if experts is not None:
        return "the counted experts are given"
    if n_experts not in (16, 32, 64, 128, 256, 512):
        return f"{n_experts} experts are not a power of two from 16 to 512"
    if logits.stride(1) != 1 or (logits.data_ptr() | 4 * logits.stride(0)) % 16:
        return "the rows of logits are not contiguous, or do not begin at multiples of 16 bytes"
    return request.why_not_on(logits.device)


def count_tokens(experts: Tensor, n_experts: int, batch: int) -> Tensor:
    """Count experts [T, K] in each of `batch` sequences → int64 [batch, E]."""
    counts = torch.zeros(batch, n_experts, dtype=torch.int64, device=experts.device)
    sequence_entries = experts.numel() // batch
    blocks = _blocks(sequence_entries, COUNT)
    constants = {**_constants(experts, n_experts, COUNT), "of_blocks": False}
    _launch(
        "count_experts", constants, experts, batch * blocks, COUNT["warps"], 4 * n_experts, experts.contiguous(), 0,
        counts, sequence_entries, blocks,
    )  # fmt: skip
    return counts


def routing_plan(experts: Tensor, load: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the entries of experts [T, K], with load [E] → row_ids [T, K], order [T·K], offs [E], int32."""
    (t, k), n_experts, device = experts.shape, len(load), experts.device
    experts, warps = experts.contiguous(), SORT["warps"]
    row_ids, order, offs = _new_plan(experts, n_experts)
    blocks, constants = _blocks(t * k, SORT), _constants(experts, n_experts, SORT)
    counts = torch.empty(blocks, n_experts, dtype=torch.int32, device=device)
    _launch(
        "count_experts", {**constants, "of_blocks": True}, experts, blocks, warps, 4 * n_experts, experts, counts, 0,
        t * k, blocks,
    )  # fmt: skip
    constants |= {"wide_load": load.dtype == torch.int64, "alone": False, "programmatic": False}
    _launch(
        "place_rows", constants, experts, blocks, warps, _place_bytes(n_experts, warps), experts, load, counts, 0,
        row_ids, order, offs, 0, load.stride(0), t * k,
    )  # fmt: skip
    return row_ids, order, offs


def weighted_routing_plan(experts: Tensor, weights: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the entries of experts [T, K] and their weights → row_ids [T, K], order [T·K], offs [E], weights [T·K]."""
    (t, k), device, warps = experts.shape, experts.device, SORT["warps"]
    rounds = 1 << (-(-t * k // (32 * warps)) - 1).bit_length()  # so that numbers of rows share a kernel
    experts, weights = experts.contiguous(), weights.contiguous()
    row_ids, order, offs = _new_plan(experts, n_experts)
    row_weights = torch.empty(t * k, dtype=torch.float32, device=device)
    constants = {**_constants(experts, n_experts, SORT), "rounds": rounds, "wide_load": False, "alone": True}
    constants |= {"programmatic": overlaps()}
    _launch(
        "place_rows", constants, experts, 1, warps, _place_bytes(n_experts, warps), experts, 0, 0, weights, row_ids,
        order, offs, row_weights, 0, t * k,
    )  # fmt: skip
    return row_ids, order, offs, row_weights


def sequence_balance(
    logits: Tensor, experts: Tensor | None, n_chosen: int, batch: int, scoring_func: str
) -> tuple[Tensor, Tensor]:
    """The loss [] and f [B, E] of logits [T, E], which count the K highest logits of each token."""
    (t, n_experts), device, warps = logits.shape, logits.device, BALANCE["warps"]
    length, columns = t // batch, min(n_experts, SUM_COLUMNS)
    tokens = warps * 32 * LANE_EXPERTS // n_experts  # of a block at a time
    most = BALANCE["blocks"] * num_sms.multiprocessors(device)
    parts = max(min(most // batch, -(-length // tokens)), 1)
    counts = torch.empty(batch * parts, n_experts, dtype=torch.int32, device=device)
    shares = torch.empty(batch * parts, n_experts, dtype=torch.float32, device=device)
    f = torch.empty(batch, n_experts, dtype=torch.float32, device=device)
    losses = torch.empty(batch * n_experts // columns, dtype=torch.float32, device=device)
    ended = torch.empty((), dtype=torch.int32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    constants = {"experts": n_experts, "chosen": n_chosen}
    _launch(
        "balance_parts", {**constants, **BALANCE, "softmax": scoring_func == "softmax"}, logits, batch * parts, warps,
        8 * warps * n_experts, logits, counts, shares, ended, logits.stride(0), length, parts,
    )  # fmt: skip
    _launch(
        "balance_sums", {**constants, "warps": SUM_WARPS, "columns": columns}, logits, len(losses), SUM_WARPS,
        8 * 32 * SUM_WARPS, counts, shares, f, losses, ended, loss, length, parts, batch,
    )  # fmt: skip
    return loss, f


def _constants(experts: Tensor, n_experts: int, settings: dict[str, int]) -> dict[str, int | bool]:
    return {"experts": n_experts, "wide": experts.dtype == torch.int64, **settings}


def _new_plan(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (experts.shape, (experts.numel(),), (n_experts,))
    row_ids, order, offs = (torch.empty(size, dtype=torch.int32, device=experts.device) for size in sizes)
    return row_ids, order, offs


def _place_bytes(n_experts: int, warps: int) -> int:
    return 4 * (n_experts + 32 + warps * n_experts)


def _blocks(entries: int, settings: dict[str, int]) -> int:
    return -(-entries // (32 * settings["warps"] * settings["rounds"]))


def _launch(
    name: str, constants: dict[str, int | bool], x: Tensor, blocks: int, warps: int, shared_bytes: int, *arguments: Any
) -> None:
    """Launch a kernel on x's GPU; tensors among the arguments become addresses."""
    addresses = (a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
    launch(name, constants, x.device, blocks, 32 * warps, shared_bytes, *addresses)
