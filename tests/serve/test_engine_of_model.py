"""Tests of the engine over a model: in batch-invariant mode a text depends on neither the batch nor drafts."""

import pytest

from octile.serve.config import EngineConfig
from octile.serve.engine import Engine
from octile.serve.model_runner import ModelRunner
from octile.serve.request import Sampling
from tests.serve.models import new_model, text

PROMPTS = [text(n, seed=n) for n in (5, 70, 33)]
SAMPLINGS = [Sampling(12, t, p, seed=3, ignore_eos=True) for t, p in ((0.0, 1.0), (1.0, 1.0), (0.8, 0.9))]


def texts_of(tokenizer, fp8, requests, n_drafts=0, max_ahead=0):
    """The tokens of some requests, which run together, and the engine's counts."""
    runner = ModelRunner(new_model(fp8), 16, batch_invariant=True, n_drafts=n_drafts)
    runner.max_ahead = max_ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32, n_drafts=n_drafts))
    added = [engine.add(PROMPTS[i], SAMPLINGS[i]) for i in requests]
    while engine.has_work:
        engine.step()
    return [request.tokens for request in added], engine.stats()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_text_is_the_same_alone_in_a_batch_and_with_drafts(tokenizer, fp8):
    alone = [texts_of(tokenizer, fp8, [i])[0][0] for i in range(3)]
    assert texts_of(tokenizer, fp8, range(3))[0] == alone
    with_drafts, stats = texts_of(tokenizer, fp8, range(3), n_drafts=2)
    assert with_drafts == alone
    assert stats.drafted_tokens > 0


@pytest.mark.parametrize("n_drafts", [0, 1, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_text_is_the_same_where_steps_are_launched_ahead(tokenizer, fp8, n_drafts):
    plain = range(2)  # the third one samples from the most likely tokens
    expected, stats = texts_of(tokenizer, fp8, plain, n_drafts)
    ahead, stats_ahead = texts_of(tokenizer, fp8, plain, n_drafts, max_ahead=4)
    assert ahead == expected
    assert stats_ahead.drafted_tokens == stats.drafted_tokens
    assert stats_ahead.accepted_tokens == stats.accepted_tokens
