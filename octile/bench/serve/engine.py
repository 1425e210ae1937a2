"""The speed of the engine alone, without HTTP: a model of a published shape with random FP8 weights on a GPU.

decode     steps in which every request has one row, after prompts of 1,024 tokens: the step, the model's forward pass
           alone as a CUDA graph, and the overhead of the engine, which is the rest (scheduler, sampling, text); the
           step's bytes and its roofline (`octile.bench.serve.roofline`)
BF16       the same decode steps of the same model, whose FP8 weights are converted to BF16
prefill    8 prompts of 1,024 tokens in one pass: the FLOPs of the layers' GEMMs per second, as a share of the GPU's
           FP8 peak
profile    of a decode step and of the prefill pass: how long the GPU computes each kind of kernel, and the largest ones
peer       transformers' `generate` with the same shape in BF16 and its dynamic cache, where transformers is installed
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median

import torch

from octile.bench import goals
from octile.bench.goals import BF16_WEIGHTS, DECODE, FP8_WEIGHTS, OVERHEAD, PREFILL, SHARE_OF_PEAK
from octile.bench.kernel_time import record_kernels
from octile.bench.rows import Row, compare
from octile.bench.serve.random_weights import random_weights
from octile.bench.serve.roofline import (
    Bandwidths,
    DecodedStep,
    copy_row,
    experts_read,
    measured_bandwidths,
    roofline_rows,
)
from octile.bench.step.profile import split
from octile.models.config import ModelConfig
from octile.models.flops import bf16_peak, multiply_adds
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.runner.batch import Batch, Chunk
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from octile.train.step.kernel_records import costs

PEER = "transformers, BF16"
PROFILED = 4  # calls whose kernels are recorded
LARGEST = 8  # kernels that a profile lists
KINDS = {"product": "GEMMs", "attention": "attention", "other": "other kernels"}  # of `octile.bench.step.profile`
NAME = 60  # characters of a kernel's name


@dataclass(frozen=True)
class Shape:
    """What is measured.

    Attributes:
        name: name of the model.
        config: configuration of the model.
        batches: numbers of requests that decode.
        peer_batches: those of them that transformers decodes, too.
        prompt: tokens of each prompt.
        prefill: prompts of the prefill pass.
        steps: decode steps that are timed.
    """

    name: str
    config: ModelConfig
    batches: Sequence[int] = (1, 32, 256)
    peer_batches: Sequence[int] = (1, 32)
    prompt: int = 1024
    prefill: int = 8
    steps: int = 32


V2_LITE = Shape(goals.V2_LITE, ModelConfig.v2_lite_16b())


def rows(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Yield the speed of decode and prefill, decode vs. BF16 weights and vs. transformers."""
    bandwidths = measured_bandwidths(device)
    if bandwidths.published is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        say(f"leaving out shares of the roofline: octile/plan/clusters has no data sheet of {name}")
    yield copy_row(shape.name, bandwidths, device)
    speeds = dict[int, float]()
    runner = _runner(shape, device, True, shape.prefill * shape.prompt)
    yield from _decode(runner, shape, True, bandwidths, speeds)
    yield from prefill_rows(runner, shape)
    del runner
    bf16 = dict[int, float]()
    runner = _runner(shape, device, False, 0)
    yield from _decode(runner, replace(shape, name=f"{shape.name}, {BF16_WEIGHTS}"), False, bandwidths, bf16)
    del runner
    for batch, speed in speeds.items():
        yield compare(decode_case(shape, batch), FP8_WEIGHTS, speed, "tokens/s", BF16_WEIGHTS, bf16[batch])
    peers = _peer_speeds(shape, device)
    for batch, speed in speeds.items():
        case = decode_case(shape, batch)
        if batch in peers:
            yield compare(case, DECODE, speed, "tokens/s", PEER, peers[batch])
        else:
            yield Row(case, DECODE, speed, "tokens/s")


