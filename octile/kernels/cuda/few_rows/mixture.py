"""Launcher of a mixture of experts of few rows, as `octile.ops.few_rows_mixture` specifies it: three kernels.

    mixture_gate    normalizes and quantizes the rows, and chooses their experts
    mixture_up      computes the gate and up projections, and SwiGLU
    mixture_down    computes the down projections, sums them, and adds them to the rows

Each may start before the kernel before it has ended (programmatic dependent launch), and loads weights meanwhile.

If row_invariant, one row has the bits of octile's GEMMs and of the operators between them; mixture_down_row takes the
place of mixture_down.

A launch depends on shapes and strides, never on values, so it can be captured in a CUDA graph. The first call of a kind
compiles and loads a kernel, which cannot be captured.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.few_rows.launcher import (
    GROUP_BLOCKS,
    HEADERS,
    MAX_KEYS,
    MAX_ROWS,
    row_bytes,
    why_no_norm,
    why_not_so_many,
)
from octile.kernels.cuda.gate import choice as gate_choice
from octile.kernels.cuda.gate.choice import Choice
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel, address_of
from octile.kernels.cuda.quantize.launcher import DTYPES, NARROW_ROWS_WITH_VALUES, norm_parts
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import VECTOR, new_scale
from octile.kernels.row_invariant import CHUNK
from octile.routing import EPS

SIDE, STAGE_BYTES, ROW_PADDING = 128, 32 * (4 * 16 + 2 * 4), 64  # as in weight_rows.cuh and the kernels
ROUTES_BYTES, ROUTE_BYTES = 16, 48  # of struct Routes without its routes, and of a Route
GATE_CLUSTER, GATE_WARPS, UP_WARPS, DOWN_COLUMNS = 8, 8, 12, 16
# Warps of mixture_down for one row and for more: the first number whose pipelines fit into shared memory. With one row
# 16 warps are not faster, and leave no registers of an SM for thread blocks of the next kernel.
DOWN_WARPS_OF_ONE_ROW, DOWN_WARPS_OF_MORE, DOWN_CLUSTER_OF_MORE = (8,), (16, 12, 8), 2
MIN_DEPTH, MAX_DEPTH = 2, 6  # k-blocks of a warp in flight

Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # up and its scale, down and its scale
SharedWeights = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_prepared: BoundedCache[tuple[PreparedKernel, ...]] = BoundedCache(MAX_KEYS)


class Plan(NamedTuple):
    """A kernel and its launch."""

    kernel: str
    constants: dict[str, int | bool]
    grid: int
    cluster: int
    threads: int


def plan_gate(
    rows: int, columns: int, gate: torch.dtype, norm: torch.dtype, choice: dict[str, int | bool], power_of_2: bool,
    row_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Plan mixture_gate for rows [rows, columns]."""
    n_experts, n_chosen = int(choice["experts"]), int(choice["chosen"])
    choice_bytes = _aligned(MAX_ROWS * (n_experts + 4 * n_chosen) + _aligned(2 * n_experts, 4) + 4, 8)
    logits = -(-columns // CHUNK) if row_invariant else rows
    shared = _aligned(_aligned(4 * (rows * GATE_WARPS + logits * n_experts), 8) + choice_bytes) + 2 * rows * columns
    units, warps = norm_parts(columns)
    constants = choice | {
        "rows": rows, "columns": columns, "warps": GATE_WARPS, "cluster": GATE_CLUSTER, "gate_dtype": DTYPES[gate],
        "weight_dtype": DTYPES[norm], "norm_units": units, "norm_warps": warps, "part": CHUNK,
        "power_of_2": power_of_2, "row_invariant": row_invariant, "shared_bytes": _aligned(shared),
    }  # fmt: skip
    return Plan("mixture_gate", constants, GATE_CLUSTER, GATE_CLUSTER, 32 * GATE_WARPS)


def plan_up(
    rows: int, columns: int, hidden: int, shared_hidden: int, n_chosen: int, n_experts: int, sms: int,
    row_invariant: bool = False,
) -> Plan:  # fmt: skip
    """Plan mixture_up: experts of `hidden` columns, shared experts of `shared_hidden` together."""
    scales = 4 * MAX_ROWS * columns // SIDE
    rows_size = row_bytes(columns // SIDE) if row_invariant else rows * (columns + ROW_PADDING)
    depth, struct, shared = _depth(UP_WARPS, scales, rows_size + routes_bytes(rows, n_chosen, n_experts))
    constants: dict[str, int | bool] = {
        "columns": columns, "chosen": n_chosen, "intermediate": hidden, "shared_intermediate": shared_hidden,
        "warps": UP_WARPS, "depth": depth, "row_invariant": row_invariant, "struct_bytes": struct,
        "shared_bytes": shared,
    }  # fmt: skip
    return Plan("mixture_up", constants, sms, 1, 32 * UP_WARPS)


def plan_down_row(columns: int, hidden: int, shared_hidden: int, n_chosen: int, power_of_2: bool) -> Plan:
    """Plan mixture_down_row; arguments as of `plan_up`."""
    tiles, results = (n_chosen * hidden + shared_hidden) // SIDE, n_chosen + (shared_hidden > 0)
    products = 4 * tiles * (2 + DOWN_COLUMNS) + 4 * results * DOWN_COLUMNS + 4 * n_chosen
    depth, struct, shared = _depth(GROUP_BLOCKS, row_bytes(tiles) + products, 0)
    constants: dict[str, int | bool] = {
        "columns": columns, "chosen": n_chosen, "intermediate": hidden, "shared_intermediate": shared_hidden,
        "depth": depth, "power_of_2": power_of_2, "struct_bytes": _aligned(struct), "shared_bytes": shared,
    }  # fmt: skip
    return Plan("mixture_down_row", constants, columns // DOWN_COLUMNS, 1, 32 * GROUP_BLOCKS)


def plan_down(
    rows: int, columns: int, hidden: int, shared_hidden: int, n_chosen: int, n_experts: int, power_of_2: bool
) -> Plan:
    """Plan mixture_down; arguments as of `plan_up`."""
    row = n_chosen * hidden + shared_hidden
    rows_size = rows * (row + ROW_PADDING) + routes_bytes(rows, n_chosen, n_experts)
    cluster = 1 if rows == 1 else DOWN_CLUSTER_OF_MORE
    for warps in DOWN_WARPS_OF_ONE_ROW if rows == 1 else DOWN_WARPS_OF_MORE:
        scales_and_partials = 4 * MAX_ROWS * row // SIDE + 4 * warps * DOWN_COLUMNS * MAX_ROWS
        depth, struct, shared = _depth(warps, scales_and_partials, rows_size)
        if shared <= SHARED_BYTES:
            break
    constants: dict[str, int | bool] = {
        "columns": columns, "chosen": n_chosen, "intermediate": hidden, "shared_intermediate": shared_hidden,
        "warps": warps, "cluster": cluster, "depth": depth, "power_of_2": power_of_2, "struct_bytes": struct,
        "shared_bytes": shared,
    }  # fmt: skip
    return Plan("mixture_down", constants, columns // DOWN_COLUMNS, cluster, 32 * warps)


def _depth(warps: int, other_bytes: int, row_bytes: int) -> tuple[int, int, int]:
    """Return the k-blocks that a warp has in flight, the bytes of a kernel's struct, and those of its shared memory.

    Args:
        warps: warps of a thread block.
        other_bytes: bytes of the struct, without the stages of the warps.
        row_bytes: the bytes after the struct.

    The shared memory is more than half of an SM's, for one block on each: a block that begins on the first SM that is
    free, next to another one of its kernel, leaves others idle.
    """
    stage = warps * STAGE_BYTES
    depth = max(min((SHARED_BYTES - other_bytes - row_bytes - VECTOR) // stage, MAX_DEPTH), MIN_DEPTH)
    struct = depth * stage + other_bytes
    return depth, struct, max(_aligned(struct + row_bytes), SHARED_BYTES // 2 + VECTOR)


def max_routes(rows: int, n_chosen: int, n_experts: int) -> int:
    """Return how many experts rows can choose together."""
    return min(rows * n_chosen, n_experts)


def routes_bytes(rows: int, n_chosen: int, n_experts: int) -> int:
    """Return the bytes of struct Routes for rows."""
    return ROUTES_BYTES + ROUTE_BYTES * max_routes(rows, n_chosen, n_experts)


def why_unsupported(
    x: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, bias: Tensor | None, choice: Choice, experts: Weights,
    shared: SharedWeights, power_of_2: bool, row_invariant: bool,
) -> str | None:  # fmt: skip
    """Return why these kernels do not compute a mixture; None: they do. Arguments as of `launch`."""
    (t, d), (n_experts, _, hidden) = x.shape, experts[2].shape
    shared_hidden = 0 if shared[2] is None else shared[2].shape[1]
    if (why := why_not_so_many(t, row_invariant)) is not None:
        return why
    if x.dtype != torch.bfloat16:
        return f"x is {x.dtype}, not bfloat16"
    if (why := gate_choice.why_too_many(n_experts, choice)) is not None:
        return why
    if row_invariant and gate.dtype != torch.bfloat16:
        return f"the gate is {gate.dtype}, not bfloat16"
    if row_invariant and (why := why_no_norm(d, NARROW_ROWS_WITH_VALUES)) is not None:
        return why
    if d % SIDE or hidden % SIDE or shared_hidden % SIDE:
        return f"{d}, {hidden} or {shared_hidden} columns are no multiple of {SIDE}"
    if bias is not None and bias.dtype != torch.float32:
        return f"bias is {bias.dtype}, not float32"
    for weight in (x, norm_weight, gate, bias, *experts, *shared):
        if weight is not None and (not weight.is_contiguous() or weight.data_ptr() % VECTOR):
            return f"a tensor is not contiguous or does not begin at a multiple of {VECTOR} bytes"
    sizes = t, d, hidden, shared_hidden, n_experts, gate.dtype, norm_weight.dtype
    plans = plan(*sizes, choice, bias is not None, False, 1, row_invariant)
    if max(int(made.constants["shared_bytes"]) for made in plans) > SHARED_BYTES:
        return f"{t} rows of {d} and {choice[0]} times {hidden} columns do not fit into shared memory"
    return request.why_not_on(x.device)


def launch(
    x: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, bias: Tensor | None, choice: Choice, experts: Weights,
    shared: SharedWeights, power_of_2: bool, row_invariant: bool,
) -> Tensor:  # fmt: skip
    """Add a mixture to x; arguments as of `octile.ops.few_rows_mixture`.

    Returns:
        experts int64 [T, K].
    """
    (t, d), (n_experts, _, hidden), n_chosen, factor = x.shape, experts[2].shape, choice[0], choice[-1]
    shared_hidden = 0 if shared[2] is None else shared[2].shape[1]
    key = (
        t,
        d,
        hidden,
        shared_hidden,
        n_experts,
        gate.dtype,
        norm_weight.dtype,
        choice[:-1],
        bias is None,
        power_of_2,
        row_invariant,
        x.device,
    )
    kernels = _prepared[key]
    if kernels is None:
        sms = num_sms.multiprocessors(x.device)
        sizes = t, d, hidden, shared_hidden, n_experts, gate.dtype, norm_weight.dtype
        plans = plan(*sizes, choice, bias is not None, power_of_2, sms, row_invariant)
        kernels = _prepared[key] = tuple(load(made, x.device) for made in plans)
    data, scale = x.new_empty(t, d, dtype=torch.float8_e4m3fn), new_scale(x, 1, SIDE)
    routes = x.new_empty(routes_bytes(t, n_chosen, n_experts), dtype=torch.uint8)
    h = x.new_empty(t, n_chosen * hidden + shared_hidden, dtype=torch.float32)
    chosen = x.new_empty(t, n_chosen, dtype=torch.int64)
    up, up_scale, down, down_scale = map(address_of, experts)
    shared_up, shared_up_scale, shared_down, shared_down_scale = map(address_of, shared)
    rows, quantized, listed = x.data_ptr(), (data.data_ptr(), scale.data_ptr()), routes.data_ptr()
    read = rows, norm_weight.data_ptr(), gate.data_ptr(), address_of(bias)
    numbers = eps, 1.0 / d, factor, EPS
    kernels[0].launch_at((*read, *quantized, listed, chosen.data_ptr(), *numbers))()
    counts = t, max_routes(t, n_chosen, n_experts)
    weights = up, up_scale, shared_up, shared_up_scale
    kernels[1].launch_at((*quantized, listed, *weights, h.data_ptr(), *counts))()
    weights = down, down_scale, shared_down, shared_down_scale
    kernels[2].launch_at((rows, h.data_ptr(), listed, *weights, *counts))()
    return chosen


@functools.lru_cache(MAX_KEYS)
def plan(
    rows: int, columns: int, hidden: int, shared_hidden: int, n_experts: int, gate: torch.dtype, norm: torch.dtype,
    choice: Choice, biased: bool, power_of_2: bool, sms: int, row_invariant: bool = False,
) -> tuple[Plan, Plan, Plan]:  # fmt: skip
    """Plan the three kernels for rows [rows, columns], experts of `hidden` columns and shared ones of shared_hidden."""
    constants, sizes = gate_choice.constants(n_experts, *choice[:-1], biased), (rows, columns, hidden, shared_hidden)
    return (
        plan_gate(rows, columns, gate, norm, constants, power_of_2, row_invariant),
        plan_up(*sizes, choice[0], n_experts, sms, row_invariant),
        plan_down_row(columns, hidden, shared_hidden, choice[0], power_of_2)
        if row_invariant
        else plan_down(*sizes, choice[0], n_experts, power_of_2),
    )


def load(plan: Plan, device: torch.device) -> PreparedKernel:
    """Load a planned kernel, to be launched programmatically."""
    kernel = specialize.load(plan.kernel, plan.constants, device, HEADERS)
    shared_bytes = int(plan.constants["shared_bytes"])
    return PreparedKernel(kernel, plan.grid, plan.cluster, plan.threads, shared_bytes, programmatic=True)


def _aligned(n: int, to: int = VECTOR) -> int:
    return -(-n // to) * to
