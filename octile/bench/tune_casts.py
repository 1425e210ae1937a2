"""`octile bench tune-casts`: a search for the fastest settings of Hopper's quantization kernels on this GPU.

For each kind of kernel, all candidates are compiled on all cores. Those that spill registers are left out. The others
must give the same bits as the chosen settings, and are timed, interleaved. Settings that are better over all shapes are
printed, not stored: they belong into `octile.kernels.cuda.quantize.launcher.SETTINGS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from statistics import geometric_mean

import torch
from torch import Tensor

from octile.bench.kernel_time import work_seconds
from octile.bench.rows import align_columns
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.quantize import launcher
from octile.kernels.cuda.quantize.catalog import Launched, recorded_launches

Settings = Mapping[str, int]
Call = Callable[[], tuple[Tensor, ...]]
DEVICE, SHAPES = "cuda", ((4096, 7168), (16384, 7168))
MAX_THREADS = 2048  # per SM
CHOICES = {  # values of each setting, by the settings that a kind has
    "tiles": {"rows": (2, 4, 8), "warps": (4, 8), "blocks": (2, 3, 4, 5, 6, 8)},
    "blocks": {"raster_height": (1, 2, 4, 8, 16, 32), "blocks": (1, 2, 3, 4)},
    "rms_norm": {"rows": (1, 2, 4, 8, 16), "blocks": (1, 2, 3, 4)},
}
MIN_GAIN = 0.99  # times the chosen settings' time; a smaller gain is noise
E4M3 = torch.float8_e4m3fn


def run() -> None:
    """Search all kinds and print the results.

    Raises:
        ValueError: there is no Hopper GPU.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("tune-casts measures Hopper's kernels: it needs a GPU of sm_90")
    for kind in launcher.SETTINGS:
        print(search(kind), flush=True)


def candidates(kind: str) -> list[Settings]:
    """Return the settings of a kind to be tried, the chosen ones first."""
    chosen = launcher.SETTINGS[kind]
    choices = CHOICES["blocks" if "raster_height" in chosen else "tiles" if "warps" in chosen else "rms_norm"]
    found = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    fitting = [s for s in found if 32 * s.get("warps", 8) * s["blocks"] <= MAX_THREADS]
    return [chosen, *(s for s in fitting if s != chosen)]


def search(kind: str) -> str:
    """Measure the candidates of a kind on the GPU; return a table, the fastest first.

    Raises:
        ArithmeticError: one gives other bits than the chosen settings.
    """
    tried = candidates(kind)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        spilled = list(pool.map(spills, (kernel(kind, settings) for settings in tried)))
    fit = [settings for settings, lost in zip(tried, spilled, strict=True) if not lost or settings is tried[0]]
    times: list[list[float]] = [[] for _ in fit]
    for shape in SHAPES:
        call = prepared(kind, torch.randn(shape, device=DEVICE, dtype=torch.bfloat16))
        calls = {str(i): partial(_with, kind, settings, call) for i, settings in enumerate(fit)}
        expected = calls["0"]()
        for i, settings in enumerate(fit):
            if not all(map(_same, calls[str(i)](), expected)):
                raise ArithmeticError(f"{kind} with {_format(settings)} gives other bits than with {_format(fit[0])}")
        for name, seconds in work_seconds(calls, rounds=20).items():
            times[int(name)].append(seconds)
    ratios = [geometric_mean([t / c for t, c in zip(found, times[0], strict=True)]) for found in times]
    order = sorted(range(len(fit)), key=ratios.__getitem__)
    lines = [[kind, *(f"{m}×{k}, µs" for m, k in SHAPES), "of the chosen"]]
    lines += [[_format(fit[i]), *(f"{1e6 * t:.1f}" for t in times[i]), f"{ratios[i]:.3f}"] for i in order]
    best = order[0]
    verdict = "the chosen settings are the fastest" if ratios[best] > MIN_GAIN else f"better: {_format(fit[best])}"
    return f"{align_columns(lines, set(lines[0][1:]))}\n{verdict}\n"


def kernel(kind: str, settings: Settings) -> Launched:
    """Return the kernel that a kind launches with these settings."""
    with recorded_launches():  # the kernels that make its inputs are not launched either
        call = prepared(kind, torch.empty(SHAPES[0], dtype=torch.bfloat16, device="meta"))
    with recorded_launches() as launched:
        _with(kind, settings, call)
    (found,) = launched
    return found


def spills(found: Launched) -> int:
    """Compile a kernel, which needs no GPU, and return its spilled bytes."""
    return specialize.compile(found.name, found.constants, "sm_90a").spill_bytes


def prepared(kind: str, x: Tensor) -> Call:
    """Return a call of a kind of kernel, with inputs made of x [M, K], bfloat16."""
    if kind in ("dequantize", "transposed_only", "transposed_block"):
        data, scale = launcher.quantize(x, 1, 128, E4M3, False)
        if kind == "dequantize":
            return lambda: (launcher.dequantize(data, scale, 1, 128, torch.bfloat16),)
        return lambda: launcher.requantize(data, scale, E4M3, False, in_blocks=kind == "transposed_block")
    if kind.startswith("swiglu_backward"):
        data, scale = launcher.quantize(x, 1, 128, E4M3, False)
        dh, saved = x.float() if kind == "swiglu_backward, FP32 or INT8" else x, (data, data, scale, scale)
        return lambda: launcher.swiglu_backward(dh, *saved, None, E4M3, False, E4M3, True)[:6]
    x_32 = x.float() if kind == "tiles, 32 bits" else x
    one = torch.ones(1, device=x.device)
    return {
        "tiles": lambda: launcher.quantize(x, 1, 128, E4M3, False),
        "tiles, 32 bits": lambda: launcher.quantize(x_32, 1, 128, E4M3, False),
        "tiles, E5M6": lambda: launcher.quantize(x, 1, 128, torch.uint8, True),
        "scale given": lambda: (launcher.quantize_with_scale(x, one, E4M3),),
        "swiglu": lambda: launcher.swiglu(x, x, E4M3, False, None)[:2],
        "swiglu, inputs saved": lambda: launcher.swiglu(x, x, E4M3, False, None, E4M3, False),
        "both": lambda: launcher.rows_and_columns(x, E4M3, False),
        "columns": lambda: launcher.quantize(x, 128, 1, E4M3, False),
        "block": lambda: launcher.quantize(x, 128, 128, E4M3, False),
        "weight": lambda: launcher.quantize_and_transpose(x, E4M3, False),
        "rms_norm": lambda: launcher.rms_norm(x, x[0], 1e-6, E4M3, False, False)[:3],
        "rms_norm, FP32 or with y": lambda: launcher.rms_norm(x, x[0], 1e-6, E4M3, False, True),
    }[kind]


def _with(kind: str, settings: Settings, call: Call) -> tuple[Tensor, ...]:
    chosen = launcher.SETTINGS[kind]
    launcher.SETTINGS[kind] = dict(settings)
    try:
        return call()
    finally:
        launcher.SETTINGS[kind] = chosen


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two results have the same bits. The order of sums, as in RMSNorm, does not depend on the settings."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.element_size() == 1 else torch.equal(a, b)


def _format(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
