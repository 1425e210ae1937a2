"""Time an engine whose passes with prompts are launched ahead, and not: `python passes_ahead.py v2_lite` (or `tiny`).

Random FP8 weights; prompts alone as `octile bench serve --part engine` measures them, then 256 requests at a time, each
replaced by a new one when it ends, as by clients that are always busy. Each twice, in turn.
"""

import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from octile.bench.serve.peer.engine_speed import EngineCase, Work, measure
from octile.bench.serve.peer.octile_engine import OctileEngine
from octile.bench.serve.peer.random_folder import V2_LITE, letter_tokenizer, write_random_folder
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.train.config import MODELS

VOCABULARY = 8192
(name,) = sys.argv[1:]
is_tiny = name == "tiny"
model = replace(MODELS["tiny"](), vocab_size=VOCABULARY, max_position_embeddings=4096) if is_tiny else V2_LITE
clients, seconds, prompt = (8, 5, 32) if is_tiny else (256, 12, 1024)
cases = [EngineCase(2, 64, False)] if is_tiny else [EngineCase(8, 1024, False), EngineCase(16, 4096, False)]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def add(engine, draw):
    """Add a request for 64 to 192 tokens."""
    tokens = draw.choices(range(100, VOCABULARY), k=prompt)
    engine.add(tokens, Sampling(draw.randint(64, 192), temperature=1.0, seed=draw.randrange(2**31), ignore_eos=True))


def busy(engine):
    """Tokens a second of clients that are always busy, and the 99th percentile of a step in milliseconds."""
    draw, found, steps = random.Random(0), 0, []
    for _ in range(clients):
        add(engine, draw)
    warm = time.perf_counter() + seconds / 3
    begin = end = None
    while end is None or time.perf_counter() < end:
        if begin is None and time.perf_counter() > warm:
            begin = time.perf_counter()
            end, found, steps = begin + seconds, 0, []
        before = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - before)
        found += sum(len(output.tokens) for output in outputs)
        for output in outputs:
            if output.finish_reason is not None:
                add(engine, draw)
    speed = found / (time.perf_counter() - begin)
    for request_id in [*engine._requests]:
        engine.cancel(request_id)
    return speed, 1e3 * sorted(steps)[int(0.99 * len(steps))]


with tempfile.TemporaryDirectory() as folder:
    write_random_folder(Path(folder) / "model", model, "fp8", device, letter_tokenizer(VOCABULARY))
    for step_tokens in (8192, 2048):  # of the measured prompts, and of a server
        config = EngineConfig(max_batch=256, max_step_tokens=step_tokens)
        engine, runner = Folder.open(Path(folder) / "model").load(device, config, CacheConfig())
        for ahead in (False, True) * 2:
            engine.runs_ahead = ahead
            for case, speed in measure(OctileEngine(engine), Work(cases, VOCABULARY, 256, step_tokens)):
                what = f"{case.requests} prompts of {case.prompt}"
                print(f"steps of {step_tokens}, ahead {ahead}: {what}: {speed:.0f} tokens/s", flush=True)
            before = engine.stats()
            speed, slowest = busy(engine)
            stats = engine.stats()
            share = (stats.steps_ahead - before.steps_ahead) / (stats.steps - before.steps)
            what = f"{speed:.0f} tokens/s, 99% of steps within {slowest:.1f} ms, {share:.0%} of steps ahead"
            print(f"steps of {step_tokens}, ahead {ahead}: {clients} busy clients: {what}", flush=True)
        engine.close()
        del engine, runner
