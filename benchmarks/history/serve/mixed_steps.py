"""Time steps that decode some requests and prefill two prompts: `python mixed_steps.py v2_lite 0 32 64 128 192 250`.

Random FP8 weights of V2-Lite's shape (or of the preset `tiny`), prompts of 1,024 tokens, steps of 2,048 tokens at most,
as in `octile bench serve --peer vllm`. A line has the decode rows, the median of steps without prompts, and each step
with two. Then the profile of one. Kernels that are compiled after the start, when requests wait, are named.
"""

import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from octile.bench.serve.peer.random_folder import V2_LITE, letter_tokenizer, write_random_folder
from octile.kernels.cuda.jit import specialize
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.train.config import MODELS

PROMPT, STEPS, VOCABULARY = 1024, 6, 8192
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
name, *numbers = sys.argv[1:]
model = V2_LITE if name == "v2_lite" else replace(MODELS[name](), vocab_size=VOCABULARY, max_position_embeddings=4096)
prompt = PROMPT if name == "v2_lite" else 32
draw = random.Random(0)


def synchronize():
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(engine):
    """Run a step, and return its milliseconds."""
    synchronize()
    begin = time.perf_counter()
    engine.step()
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def add(engine, n, new_tokens):
    for _ in range(n):
        sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, seed=draw.randrange(2**31), ignore_eos=True)
        engine.add([draw.randrange(100, VOCABULARY) for _ in range(prompt)], sampling)


def name_compiled():
    """Name each kernel that is compiled, or read from the disk, from now on."""
    compile_kernel = specialize.compile

    def compile_and_name(kernel, *others):
        print(f"compiled late: {kernel}", flush=True)
        return compile_kernel(kernel, *others)

    specialize.compile = compile_and_name
    if device.type == "cuda":
        import triton  # a machine without a GPU may have none

        triton.knobs.runtime.jit_post_compile_hook = lambda **of: print(
            f"compiled late: {of['repr'][:200]}", flush=True
        )


with tempfile.TemporaryDirectory() as folder:
    write_random_folder(Path(folder) / "model", model, "fp8", device, letter_tokenizer(VOCABULARY))
    engine, runner = Folder.open(Path(folder) / "model").load(device, EngineConfig(max_batch=256), CacheConfig())
    runner.warm_up()
    name_compiled()
    for number in map(int, numbers):
        add(engine, number, 400)
        while any(request.n_pending > 1 for request in engine._scheduler.running.values()) or engine._scheduler.waiting:
            engine.step()
        decoding = [timed(engine) for _ in range(5)] if number else [0.0]
        mixed = []
        for _ in range(STEPS):
            add(engine, 2, 2)
            mixed.append(timed(engine))
            engine.step()
            engine.step()
        steps = ", ".join(f"{milliseconds:.1f}" for milliseconds in mixed)
        print(f"{number} decode rows: {statistics.median(decoding):.2f} ms; with two prompts {steps}", flush=True)
        if number == max(map(int, numbers)):
            add(engine, 2, 2)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                timed(engine)
            for by in ("self_device_time_total", "self_cpu_time_total"):
                print(profiled.key_averages().table(sort_by=by, row_limit=22, max_name_column_width=60))
        for request in [*engine._requests.values()]:
            engine.cancel(request.id)
