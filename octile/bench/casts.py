"""`octile bench casts`: quantization and other memory-bound operators vs. a copy of the same number of bytes.

The bytes are those of inputs and outputs, each counted once, however often the kernel reads or writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from octile.bench import goals
from octile.bench.kernel_time import work_seconds
from octile.bench.rows import LEGEND, Row, compare, table
from octile.nn.dispatcher import LocalDispatcher
from octile.ops.adamw import adamw
from octile.ops.norm import rms_norm_backward, rms_norm_quantize
from octile.ops.permute import permute, unpermute
from octile.ops.quantize import dequantize, quantize, quantize_with_scale
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize, swiglu_quantize_and_save
from octile.ops.transpose import quantize_and_transpose, quantize_rows_and_columns, requantize_transposed

GPU_SHAPES, CPU_SHAPES = ((4096, 7168), (8192, 7168), (16384, 7168)), ((2048, 1024),)
CHOSEN, EXPERTS = 8, 64  # experts per token, and per layer
ALIGNMENT = 2**21  # bytes; with source and target aligned to 512 only, a copy took up to 15% longer on an H200
BLOCKS = {"1×128": (1, 128), "128×1": (128, 1), "128×128": (128, 128)}

Case = tuple[str, Callable[..., Tensor | Sequence[Tensor]], tuple[Tensor, ...]]


def rows() -> Iterator[Row]:
    """Measure each operator and yield its row; inputs are BF16 on a GPU, FP32 on a CPU."""
    gpu = torch.cuda.is_available()
    device, dtype, shapes = ("cuda", torch.bfloat16, GPU_SHAPES) if gpu else ("cpu", torch.float32, CPU_SHAPES)
    for m, k in shapes:
        torch.manual_seed(0)
        for what, operator, inputs in _cases(torch.randn(m, k, device=device, dtype=dtype)):
            outputs = operator(*inputs)
            moved = sum(t.nbytes for t in (*inputs, *([outputs] if isinstance(outputs, Tensor) else outputs)))
            source, target = _halves(moved, device)
            copy = partial(target.copy_, source)
            times = work_seconds({"operator": partial(operator, *inputs), "copy": copy}, rounds=20)
            speed, peer = (n / times[name] / 1e9 for name, n in (("operator", moved), ("copy", 2 * source.nbytes)))
            yield compare(f"{m}×{k}", what, speed, "GB/s", "copy", peer)


def _halves(moved: int, device: str) -> tuple[Tensor, Tensor]:
    """Allocate the source and the target of a copy that moves this many bytes: of equal size and aligned."""
    half = -(-moved // 2 // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(2 * half + ALIGNMENT, dtype=torch.uint8, device=device)
    first = -buffer.data_ptr() % ALIGNMENT
    return buffer[first : first + half], buffer[first + half : first + 2 * half]


def show(rows: Sequence[Row]) -> str:
    """Format the table, and on a GPU the verdicts on the goals."""
    verdicts = goals.casts_verdicts(rows) if torch.cuda.is_available() else ""
    return "\n\n".join(filter(None, (table(rows), LEGEND, verdicts)))


def _cases(x: Tensor) -> list[Case]:
    """Return the operators with their inputs, by the names that committed results have in `what`."""
    cases: list[Case] = []
    for name, block in {**BLOCKS, "all×all": tuple(x.shape)}.items():
        cases += _both_ways(name, x, block, "e4m3")
    cases += _both_ways("1×128 E5M6", x, BLOCKS["1×128"], "e5m6")
    tiles = quantize(x, 1, 128, "e4m3", False)
    scale = torch.ones(1, device=x.device)
    gate, up, dh = torch.randn_like(x), torch.randn_like(x), torch.randn_like(x)
    saved = quantize(torch.stack((gate, up)), 1, 128, "e4m3", False)
    weight, rstd = torch.randn(x.shape[1], device=x.device, dtype=x.dtype), torch.rand(len(x), device=x.device)
    place = _places(len(x) // CHOSEN, x.device)
    tokens = quantize(x[: len(place)], 1, 128, "e4m3", True)
    moments = torch.randn_like(x).bfloat16() * 1e-2, torch.rand_like(x).bfloat16() * 1e-4
    corrections = torch.tensor([[3e-3, 0.5, 0.9997]], device=x.device)
    return [
        *cases,
        ("quantize, scale given", lambda x, s: quantize_with_scale(x, s, "e4m3"), (x, scale)),
        ("1×128 and transposed", lambda x: quantize_rows_and_columns(x, "e4m3", False), (x,)),
        ("requantize 1×128, transposed", lambda *q: requantize_transposed(*q, False), tiles),
        ("128×128 and transposed", lambda x: quantize_and_transpose(x, "e4m3", False), (x,)),
        ("SwiGLU, 1×128", lambda g, u: swiglu_quantize(g, u, "e4m3", False), (gate, up)),
        (
            "SwiGLU, 1×128, inputs saved",
            lambda g, u: swiglu_quantize_and_save(g, u, "e4m3", False, "e4m3", False),
            (gate, up),
        ),
        (
            "SwiGLU backward, 1×128 and transposed",
            lambda d, k, s: swiglu_backward_quantize(d, *k, *s, None, "e4m3", False, "e4m3", True),
            (dh, *saved),
        ),
        ("RMSNorm, 1×128", lambda x, w: rms_norm_quantize(x, w, 1e-6, "e4m3", False), (x, weight)),
        (
            "RMSNorm, 1×128 and high precision",
            lambda x, w: rms_norm_quantize(x, w, 1e-6, "e4m3", False, True),
            (x, weight),
        ),
        ("RMSNorm backward", rms_norm_backward, (dh, x, weight, rstd)),
        (f"permute to {CHOSEN} places", permute, (*tokens, place)),
        (f"unpermute, sums of {CHOSEN}", unpermute, (x, place)),
        ("AdamW, BF16 moments", _adamw_step, (x.float(), dh.float(), *moments, corrections)),
    ]


def _places(tokens: int, device: torch.device) -> Tensor:
    """Return the position of each token's rows among all rows sorted by expert, for random experts: [T, K]."""
    experts = torch.rand(tokens, EXPERTS, device=device).topk(CHOSEN).indices
    return LocalDispatcher().plan(experts, experts.flatten().bincount(minlength=EXPERTS)).place_TK


def _adamw_step(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, corrections: Tensor
) -> list[Tensor]:
    """Make a step of the optimizer and return the tensors that it writes."""
    adamw([weight], [gradient], [exp_avg], [exp_avg_sq], [], corrections, 0.9, 0.95, 1e-8)
    return [weight, exp_avg, exp_avg_sq]


def _both_ways(name: str, x: Tensor, block: Sequence[int], fmt: str) -> list[Case]:
    power_of_2 = fmt == "e5m6"  # as in the recipe
    return [
        (f"quantize {name}", lambda x: quantize(x, *block, fmt, power_of_2), (x,)),
        (f"dequantize {name}", lambda *q: dequantize(*q, *block, x.dtype), quantize(x, *block, fmt, power_of_2)),
    ]
