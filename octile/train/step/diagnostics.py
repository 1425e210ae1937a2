"""Diagnostics of a run: histograms of tile scales, and the module in which a value became NaN or Inf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octile.nn.observer import observe_quantization
from octile.ops.quantize import decode, split_into_blocks
from octile.scaled import ScaledTensor

Histogram = dict[str, list[int]]

NOWHERE = "the loss"  # where a value became NaN or Inf if all parameters and outputs are finite


@contextmanager
def record_tile_scales() -> Iterator[Callable[[], dict[str, Histogram]]]:
    """Count the scales of everything that is quantized inside the context.

    Blocks of zeros are not counted, because their scale is always 1.

    Yields:
        A function that returns the histograms so far:
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
        return {operand: _histogram(counter) for operand, counter in counts.items() if counter}

    with observe_quantization(count):
        yield histograms


def add_histograms(rank_histograms: Iterable[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """Add up the histograms of `record_tile_scales` of several ranks."""
    counts: dict[str, Counter[int]] = {}
    for operands in rank_histograms:
        for operand, histogram in operands.items():
            counts.setdefault(operand, Counter()).update(dict(zip(histogram["log2"], histogram["count"], strict=True)))
    return {operand: _histogram(counter) for operand, counter in counts.items()}


def _histogram(counter: Counter[int]) -> Histogram:
    return {"log2": sorted(counter), "count": [counter[value] for value in sorted(counter)]}


def zero_blocks(q: ScaledTensor) -> Tensor:
    """Which blocks contain only zeros, so that their scale is meaningless: [..., ⌈M/R⌉, ⌈K/C⌉] bool.

    An INT8 block that contained a NaN is not among them: its values are 0, but its scale is NaN.
    """
    packed = q.data.dtype == torch.uint8  # E5M6
    magnitude = decode(q.data).abs() if packed else q.data.view(torch.uint8) & 0x7F
    return (split_into_blocks(magnitude, *q.block).amax((-3, -1)) == 0) & ~q.scale.isnan()


def first_non_finite(
    model: nn.Module, run: Callable[[], object], gather: Callable[[str], list[str]] = lambda own: [own]
) -> str:
    """Find where a forward pass becomes NaN or Inf, on the first rank that finds something.

    Args:
        model: the model.
        run: calls the model. Either all ranks call it or none, because it may need the experts of other ranks.
        gather: given what this rank has found, returns what each rank has.

    Returns:
        The name of the first parameter that is not finite, else of the first module whose output is not finite, else
        NOWHERE.
    """
    broken = (f"parameter {name}" for name, parameter in model.named_parameters() if not parameter.isfinite().all())
    if (parameter := _first(gather(next(broken, NOWHERE)))) != NOWHERE:
        return parameter
    found: list[str] = []

    def make_hook(name: str) -> Callable[..., None]:
        def check_output(module: nn.Module, inputs: object, output: object) -> None:
            if not found and any(not t.isfinite().all() for t in _tensors(output)):
                found.append(name)

        return check_output

    hooks = [module.register_forward_hook(make_hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return _first(gather(found[0] if found else NOWHERE))


def _first(names: list[str]) -> str:
    return next((name for name in names if name != NOWHERE), NOWHERE)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.dtype.is_floating_point:
            yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
