# mypy: allow-untyped-defs
"""Products of few rows of each head with its weight, as `octile.ops.paged_attention` specifies, on Hopper.

A program multiplies over all of K at once. Where launches overlap, it loads the weight before it waits for the previous
kernel, which must not write it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import TILE
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.fp8_bits import quantize_constants
from octile.kernels.triton.launch_config import EXACT, HEADS, QUANTIZED_HEADS
from octile.kernels.triton.overlap import overlap_options, wait_for_previous
from octile.kernels.triton.scaling import divide, magnitude, round_to_format, scale_from_amax

# Whose weights a program can hold; at least 16 at a time in a product, of which quantization has two.
PRODUCT_K, QUANTIZED_K = (16, 256), (32, 512)


def why_no_product(out: Tensor, x: Tensor, w: Tensor) -> str | None:
    """Return why `launch_out` does not support a call; None: it does."""
    return _why_unsupported((x, w, out), *PRODUCT_K)


def why_not_quantized(x: Tensor, w: Tensor) -> str | None:
    """Return why `launch_quantized` does not support a call; None: it does."""
    if w.shape[1] % TILE[1]:
        return f"heads have {w.shape[1]} columns, so tiles of {TILE[1]} belong to several"
    return _why_unsupported((x, w), *QUANTIZED_K)


def _why_unsupported(tensors: tuple[Tensor, ...], min_k: int, max_k: int) -> str | None:
    x, k = tensors[0], tensors[0].shape[2]
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the operands are {x.dtype}, not bfloat16 or float16"
    if not min_k <= k <= max_k or k & (k - 1):
        return f"K is {k}, not a power of two from {min_k} to {max_k}"
    if not all(t.numel() and t.stride(2) == 1 for t in tensors):
        return "a tensor is empty, or its rows are not contiguous"
    return None


def launch_out(out: Tensor, x: Tensor, w: Tensor) -> None:
    """Write x [T, H, K] · w [H, N, K]ᵀ of each head to out [T, H, N]."""
    (t, h, k), n = x.shape, w.shape[1]
    tile_t = min(max(triton.next_power_of_2(t), 16), HEADS["MAX_ROWS"])
    with torch.cuda.device_of(x):
        multiply_heads[(triton.cdiv(n, HEADS["COLS"]), h, triton.cdiv(t, tile_t))](
            x, w, out, t, n, *x.stride()[:2], *w.stride()[:2], *out.stride()[:2], K=k, ROWS=tile_t, COLS=HEADS["COLS"],
            num_warps=HEADS["num_warps"], **overlap_options(x.device),
        )  # fmt: skip


def launch_quantized(x: Tensor, w: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Multiply the same, and quantize rows [T, H·N] to E4M3 in tiles of 1×128 → data and scale."""
    (t, h, k), n = x.shape, w.shape[1]
    data = x.new_empty(t, h * n, dtype=torch.float8_e4m3fn)
    scale, cols = new_scale(data, *TILE), TILE[1]
    rows = QUANTIZED_HEADS["ROWS" if t > QUANTIZED_HEADS["ROWS"] else "FEW_ROWS"]
    with torch.cuda.device_of(x):
        multiply_and_quantize[(h * n // cols, triton.cdiv(t, rows))](
            x, w, data, scale, t, n // cols, *x.stride()[:2], *w.stride()[:2], h * n, scale.stride(1),
            K=k, ROWS=rows, COLS=cols, POWER_OF_2=power_of_2, num_warps=QUANTIZED_HEADS["num_warps"],
            **quantize_constants(torch.float8_e4m3fn), **EXACT, **overlap_options(x.device),
        )  # fmt: skip
    return data, scale


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    q, absorbed, attended = (cases.empty(256, 16, width) for width in (192, 576, 512))
    w_k, w_v = cases.empty(16, 512, 128), cases.empty(16, 128, 512)

    def on_hopper(launch: Callable[..., object], *operands: Any) -> Callable[[], object]:
        return lambda: device_properties(q.device).shared_bytes >= SHARED_BYTES and launch(*operands)

    return {
        "products of heads": on_hopper(launch_out, absorbed[..., :512], q[..., :128], w_k),
        "quantized products of heads": on_hopper(launch_quantized, attended, w_v, False),
        "the same of few rows": on_hopper(launch_quantized, attended[:32], w_v, False),
    }


@triton.jit(do_not_specialize=["T"])
def multiply_heads(
    x, w, out, T, N, x_row, x_head, w_head, w_row, out_row, out_head,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes COLS columns of ROWS rows of a head."""
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K)
    weight = tl.load(w + head * w_head + n.to(tl.int64)[None, :] * w_row + k[:, None], mask=(n < N)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    inside = (t < T)[:, None]
    rows = tl.load(x + t.to(tl.int64)[:, None] * x_row + head * x_head + k[None, :], mask=inside, other=0.0)
    to = out + t.to(tl.int64)[:, None] * out_row + head * out_head + n[None, :]
    tl.store(to, tl.dot(rows, weight).to(out.dtype.element_ty), mask=inside & (n < N)[None, :])


@triton.jit(do_not_specialize=["T"])
def multiply_and_quantize(
    x, w, data, scale, T, TILES, x_row, x_head, w_head, w_row, data_row, scale_tile,
    K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, POWER_OF_2: tl.constexpr, INVERSE: tl.constexpr,
    REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program computes and quantizes a tile of ROWS rows of a head, of which each has TILES tiles.

    It adds the products of both halves of K in the order of one product: registers do not hold all rows and the weight.
    """
    tile = tl.program_id(0).to(tl.int64)
    head, n = tile // TILES, tl.arange(0, COLS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K // 2)
    weights = w + head * w_head + (tile % TILES * COLS + n)[None, :] * w_row + k[:, None]
    first_weight = tl.load(weights)
    second_weight = tl.load(weights + K // 2)
    wait_for_previous(OVERLAPS)
    inside = (t < T)[:, None]
    operand = x + t.to(tl.int64)[:, None] * x_row + head * x_head + k[None, :]
    first_rows = tl.load(operand, mask=inside, other=0.0)
    second_rows = tl.load(operand + K // 2, mask=inside, other=0.0)
    total = tl.dot(second_rows, second_weight, tl.dot(first_rows, first_weight))
    value = total.to(x.dtype.element_ty).to(tl.float32)
    row_scale = scale_from_amax(tl.max(magnitude(value), axis=1), INVERSE, REST, POWER_OF_2)
    encoded = round_to_format(divide(value, row_scale[:, None], POWER_OF_2), data.dtype.element_ty, MANTISSA, BIAS)
    tl.store(data + t.to(tl.int64)[:, None] * data_row + tile * COLS + n[None, :], encoded, mask=inside)
    tl.store(scale + tile * scale_tile + t, row_scale, mask=t < T)
