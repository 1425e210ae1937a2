"""`octile bench tune-casts`: which settings of Hopper's casts are the fastest on this GPU.

For each kind of cast all candidates are compiled, on all cores. Those that need more registers than there are are left
out; the others give the same bits as the chosen one, and then run by turns. What is better than the chosen one for all
shapes together belongs into `octile.kernels.cuda.quantize.launcher.SETTINGS`: it is printed, not kept.
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
from octile.kernels.cuda.quantize.catalog import Launched, noted

Settings = Mapping[str, int]
Cast = Callable[[], tuple[Tensor, ...]]
DEVICE, SHAPES = "cuda", ((4096, 7168), (16384, 7168))
MOST_THREADS = 2048  # of a multiprocessor
CHOICES = {  # of each setting that a kind has
    "tiles": {"rows": (2, 4, 8), "warps": (4, 8), "blocks": (2, 3, 4, 5, 6, 8)},
    "blocks": {"raster_height": (1, 2, 4, 8, 16, 32), "blocks": (1, 2, 3, 4)},
    "rms_norm": {"rows": (1, 2, 4, 8, 16), "blocks": (1, 2, 3, 4)},
}
GAIN = 0.99  # of the chosen settings' time: less than that is noise
E4M3 = torch.float8_e4m3fn


def run() -> None:
    """Searches all kinds, and prints what it finds of each.

    Raises:
        ValueError: there is no Hopper GPU.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("tune-casts measures Hopper's kernels: it needs a GPU of sm_90")
    for kind in launcher.SETTINGS:
        print(search(kind), flush=True)


def candidates(kind: str) -> list[Settings]:
    """The settings of a kind to be tried, the chosen ones first."""
    chosen = launcher.SETTINGS[kind]
    choices = CHOICES["blocks" if "raster_height" in chosen else "tiles" if "warps" in chosen else "rms_norm"]
    found = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    fitting = [s for s in found if 32 * s.get("warps", 8) * s["blocks"] <= MOST_THREADS]
    return [chosen, *(s for s in fitting if s != chosen)]


def search(kind: str) -> str:
    """Measures the candidates of a kind on the GPU; a table, the fastest first.

    Raises:
        ArithmeticError: one gives other bits than the chosen settings.
    """
    tried = candidates(kind)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        spilled = list(pool.map(spills, (kernel(kind, settings) for settings in tried)))
    fit = [settings for settings, lost in zip(tried, spilled, strict=True) if not lost or settings is tried[0]]
    times: list[list[float]] = [[] for _ in fit]
    for shape in SHAPES:
        cast = prepared(kind, torch.randn(shape, device=DEVICE, dtype=torch.bfloat16))
        calls = {str(i): partial(_with, kind, settings, cast) for i, settings in enumerate(fit)}
        expected = calls["0"]()
        for i, settings in enumerate(fit):
            if not all(map(_same, calls[str(i)](), expected)):
                raise ArithmeticError(f"{kind} with {_words(settings)} gives other bits than with {_words(fit[0])}")
        for name, seconds in work_seconds(calls, rounds=20).items():
            times[int(name)].append(seconds)
    ratios = [geometric_mean([t / c for t, c in zip(found, times[0], strict=True)]) for found in times]
    order = sorted(range(len(fit)), key=ratios.__getitem__)
    lines = [[kind, *(f"{m}×{k}, µs" for m, k in SHAPES), "of the chosen"]]
    lines += [[_words(fit[i]), *(f"{1e6 * t:.1f}" for t in times[i]), f"{ratios[i]:.3f}"] for i in order]
    best = order[0]
    said = "the chosen settings are the fastest" if ratios[best] > GAIN else f"better: {_words(fit[best])}"
    return f"{align_columns(lines, set(lines[0][1:]))}\n{said}\n"


def kernel(kind: str, settings: Settings) -> Launched:
    """What a cast of this kind launches with these settings."""
    with noted():  # what makes its inputs is not launched either
        cast = prepared(kind, torch.empty(SHAPES[0], dtype=torch.bfloat16, device="meta"))
    with noted() as launched:
        _with(kind, settings, cast)
    (found,) = launched
    return found


def spills(found: Launched) -> int:
    """Bytes of registers that do not fit; compiles the kernel, which needs no GPU."""
    return specialize.compile(found.name, found.constants, "sm_90a").spill_bytes


def prepared(kind: str, x: Tensor) -> Cast:
    """A cast of this kind, with its inputs made of x [M, K], bfloat16."""
    if kind in ("dequantize", "transposed_only"):
        data, scale = launcher.quantize(x, 1, 128, E4M3, False)
        if kind == "dequantize":
            return lambda: (launcher.dequantize(data, scale, 1, 128, torch.bfloat16),)
        return lambda: launcher.requantize(data, scale, E4M3, False)
    if kind.startswith("swiglu_backward"):
        data, scale = launcher.quantize(x, 1, 128, E4M3, False)
        dh, kept = x.float() if kind.endswith("wide") else x, (data, data, scale, scale)
        return lambda: launcher.swiglu_backward(dh, *kept, None, E4M3, False, E4M3, True)[:6]
    wide = x.float() if kind == "tiles, 32 bits" else x
    one = torch.ones(1, device=x.device)
    return {
        "tiles": lambda: launcher.quantize(x, 1, 128, E4M3, False),
        "tiles, 32 bits": lambda: launcher.quantize(wide, 1, 128, E4M3, False),
        "tiles, E5M6": lambda: launcher.quantize(x, 1, 128, torch.uint8, True),
        "scale given": lambda: (launcher.quantize_with_scale(x, one, E4M3),),
        "swiglu": lambda: launcher.swiglu(x, x, E4M3, False, None)[:2],
        "swiglu, inputs kept": lambda: launcher.swiglu(x, x, E4M3, False, None, E4M3, False),
        "both": lambda: launcher.rows_and_columns(x, E4M3, False),
        "columns": lambda: launcher.quantize(x, 128, 1, E4M3, False),
        "block": lambda: launcher.quantize(x, 128, 128, E4M3, False),
        "weight": lambda: launcher.quantize_and_transpose(x, E4M3, False),
        "rms_norm": lambda: launcher.rms_norm(x, x[0], 1e-6, E4M3, False, False)[:3],
        "rms_norm, wide": lambda: launcher.rms_norm(x, x[0], 1e-6, E4M3, False, True),
    }[kind]


def _with(kind: str, settings: Settings, cast: Cast) -> tuple[Tensor, ...]:
    chosen = launcher.SETTINGS[kind]
    launcher.SETTINGS[kind] = dict(settings)
    try:
        return cast()
    finally:
        launcher.SETTINGS[kind] = chosen


def _same(a: Tensor, b: Tensor) -> bool:
    """The same bits; sums whose order is open, such as RMSNorm's, have one order whatever the settings."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.element_size() == 1 else torch.equal(a, b)


def _words(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
