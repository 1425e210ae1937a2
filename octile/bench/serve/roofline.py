"""A decode step vs. its roofline: the time of its bytes at the memory bandwidth of the GPU's data sheet.

The routed experts that a step reads are counted: by what its gates choose in a step that is not captured, right after
those that are timed. A copy's speed is measured in the same run, since no kernel reaches the data sheet.
"""

from __future__ import annotations

from collections import Counter
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
from octile.serve.model.feed_forward import PARTS, ExpertLoad
from octile.serve.runner.kv_cache import CacheFormat, bytes_per_row
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weight_bytes import BF16_BYTES, EMBEDDING, ROUTED, weight_bytes

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


def copy_row(case: str, bandwidths: Bandwidths, device: torch.device) -> Row:
    """Return the row of the copy on a device, whose data sheet may be unknown."""
    return byte_rate(case, "copy", bandwidths.copy, device.type == "cuda")


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
    counts = [sum(tokens > 0 for tokens in layer) for layer in load.in_window.values()]
    if min(counts, default=0) < c.num_experts_per_tok:
        raise RuntimeError(f"a row chooses {c.num_experts_per_tok} experts of each layer, but {counts} were counted")
    return sum(counts)


def roofline_rows(
    case: str, config: ModelConfig, fp8: bool, step: DecodedStep, bandwidths: Bandwidths
) -> Iterator[Row]:
    """Yield the bytes of a step with a cache in BF16, their time, and its share of the measured time.

    Args:
        case: case of the rows.
        config: configuration of the model, whose activations are BF16.
        fp8: whether the weights of linear layers are in FP8.
        step: the step.
        bandwidths: measured bandwidths of the memory.
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


CACHE = "cache"


def decode_bytes(
    config: ModelConfig, lengths: Sequence[int], experts_read: int, fp8: bool = True, cache_format: CacheFormat = "bf16"
) -> dict[str, int]:
    """Count the bytes of a decode step without drafts, by kind.

    Args:
        config: configuration of the model, whose activations are BF16.
        lengths: for each request the positions that its row attends to, its own among them.
        experts_read: routed experts that some row has chosen, summed over the layers.
        fp8: whether the weights of linear layers are in FP8, as in published checkpoints; otherwise in BF16.
        cache_format: storage format of the cache.

    Returns:
        Bytes of each kind of weights, by the names of `octile.models.counts`, and of "cache".

    Raises:
        ValueError: the model has indexers, which read keys of their own, cache_format is unknown, lengths is empty or
            one is below 1, or there are not so many experts.
    """
    c = config
    if c.has_indexer:
        raise ValueError("config must have no indexer (index_topk): the bytes of sparse attention are not counted")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must have a positive number for each request, not {list(lengths)}")
    mixtures = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
    if not 0 <= experts_read <= mixtures * c.n_routed_experts:
        raise ValueError(
            f"experts_read must be from 0 to {mixtures * c.n_routed_experts}, the routed experts of {mixtures} layers, "
            f"not {experts_read}"
        )
    found = Counter(weight_bytes(c, fp8).main)
    if found[ROUTED]:  # experts of one size
        found[ROUTED] = found[ROUTED] // (mixtures * c.n_routed_experts) * experts_read
    found[EMBEDDING] = len(lengths) * c.hidden_size * BF16_BYTES
    found[CACHE] = sum(lengths) * c.num_hidden_layers * bytes_per_row(c.kv_lora_rank, c.qk_rope_head_dim, cache_format)
    return dict(found)
