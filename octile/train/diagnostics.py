"""What a run looks at besides its loss: the scales of the tiles, and where a number stopped being one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octile.nn.observer import observe_quantization
from octile.ops.quantize import decode, split_into_blocks
from octile.scaled import ScaledTensor

Histogram = dict[str, list[int]]


@contextmanager
def tile_scales() -> Iterator[Callable[[], dict[str, Histogram]]]:
    """Counts the scales of everything that is quantised inside; the function it gives returns them at the end.

    Blocks of zeros are left out: their scale is 1 whatever the numbers around them.

    {"x" | "w" | "dy": {"log2": [rounded log₂ of a scale, …], "count": [blocks, …]}}
    """
    counts: dict[str, Counter[int]] = {"x": Counter(), "w": Counter(), "dy": Counter()}

    def count(operand: str, q: ScaledTensor) -> None:
        if operand in counts:
            values, times = (
                q.scale[q.scale.isfinite() & ~zero_blocks(q)].log2().round().to(torch.int64).unique(return_counts=True)
            )
            counts[operand].update(dict(zip(values.tolist(), times.tolist(), strict=True)))

    def histograms() -> dict[str, Histogram]:
        return {
            operand: {"log2": sorted(counter), "count": [counter[v] for v in sorted(counter)]}
            for operand, counter in counts.items()
            if counter
        }

    with observe_quantization(count):
        yield histograms


def zero_blocks(q: ScaledTensor) -> Tensor:
    """Which blocks hold nothing but zeros, so that their scale says nothing: [..., ⌈M/R⌉, ⌈K/C⌉] bool.

    An INT8 block of a NaN is none, though its numbers are 0: its scale is NaN.
    """
    packed = q.data.dtype == torch.uint8  # E5M6
    magnitude = decode(q.data).abs() if packed else q.data.view(torch.uint8) & 0x7F
    return (split_into_blocks(magnitude, *q.block).amax((-3, -1)) == 0) & ~q.scale.isnan()


def first_non_finite(model: nn.Module, run: Callable[[], object]) -> str:
    """The name of the first module whose output is NaN or Inf when run() calls the model, or of such a parameter.

    Returns "the loss" where every module's output is finite.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"parameter {name}"
    found: list[str] = []

    def looker(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if not found and any(not t.isfinite().all() for t in _tensors(output)):
                found.append(name)

        return look

    hooks = [module.register_forward_hook(looker(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "the loss"


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.dtype.is_floating_point:
            yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
