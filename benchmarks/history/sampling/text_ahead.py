"""Times decode steps of requests whose tokens depend on their text, launched ahead and not.

python text_ahead.py 1 8 64        # requests at a time

V2-Lite's shape with random FP8 weights on a GPU, 128 new tokens after 512 each; `tiny` on a CPU.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from tools.long_load import MODELS, V2_LITE, write_model

ON_GPU = torch.cuda.is_available()
PROMPT, NEW = (512, 128) if ON_GPU else (60, 24)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "grammar": {"grammar": "start: /([a-z]+ )*/"},
    "logprobs 5": {"logprobs": 5},
    "one of them": {"presence_penalty": 0.5},  # the others are plain
}


def measure(engine: Engine, requests: int, way: str) -> str:
    draw = torch.Generator().manual_seed(len(way) + 2 * engine.steps.runs_ahead)  # other prompts: none is in the cache
    for i in range(requests):
        fields = {} if way == "one of them" and i else WAYS[way]
        prompt = torch.randint(3, 200, (PROMPT,), generator=draw).tolist()
        engine.add(prompt, Sampling(NEW, 1.0, seed=i, ignore_eos=True, **fields))
    while engine.stats().running < requests or engine.stats().waiting:
        engine.step()
    before, begin = engine.stats(), time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds, stats = time.perf_counter() - begin, engine.stats()
    steps, tokens = stats.steps - before.steps, stats.generated_tokens - before.generated_tokens
    ahead = stats.steps_ahead - before.steps_ahead
    return f"{tokens / seconds:9,.0f} tokens/s  {1e3 * seconds / steps:7.2f} ms a step  {ahead} of {steps} ahead"


if __name__ == "__main__":
    folder, device = Path(tempfile.mkdtemp()), torch.device("cuda" if ON_GPU else "cpu")
    write_model(folder, V2_LITE if ON_GPU else MODELS["tiny"](), device.type)
    for requests in map(int, sys.argv[1:]):
        engine, runner = Folder.open(folder).load(device, EngineConfig(max_batch=requests), CacheConfig())
        for ahead in (True, False):
            engine.steps.runs_ahead = ahead and runner.runs_ahead
            for way in WAYS:
                print(
                    f"{requests:3} requests  ahead {ahead!s:5}  {way:20} {measure(engine, requests, way)}", flush=True
                )
