"""Where the time of a training step goes: each operator's time vs. its time at the GPU's peak.

    calls       the time of every operator that a step calls, between two CUDA events. The GPU sleeps first, so that the
                host is ahead and gaps are not counted.
    timeline    the kernels of a step as the profiler records them, and the time in which the GPU idles

The peak is measured in the same run. For a GEMM it is the speed of a large GEMM of torch (FP8 with per-tensor scales,
BF16), for everything else the time of a copy of the bytes that it reads and writes, each once.
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

from octile.bench.kernel_time import record_kernels
from octile.bench.rows import Against, Row
from octile.bench.timing import seconds
from octile.train.step.kernel_records import KernelRecord, busy_times, idle_share

SLEEP = 1_000_000_000  # cycles, in which the host gets ahead
STEPS = 4  # in sequence; only the last counts, since a GPU that has rested is faster
GEMMS = ("matmul_nt", "grouped_matmul_nt", "grouped_wgrad")
FUSED = re.compile(r"^triton_(poi|red|per|for)_")  # kernels of inductor, whose names also list operators around them
ATTENTION = re.compile(
    r"sdpa|flash|fmha|attention|attend_pages|merge_splits|mla_decode|mla_merge|latent_queries|mla_few_rows|merge_values"
    r"|mla_one_row|values_one_row",
    re.IGNORECASE,
)
GEMM = re.compile(
    r"gemm|nvjet|cutlass|matmul|xmma|_mm_|high_precision_(nt|tn)|few_rows_nt|one_row_nt|mixture_(gate|up|down)",
    re.IGNORECASE,
)


class Peak(NamedTuple):
    """The measured peak of this GPU: FLOP/s of FP8 and BF16 GEMMs, bytes/s of a copy."""

    fp8: float
    bf16: float
    copy: float


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        name: the operator and the shapes of its inputs.
        kind: "product" (a quantized GEMM), "attention", "plain product" (a high-precision GEMM) or "other", as in
            committed results.
        operations: floating-point operations, if it is a GEMM or attention.
        bytes: bytes read and written.
        seconds: its time.
    """

    name: str
    kind: str
    operations: int
    bytes: int
    seconds: float

    def at(self, peak: Peak) -> float:
        """Return the seconds that the call would take at the peak."""
        speed = peak.fp8 if self.kind == "product" else peak.bf16
        return max(self.operations / speed, self.bytes / peak.copy)


def measured_peak(side: int = 8192, bytes: int = 2**30) -> Peak:
    """Measure the peak with torch's GEMMs of square matrices of this side, and with a copy of this many bytes."""
    bf16, other, one = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    a, b, scale = bf16.to(torch.float8_e4m3fn), other.to(torch.float8_e4m3fn), one.new_ones((), dtype=torch.float32)
    source, target = torch.empty(2, bytes // 2, dtype=torch.uint8, device="cuda")
    times = seconds(
        {
            "fp8": lambda: torch._scaled_mm(a, b.mT, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True),
            "bf16": lambda: bf16 @ other.mT,
            "copy": lambda: target.copy_(source),
        },
        rounds=20,
    )
    return Peak(2 * side**3 / times["fp8"], 2 * side**3 / times["bf16"], bytes / times["copy"])


def calls(step: Callable[[], object]) -> list[Call]:
    """Time the operators that a step calls, without views and allocations."""
    with _Clock() as clock:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP)
        for _ in range(STEPS):
            clock.forget()
            step()
    return clock.calls()


def table(case: str, found: Sequence[Call], peak: Peak) -> Iterator[Row]:
    """Yield a row for all calls, and one for the calls of each name, in descending order of time lost to the peak."""
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
    """Return each kind of call's share of the time."""
    total = sum(call.seconds for call in found)
    parts: dict[str, float] = defaultdict(float)
    for call in found:
        parts[call.kind] += call.seconds / total
    return parts


def timeline(step: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Measure the share of a step in which the GPU idles, and each kind of kernel's share of the rest.

    Raises:
        RuntimeError: the profiler has no access to the GPU.
    """
    step()
    kernels = record_kernels(step)
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel")
    return split(kernels)


def split(kernels: Sequence[KernelRecord]) -> tuple[float, dict[str, float]]:
    """Return `timeline` of recorded kernels."""
    by_kind: dict[str, float] = defaultdict(float)
    for kernel, alone in busy_times(kernels):  # time of concurrent kernels is counted once
        by_kind[_kind_of_kernel(kernel.name)] += alone
    busy = sum(by_kind.values())
    return idle_share(kernels), {kind: part / busy for kind, part in by_kind.items()}


def _kind_of_kernel(name: str) -> str:
    if FUSED.search(name):
        return "other"
    if ATTENTION.search(name):
        return "attention"
    return "product" if GEMM.search(name) else "other"


class _Clock(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[tuple[str, str, int, int], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            return func(*args, **(kwargs or {}))
        start = _now()
        result = func(*args, **(kwargs or {}))
        self._calls.append((_describe(func, args, kwargs or {}, result), start, _now()))
        return result

    def forget(self) -> None:
        self._calls.clear()

    def calls(self) -> list[Call]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [Call(*what, _between(start, end)) for what, start, end in self._calls]


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _describe(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, str, int, int]:
    """Return the name, kind, operations and bytes of a call."""
    name = func._schema.name.rpartition("::")[2]
    tensors = _tensors((args, kwargs))
    written = [a for spec, a in zip(func._schema.arguments, args, strict=False) if spec.alias_info is not None]
    touched = [*_touched(name, args, tensors), *_touched(name, args, _tensors(written or result))]
    moved = sum(t.numel() * t.itemsize for t in touched)
    kind, operations = _work_of(name, args)
    shapes = "·".join("×".join(map(str, t.shape)) for t in tensors if t.dim() > 1 and t.dtype != torch.float32)
    return f"{name} {shapes or 'float32'}", kind, operations, moved


def _touched(name: str, args: Sequence[Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return the parts of an operator's tensors that it reads or writes; rotary operators skip some channels."""
    if name in ("rotate_", "rotate_and_copy_"):
        return [t if t.dim() == 2 else t[..., : 2 * args[-1].shape[1]] for t in tensors]
    if name == "latent_keys":
        return [t[..., : args[4]] if t is args[0] else t for t in tensors]
    return tensors


def _work_of(name: str, args: Sequence[Any]) -> tuple[str, int]:
    """Return the kind and the floating-point operations of a call."""
    if name.startswith(GEMMS):
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
