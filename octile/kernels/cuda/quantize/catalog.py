"""Catalog of the quantization kernels: calls of training and serving whose kernels are compiled without a GPU.

The launcher is called with tensors on the meta device; its launches are recorded and not started.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.cuda.quantize import launcher
from octile.kernels.memory_layout import new_scale

E4M3, E5M6 = torch.float8_e4m3fn, torch.uint8


class Launched(NamedTuple):
    """A launch: the kernel's name and constants, and the dynamic shared memory of a block in bytes."""

    name: str
    constants: Mapping[str, int | bool]
    shared_bytes: int


def launches() -> dict[str, Launched]:
    """Return the launch of each case, by the name of the case."""
    found = {}
    for case, call in _cases().items():
        with recorded_launches() as recorded:
            call()
        (found[case],) = recorded
    return found


def _cases() -> dict[str, Callable[[], object]]:
    t, k, h = 8192, 7168, 2048
    x, x_fp32 = _empty(t, k), _empty(t, k, dtype=torch.float32)
    encoded, packed = _empty(t, k, dtype=E4M3), _empty(t, k * 3 // 2, dtype=E5M6)
    scale = new_scale(encoded, 1, 128)
    gate, up = _empty(t, 2 * h).chunk(2, dim=1)
    dh, weight, rows = _empty(t, h), _empty(t, dtype=torch.float32), _empty(8 * t, dtype=torch.int32)
    tiles = _empty(t // 128 + 8, 2, dtype=torch.int32)
    saved, long_rows = _empty(2, t, h, dtype=E4M3), _empty(t, launcher.MAX_COLUMNS)
    saved_scale = new_scale(saved, 1, 128)
    with_scales: dict[str, Callable[[bool], object]] = {
        "quantize 1×128": lambda p: launcher.quantize(x, 1, 128, E4M3, p),
        "quantize 1×128 of FP32": lambda p: launcher.quantize(x_fp32, 1, 128, E4M3, p),
        "quantize 1×128 to E5M6": lambda p: launcher.quantize(x, 1, 128, E5M6, p),
        "quantize 128×1": lambda p: launcher.quantize(x, 128, 1, E4M3, p),
        "quantize 128×128 of FP32": lambda p: launcher.quantize(x_fp32, 128, 128, E4M3, p),
        "rows and columns": lambda p: launcher.rows_and_columns(x, E4M3, p),
        "rows and columns of FP32": lambda p: launcher.rows_and_columns(x_fp32, E4M3, p),
        "rows and columns of groups": lambda p: launcher.rows_and_columns(x, E4M3, p, tiles),
        "rows and columns of parts": lambda p: launcher.joined_rows_and_columns([x, gate], E4M3, p),
        "requantize, transposed": lambda p: launcher.requantize(encoded, scale, E4M3, p),
        "requantize rows, transposed": lambda p: launcher.requantize(encoded, scale, E4M3, p, rows),
        "requantize rows of groups, transposed": lambda p: launcher.requantize(encoded, scale, E4M3, p, rows, tiles),
        "requantize rows of groups in blocks, transposed": lambda p: launcher.requantize(
            encoded, scale, E4M3, p, rows, tiles, True
        ),
        "requantize groups, transposed": lambda p: launcher.requantize(encoded, scale, E4M3, p, None, tiles),
        "requantize E5M6, transposed": lambda p: launcher.requantize(packed, scale, E4M3, p),
        "weight and its transpose": lambda p: launcher.quantize_and_transpose(x_fp32, E4M3, p),
        "weight, transposed only": lambda p: launcher.quantize_transposed(x, E4M3, p),
        "weights and their transposes": lambda p: launcher.quantize_matrices([[x_fp32], [x_fp32]], E4M3, p, True, True),
        "weights, not transposed": lambda p: launcher.quantize_matrices([[x_fp32], [x_fp32]], E4M3, p, True, False),
        "weights, transposed only": lambda p: launcher.quantize_matrices([[x], [x]], E4M3, p, False, True),
        "SwiGLU": lambda p: launcher.swiglu(gate, up, E4M3, p, None),
        "SwiGLU, inputs saved": lambda p: launcher.swiglu(gate, up, E4M3, p, weight, E4M3, p),
        "SwiGLU backward": lambda p: launcher.swiglu_backward(dh, gate, up, None, None, None, E4M3, p, E4M3, True),
        "SwiGLU backward, inputs saved": lambda p: launcher.swiglu_backward(
            dh, saved[0], saved[1], saved_scale[0], saved_scale[1], weight, E4M3, p, E4M3, True
        ),
        "SwiGLU backward of groups": lambda p: launcher.swiglu_backward(
            dh, gate, up, None, None, weight, E4M3, p, E4M3, True, tiles
        ),
        "SwiGLU backward of groups, h in blocks": lambda p: launcher.swiglu_backward(
            dh, saved[0], saved[1], saved_scale[0], saved_scale[1], weight, E4M3, p, E4M3, True, tiles, True
        ),
        "SwiGLU backward of groups, inputs saved": lambda p: launcher.swiglu_backward(
            dh, saved[0], saved[1], saved_scale[0], saved_scale[1], weight, E4M3, p, E4M3, True, tiles
        ),
        "RMSNorm": lambda p: launcher.rms_norm(x, _empty(k), 1e-6, E4M3, p, False),
        "RMSNorm, and in high precision": lambda p: launcher.rms_norm(x, _empty(k), 1e-6, E4M3, p, True),
        "RMSNorm of rows of 384": lambda p: launcher.rms_norm(_empty(t, 384), _empty(384), 1e-6, E4M3, p, False),
        "RMSNorm of rows of 128": lambda p: launcher.rms_norm(_empty(t, 128), _empty(128), 1e-6, E4M3, p, True),
        "RMSNorm of few rows, overlapping": lambda p: _few_rows_overlapping(x[:256], p, False),
        "RMSNorm of few rows, and in high precision, overlapping": lambda p: _few_rows_overlapping(x[:256], p, True),
        "RMSNorm of the longest row": lambda p: launcher.rms_norm(long_rows, long_rows[0], 1e-6, E4M3, p, False),
    }
    cases: dict[str, Callable[[], object]] = {}
    for name, call in with_scales.items():
        cases |= {name: partial(call, False), f"{name}, powers of two": partial(call, True)}
    return cases | {
        "RMSNorm in high precision": lambda: launcher.rms_norm_high_precision(x, _empty(k), 1e-6),
        "scale given": lambda: launcher.quantize_with_scale(x, _empty(1, dtype=torch.float32), E4M3),
        "dequantize 1×128": lambda: launcher.dequantize(encoded, scale, 1, 128, torch.bfloat16),
        "dequantize 128×1": lambda: launcher.dequantize(encoded, new_scale(encoded, 128, 1), 128, 1, torch.bfloat16),
        "dequantize 128×128": lambda: launcher.dequantize(
            encoded, new_scale(encoded, 128, 128), 128, 128, torch.bfloat16
        ),
        "dequantize E5M6": lambda: launcher.dequantize(packed, scale, 1, 128, torch.bfloat16),
    }


def _few_rows_overlapping(x: Tensor, power_of_2: bool, values: bool) -> None:
    with overlapping_launches():
        launcher.rms_norm(x, _empty(x.shape[1]), 1e-6, E4M3, power_of_2, values)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def recorded_launches() -> Iterator[list[Launched]]:
    """Record the launches inside this context; none of them is started."""
    recorded: list[Launched] = []

    def record(
        name: str,
        constants: Mapping[str, int | bool],
        x: Tensor,
        blocks: int,
        threads: int,
        shared: int,
        *_: Any,
        resident: int | None = None,
    ) -> None:
        recorded.append(Launched(name, constants, shared))

    launch = launcher._launch
    launcher._launch = record
    try:
        yield recorded
    finally:
        launcher._launch = launch
