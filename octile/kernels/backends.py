"""Backends on a GPU: which kernels an operator takes, and why.

Each operator has two: Hopper's own kernels in CUDA C++, and Triton's, which run on every GPU from sm_80. `TABLE` names
both, and the function that says why a call is not supported by Hopper's; `run` takes the first that supports the call.
`octile doctor` prints the choice.

Arguments are checked already. GEMMs take a `GemmRequest`; quantizations take the arguments of the operators of the same
names, with dtypes instead of formats. Triton is imported when it is needed: a machine without a GPU has none.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.kernels.cuda.gemm import launch_cache
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, why_unsupported
from octile.kernels.cuda.quantize import launcher


class Backends(NamedTuple):
    """The kernels of an operator.

    Attributes:
        why_not_hopper: returns why Hopper's own kernels do not support a call; None: they do.
        hopper, triton: the call by either. All three take the same arguments.
    """

    why_not_hopper: Callable[..., str | None]
    hopper: Callable[..., Any]
    triton: Callable[..., Any]


def run(operator: str, *args: Any) -> Any:
    """Call an operator of `TABLE` with the kernels that support the call.

    Raises:
        ValueError: no kernels do.
    """
    backends = TABLE[operator]
    if backends.why_not_hopper(*args) is None:
        return backends.hopper(*args)
    return backends.triton(*args)


def _triton(module: str, function: str) -> Callable[..., Any]:
    return lambda *args: getattr(import_module(f"octile.kernels.triton.{module}"), function)(*args)


def _triton_gemm(request: GemmRequest) -> Tensor:
    from octile.kernels.triton import grouped, matmul

    if not request.promote:
        raise ValueError(f"only Hopper's own kernels sum without promotion: {why_unsupported(request)}")
    operands = (*request.a.parts(), *request.b.parts())
    out, sizes = request.out, request.sizes
    if request.schedule is Schedule.DENSE:
        out = request.new_out() if out is None else out
        matmul.launch(out, *operands, request.accumulate)
        return out
    assert sizes is not None
    if request.schedule is Schedule.GROUPED:
        return grouped.launch(*operands, sizes, request.out_dtype, out)
    if request.schedule is Schedule.MASKED:
        return grouped.launch_masked(*operands, sizes, request.out_dtype, out)
    return grouped.launch_wgrad(*operands, sizes, request.out_dtype, out, request.accumulate)


def _why_not_quantize(x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, *_: bool) -> str | None:
    supported = (TILE,) if dtype == torch.uint8 else (TILE, COLUMN_TILE, BLOCK)
    if (block_rows, block_cols) not in supported:
        return f"it has no blocks of {block_rows}×{block_cols} for {dtype}"
    return launcher.why_unsupported(x, out=dtype)


def _why_not_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, *_: torch.dtype) -> str | None:
    whole = block_rows >= data.shape[-2] and block_cols >= launcher.columns(data)
    if (block_rows, block_cols) not in (TILE, COLUMN_TILE, BLOCK) and not whole:
        return f"it has no blocks of {block_rows}×{block_cols}"
    if not data.is_contiguous() or not launcher.reads_scale(scale, block_cols):
        return "data or scales are not contiguous"
    return launcher.why_unsupported(data)


def _why_not_requantize(data: Tensor, scale: Tensor, *others: Any) -> str | None:
    rows = others[-1]
    if not launcher.reads_tile_scales(scale) or (rows is not None and not rows.is_contiguous()):
        return "scales or rows are not contiguous"
    return launcher.why_unsupported(data)


def _why_not_rms_norm(x: Tensor, weight: Tensor, *_: Any) -> str | None:
    if x.shape[1] > launcher.MAX_COLUMNS or not launcher.is_vector(weight):
        return f"rows have more than {launcher.MAX_COLUMNS} columns, or the weight is not contiguous"
    return launcher.why_unsupported(x)


def _why_not_first(count: int) -> Callable[..., str | None]:
    """Return a function that asks the launcher about its first arguments, which are the matrices."""
    return lambda *args: launcher.why_unsupported(*args[:count])


def _swiglu_and_save(gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool, *saved_and_weight: Any) -> Any:
    saved_dtype, saved_power_of_2, weight = saved_and_weight
    return launcher.swiglu(gate, up, dtype, power_of_2, weight, saved_dtype, saved_power_of_2)


TABLE = {
    "gemm": Backends(why_unsupported, launch_cache.launch, _triton_gemm),
    "quantize": Backends(_why_not_quantize, launcher.quantize, _triton("quantize", "launch")),
    "quantize_with_scale": Backends(
        _why_not_first(1), launcher.quantize_with_scale, _triton("quantize", "launch_with_scale")
    ),
    "dequantize": Backends(_why_not_dequantize, launcher.dequantize, _triton("quantize", "launch_dequantize")),
    "quantize_rows_and_columns": Backends(
        _why_not_first(1), launcher.rows_and_columns, _triton("transpose", "launch_rows_and_columns")
    ),
    "requantize_transposed": Backends(
        _why_not_requantize, launcher.requantize, _triton("transpose", "launch_requantize")
    ),
    "quantize_and_transpose": Backends(
        _why_not_first(1), launcher.quantize_and_transpose, _triton("transpose", "launch_block")
    ),
    "swiglu_quantize": Backends(
        _why_not_first(2), lambda *args: launcher.swiglu(*args)[:2], _triton("swiglu", "launch")
    ),
    "swiglu_quantize_and_save": Backends(_why_not_first(2), _swiglu_and_save, _triton("swiglu", "launch_and_save")),
    "swiglu_backward_quantize": Backends(
        _why_not_first(3), launcher.swiglu_backward, _triton("swiglu", "launch_backward")
    ),
    "rms_norm_quantize": Backends(_why_not_rms_norm, launcher.rms_norm, _triton("norm", "launch")),
}