def _runner(shape: Shape, device: torch.device, fp8: bool, max_step_tokens: int) -> ModelRunner:
    say(f"making {shape.name} with {'FP8' if fp8 else 'BF16'} weights and its CUDA graphs")
    pages = 1 + -(-(shape.prompt + new_tokens(shape)) // ModelRunner.page_size)  # the engine admits with one to spare
    n_pages, max_batch = max(shape.batches) * pages, max(shape.batches)
    weights = random_weights(shape.config, device, fp8)
    return ModelRunner(weights, n_pages, max_batch=max_batch, max_step_tokens=max_step_tokens)


def _decode(
    runner: ModelRunner, shape: Shape, fp8: bool, bandwidths: Bandwidths, speeds: dict[int, float]
) -> Iterator[Row]:
    """Yield the times, the rooflines and the profiles of decode steps; add the tokens/s of each batch to speeds."""
    profiles = list[Row]()
    for batch in shape.batches:
        case = decode_case(shape, batch)
        say(f"measuring {case}")
        step, model, profile = decoded_step(runner, shape, batch)
        profiles += profile
        speeds[batch] = batch / step.seconds
        yield Row(case, "step", 1e3 * step.seconds, "ms")
        if model is not None:
            yield Row(case, "the model's CUDA graph", 1e3 * model, "ms")
            yield Row(case, OVERHEAD, 1e3 * (step.seconds - model), "ms")
        yield from roofline_rows(case, shape.config, fp8, step, bandwidths)
    yield from profiles


def decode_case(shape: Shape, batch: int) -> str:
    """The case of a batch of requests that decode."""
    return goals.decode_case(shape.name, batch)


def decoded_step(runner: ModelRunner, shape: Shape, batch: int) -> tuple[DecodedStep, float | None, list[Row]]:
    """A step in which a batch of requests decodes, in wall-clock time, that of the model in it, and a profile."""
    tokenizer = Tokenizer.train([], MIN_VOCAB_SIZE)
    max_step_tokens = max(batch, shape.prefill * shape.prompt)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=batch, max_step_tokens=max_step_tokens))
    chosen = random.Random(batch)
    requests = [
        engine.add(
            chosen.choices(range(shape.config.vocab_size), k=shape.prompt),
            Sampling(max_new_tokens=new_tokens(shape), temperature=1.0, seed=i, ignore_eos=True),
        )
        for i in range(batch)
    ]
    while len(engine.step()) < batch:
        if not engine.has_work:
            raise RuntimeError(f"the {batch} requests did not decode at the same time: {engine.stats()}")
    lengths = [len(request.tokens) + shape.steps // 2 for request in requests]  # on average
    seconds = median(_wall_seconds(engine.step) for _ in range(shape.steps))
    profile = profile_rows(decode_case(shape, batch), engine.step, runner.device)
    experts, model = experts_read(runner, engine), None
    if runner.graphs is not None:
        max_ahead = runner.max_ahead
        runner.max_ahead = 0  # steps that are not launched ahead have a graph of the model alone
        try:
            for _ in range(2):
                engine.step()
        finally:
            runner.max_ahead = max_ahead
        size = next(size for size in runner.graphs.sizes if size >= batch)
        captured = runner.graphs.captured[runner.forward.attention.is_sparse(runner.max_position)]
        model = _gpu_seconds(captured[size][0])
    engine.close()
    return DecodedStep(seconds, lengths, experts), model, profile


def new_tokens(shape: Shape) -> int:
    """The tokens of a request, which still decodes when the last prompts have been read and the steps are timed."""
    return 2 + PROFILED + 2 * shape.steps + -(-max(shape.batches) // shape.prefill)


def prefill_rows(runner: ModelRunner, shape: Shape) -> Iterator[Row]:
    """Yield the speed and the profile of a pass over several prompts of a shape."""
    chosen, n, pages = random.Random(0), shape.prompt, -(-shape.prompt // runner.page_size)
    chunks = [
        Chunk(chosen.choices(range(runner.vocab_size), k=n), 0, array("i", range(i * pages, (i + 1) * pages)), 1)
        for i in range(shape.prefill)
    ]

    def run() -> None:
        runner.run(Batch(chunks)).logits.argmax(-1).tolist()

    case = f"{shape.name}, {PREFILL}"
    say(f"measuring {case}")
    run()
    seconds = median(_wall_seconds(run) for _ in range(5))
    yield Row(case, "throughput", shape.prefill * n / seconds, "tokens/s")
    flops = 2 * multiply_adds(shape.config, 0)["layers"] * shape.prefill * n / seconds
    yield Row(case, "GEMMs of layers", flops / 1e12, "TFLOP/s")
    peak = bf16_peak(torch.cuda.get_device_name(runner.device)) if runner.device.type == "cuda" else None
    if peak is not None:
        yield Row(case, SHARE_OF_PEAK, 100 * flops / (2 * peak), "%")
    yield from profile_rows(case, run, runner.device)


def profile_rows(case: str, call: Callable[[], object], device: torch.device) -> list[Row]:
    """Record where a GPU spends the time of a call: the kinds of kernels, the idle time, and the largest kernels.

    Returns no row on a CPU, and where the profiler has no access to the GPU.
    """
    if device.type != "cuda":
        return []
    kernels = record_kernels(lambda: [call() for _ in range(PROFILED)])
    if not kernels:
        say(f"left out: profile of {case}: the profiler recorded no kernel")
        return []
    idle, shares = split(kernels)
    rows = [
        Row(f"{case}: profile", f"{KINDS[kind]}, of the kernels", 100 * share, "%") for kind, share in shares.items()
    ]
    rows.append(Row(f"{case}: profile", "the GPU idles", 100 * idle, "%"))
    for cost in costs(kernels, PROFILED)[:LARGEST]:
        name = cost.name if len(cost.name) <= NAME else f"{cost.name[: NAME - 1]}…"
        rows.append(Row(f"{case}: profile", f"{cost.calls:g}× {name}", cost.ms, "ms"))
    return rows


def _peer_speeds(shape: Shape, device: torch.device) -> dict[int, float]:
    """Tokens per second of the peer by batch; without one where it does not run, which stderr says."""
    if not find_spec("transformers"):
        say(f"left out: {PEER}: transformers is not installed")
        return {}
    say(f"measuring {shape.name}, {PEER}")
    try:
        return _transformers_speeds(shape, device)
    except Exception as error:  # another library's
        say(f"left out: {PEER}: {type(error).__name__}: {error}")
        return {}


def _transformers_speeds(shape: Shape, device: torch.device) -> dict[int, float]:
    """Tokens per second that transformers' `generate` decodes in BF16."""
    import transformers

    settings = shape.config.to_hf()
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    speeds = {}
    for batch in shape.peer_batches:
        prompts = torch.randint(shape.config.vocab_size, (batch, shape.prompt), device=device)

        def generate(new_tokens: int, prompts: torch.Tensor = prompts) -> None:
            mask = torch.ones_like(prompts)
            ends = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
            model.generate(prompts, attention_mask=mask, **ends)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        generate(2)
        first, all_of_them = (_wall_seconds(lambda n=n: generate(n)) for n in (1, 1 + shape.steps))  # type: ignore
        speeds[batch] = batch * shape.steps / (all_of_them - first)
    return speeds


def say(what: str) -> None:
    """Print what is measured, or left out, to stderr."""
    print(what, file=sys.stderr, flush=True)


def _wall_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _gpu_seconds(call: Callable[[], object]) -> float:
    """The time on the GPU of a call, without the host."""
    calls = 10
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
