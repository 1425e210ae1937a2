"""Launcher of Hopper's gate of few rows: one kernel that splits the weight, multiplies, and chooses the experts.

If row_invariant, a row has the bits of `octile.kernels.triton.gate.row_invariant_products`, whose parts of K are added
in their order; the weight must be in BF16.
"""

from typing import Any, cast

import torch
from torch import Tensor

from octile.kernels.cuda.gate import choice
from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.launch import overlaps
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel, address_of
from octile.kernels.cuda.quantize.launcher import DTYPES
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import VECTOR
from octile.kernels.row_invariant import CHUNK
from octile.routing import EPS

MAX_ROWS = 256
CLUSTER, WARPS = 8, 8  # thread blocks of a cluster, and warps of a block
TILE = 16  # experts that a warp multiplies by the rows
STAGED_BYTES = 2 * (CHUNK + 16)  # of a row's columns in a part, as the kernel pads them
ONE_TILE_ROWS = 64  # with more, a cluster has two tiles of 8 rows, for which it reads the weight once
MAX_KEYS = 1024

_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)


def why_unsupported(
    x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any, row_invariant: bool = False
) -> str | None:
    """Return why this kernel does not compute a gate; None: it does. Arguments as of `launch`."""
    (t, d), n_experts = x.shape, len(weight)
    if not 0 < t <= MAX_ROWS:
        return f"{t} tokens are not from 1 to {MAX_ROWS}"
    if (why := choice.why_too_many(n_experts, cast(choice.Choice, how))) is not None:
        return why
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"the weight is {weight.dtype}"
    if row_invariant and weight.dtype != torch.bfloat16:
        return f"the weight is {weight.dtype}, not bfloat16"
    if row_invariant and _shared_bytes(t, d, n_experts, row_invariant) > SHARED_BYTES:
        return f"parts of {d} columns do not fit into the shared memory of a thread block"
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return "the bias is not float32, or not contiguous"
    if d % 8 or x.stride(1) != 1 or x.stride(0) % 8 or not weight.is_contiguous():
        return "the rows of x or of the weight are not contiguous, or do not begin at multiples of 16 bytes"
    if (x.data_ptr() | weight.data_ptr()) % VECTOR:
        return "x or the weight does not begin at a multiple of 16 bytes"
    return request.why_not_on(x.device)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any, row_invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a gate of x [T, D] bfloat16 and the weight [E, D]; `how` as `Choice`.

    Returns:
        weights [T, K] float32, experts [T, K] int64, logits [T, E] float32.
    """
    (t, d), n_experts, n_chosen = x.shape, len(weight), how[0]
    weights, logits = (torch.empty(t, n, dtype=torch.float32, device=x.device) for n in (n_chosen, n_experts))
    experts = torch.empty(t, n_chosen, dtype=torch.int64, device=x.device)
    key = t, d, n_experts, how[:-1], weight.dtype, bias is None, row_invariant, overlaps(), x.device
    prepared = _prepared[key]
    if prepared is None:
        constants = plan(t, d, n_experts, weight.dtype, cast(choice.Choice, how), bias is not None, row_invariant)
        kernel = specialize.load("gate_few_rows", constants, x.device)
        prepared = _prepared[key] = PreparedKernel(
            kernel, grid(t), CLUSTER, 32 * WARPS, int(constants["shared_bytes"]), overlaps()
        )
    read = x.data_ptr(), weight.data_ptr(), address_of(bias)
    results = logits.data_ptr(), weights.data_ptr(), experts.data_ptr()
    prepared.launch_at((*read, *results, how[-1], EPS, x.stride(0), t))()
    return weights, experts, logits


def row_tiles(rows: int) -> int:
    """Return how many tiles of 8 rows a cluster has."""
    return 1 if rows <= ONE_TILE_ROWS else 2


def grid(rows: int) -> int:
    """Return the number of thread blocks for rows."""
    return CLUSTER * -(-rows // (8 * row_tiles(rows)))


def plan(
    rows: int, columns: int, n_experts: int, dtype: torch.dtype, how: choice.Choice, biased: bool,
    row_invariant: bool = False,
) -> dict[str, int | bool]:  # fmt: skip
    """Return the constants of the kernel for rows."""
    return choice.constants(n_experts, *how[:-1], biased) | {
        "columns": columns, "weight_dtype": DTYPES[dtype], "warps": WARPS, "programmatic": overlaps(),
        "row_tiles": row_tiles(rows), "part": CHUNK, "row_invariant": row_invariant,
        "shared_bytes": _shared_bytes(rows, columns, n_experts, row_invariant),
    }  # fmt: skip


def _shared_bytes(rows: int, columns: int, n_experts: int, row_invariant: bool) -> int:
    tiles, parts, staged = -(-n_experts // TILE), -(-columns // CHUNK), 0
    sources = parts if row_invariant else CLUSTER * max(WARPS // tiles, 1)  # of sums that make up a logit
    if row_invariant:
        units = -(-tiles * parts // CLUSTER)  # of a thread block
        staged = ((units + tiles - 2) // tiles + 1) * 8 * row_tiles(rows) * STAGED_BYTES
    return -(-4 * row_tiles(rows) * (sources + 1) * n_experts // VECTOR) * VECTOR + staged
