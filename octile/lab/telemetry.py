"""Telemetry: statistics of quantization and accumulation for every FP8 GEMM of a training run.

    with octile.lab.telemetry(model, every=100, layers="*.experts.*") as t:
        for batch in batches:
            loss = model(batch, batch)
            loss.backward()
            optimizer.step()
            for row in t.step():            # empty except in steps 100, 200, …
                print(row)

The observer is attached only in measured steps, so other steps cost nothing. All statistics stay on the device until
`step`, which copies them once. Micro-batches of a step are added up. A GEMM counts once its backward pass has run.
Validation therefore does not count, and the forward pass that activation checkpointing repeats counts once, although it
is measured twice. GEMMs inside `torch.compile` are not observed. A step that is captured as a CUDA graph cannot be
measured, since the experts' offsets are read on the host.

A row is a flat dictionary of JSON values, for one operand or for one GEMM:

    {"step", "layer", "product": "fprop" | "dgrad" | "wgrad", "operand": "x" | "w" | "dy", …}    operand_stats.py
    {"step", "layer", "product", "quantization_snr_db", "accumulation_snr_db", …}                gemm_stats.py

dgrad's w has no row of its own: it is the w of fprop, transposed, or in blocks of one row the transposed weight in such
blocks. wgrad's x is compared with fprop's quantized x: the error is that of requantization, or, where x is computed
again from what SwiGLU or attention has saved, the distance of the two. Where wgrad uses the same tensors as fprop and
dgrad, as with per-tensor scaling, it has no operand rows. The rows of GEMMs compare with the values before any
quantization. Under a batch-invariant recipe `kv_b_proj` has no rows: its forward GEMM does not exist, and its backward
GEMMs are not observed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from octile.lab.gemm_stats import ErrorSums, OperandSample, evenly_spaced, gemm_errors
from octile.lab.layers import observed_weights
from octile.lab.operand_stats import OperandStats, TelemetryRow, measure_operand
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.ops.groups import take_tiles
from octile.recipe import GemmName
from octile.scaled import ScaledTensor

OperandKey = tuple[str, GemmName, str]  # layer, GEMM, operand
ErrorPair = tuple[ErrorSums, ErrorSums | None]  # quantization error, accumulation error


@contextmanager
def telemetry(model: nn.Module, every: int = 1, layers: str = "*") -> Iterator[Telemetry]:
    """Measure the GEMMs of every n-th step. Call `Telemetry.step` at the end of each step.

    Args:
        model: a model with layers that `octile.convert` has converted.
        every: n; the steps n, 2n, … are measured, counted from 1.
        layers: patterns of layer names in the syntax of file names, separated by commas.

    Raises:
        ValueError: every is below 1, the model has no converted layer, a pattern matches none, or only layers match of
            which no GEMM is observed (`LayerWeights.unobserved`).
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    measurement = Telemetry(model, every, layers)
    try:
        measurement.begin()
        yield measurement
    finally:
        measurement.close()


