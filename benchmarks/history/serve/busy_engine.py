"""Where the time of a busy engine's steps goes: `python busy_engine.py v2_lite` (or `tiny`).

256 requests at a time, with random FP8 weights, prompts of 1,024 tokens and 64 to 192 new ones, each replaced by a new
one when it ends; no prompt comes twice, so that none is found in the cache. With passes launched ahead and not, and
with attention in CUDA graphs and not: tokens/s, quantiles of a step's milliseconds, and how long methods of the engine
and of the runner take the host, each with all that it calls. Of the first two also the GPU's kernels and the host's
functions.
"""

import cProfile
import io
import pstats
import random
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from octile.bench.kernel_time import record_kernels
from octile.bench.serve.peer.random_folder import V2_LITE, letter_tokenizer, write_random_folder
from octile.bench.step.profile import split
from octile.serve.engine import sampler
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.launched_steps import LaunchedSteps
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import ChosenTokens
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder
from octile.train.config import MODELS
from octile.train.step.kernel_records import costs

VOCABULARY, QUANTILES = 8192, (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
WAYS = [(True, True), (True, False), (False, True), (False, False), (True, True), (True, False)]
is_tiny = sys.argv[1] == "tiny"
model = replace(MODELS["tiny"](), vocab_size=VOCABULARY, max_position_embeddings=4096) if is_tiny else V2_LITE
clients, warm, seconds, prompt = (8, 1, 2, 32) if is_tiny else (256, 5, 6, 1024)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
draw, seeds, times = random.Random(0), count(), dict[str, list[float]]()


def timed(owner, name):
    """Let a method add its seconds to times."""
    method = getattr(owner, name)

    def call(*args, **kwargs):
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            times.setdefault(name, []).append(time.perf_counter() - begin)

    setattr(owner, name, call)


def add(engine):
    tokens = [draw.randrange(100, VOCABULARY) for _ in range(prompt)]
    engine.add(tokens, Sampling(draw.randint(64, 192), temperature=1.0, seed=next(seeds), ignore_eos=True))


def step(engine):
    """Run a step, replace requests that end, and return how many tokens all got."""
    outputs = engine.step()
    for output in outputs:
        if output.finish_reason is not None:
            add(engine)
    return sum(len(output.tokens) for output in outputs)


def steps_for(engine, seconds):
    """Run steps for so long; return their tokens and their seconds."""
    tokens, found, begin = 0, [], time.perf_counter()
    while time.perf_counter() - begin < seconds:
        before = time.perf_counter()
        tokens += step(engine)
        found.append(time.perf_counter() - before)
    return tokens, found


for name in "_collect", "add":
    timed(Engine, name)
for name in "_launch_pass", "_collect_chosen", "_collect_logits", "_collect_decoded", "_launch_decode":
    timed(LaunchedSteps, name)
for name in "run", "_layout", "_step", "_hidden", "_results", "_wait_for":
    timed(ModelRunner, name)
timed(ChosenTokens, "wait")
timed(sampler, "choose")
with tempfile.TemporaryDirectory() as folder:
    write_random_folder(Path(folder) / "model", model, "fp8", device, letter_tokenizer(VOCABULARY))
    config = EngineConfig(max_batch=256, max_step_tokens=2048)
    engine, runner = Folder.open(Path(folder) / "model").load(device, config, CacheConfig())
    graphs = None if runner.prefill_graphs is None else runner.prefill_graphs._attention
    for _ in range(clients):
        add(engine)
    for i, (ahead, has_graphs) in enumerate(WAYS):
        engine.steps.runs_ahead = ahead
        if runner.prefill_graphs is not None:
            runner.prefill_graphs._attention = graphs if has_graphs else None
        steps_for(engine, warm)
        times.clear()
        tokens, found = steps_for(engine, seconds)
        total, n = sum(found), len(found)
        quantiles = [round(1e3 * sorted(found)[int(q * n)], 1) for q in QUANTILES]
        what = f"{tokens / total:.0f} tokens/s, {n} steps, {1e3 * total / n:.1f} ms a step, quantiles {quantiles}"
        print(f"ahead {ahead}, graphs of attention {has_graphs}: {what}", flush=True)
        for name, of_calls in times.items():
            print(f"   {name}: {len(of_calls) / n:.2f} a step, {1e3 * sum(of_calls) / n:.2f} ms a step", flush=True)
        if i < 2 and device.type == "cuda":
            kernels = record_kernels(lambda: [step(engine) for _ in range(16)])
            print("  idle", *split(kernels))
            for cost in costs(kernels, 16)[:16]:
                print(f"  {cost.calls:g}× {cost.ms:.3f} ms {cost.name[:90]}")
            with cProfile.Profile() as profile:
                for _ in range(30):
                    step(engine)
            pstats.Stats(profile, stream=(table := io.StringIO())).sort_stats("tottime").print_stats(25)
            print(table.getvalue(), flush=True)
    engine.close()
