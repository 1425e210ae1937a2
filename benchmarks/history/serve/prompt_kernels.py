"""The kernels of steps with prompts alone, of 8,192 tokens, of V2-Lite's shape: `python prompt_kernels.py`.

Random FP8 weights, in the engine: passes launched ahead and not, or ahead with flash-attn-4, where it is installed, and
without it. There are 64 prompts of 1,024 tokens, 16 of 4,096, and 32 of drawn lengths of at most 4,000, of each of
which one token is chosen. A line has the milliseconds of 8,192 tokens in three rounds, after two, and their tokens/s;
then the share of the time in which the GPU idles, and its kernels in 8,192 tokens.
"""

import random
import tempfile
import time
from pathlib import Path

import torch

from octile.bench.kernel_time import record_kernels
from octile.bench.serve.peer.random_folder import V2_LITE, letter_tokenizer, write_random_folder
from octile.bench.step.profile import split
from octile.kernels import flash_attn_4
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.train.step.kernel_records import costs

VOCABULARY, STEP_TOKENS = 8192, 8192
device, draw = torch.device("cuda"), random.Random(0)


PROMPTS = {
    "64 of 1024": [1024] * 64,
    "16 of 4096": [4096] * 16,
    "32 of 300 to 4000": [draw.randint(300, 4000) for _ in range(32)],
}
WAYS = [(True, False), (False, False)]  # launched ahead, with flash-attn-4
if flash_attn_4.why_not_on(device) is None:
    WAYS = [(True, True), (True, False), (True, True), (True, False)]


def seconds_of(engine, lengths):
    """Run prompts of these lengths, and return how long all take."""
    for prompt in lengths:
        sampling = Sampling(1, temperature=1.0, seed=draw.randrange(2**31), ignore_eos=True)
        engine.add(draw.choices(range(100, VOCABULARY), k=prompt), sampling)
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin


with tempfile.TemporaryDirectory() as folder:
    write_random_folder(Path(folder) / "model", V2_LITE, "fp8", device, letter_tokenizer(VOCABULARY))
    config = EngineConfig(max_batch=256, max_step_tokens=STEP_TOKENS)
    engine, runner = Folder.open(Path(folder) / "model").load(device, config, CacheConfig())
    why_not_prompts = flash_attn_4.why_not_prompts
    for ahead, has_library in WAYS:
        engine.steps.runs_ahead = ahead
        flash_attn_4.why_not_prompts = why_not_prompts if has_library else lambda *_: "not in this round"
        for name, lengths in PROMPTS.items():
            tokens = sum(lengths)
            steps = tokens / STEP_TOKENS
            times = [seconds_of(engine, lengths) for _ in range(5)][2:]
            milliseconds = [round(1e3 * t / steps, 2) for t in times]
            what = f"ms a step of {STEP_TOKENS}: {milliseconds} tokens/s {[round(tokens / t) for t in times]}"
            print(f"ahead {ahead}, flash-attn-4 {has_library}, {name}:", what, flush=True)
            kernels = record_kernels(lambda lengths=lengths: seconds_of(engine, lengths))
            print("  idle", *split(kernels))
            for cost in costs(kernels, steps)[:22]:
                print(f"  {cost.calls:g}× {cost.ms:.3f} ms {cost.name[:90]}", flush=True)
    engine.close()
