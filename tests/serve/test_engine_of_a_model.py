"""Tests of the engine over a real model: in batch-invariant mode a sampled text depends on its own request alone."""

import random

import pytest

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.serve.config import EngineConfig
from octile.serve.engine import Engine
from octile.serve.model_runner import ModelRunner
from octile.serve.request import Sampling
from tests.train.conftest import MICRO

N_TEXTS, NEW_TOKENS = 5, 60


def texts(tokenizer, model: DeepseekV3, n_pages: int, together: bool, n_drafts: int = 0) -> list[tuple[int, ...]]:
    """The tokens that requests of different lengths get, all together or one after another."""
    runner = ModelRunner(model, n_pages, batch_invariant=True)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=24, n_drafts=n_drafts))
    draw, found = random.Random(0), dict[int, tuple[int, ...]]()
    for seed in range(N_TEXTS):
        prompt = [draw.randrange(MICRO.vocab_size) for _ in range(30 + 5 * seed)]
        engine.add(prompt, Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=seed, ignore_eos=True))
        while engine.has_work and (not together or seed == N_TEXTS - 1):
            for output in engine.step():
                found[output.request_id] = found.get(output.request_id, ()) + output.tokens
    assert not together or engine.stats().preemptions > 0
    return [found[i] for i in range(N_TEXTS)]


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_a_sampled_text_is_the_same_next_to_others_cut_into_chunks_and_preempted(tokenizer, n_drafts: int):
    model = apply_recipe(DeepseekV3(MICRO))
    alone = texts(tokenizer, model, 64, together=False)  # without drafts, which change no text
    assert texts(tokenizer, model, 3, together=True, n_drafts=n_drafts) == alone
