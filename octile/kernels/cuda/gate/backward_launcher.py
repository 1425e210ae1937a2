"""Launcher of the GEMMs of the gate's gradients on Hopper: one kernel that reads x once for dx and for the weight.

torch's GEMMs read the terms of the gradient of the logits six times for dx, and x again for the gradient of the weight.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.gate.launcher import MAX_EXPERTS, MAX_KEYS, UNKNOWN, is_readable
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit import wgmma
from octile.kernels.cuda.jit.mapped import MappedKernel, MappedLaunch
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.kernels.cuda.jit.tensor_map import TensorMap
from octile.kernels.terms import TERMS

MIN_TOKENS = 2048  # with fewer, splitting the weight takes longer than the GEMMs
MIN_EXPERTS = 24  # this kernel multiplies as if they were 64: of 16 Triton's is faster
SLICE, STEP = 256, 64  # columns of a thread block, and tokens of a step
ROW_BYTES = 128  # of a tile in shared memory
DY_STAGES, X_STAGES = 3, 3  # the latter of half a step
THREADS = 384


class BackwardPlan(NamedTuple):
    """The kernel's launch.

    Attributes:
        ranges: number of ranges of tokens, each with its part of the gradient of the weight.
        steps: steps of 64 tokens in a range.
    """

    launch: MappedLaunch
    ranges: int
    steps: int


class _Prepared(NamedTuple):
    kernel: MappedKernel
    plan: BackwardPlan


def why_unsupported(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, x: Tensor, weight: Tensor, *_: Any
) -> str | None:
    """Return why this kernel does not compute the gradients; None: it does. Arguments as of `launch`."""
    n_experts = len(weight)
    if n_experts < MIN_EXPERTS:
        return f"{n_experts} experts are fewer than {MIN_EXPERTS}"
    if n_experts > MAX_EXPERTS:
        return f"{n_experts} experts are more than {MAX_EXPERTS}"
    if n_experts % 8:
        return f"{n_experts} experts are not a multiple of 8"
    if len(x) < MIN_TOKENS:
        return f"{len(x)} tokens are fewer than {MIN_TOKENS}"
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.float32, torch.bfloat16):
        return f"x is {x.dtype}, the weight {weight.dtype}"
    if not is_readable(x) or x.shape[1] % 8:
        return "the rows of x are not contiguous, or do not begin at multiples of 16 bytes"
    if weight.stride(1) != 1:
        return "the rows of the weight are not contiguous"
    return request.why_not_on(x.device)


def launch(
    dweights: Tensor | None, dlogits: Tensor | None, logits: Tensor, experts: Tensor, x: Tensor, weight: Tensor,
    scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of x [T, D] and of the weight [E, D]; arguments as of `ops.gate.gate_backward`.

    Returns:
        dx [T, D] bfloat16, dweight [E, D] float32.
    """
    from octile.kernels.triton import gate, partial_sums  # late: Triton may not be installed without a GPU

    settings = scoring_func, norm_topk_prob, routed_scaling_factor
    dys = gate.launch_backward(dweights, dlogits, logits, experts, *settings, range(TERMS))
    dx, partials = multiply(dys, x, weight)
    return dx, partial_sums.launch(partials)


def multiply(dys: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the terms dys [T, 3·E] of the gradient of the logits by the weight [E, D], and by x [T, D].

    Returns:
        dx [T, D] bfloat16, and parts [R, E, D] float32 whose sum over R is the gradient of the weight.
    """
    (t, d), n_experts = x.shape, len(weight)
    key = x.shape, x.stride(), weight.shape, weight.dtype, x.device
    prepared = _prepared[key]
    if prepared is None:
        made = plan(dys, x, weight, num_sms.multiprocessors(x.device))
        prepared = _prepared[key] = _Prepared(MappedKernel(made.launch, x.device), made)
    kernel, made = prepared
    dx = torch.empty(t, d, dtype=x.dtype, device=x.device)
    partials = torch.empty(made.ranges, n_experts, d, dtype=torch.float32, device=x.device)
    addresses = x.data_ptr(), dys.data_ptr(), weight.data_ptr(), dx.data_ptr(), partials.data_ptr()
    kernel.launch_at((*addresses, weight.stride(0), t, d, made.steps))()
    return dx, partials


def plan(dys: Tensor, x: Tensor, weight: Tensor, multiprocessors: int) -> BackwardPlan:
    """Plan the launch for tensors that the kernel supports."""
    (t, d), n_experts = x.shape, len(weight)
    parts = 1 if weight.dtype == torch.bfloat16 else TERMS
    slices, all_steps = -(-d // SLICE), -(-t // STEP)
    steps = -(-all_steps // max(multiprocessors // slices, 1))
    ranges = -(-all_steps // steps)
    stages = DY_STAGES * TERMS * STEP + X_STAGES * STEP // 2 * SLICE // 64
    constants = {
        "experts": n_experts, "parts": parts, "dy_stages": DY_STAGES, "x_stages": X_STAGES,
        "shared_bytes": (parts * SLICE + stages) * ROW_BYTES + 16 * (DY_STAGES + X_STAGES),
    }  # fmt: skip
    headers = {
        "wgmma.cuh": wgmma.header(SLICE, "bf16", "bf16"),
        "wgmma_transposed.cuh": wgmma.header(
            SLICE, "bf16", "bf16", name="wgmma_transposed", a_transposed=True, b_transposed=True
        ),
    }
    map_of_x = TensorMap(UNKNOWN, x.dtype, (1, t, d), (8, *x.stride()), (1, STEP // 2, 64), ROW_BYTES)
    map_of_dy = TensorMap(
        UNKNOWN, dys.dtype, (TERMS, t, n_experts), (n_experts, TERMS * n_experts, 1), (TERMS, STEP, 64), ROW_BYTES
    )
    made = MappedLaunch("gate_backward", constants, headers, slices * ranges, THREADS, (map_of_x, map_of_dy))
    return BackwardPlan(made, ranges, steps)


_prepared: BoundedCache[_Prepared] = BoundedCache(MAX_KEYS)
