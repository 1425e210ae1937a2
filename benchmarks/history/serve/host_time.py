"""Time what the host does for steps with prompts, on a machine without a GPU: `PYTHONPATH=… python host_time.py`.

An engine drives a runner that checks and lays out a batch as `ModelRunner` does, and computes nothing; tokens are not
sampled either. A GPU waits meanwhile, unless the next step is launched before. PYTHONPATH chooses the octile.
"""

import random
import time

import torch

from octile.bench.serve.peer.random_folder import letter_tokenizer
from octile.serve.engine import sampler
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.runner.batch import Results
from octile.serve.runner.graphs import FILL_ROWS
from octile.serve.runner.step import BatchCheck, Layout, mixed_step

VOCABULARY, PROMPT, ROUNDS = 8192, 1024, 15
draw = random.Random(0)


class HostRunner:
    """The host's part of `ModelRunner.run`."""

    n_pages, page_size, vocab_size, max_position = 2**14, 64, VOCABULARY, 2**14
    n_drafts, max_ahead, end_tokens, expert_tokens = 0, 0, (), None
    can_draft = runs_ahead = False
    device = torch.device("cpu")

    def __init__(self):
        self.check, self.logits = BatchCheck(VOCABULARY, self.max_position, self.n_pages), torch.zeros(4096, 8)

    def run(self, batch):
        """Lay out a batch."""
        self.check(batch)
        layout = Layout.of(batch.chunks, absorbed_only=False)
        mixed_step(layout, 1, self.device, None, True, FILL_ROWS)
        layout.rows()
        wanted = layout.logit_rows()
        return Results(self.logits[: layout.n_decode if wanted is None else len(wanted)], self.logits)


def add(engine, n, new_tokens):
    """Add requests with random prompts."""
    for _ in range(n):
        sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, seed=0, ignore_eos=True)
        engine.add(draw.choices(range(100, VOCABULARY), k=PROMPT), sampling)


def timed(engine):
    """Run a step, and return its milliseconds."""
    begin = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - begin)


sampler.sample_tokens = lambda logits, *_: torch.full((len(logits),), 300)
tokenizer = letter_tokenizer(VOCABULARY)
for decoding, prompts in ((0, 8), (64, 2), (250, 2)):
    engine = Engine(HostRunner(), tokenizer, EngineConfig(max_batch=256, max_step_tokens=prompts * PROMPT + decoding))
    add(engine, decoding, 400)
    while engine.stats().waiting or any(request.n_pending > 1 for request in engine._requests.values()):
        engine.step()
    times = []
    for _ in range(ROUNDS):
        add(engine, prompts, 1)
        times.append(timed(engine))
        engine.step()
    print(
        f"{decoding} requests decode, {prompts} prompts of {PROMPT} tokens join: {min(times):.1f} ms at least",
        flush=True,
    )
