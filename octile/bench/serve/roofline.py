"""A decode step vs. its roofline: the time of its bytes at the memory bandwidth of the GPU's data sheet.

The routed experts that a step reads are counted: by what its gates choose in a step that is not captured, right after
those that are timed. A copy's speed is measured in the same run, since no kernel reaches the data sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from octile.bench.attention import copying
from octile.bench.casts import halves
from octile.bench.goals import ROOFLINE
from octile.bench.rows import Row, byte_rate
from octile.bench.timing import seconds
from octile.models.config import ModelConfig
from octile.plan.hardware import find_gpu
from octile.serve.engine.engine import Engine
from octile.serve.model.expert_load import PARTS, ExpertLoad
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step_bytes import CACHE, ROUTED, decode_bytes

COPIED = 2**32  # bytes that the copy reads and writes


class Bandwidths(NamedTuple):
    """Bytes per second of the GPU's memory by its data sheet, None where it is unknown, and of a copy."""

    published: float | None
    copy: float


class DecodedStep(NamedTuple):
    """A measured step: its time, the positions that each request attends to, and the routed experts of all layers."""

    seconds: float
    lengths: Sequence[int]
    experts: int


def measured_bandwidths(device: torch.device) -> Bandwidths:
    """Measure a copy, and find the data sheet."""
    source, target = halves(COPIED, device.type)
    copy = 2 * source.nbytes / seconds({"copy": copying(source, target)}, rounds=10)["copy"]
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Bandwidths(None if gpu is None else gpu.memory_bandwidth, copy)


def copy_row(case: str, bandwidths: Bandwidths) -> Row:
    """Return the row of the copy."""
    return byte_rate(case, "copy", bandwidths.copy, bandwidths.published is not None)


def experts_read(runner: ModelRunner, engine: Engine) -> int:
    """Run a step in which all requests decode, and count the routed experts that it reads, summed over the layers.

    Raises:
        RuntimeError: a layer has read fewer experts than a row chooses: its gate was not counted.
    """
    c = runner.forward.weights.config
    layers = [layer for layer in range(c.num_hidden_layers) if c.is_moe(layer)]
    load = ExpertLoad(layers, c.n_routed_experts, PARTS, runner.device)
    _, scheduled = engine.schedule()
    before = runner.forward, runner.graphs, runner.prefill_graphs
    runner.forward = runner.forward.with_feed_forward(expert_load=load)
    runner.graphs = runner.prefill_graphs = None
    try:
        engine.run(scheduled)
    finally:
        runner.forward, runner.graphs, runner.prefill_graphs = before
    for _ in range(2):  # a GPU's counts are read with those after them
        load.end_step()
    of_layers = [sum(tokens > 0 for tokens in of_layer) for of_layer in load.in_window.values()]
    if min(of_layers, default=0) < c.num_experts_per_tok:
        raise RuntimeError(f"a row chooses {c.num_experts_per_tok} experts of each layer, but {of_layers} were counted")
    return sum(of_layers)


def roofline_rows(
    case: str, config: ModelConfig, fp8: bool, step: DecodedStep, bandwidths: Bandwidths
) -> Iterator[Row]:
    """Yield the bytes of a step with a cache in BF16, their time, and its share of the measured time.

    Args:
        case: of the rows.
        config: of the model, whose activations are BF16.
        fp8: whether the weights of linear layers are in FP8.
        step: the step.
        bandwidths: of the memory.
    """
    found = decode_bytes(config, step.lengths, step.experts, fp8)
    total, mixtures = sum(found.values()), sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    yield Row(case, "experts read by a layer", step.experts / mixtures, "experts")
    yield Row(case, "bytes", total / 1e9, "GB")
    for kind in (ROUTED, CACHE):
        yield Row(case, f"bytes of {kind}", found[kind] / 1e9, "GB")
    if bandwidths.published is not None:
        yield Row(case, "roofline", 1e3 * total / bandwidths.published, "ms")
        yield Row(case, ROOFLINE, 100 * total / bandwidths.published / step.seconds, "%")
    yield Row(case, "share of a copy's speed", 100 * total / bandwidths.copy / step.seconds, "%")
