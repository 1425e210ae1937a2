"""Launcher of Hopper's products of at most 8 rows, as `octile.ops.few_rows` specifies them.

A launch may start before the previous kernel of the stream has ended (programmatic dependent launch) and loads its
weights meanwhile. It depends on shapes and strides, never on values, so it can be captured in a CUDA graph; the first
call of a kind compiles and loads a kernel, which cannot be captured.

If row_invariant, one row is multiplied with the bits of octile's GEMM: by one_row_nt.cu, with wgmma.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit import specialize, wgmma
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel, address_of
from octile.kernels.cuda.quantize.launcher import DTYPES, NARROW_ROWS, norm_parts
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import VECTOR

MAX_ROWS = 8  # columns of mma's operand B
WARPS, THREADS, TILE_ROWS = 8, 256, 16  # warp_sums.cuh and fragments.cuh have the same
SUMS_BYTES = WARPS * MAX_ROWS * 20 * 4
DEPTH = 4  # blocks of 128 along K that a warp loads ahead
BLOCKS = 2  # thread blocks that must fit on an SM
GROUP_BLOCKS = 8  # k-blocks of a row that are the columns of a wgmma, of 128 bytes each
MAX_KEYS = 1024
HEADERS = {"wgmma_row.cuh": wgmma.header(GROUP_BLOCKS, name="wgmma_row", a_in_registers=True)}
KERNELS = {False: ("few_rows_nt", HEADERS), True: ("one_row_nt", HEADERS)}  # and headers, by row_invariant

_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)


def why_unsupported(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, scale: Tensor, add: Tensor | None, row_invariant: bool
) -> str | None:
    """Return why this kernel does not multiply x [M, K] by an FP8 weight [N, K]; None: it does."""
    if (why := why_not_so_many(len(x), row_invariant)) is not None:
        return why
    if x.dtype != torch.bfloat16 or weight.dtype != torch.float8_e4m3fn:
        return f"x is {x.dtype} and the weight {weight.dtype}, not bfloat16 and float8_e4m3fn"
    if not len(weight) or not x.shape[1] or x.shape[1] % VECTOR:
        return f"the weight is {tuple(weight.shape)}: K is not a multiple of {VECTOR}, or it is empty"
    if _shared_bytes(len(x), x.shape[1], row_invariant) > SHARED_BYTES:
        return f"{len(x)} rows of {x.shape[1]} columns do not fit into the shared memory of a thread block"
    if not weight.is_contiguous() or not scale.is_contiguous() or weight.data_ptr() % VECTOR:
        return "the weight or its scale is not contiguous"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % VECTOR:
        return f"the rows of x are not contiguous or do not begin at multiples of {VECTOR} bytes"
    if norm_weight is not None and (not norm_weight.is_contiguous() or norm_weight.data_ptr() % VECTOR):
        return "the norm's weight is not contiguous"
    if norm_weight is not None and row_invariant and (why := why_no_norm(x.shape[1], NARROW_ROWS)) is not None:
        return why
    if add is not None and add.stride(1) != 1:
        return "the rows of add are not contiguous"
    return request.why_not_on(x.device)


def why_not_so_many(rows: int, row_invariant: bool) -> str | None:
    """Return why there are no kernels for so many rows; None: there are."""
    if row_invariant and rows != 1:
        return f"there are {rows} rows, not 1, whose bits depend on no other row"
    if not 0 < rows <= MAX_ROWS:
        return f"there are {rows} rows, not 1 to {MAX_ROWS}"
    return None


def why_no_norm(k: int, narrow: int) -> str | None:
    """Return why row_norm.cuh does not sum k columns as the operator does, whose kernel is Triton's up to `narrow`."""
    if k <= narrow or norm_parts(k)[1] > WARPS:
        return f"rows of {k} columns are normalized by another kernel, or by more than {WARPS} warps"
    return None


def few_rows_nt(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    power_of_2: bool,
    add: Tensor | None,
    row_invariant: bool,
) -> Tensor:
    """Multiply quantized rows of x [M, K], normalized if there is a norm's weight, by weight [N, K] → [M, N]."""
    (m, k), n = x.shape, len(weight)
    y = x.new_empty(m, n)
    norm = None if norm_weight is None else norm_weight.dtype
    key = m, k, n, norm, power_of_2, add is None, row_invariant, x.device
    prepared = _prepared[key]
    if prepared is None:
        name, headers = KERNELS[row_invariant]
        constants = plan(m, k, norm, power_of_2, add is not None, row_invariant)
        prepared = _prepared[key] = prepare(name, constants, -(-n // TILE_ROWS), x.device, headers=headers)
    prepared.launch_at(
        (x.data_ptr(), x.stride(0), address_of(norm_weight), eps, weight.data_ptr(), scale.data_ptr(), address_of(add),
         0 if add is None else add.stride(0), y.data_ptr(), n)
    )()  # fmt: skip
    return y


def plan(
    m: int, k: int, norm_dtype: torch.dtype | None, power_of_2: bool, add: bool, row_invariant: bool = False
) -> dict[str, int | bool]:
    """Return the constants of the kernel that multiplies m rows of k columns."""
    units, warps = norm_parts(k)
    return {
        "rows": m, "k": k, "norm": norm_dtype is not None, "weight_dtype": DTYPES[norm_dtype or torch.float32],
        "norm_units": units, "norm_warps": warps, "power_of_2": power_of_2, "add": add, "depth": DEPTH,
        "blocks": BLOCKS, "row_invariant": row_invariant, "shared_bytes": _shared_bytes(m, k, row_invariant),
    }  # fmt: skip


def _shared_bytes(m: int, k: int, row_invariant: bool) -> int:
    """Return the bytes of m quantized rows, as fp8_rows.cuh divides them, and of accumulators or products."""
    blocks = -(-k // 128)
    rows = row_bytes(blocks) if row_invariant else m * (256 * blocks + 16)
    rows += blocks * MAX_ROWS * 4 + WARPS * 4
    return -(-rows // VECTOR) * VECTOR + (4 * blocks * (TILE_ROWS + 1) if row_invariant else SUMS_BYTES)


def row_bytes(blocks: int) -> int:
    """Return the bytes of one row of so many k-blocks, as row_product.cuh stores it."""
    return -(-blocks // GROUP_BLOCKS) * GROUP_BLOCKS * 128


def prepare(
    name: str,
    constants: dict[str, int | bool],
    grid: int,
    device: torch.device,
    cluster: int = 1,
    threads: int = THREADS,
    headers: Mapping[str, str] | None = None,
) -> PreparedKernel:
    """Load a kernel of this folder, to be launched programmatically."""
    kernel = specialize.load(name, constants, device, headers)
    return PreparedKernel(kernel, grid, cluster, threads, int(constants["shared_bytes"]), programmatic=True)
