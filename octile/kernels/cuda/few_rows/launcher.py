"""Launcher of Hopper's products of at most 8 rows, as `octile.ops.few_rows` specifies them.

A launch may start before the previous kernel of the stream has ended (programmatic dependent launch) and loads its
weights meanwhile. It depends on shapes and strides, never on values, so it can be captured in a CUDA graph; the first
call of a kind compiles and loads a kernel, which cannot be captured.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel, address_of
from octile.kernels.cuda.quantize.launcher import DTYPES
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import VECTOR

MAX_ROWS = 8  # columns of mma's operand B
WARPS, THREADS, TILE_ROWS = 8, 256, 16  # warp_sums.cuh and fragments.cuh have the same
SUMS_BYTES = WARPS * MAX_ROWS * 20 * 4
DEPTH = 4  # blocks of 128 along K that a warp loads ahead
BLOCKS = 2  # thread blocks that must fit on an SM
MAX_KEYS = 1024

_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)


def why_unsupported(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, scale: Tensor, add: Tensor | None
) -> str | None:
    """Return why this kernel does not multiply x [M, K] by an FP8 weight [N, K]; None: it does."""
    if not 0 < len(x) <= MAX_ROWS:
        return f"there are {len(x)} rows, not 1 to {MAX_ROWS}"
    if x.dtype != torch.bfloat16 or weight.dtype != torch.float8_e4m3fn:
        return f"x is {x.dtype} and the weight {weight.dtype}, not bfloat16 and float8_e4m3fn"
    if not len(weight) or not x.shape[1] or x.shape[1] % VECTOR:
        return f"the weight is {tuple(weight.shape)}: K is not a multiple of {VECTOR}, or it is empty"
    if _shared_bytes(*x.shape) > SHARED_BYTES:
        return f"{len(x)} rows of {x.shape[1]} columns do not fit into the shared memory of a thread block"
    if not weight.is_contiguous() or not scale.is_contiguous() or weight.data_ptr() % VECTOR:
        return "the weight or its scale is not contiguous"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % VECTOR:
        return f"the rows of x are not contiguous or do not begin at multiples of {VECTOR} bytes"
    if norm_weight is not None and (not norm_weight.is_contiguous() or norm_weight.data_ptr() % VECTOR):
        return "the norm's weight is not contiguous"
    if add is not None and add.stride(1) != 1:
        return "the rows of add are not contiguous"
    return request.why_not_on(x.device)


def few_rows_nt(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    power_of_2: bool,
    add: Tensor | None,
) -> Tensor:
    """Multiply quantized rows of x [M, K], normalized if there is a norm's weight, by weight [N, K] → [M, N]."""
    (m, k), n = x.shape, len(weight)
    y = x.new_empty(m, n)
    key = m, k, n, None if norm_weight is None else norm_weight.dtype, power_of_2, add is None, x.device
    prepared = _prepared[key]
    if prepared is None:
        constants = plan(m, k, None if norm_weight is None else norm_weight.dtype, power_of_2, add is not None)
        prepared = _prepared[key] = prepare("few_rows_nt", constants, -(-n // TILE_ROWS), x.device)
    prepared.launch_at(
        (x.data_ptr(), x.stride(0), address_of(norm_weight), eps, weight.data_ptr(), scale.data_ptr(), address_of(add),
         0 if add is None else add.stride(0), y.data_ptr(), n)
    )()  # fmt: skip
    return y


def plan(m: int, k: int, norm_dtype: torch.dtype | None, power_of_2: bool, add: bool) -> dict[str, int | bool]:
    """Return the constants of the kernel that multiplies m rows of k columns."""
    return {
        "rows": m, "k": k, "norm": norm_dtype is not None, "weight_dtype": DTYPES[norm_dtype or torch.float32],
        "power_of_2": power_of_2, "add": add, "depth": DEPTH, "blocks": BLOCKS,
        "shared_bytes": _shared_bytes(m, k),
    }  # fmt: skip


def _shared_bytes(m: int, k: int) -> int:
    """Return the bytes of m quantized rows, as fp8_rows.cuh divides them, and of the warps' accumulators."""
    blocks = -(-k // 128)
    rows = m * (256 * blocks + 16) + blocks * MAX_ROWS * 4 + WARPS * 4
    return -(-rows // VECTOR) * VECTOR + SUMS_BYTES


def prepare(
    name: str,
    constants: dict[str, int | bool],
    grid: int,
    device: torch.device,
    cluster: int = 1,
) -> PreparedKernel:
    """Load a kernel of this folder, to be launched programmatically."""
    kernel = specialize.load(name, constants, device)
    return PreparedKernel(kernel, grid, cluster, THREADS, int(constants["shared_bytes"]), programmatic=True)
