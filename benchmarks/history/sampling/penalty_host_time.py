"""What penalties of 64 requests cost the host in a step, without the operations on logits.

python -m benchmarks.history.sampling.penalty_host_time
"""

import random
import time
from typing import Any, cast

import torch

from octile.serve.engine.penalties import logit_changes
from octile.serve.engine.request import Request, Sampling

VOCABULARY, N_REQUESTS, N_PROMPT, N_GENERATED, STEPS = 129_280, 64, 2000, 1000, 20


def measure(**fields: float) -> None:
    """Print the milliseconds of a step in which each request has one more token."""
    draw, requests = random.Random(0), []
    for i in range(N_REQUESTS):
        prompt = tuple(draw.choices(range(VOCABULARY), k=N_PROMPT))
        requests.append(Request(i, prompt, Sampling(4000, 1.0, seed=i, **cast(Any, fields)), i))
        requests[-1].tokens.extend(draw.choices(range(5000), k=N_GENERATED))
        requests[-1].histories(())
    seconds = []
    for _ in range(STEPS):
        for request in requests:
            request.tokens.append(draw.randrange(5000))
        begin = time.perf_counter()
        how = [(request.sampling, request.histories(())[0]) for request in requests]
        logit_changes(how, VOCABULARY)
        seconds.append(time.perf_counter() - begin)
    print(f"{fields}: {1e3 * sorted(seconds)[STEPS // 2]:.2f} ms a step")


torch.set_num_threads(1)
for one in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}):
    measure(**one)