class Telemetry:
    """Measures the GEMMs of a model while it is attached; created by `telemetry`."""

    def __init__(self, model: nn.Module, every: int, layers: str):
        self.layers = observed_weights(model, layers)
        self.every = every
        self.steps_done = 0
        self._attached = ExitStack()
        self._operands: dict[OperandKey, OperandStats] = {}
        self._errors: dict[tuple[str, GemmName], ErrorPair] = {}

    def begin(self) -> None:
        """Attach the observer if the next step is to be measured."""
        if (self.steps_done + 1) % self.every == 0:
            self._attached.enter_context(observe_gemms(self._observe))

    def close(self) -> None:
        """Detach the observer."""
        self._attached.close()

    def step(self) -> list[TelemetryRow]:
        """End a step, and return its rows if it was measured. A measured step waits for the device once."""
        self.close()
        self.steps_done += 1
        rows = self._rows() if self._operands or self._errors else []
        self._operands, self._errors = {}, {}
        self.begin()
        return rows

    def _rows(self) -> list[TelemetryRow]:
        step = self.steps_done
        parts = [stats.packed() for stats in self._operands.values()]
        parts += [errors.packed() for pair in self._errors.values() for errors in pair if errors is not None]
        on_host = iter(part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts]))
        rows = [
            {"step": step, "layer": layer, "product": product, "operand": operand, **stats.row(next(on_host))}
            for (layer, product, operand), stats in self._operands.items()
        ]
        for (layer, product), (quantization, accumulation) in self._errors.items():
            row: TelemetryRow = {"step": step, "layer": layer, "product": product}
            row |= {"outputs": int(quantization.sums["outputs"]), **quantization.row("quantization", next(on_host))}
            rows.append(row | (accumulation.row("accumulation", next(on_host)) if accumulation else {}))
        return rows

    @torch.no_grad()
    def _observe(self, weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = self.layers.name_of(weight)
        if name is None:
            return None
        group, tokens = _largest_group(fprop)
        if not tokens:
            return None
        layer = _Layer(weight, fprop, group, tokens, weight_is_new=(name, "fprop", "w") not in self._operands)

        @torch.no_grad()
        def backward(gemm: ObservedGemm) -> None:
            operands, errors = layer.measure_backward(gemm)
            for (gemm_name, operand), stats in operands.items():
                known = self._operands.setdefault((name, gemm_name, operand), stats)
                if known is not stats:
                    known.add(stats)
            for gemm_name, pair in errors.items():
                self._errors[name, gemm_name] = _add_pair(self._errors.get((name, gemm_name)), pair)

        return backward


Measured = tuple[dict[tuple[GemmName, str], OperandStats], dict[GemmName, ErrorPair]]


class _Layer:
    """Measurements of one layer in one micro-batch; those of fprop are reported with the first backward GEMM."""

    def __init__(self, weight: Tensor, fprop: ObservedGemm, group: int | None, tokens: range, weight_is_new: bool):
        self.weight, self.group, self.tokens = weight.detach(), group, tokens
        self.x = fprop.a
        self.dy: ScaledTensor | None = None  # the operand of dgrad
        self.x_columns = fprop.before[:, evenly_spaced(fprop.before.shape[1], device=weight.device)].detach()
        self.from_fprop: Measured = {}, {}
        if fprop.a is None or fprop.b is None:
            return
        self.from_fprop[0]["fprop", "x"] = measure_operand(fprop.before, fprop.a)
        if weight_is_new:
            self.from_fprop[0]["fprop", "w"] = measure_operand(self.weight, fprop.b)
        self.from_fprop[1]["fprop"] = self._errors_by_token(fprop, self.weight)

    def measure_backward(self, gemm: ObservedGemm) -> Measured:
        """Measure a backward GEMM, and return what was measured since the last call."""
        (operands, errors), self.from_fprop = self.from_fprop, ({}, {})
        a, b = gemm.a, gemm.b
        if a is None or b is None:
            return operands, errors
        if gemm.name == "dgrad":
            operands["dgrad", "dy"] = measure_operand(gemm.before, a)
            errors["dgrad"] = self._errors_by_token(gemm, self.weight.mT)
            self.dy = a
            return operands, errors
        if self.dy is None or not _is_same_tensor(a.mT, self.dy):
            operands["wgrad", "dy"] = measure_operand(gemm.before.mT, a.mT, gemm.tiles)
        if self.x is not None and not _is_same_tensor(b.mT, self.x):
            operands["wgrad", "x"] = measure_operand(self.x.dequantize(), b.mT, gemm.tiles)
        rows_a, rows_b = (evenly_spaced(q.shape[0], device=a.device) for q in (a, b))
        dy, x = gemm.before[rows_a], self.x_columns.mT
        if gemm.tiles is not None:
            dy, x = (take_tiles(t.mT, gemm.tiles).mT for t in (dy, x))
        tokens = self.tokens if self.group is None else _rows_of_groups(gemm)[self.group]
        errors["wgrad"] = gemm_errors(OperandSample.of(dy, a, rows_a, tokens), OperandSample.of(x, b, rows_b, tokens))
        return operands, errors

    def _errors_by_token(self, gemm: ObservedGemm, b_before: Tensor) -> ErrorPair:
        """Measure the errors of fprop or dgrad, the GEMMs whose a has tokens as rows."""
        a, b = gemm.a, gemm.b
        if a is None or b is None:
            raise AssertionError("only GEMMs in 8 bits are measured")
        if self.group is not None:
            b, b_before = ScaledTensor(b.data[self.group], b.scale[self.group], b.block), b_before[self.group]
        rows_a = evenly_spaced(len(self.tokens), self.tokens.start, a.device)
        rows_b = evenly_spaced(b.shape[0], device=a.device)
        return gemm_errors(
            OperandSample.of(gemm.before[rows_a], a, rows_a), OperandSample.of(b_before[rows_b], b, rows_b)
        )


def _largest_group(fprop: ObservedGemm) -> tuple[int | None, range]:
    """Return the expert with the most tokens and its rows, or None and all rows. Reads offs on the host."""
    if fprop.offs is None:
        return None, range(fprop.before.shape[0])
    rows = _rows_of_groups(fprop)
    group = max(range(len(rows)), key=lambda g: len(rows[g]))
    return group, rows[group]


def _rows_of_groups(gemm: ObservedGemm) -> list[range]:
    assert gemm.offs is not None
    return [range(start, end) for start, end in pairwise([0, *gemm.offs.tolist()])]


def _is_same_tensor(a: ScaledTensor, b: ScaledTensor) -> bool:
    return a.data.data_ptr() == b.data.data_ptr() and a.block == b.block


def _add_pair(known: ErrorPair | None, new: ErrorPair) -> ErrorPair:
    """Add the errors of a micro-batch to those of the micro-batches before it."""
    if known is not None:
        for mine, other in zip(known, new, strict=True):
            if mine is not None and other is not None:
                mine.add(other)
    return known or new
