"""Where the time of a training step goes: each product and cast beside what it would take at the peak.

    calls       every operator of a step as it is called, timed between two events; the GPU sleeps first, so that the
                host is ahead and no gap is counted
    timeline    the kernels of a step as the profiler records them: what runs, and how long nothing does

At the peak a product takes its operations at the speed that torch's own large product reaches in the same run (FP8
with one scale a tensor, BF16), and everything else the time to copy its bytes, each read and written once.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from octile.bench.kernel_time import Kernel, _recorded
from octile.bench.rows import Against, Row
from octile.bench.timing import seconds

SLEEP = 1_000_000_000  # cycles: the host is ahead from then on
STEPS = 4  # one after the other, of which the last counts: a GPU that has rested is faster
PRODUCTS = ("matmul_nt", "grouped_matmul_nt", "grouped_wgrad")
FUSED = re.compile(r"^triton_(poi|red|per|for)_")  # by inductor, named after all that is around
ATTENTION = re.compile(r"sdpa|flash|fmha|attention", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|matmul|xmma|_mm_", re.IGNORECASE)


class Peak(NamedTuple):
    """What this GPU reaches: operations and bytes a second."""

    fp8: float
    bf16: float
    copy: float


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        kind: "product" of octile's formats, "attention", "plain product", "other".
        operations: of a product.
        bytes: read and written.
    """

    name: str
    kind: str
    operations: int
    bytes: int
    seconds: float

    def at(self, peak: Peak) -> float:
        """Seconds at the peak."""
        speed = peak.fp8 if self.kind == "product" else peak.bf16
        return max(self.operations / speed, self.bytes / peak.copy)


def measured_peak(side: int = 8192, bytes: int = 2**30) -> Peak:
    """By torch's products of matrices of this side, and by a copy."""
    bf16, plain, one = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    a, b, scale = bf16.to(torch.float8_e4m3fn), plain.to(torch.float8_e4m3fn), one.new_ones((), dtype=torch.float32)
    source, target = torch.empty(2, bytes // 2, dtype=torch.uint8, device="cuda")
    times = seconds(
        {
            "fp8": lambda: torch._scaled_mm(a, b.mT, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True),
            "bf16": lambda: bf16 @ plain.mT,
            "copy": lambda: target.copy_(source),
        },
        rounds=20,
    )
    return Peak(2 * side**3 / times["fp8"], 2 * side**3 / times["bf16"], bytes / times["copy"])


def calls(step: Callable[[], object]) -> list[Call]:
    """The operators that a step calls; views and empty tensors are left out."""
    with _Clock() as clock:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP)
        for _ in range(STEPS):
            clock.forget()
            step()
    return clock.calls()


def table(case: str, found: Sequence[Call], peak: Peak) -> Iterator[Row]:
    """A row for all calls, and one for those of each name, those first that lose most to the peak."""
    groups: dict[str, list[Call]] = defaultdict(list)
    for call in found:
        groups[call.name].append(call)
    lines = [
        (f"{len(same)}× {name}", sum(c.seconds for c in same), sum(c.at(peak) for c in same))
        for name, same in [("all", found), *groups.items()]
    ]
    for what, took, least in sorted(lines, key=lambda line: line[2] - line[1]):
        yield Row(case, what, took * 1e3, "ms", Against("at the peak", least * 1e3, took / least if least else 0.0))


def shares(found: Sequence[Call]) -> dict[str, float]:
    """What part of the time each kind of call takes."""
    total = sum(call.seconds for call in found)
    parts: dict[str, float] = defaultdict(float)
    for call in found:
        parts[call.kind] += call.seconds / total
    return parts


def timeline(step: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """What part of a step the GPU idles, and what part of the rest its kernels take by their kind.

    Raises:
        RuntimeError: the profiler may not read the GPU.
    """
    step()
    kernels = sorted(_recorded(step), key=lambda kernel: kernel.start)
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel")
    return split(kernels)


def split(kernels: Sequence[Kernel]) -> tuple[float, dict[str, float]]:
    """`timeline` of kernels in the order of their starts."""
    busy, end = 0.0, kernels[0].start
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        until = kernel.start + kernel.duration
        new = max(until - max(kernel.start, end), 0.0)  # what runs beside another is counted once
        busy, end = busy + new, max(end, until)
        by_kind[_kind_of_kernel(kernel.name)] += new
    return 1 - busy / (end - kernels[0].start), {kind: t / busy for kind, t in by_kind.items()}


def _kind_of_kernel(name: str) -> str:
    if FUSED.search(name):
        return "other"
    if ATTENTION.search(name):
        return "attention"
    return "product" if PRODUCT.search(name) else "other"


class _Clock(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[tuple[str, str, int, int], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            return func(*args, **(kwargs or {}))
        start = _now()
        result = func(*args, **(kwargs or {}))
        self._made.append((_describe(func, args, kwargs or {}, result), start, _now()))
        return result

    def forget(self) -> None:
        self._made.clear()

    def calls(self) -> list[Call]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [Call(*what, _between(start, end)) for what, start, end in self._made]


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _describe(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, str, int, int]:
    """Name, kind, operations and bytes of a call."""
    name = func._schema.name.rpartition("::")[2]
    tensors = _tensors((args, kwargs))
    written = [a for spec, a in zip(func._schema.arguments, args, strict=False) if spec.alias_info is not None]
    touched = [*_touched(name, args, tensors), *_touched(name, args, _tensors(written or result))]
    moved = sum(t.numel() * t.itemsize for t in touched)
    kind, operations = _work_of(name, args)
    shapes = "·".join("×".join(map(str, t.shape)) for t in tensors if t.dim() > 1 and t.dtype != torch.float32)
    return f"{name} {shapes or 'float32'}", kind, operations, moved


def _touched(name: str, args: Sequence[Any], tensors: list[Tensor]) -> list[Tensor]:
    """What of an operator's tensors it reads or writes; the rotary ones leave channels alone."""
    if name == "rotate_":
        return [t if t.dim() == 2 else t[..., : 2 * args[1].shape[1]] for t in tensors]
    if name == "latent_keys":
        return [t[..., : args[4]] if t is args[0] else t for t in tensors]
    return tensors


def _work_of(name: str, args: Sequence[Any]) -> tuple[str, int]:
    if name.startswith(PRODUCTS):
        a, b = (t for t in _tensors(args[1:] if name.endswith("out") else args) if t.itemsize == 1)
        shared = a.shape[0] if "wgrad" in name else a.shape[1]  # summed over tokens, or over channels
        sides = a.shape[1] * b.shape[1] if "wgrad" in name else a.shape[0] * b.shape[-2]
        return "product", 2 * shared * sides
    if name in ("attention", "attention_backward"):
        q, _, v = args[:3] if name == "attention" else args[1:4]
        (b, s, h, x), width = q.shape, v.shape[-1]
        return "attention", b * h * s * s * (x + width if name == "attention" else 3 * x + 2 * width)
    if name in ("mm", "bmm", "addmm", "_grouped_mm"):
        a, b = _tensors(args)[-2:] if name == "addmm" else _tensors(args)[:2]
        return "plain product", 2 * prod(a.shape) * b.shape[-1]
    return "other", 0


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
