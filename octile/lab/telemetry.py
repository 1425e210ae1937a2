"""What every product of a training run sees: how its operands were cast, and what the cast and the sum cost.

    with octile.lab.telemetry(model, every=100, layers="*.experts.*") as t:
        for batch in batches:
            loss = model(batch, batch)
            loss.backward()
            optimizer.step()
            for row in t.step():            # empty but for steps 100, 200, …
                print(row)

Between two watched steps nothing is attached anywhere, so it costs nothing. A watched step is measured where its
products are made; all figures stay on the device until `step`, which copies them once. Micro-batches of a step are
added up. A product counts once its backward pass has run, so a validation does not count, and the forward pass that a
checkpointed block repeats counts once (it is measured twice and one of them forgotten). Products inside
`torch.compile` are not seen, and a step that is captured as a CUDA graph cannot be measured: experts' offsets are read
on the host.

A row is a flat dictionary that JSON can hold, of one operand or of one product:

    {"step", "layer", "product": "fprop" | "dgrad" | "wgrad", "operand": "x" | "w" | "dy", …}       operand_stats.py
    {"step", "layer", "product", "quantization_snr_db", "accumulation_snr_db", …}                   product_stats.py

dgrad's w is fprop's, so it has no row of its own. wgrad's x is what fprop kept, so its error is that of being
quantized again; where wgrad takes the very tensors of fprop and dgrad, as with one scale a tensor, it has no operand
rows. The product rows compare with the values before any cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from octile.lab.gemm_stats import Errors, OperandSample, gemm_errors, spread
from octile.lab.layers import layer_weights
from octile.lab.operand_stats import OperandStats, Row, measure
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.recipe import GemmName
from octile.scaled import ScaledTensor

Key = tuple[str, GemmName, str]  # layer, product, operand
Pair = tuple[Errors, Errors | None]  # of quantization, of accumulation


@contextmanager
def telemetry(model: nn.Module, every: int = 1, layers: str = "*") -> Iterator[Telemetry]:
    """Measures the products of every `every`-th step; `step` of what it gives ends a step.

    Args:
        model: with layers that `octile.convert` has converted.
        every: n measures the steps n, 2n, …, counted from 1.
        layers: patterns of layers' names, as of files, separated by commas.

    Raises:
        ValueError: every is below 1, model has no converted layer, or a pattern matches none.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    watching = Telemetry(model, every, layers)
    try:
        watching.begin()
        yield watching
    finally:
        watching.close()


