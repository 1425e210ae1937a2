"""Measure how many of 1,000 additions a model solves, at temperature 0 and 1: `python accuracy.py RUN …`."""

import random
import sys
from pathlib import Path

import torch

from octile.rl.prompts import Prompt
from octile.rl.rewards import accuracy
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.train.data.arithmetic import draw_problem

COUNT = 1000


def measure(run: str, temperature: float) -> float:
    folder = Folder.open(Path(run))
    engine, _ = folder.load(torch.device("cpu"), EngineConfig(max_batch=200, exact=True), CacheConfig(gib=0.2))
    rng = random.Random("accuracy")
    prompts, texts = {}, {}
    for number in range(COUNT):
        problem = draw_problem(rng)
        tokens = folder.tokenizer.encode_prompt(problem.prompt)
        request = engine.add(tokens, Sampling(64, temperature, seed=number))
        prompts[request.id], texts[request.id] = Prompt(problem.prompt, problem.answer), ""
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
    return sum(accuracy(*prompts[n][:1], texts[n], prompts[n].answer) for n in prompts) / COUNT


for run in sys.argv[1:]:
    print(f"{run}: {measure(run, 0.0):.3f} at temperature 0, {measure(run, 1.0):.3f} at temperature 1")
