"""Expert-parallel decoding, started by `torchrun --nproc-per-node 2 -m octile bench serve`.

Each rank first decodes alone with all experts. Then the same number of requests is divided among the ranks, which have
requests and caches of their own and share the experts (`octile.serve.ranks.experts`); and then each rank has as many
requests as one had alone. The requests are divided again with shared experts that are routed; and then the ranks have
all of them together, and divide the heads of attention (`octile.serve.ranks.tensor_parallel`). A step is one of all
ranks.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from octile.bench.goals import DECODE, expert_parallel_case, group_case, one_rank, routed_case
from octile.bench.rows import Row, compare
from octile.bench.serve import engine as alone
from octile.bench.serve.engine import Shape
from octile.bench.serve.random_weights import random_weights
from octile.parallel.ranks import join, leave, world
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Output, Sampling
from octile.serve.ranks.engine import ExpertParallelEngine
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.placement import rebalance_experts
from octile.serve.ranks.tensor_parallel import TensorParallel
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.head_share import check_heads
from octile.serve.weights.routed_shared_experts import with_shared_load
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer

V2_LITE = replace(alone.V2_LITE, batches=(256,))
TIMEOUT = 60.0  # seconds; a rank that hangs ends the measurement


def rows(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Measure on all ranks, and yield the rows on rank 0; without a GPU the steps are not captured.

    Raises:
        ValueError: the ranks do not divide a batch or the experts.
    """
    ranks = join(device, TIMEOUT)
    c = shape.config
    for what, size in (("experts", c.n_routed_experts), *(("requests of a batch", batch) for batch in shape.batches)):
        if size % ranks.size:
            raise ValueError(f"the {ranks.size} ranks must divide the {size} {what}")
    for row in _measure(shape, device, ranks.size):
        if ranks.is_first:
            yield row
    leave()


def _measure(shape: Shape, device: torch.device, n_ranks: int) -> Iterator[Row]:
    _say(f"making {shape.name} with all experts on each rank")
    weights = random_weights(shape.config, device)
    pages = 1 + -(-(shape.prompt + alone.new_tokens(shape)) // ModelRunner.page_size)
    sizes = max(shape.batches) * pages, None, max(shape.batches)
    runner = ModelRunner(weights, *sizes, max_step_tokens=0)
    speeds = {}
    for batch in shape.batches:
        _say(f"measuring {alone.decode_case(shape, batch)} on each rank alone")
        engine = _engine(runner, shape, batch, 0)
        seconds = _step_seconds(engine, engine.step, shape, batch, bool)
        engine.close()
        speeds[batch] = batch / seconds
        yield Row(alone.decode_case(shape, batch), DECODE, speeds[batch], "tokens/s")
    del engine, runner

    control = world() if device.type == "cpu" else dist.new_group(backend="gloo")

    def on_all(is_so: bool) -> bool:
        flag = torch.tensor(int(is_so))
        dist.all_reduce(flag, dist.ReduceOp.MIN, control)
        return bool(flag)

    def measure(runner: ModelRunner, batch: int, own: int, case: str) -> Iterator[Row]:
        _say(f"measuring {case}")
        group, n_groups = dist.get_rank() // runner.tp.size, n_ranks // runner.tp.size
        engine = _engine(runner, shape, own, group)
        together = ExpertParallelEngine(engine, runner, control=control)

        def step() -> list[Output]:
            return together.step() or []

        seconds = _step_seconds(engine, step, shape, own, on_all)
        profile = alone.profile_rows(case, step, device)
        engine.close()
        yield Row(case, "step", 1e3 * seconds, "ms")
        yield compare(case, DECODE, n_groups * own / seconds, "tokens/s", one_rank(batch), speeds[batch])
        yield from profile

    c = shape.config
    even_LE = torch.ones(sum(c.is_moe(layer) for layer in range(c.num_hidden_layers)), c.n_routed_experts)
    placement = torch.arange(c.n_routed_experts).expand(len(even_LE), -1)
    runner = ModelRunner(ExpertParallelWeights(weights, placement), *sizes, max_step_tokens=0)
    for batch in shape.batches:
        for own in (batch // n_ranks, batch):
            yield from measure(runner, batch, own, expert_parallel_case(shape.name, own, n_ranks))
    runner.close()
    load_LE = with_shared_load(even_LE, c.n_shared_experts, c.num_experts_per_tok)
    with_copies = rebalance_experts(load_LE, c.n_routed_experts + n_ranks * c.n_shared_experts, 1, 1, n_ranks)[0]
    runner = ModelRunner(ExpertParallelWeights(weights, with_copies, routes_shared=True), *sizes, max_step_tokens=0)
    del weights
    for batch in shape.batches:
        own = batch // n_ranks
        yield from measure(runner, batch, own, routed_case(shape.name, own, n_ranks))
    runner.close()
    try:
        check_heads(c, n_ranks, is_fp8=True)
    except ValueError as error:
        if not dist.get_rank():
            print(f"left out: heads over ranks: {error}", file=sys.stderr, flush=True)
        return
    tp = TensorParallel.of_consecutive(n_ranks)
    weights = random_weights(c, device, heads=tp.share)
    runner = ModelRunner(ExpertParallelWeights(weights, placement, tp=tp), *sizes, max_step_tokens=0)
    del weights
    for batch in shape.batches:
        yield from measure(runner, batch, batch, group_case(shape.name, batch, n_ranks))
    runner.close()


def _say(what: str) -> None:
    if dist.get_rank() == 0:
        alone.say(what)


def _engine(runner: ModelRunner, shape: Shape, batch: int, rank: int) -> Engine:
    """Make an engine of which each request decodes after a prompt of random tokens."""
    config = EngineConfig(max_batch=batch, max_step_tokens=max(batch, shape.prefill * shape.prompt))
    engine, chosen = Engine(runner, Tokenizer.train([], MIN_VOCAB_SIZE), config), random.Random(batch + 10_000 * rank)
    for i in range(batch):
        prompt = chosen.choices(range(shape.config.vocab_size), k=shape.prompt)
        sampling = Sampling(max_new_tokens=alone.new_tokens(shape), temperature=1.0, seed=i, ignore_eos=True)
        engine.add(prompt, sampling)
    return engine


def _step_seconds(
    engine: Engine, step: Callable[[], Sequence[Output]], shape: Shape, batch: int, on_all: Callable[[bool], bool]
) -> float:
    """The wall-clock time of a step in which all requests decode.

    Args:
        engine: engine of this rank, which has as many requests as `batch`.
        step: runs a step.
        shape: what is measured.
        batch: requests of this rank.
        on_all: whether something is so on all ranks that step together.

    Raises:
        RuntimeError: they do not decode at the same time.
    """
    while not on_all(len(step()) == batch):
        if not engine.has_work:
            raise RuntimeError(f"the {batch} requests did not decode at the same time: {engine.stats()}")

    def seconds() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return median(seconds() for _ in range(shape.steps))
