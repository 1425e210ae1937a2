"""GEMMs of BF16 operands whose elements depend on no other row: a · bᵀ of a wide matrix, or of several matrices.

The kernel is that of FP8 with another wgmma: it reads BF16 rows as twice as many bytes, with a scale of 1. Tensor cores
sum over all of K in its order, as `octile.kernels.triton.row_invariant` does where it does not divide K, so both have
the same bits for any number of rows.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule
from octile.kernels.cuda.gemm.launch_cache import PreparedGemm
from octile.kernels.cuda.gemm.launch_plan import plan_launch
from octile.kernels.cuda.gemm.request import MAX_GROUPS, GemmRequest, Operand
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.kernels.memory_layout import VECTOR

CONFIG = GemmConfig(  # of nine the fastest for heads, or within 2% of it (benchmarks/history/exact)
    tile_m=256, tile_n=128, stages=4, a_scales=Scales.PER_TENSOR, b_scales=Scales.PER_TENSOR, out_float=True,
    promote=False, staged_boxes=1, bf16=True,
)  # fmt: skip
# Of several matrices with short sums: one warpgroup stores while the other multiplies.
OF_GROUPS = replace(CONFIG, tile_m=128, stages=3, ping_pong=True, schedule=Schedule.MASKED, max_groups=MAX_GROUPS)
OF_WIDE_GROUPS = replace(OF_GROUPS, tile_m=64, tile_n=256, stages=2)
MIN_ROWS, MIN_ROWS_OF_GROUPS = 128, 1024  # fewer leave a tile half empty; of groups, Triton's are as fast
MAX_KEYS = 1024

_prepared: BoundedCache[PreparedGemm] = BoundedCache(MAX_KEYS)
_constants: BoundedCache[Tensor] = BoundedCache(MAX_KEYS)


def why_unsupported(out: Tensor, a: Tensor, b: Tensor) -> str | None:
    """Return why this kernel does not write a [G, M, K] · b [G, N, K]ᵀ to out [G, M, N]; None: it does."""
    groups, rows, _ = a.shape
    least = MIN_ROWS if groups == 1 else MIN_ROWS_OF_GROUPS
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or out.dtype not in (torch.bfloat16, torch.float32):
        return f"the operands are {a.dtype} and {b.dtype}, not bfloat16, or the result is {out.dtype}"
    if rows < least or groups > MAX_GROUPS or not b.numel():
        return f"there are {rows} rows, fewer than {least}, more than {MAX_GROUPS} matrices, or b is empty"
    for t in (out, a, b):
        steps = [t.stride(i) * t.itemsize for i in (0, 1) if t.shape[i] > 1]
        if t.stride(2) != 1 or any(step <= 0 or step % VECTOR for step in steps) or t.data_ptr() % VECTOR:
            return f"rows are not contiguous, or do not begin at multiples of {VECTOR} bytes"
    if out.shape[2] * out.itemsize % VECTOR:
        return f"{out.shape[2]} columns of the result are no multiple of {VECTOR} bytes"
    return request.why_not_on(a.device)


def launch(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a [G, M, K] · b [G, N, K]ᵀ to out [G, M, N]."""
    sms = num_sms.limit, num_sms.left_free
    key = a.shape, a.stride(), b.shape, b.stride(), out.stride(), out.dtype, a.device, sms
    made = request_of(out, a, b)
    prepared = _prepared[key]
    if prepared is None:
        prepared = _prepared[key] = _prepare(made)
    sizes = 0 if made.sizes is None else made.sizes.data_ptr()
    scale = made.a.scale.data_ptr()
    prepared.launch_at((a.data_ptr(), b.data_ptr(), scale, scale, sizes, out.data_ptr()))()
    if num_sms.left_free:
        num_sms.count_launched(2 * a.numel() * b.shape[1])


def request_of(out: Tensor, a: Tensor, b: Tensor) -> GemmRequest:
    """Return the GEMM of the operands' bytes: dense if there is one matrix, otherwise masked, of all rows."""
    scale, (groups, rows, _) = _one(a.device), a.shape
    if groups == 1:
        out, a, b = out[0], a[0], b[0]
    left, right = (Operand(t.view(torch.uint8), scale, (t.shape[-2], 2 * t.shape[-1])) for t in (a, b))
    if groups == 1:
        return GemmRequest(Schedule.DENSE, left, right, out.dtype, out, promote=False)
    sizes = _all_rows(groups, rows, a.device)
    return GemmRequest(Schedule.MASKED, left, right, out.dtype, out, sizes, promote=False)


def config_of(made: GemmRequest) -> GemmConfig:
    """Return the kernel of a request."""
    config = CONFIG
    if made.sizes is not None:
        config = OF_WIDE_GROUPS if made.b.data.shape[-2] >= OF_WIDE_GROUPS.tile_n else OF_GROUPS
    return replace(config, out_float=made.out_dtype == torch.float32)


def _prepare(made: GemmRequest) -> PreparedGemm:
    device = made.a.data.device
    plan = plan_launch(made, num_sms.chip(made.a.data.get_device()), config_of(made))
    return PreparedGemm(plan, specialize.load("gemm", plan.config.constants(), device, plan.config.headers()))


def _one(device: torch.device) -> Tensor:
    return _kept(("one", device), lambda: torch.ones(1, 1, dtype=torch.float32, device=device))


def _all_rows(groups: int, rows: int, device: torch.device) -> Tensor:
    return _kept((groups, rows, device), lambda: torch.full((groups,), rows, dtype=torch.int32, device=device))


def _kept(key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Return a tensor that was made before. A CUDA graph makes its own, since what is kept here may be dropped."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return make()
    kept = _constants[key]
    if kept is None:
        kept = _constants[key] = make()
    return kept
