"""Record what a GPU's approximate functions return for all significands: `python functions.py`, on a GPU.

Writes functions.npz for `octile lab recompute --functions`: differences from the correctly rounded results in units of
the last place, cosines and sines of the positions of `tiny`, and samples of what Triton computes with the functions.
"""

import time
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import rope_of

BEGIN = time.monotonic()
RANGES = {  # function: the bits of the first argument, and how many follow
    "exp2_-2_-1": ("exp2", 0xBF800000, 2**23),
    "exp2_-1_-0.5": ("exp2", 0xBF000000, 2**23),
    "rsqrt_1_4": ("rsqrt", 0x3F800000, 2**24),
    "rcp_1_2": ("rcp", 0x3F800000, 2**23),
}


@triton.jit
def compute(x, y, out, N, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < N, other=1.0)
    if WHAT == "exp2":
        r = tl.exp2(a)
    elif WHAT == "exp":
        r = tl.exp(a)
    elif WHAT == "log":
        r = tl.log(a)
    elif WHAT == "log2":
        r = tl.log2(a)
    elif WHAT == "rsqrt":
        r = tl.rsqrt(a)
    elif WHAT == "rcp":
        r = 1.0 / a
    else:
        r = a / tl.load(y + i, mask=i < N, other=1.0)
    tl.store(out + i, r, mask=i < N)


def on_gpu(what: str, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    compute[(triton.cdiv(len(x), 1024),)](
        x, x if y is None else y, out, len(x), WHAT=what, BLOCK=1024, enable_fp_fusion=False
    )
    return out


def rounded(what: str, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    d = x.double()
    exact = {
        "exp2": torch.exp2,
        "exp": torch.exp,
        "log": torch.log,
        "log2": torch.log2,
        "rsqrt": torch.rsqrt,
        "rcp": torch.reciprocal,
    }
    return (d / y.double() if what == "div" else exact[what](d)).float()


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    bits = [t.view(torch.int32).long() for t in (a, b)]
    a, b = (torch.where(t < 0, -(t & 0x7FFFFFFF), t) for t in bits)
    return a - b


def main() -> None:
    stored = {}
    for name, (what, first, count) in RANGES.items():
        bits = torch.arange(first, first + count, device="cuda") - (2**32 if first >= 2**31 else 0)
        x = bits.to(torch.int32).view(torch.float32)
        d = ulps(on_gpu(what, x), rounded(what, x))
        assert int(d.abs().max()) < 128
        stored[name] = d.to(torch.int8).cpu().numpy()
        print(
            f"[{time.monotonic() - BEGIN:5.1f} s] {name}: {int((d == 0).sum()):,} of {count:,} correctly rounded, "
            f"from {int(d.min())} to {int(d.max())} ulp",
            flush=True,
        )
    g = torch.Generator("cuda").manual_seed(0)
    for what, low, high in (
        ("exp", -20.0, 0.0),
        ("exp", -8.0, 8.0),
        ("exp2", -0.5, 0.0),
        ("exp2", -30.0, 0.0),
        ("log", 1.0, 5000.0),
        ("rsqrt", 1e-6, 100.0),
        ("rcp", 1.0, 100.0),
        ("div", -4.0, 4.0),
    ):
        x = torch.empty(2**16, device="cuda").uniform_(low, high, generator=g)
        y = torch.empty(2**16, device="cuda").uniform_(1.0, 500.0, generator=g)
        found = on_gpu(what, x, y)
        d = ulps(found, rounded(what, x, y))
        name = f"samples_{what}_{low:g}_{high:g}"
        stored |= {f"{name}_x": x.cpu().numpy(), f"{name}_y": y.cpu().numpy(), f"{name}_result": found.cpu().numpy()}
        print(
            f"[{time.monotonic() - BEGIN:5.1f} s] {what} from {low:g} to {high:g}: "
            f"{float((d == 0).float().mean()):.2%} correctly rounded, up to {int(d.abs().max())} ulp",
            flush=True,
        )
    cos, sin = rope_of(ModelConfig.tiny()).cos_sin(torch.arange(2048, device="cuda"))  # torch's cosine and sine
    stored |= {"rope_tiny_cos": cos.cpu().numpy(), "rope_tiny_sin": sin.cpu().numpy()}
    path = Path("functions.npz")
    np.savez_compressed(path, **stored)
    print(f"[{time.monotonic() - BEGIN:5.1f} s] {path.name}: {path.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