class Telemetry:
    """See `telemetry`."""

    def __init__(self, model: nn.Module, every: int, layers: str):
        self.layers = layer_weights(model, layers)
        self.every = every
        self.steps_done = 0
        self._attached = ExitStack()
        self._operands: dict[Key, OperandStats] = {}
        self._errors: dict[tuple[str, GemmName], Pair] = {}

    def begin(self) -> None:
        """Attaches where the step that begins is to be measured."""
        if (self.steps_done + 1) % self.every == 0:
            self._attached.enter_context(observe_gemms(self._watch))

    def close(self) -> None:
        """Detaches."""
        self._attached.close()

    def step(self) -> list[Row]:
        """Ends a step; returns its rows where it was measured, else none. Waits for the device once."""
        self.close()
        self.steps_done += 1
        rows = self._rows() if self._operands or self._errors else []
        self._operands, self._errors = {}, {}
        self.begin()
        return rows

    def _rows(self) -> list[Row]:
        step = self.steps_done
        parts = [stats.packed() for stats in self._operands.values()]
        parts += [errors.packed() for pair in self._errors.values() for errors in pair if errors is not None]
        on_host = iter(part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts]))
        rows = [
            {"step": step, "layer": layer, "product": product, "operand": operand, **stats.row(next(on_host))}
            for (layer, product, operand), stats in self._operands.items()
        ]
        for (layer, product), (quantization, accumulation) in self._errors.items():
            row: Row = {"step": step, "layer": layer, "product": product}
            row |= {"outputs": int(quantization.sums["outputs"]), **quantization.row("quantization", next(on_host))}
            rows.append(row | (accumulation.row("accumulation", next(on_host)) if accumulation else {}))
        return rows

    @torch.no_grad()
    def _watch(self, weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = self.layers.name_of(weight)
        if name is None:
            return None
        group, tokens = _busiest(fprop)
        if not tokens:
            return None
        layer = _Layer(weight, fprop, group, tokens, weight_is_new=(name, "fprop", "w") not in self._operands)

        @torch.no_grad()
        def backward(product: ObservedGemm) -> None:
            operands, errors = layer.see(product)
            for (made, operand), stats in operands.items():
                known = self._operands.setdefault((name, made, operand), stats)
                if known is not stats:
                    known.add(stats)
            for made, pair in errors.items():
                self._errors[name, made] = _together(self._errors.get((name, made)), pair)

        return backward


Measured = tuple[dict[tuple[GemmName, str], OperandStats], dict[GemmName, Pair]]


class _Layer:
    """One layer in one micro-batch: measured at fprop, told of at the first of its backward products."""

    def __init__(self, weight: Tensor, fprop: ObservedGemm, group: int | None, tokens: range, weight_is_new: bool):
        self.weight, self.group, self.tokens = weight.detach(), group, tokens
        self.x = fprop.a
        self.dy: ScaledTensor | None = None  # as dgrad took it
        self.x_columns = fprop.before[:, spread(fprop.before.shape[1], device=weight.device)].detach()
        self.of_fprop: Measured = {}, {}
        if fprop.a is None or fprop.b is None:
            return
        self.of_fprop[0]["fprop", "x"] = measure(fprop.before, fprop.a)
        if weight_is_new:
            self.of_fprop[0]["fprop", "w"] = measure(self.weight, fprop.b)
        self.of_fprop[1]["fprop"] = self._errors_by_token(fprop, self.weight)

    def see(self, product: ObservedGemm) -> Measured:
        """What there is to tell, now that this backward product is made."""
        (operands, errors), self.of_fprop = self.of_fprop, ({}, {})
        a, b = product.a, product.b
        if a is None or b is None:
            return operands, errors
        if product.name == "dgrad":
            operands["dgrad", "dy"] = measure(product.before, a)
            errors["dgrad"] = self._errors_by_token(product, self.weight.mT)
            self.dy = a
            return operands, errors
        if self.dy is None or not _same(a.mT, self.dy):
            operands["wgrad", "dy"] = measure(product.before.mT, a.mT)
        if self.x is not None and not _same(b.mT, self.x):
            operands["wgrad", "x"] = measure(self.x.dequantize(), b.mT)
        rows_a, rows_b = (spread(q.shape[0], device=a.device) for q in (a, b))
        errors["wgrad"] = gemm_errors(
            OperandSample.of(product.before[rows_a], a, rows_a, self.tokens),
            OperandSample.of(self.x_columns.mT, b, rows_b, self.tokens),
        )
        return operands, errors

    def _errors_by_token(self, product: ObservedGemm, b_before: Tensor) -> Pair:
        """Of fprop and dgrad, whose a has tokens as rows."""
        a, b = product.a, product.b
        if a is None or b is None:
            raise AssertionError("only products in 8 bits are measured")
        if self.group is not None:
            b, b_before = ScaledTensor(b.data[self.group], b.scale[self.group], b.block), b_before[self.group]
        rows_a = spread(len(self.tokens), self.tokens.start, a.device)
        rows_b = spread(b.shape[0], device=a.device)
        return gemm_errors(
            OperandSample.of(product.before[rows_a], a, rows_a), OperandSample.of(b_before[rows_b], b, rows_b)
        )


def _busiest(fprop: ObservedGemm) -> tuple[int | None, range]:
    """Of experts, the one with the most tokens and its rows; otherwise None and all rows. Reads offs on the host."""
    if fprop.offs is None:
        return None, range(fprop.before.shape[0])
    ends = fprop.offs.tolist()
    rows = [range(start, end) for start, end in pairwise([0, *ends])]
    group = max(range(len(rows)), key=lambda g: len(rows[g]))
    return group, rows[group]


def _same(a: ScaledTensor, b: ScaledTensor) -> bool:
    return a.data.data_ptr() == b.data.data_ptr() and a.block == b.block


def _together(known: Pair | None, new: Pair) -> Pair:
    if known is not None:
        for mine, other in zip(known, new, strict=True):
            if mine is not None and other is not None:
                mine.add(other)
    return known or new
