"""Decode steps with drafts, launched ahead in two parts or collected at once: drafts_ahead.py v2_lite|tiny [N…]."""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from tools.long_load import MODELS, V2_LITE, write_model

PENALTY, GRAMMAR = {"presence_penalty": 0.5}, {"grammar": "start: /([a-z]+ )*/"}
WAYS = {  # the fields of the first request, and of the others
    "plain": ({}, {}),
    "presence_penalty": (PENALTY, PENALTY),
    "grammar": (GRAMMAR, GRAMMAR),
    "logprobs 5": ({"logprobs": 5}, {"logprobs": 5}),
    "one penalty": (PENALTY, {}),
    "one grammar": (GRAMMAR, {}),
}


def measure(engine, batch: int, prompt: int, new: int, first: dict, others: dict) -> str:
    """Add a batch, step until all decode, and format what the steps from there to the end take."""
    for i in range(batch):
        tokens = torch.randint(3, 200, (prompt,), generator=torch.Generator().manual_seed(i)).tolist()
        engine.add(tokens, Sampling(new, 1.0, seed=i, ignore_eos=True, **(others if i else first)))
    scheduler = engine._scheduler
    while engine._compiling or scheduler.waiting or any(r.n_computed < prompt for r in scheduler.running.values()):
        engine.step()
    for _ in range(4):
        engine.step()
    before, begin = engine.stats(), time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds, now = time.perf_counter() - begin, engine.stats()
    tokens, steps = now.generated_tokens - before.generated_tokens, now.steps - before.steps
    return (
        f"{tokens / seconds:9,.0f} tokens/s  {1e3 * seconds / steps:7.2f} ms a step  {tokens / steps / batch:5.2f} "
        f"tokens a step  {now.steps_ahead - before.steps_ahead} of {steps} ahead"
    )


def main(name: str, *batches: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp())
    config = V2_LITE if name == "v2_lite" else MODELS["tiny"]()
    write_model(folder, replace(config, num_nextn_predict_layers=1), device.type)
    new, prompt = (128, 512) if device.type == "cuda" else (24, 60)
    for batch in map(int, batches or (8, 1)):
        begin = time.perf_counter()
        engine, _ = Folder.open(folder).load(device, EngineConfig(max_batch=batch, n_drafts=2), CacheConfig())
        print(f"loaded in {time.perf_counter() - begin:.1f} s", flush=True)
        for divides in (True, False):
            engine.steps._divides_steps = divides
            for way, fields in WAYS.items():
                row = measure(engine, batch, prompt, new, *fields)
                print(f"{batch:3} requests  two parts {divides!s:5}  {way:20} {row}", flush=True)
        del engine


if __name__ == "__main__":
    main(*sys.argv[1:])
