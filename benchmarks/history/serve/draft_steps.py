"""Times of decode steps in which each request has a fixed number of drafts.

python draft_steps.py small 1 2 4 8 16 32
python draft_steps.py v2_lite 1 2 4 8 32

The weights are random and in FP8, and prompts have 512 tokens. A step verifies the drafts of the one before and makes
new ones; times are medians of 24 steps after the first ones, in ms. Of a model on a CPU the prompts have 40 tokens.
"""

import random
import sys
import time
from dataclasses import replace
from statistics import median

import torch

from octile.bench.serve.random_weights import random_weights
from octile.models.config import ModelConfig
from octile.serve.engine import engine as engine_module
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer

MOST = 4
MODELS = {"tiny": ModelConfig.tiny, "small": ModelConfig.small, "v2_lite": ModelConfig.v2_lite_16b}


class Fixed:
    """Instead of `DraftCount`: the same number for each request and step."""

    count = 0

    def __init__(self, *_: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass


def main() -> None:
    name, batches = sys.argv[1], [*map(int, sys.argv[2:])]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(MODELS[name](), num_nextn_predict_layers=1)
    engine_module.DraftCount = Fixed
    engine_module.shared_count = lambda *_: Fixed.count
    prompt, steps = (512, 24) if device.type == "cuda" else (40, 6)
    pages = 2 + -(-(prompt + 5 * (steps + 12)) // ModelRunner.page_size)
    limits = {"n_drafts": MOST, "max_step_tokens": 4096}
    weights = random_weights(config, device, True)
    runner = ModelRunner(weights, max(batches) * pages, max_batch=max(batches), **limits)
    for batch in batches:
        first = None
        for Fixed.count in range(MOST + 1):
            engine = Engine(runner, Tokenizer.train([], MIN_VOCAB_SIZE), EngineConfig(max_batch=batch, **limits))
            draw = random.Random(batch)
            for seed in range(batch):
                text = draw.choices(range(config.vocab_size), k=prompt)
                engine.add(text, Sampling(5 * (steps + 8), temperature=1.0, seed=seed, ignore_eos=True))
            while len(engine.step()) < batch:
                pass
            for _ in range(4):
                engine.step()
            seconds = []
            for _ in range(steps):
                begin = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - begin)
            step = median(seconds)
            first = first or step
            what = f"{name} requests {batch} drafts {Fixed.count}"
            print(f"{what}: {1e3 * step:.4f} ms, {step / first:.3f} of a step without", flush=True)
            engine.close()


main()
