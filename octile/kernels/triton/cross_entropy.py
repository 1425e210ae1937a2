# mypy: allow-untyped-defs
"""Cross-entropy and its gradient; `octile.ops.cross_entropy` specifies both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.memory_layout import VECTOR
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import CROSS_ENTROPY, EXACT
from octile.kernels.triton.layout import is_vectorizable


def launch(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Logits [M, V], any strides, and labels [M] → losses [M] and lse [M], float32."""
    m, v = logits.shape
    vector = VECTOR // logits.element_size() if is_vectorizable(logits) else 1
    losses, lse = (torch.empty(m, dtype=torch.float32, device=logits.device) for _ in range(2))
    if m:
        with torch.cuda.device_of(logits):
            cross_entropy[(m,)](
                logits, labels, v, *logits.stride(), labels.stride(0), losses, lse,
                IGNORED=ignored, VECTOR=vector, **_columns_of_program(v), **EXACT,
            )  # fmt: skip
    return losses, lse


def launch_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignored: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of logits [M, V], in dtype and contiguous."""
    m, v = logits.shape
    dlogits = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    columns = _columns_of_program(v)
    blocks = triton.cdiv(v, columns["COLS"])
    if m:
        with torch.cuda.device_of(logits):
            cross_entropy_backward[(m * blocks,)](
                dlosses, logits, labels, lse, v, blocks, dlosses.stride(0), *logits.stride(), labels.stride(0),
                lse.stride(0), dlogits, IGNORED=ignored, **columns, **EXACT,
            )  # fmt: skip
    return dlogits


def _columns_of_program(v: int) -> dict[str, int]:
    """The columns that a program takes at a time, and its warps."""
    cols = min(max(triton.next_power_of_2(v), 128), CROSS_ENTROPY["cols"])
    return {"COLS": cols, "num_warps": max(cols // CROSS_ENTROPY["cols_per_warp"], 1)}


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""

    def losses(logits: Tensor) -> None:
        labels, lse = cases.empty(cases.T, dtype=torch.int64), cases.empty(cases.T, dtype=cases.FP32)
        launch(logits, labels, -100)
        launch_backward(lse, logits, labels, lse, -100, cases.BF16)

    return {
        "cross-entropy": lambda: losses(cases.empty(cases.T, 8 * cases.N)),
        "cross-entropy of a small vocabulary": lambda: losses(cases.empty(cases.T, 512)),
        "ragged: cross-entropy": lambda: losses(cases.empty(cases.T, 50257, dtype=cases.FP32)),
    }


@triton.jit
def cross_entropy(
    logits, labels, V, row_stride, col_stride, label_step, losses, lse,
    IGNORED: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A program reads a row, COLS columns at a time, and rescales its sums when it finds a larger logit.

    A thread loads VECTOR columns at a time, and adds up their exponentials.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    largest = float("-inf")
    sums = tl.zeros([COLS // VECTOR], tl.float32)  # summed once, after the loop
    next_x = _load(start, tl.arange(0, COLS), V, col_stride)
    for first in range(0, V, COLS):
        x = next_x.to(tl.float32)
        # the next columns are loaded while these are summed
        next_x = _load(start, first + COLS + tl.arange(0, COLS), V, col_stride)
        before = largest
        largest = tl.maximum(before, tl.max(x, axis=0))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # −Inf − −Inf would be NaN, also for later columns
        vectors = tl.reshape(tl.exp(x - shift), [COLS // VECTOR, VECTOR])
        sums = sums * tl.exp(before - shift) + tl.sum(vectors, axis=1)
    # a row of −Inf alone is NaN, as in torch
    row_lse = tl.where(largest == float("-inf"), float("nan"), largest + tl.log(tl.sum(sums, axis=0)))
    label = tl.load(labels + row * label_step)
    is_class = (label >= 0) & (label < V)
    label_logit = tl.load(start + tl.where(is_class, label, 0) * col_stride).to(tl.float32)
    loss = tl.where(is_class, row_lse - label_logit, float("nan"))
    tl.store(lse + row, row_lse)
    tl.store(losses + row, tl.where(label == IGNORED, 0.0, loss))


@triton.jit
def _load(start, c, V, col_stride):
    return tl.load(start + c.to(tl.int64) * col_stride, mask=c < V, other=float("-inf"))


@triton.jit
def cross_entropy_backward(
    dlosses, logits, labels, lse, V, blocks, dloss_step, row_stride, col_stride, label_step, lse_step, dlogits,
    IGNORED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program computes COLS columns of a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    label = tl.load(labels + row * label_step)
    is_counted = label != IGNORED
    dloss = tl.load(dlosses + row * dloss_step)
    dloss = tl.where((label >= 0) & (label < V), dloss, float("nan"))
    at = logits + row * row_stride + c.to(tl.int64) * col_stride
    x = tl.load(at, mask=c < tl.where(is_counted, V, 0), other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row * lse_step))
    dx = tl.where(is_counted, (p - (c == label.to(tl.int32)).to(tl.float32)) * dloss, 0.0)
    tl.store(dlogits + row * V + c, dx.to(dlogits.dtype.element_ty), mask=c < V)
