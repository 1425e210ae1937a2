"""Tests of the engine over a model: in batch-invariant mode a text depends on its own request alone."""

import random

import pytest

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.draft_count import DraftCount
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling, TokenLogprobs
from octile.serve.runner import decode_loop
from octile.serve.runner.model_runner import ModelRunner
from tests.serve.models import new_model, text
from tests.train.conftest import MICRO

PROMPTS = [text(n, seed=n) for n in (5, 70, 33)]
SAMPLINGS = [Sampling(12, t, p, seed=3, ignore_eos=True) for t, p in ((0.0, 1.0), (1.0, 1.0), (0.8, 0.9))]
N_TEXTS, NEW_TOKENS = 5, 20


def texts_of(tokenizer, fp8, requests, n_drafts=0, max_ahead=0):
    """The tokens of some requests, which run together, and the engine's counts."""
    runner = ModelRunner(new_model(fp8), 16, batch_invariant=True, n_drafts=n_drafts)
    runner.max_ahead = max_ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32, n_drafts=n_drafts))
    added = [engine.add(PROMPTS[i], SAMPLINGS[i]) for i in requests]
    while engine.has_work:
        engine.step()
    return [request.tokens for request in added], engine.stats()


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [True, False])
def test_a_text_is_the_same_alone_in_a_batch_and_with_drafts(tokenizer, fp8):
    alone = [texts_of(tokenizer, fp8, [i])[0][0] for i in range(3)]
    assert texts_of(tokenizer, fp8, range(3))[0] == alone
    with_drafts, stats = texts_of(tokenizer, fp8, range(3), n_drafts=2)
    assert with_drafts == alone
    assert stats.drafted_tokens > 0


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("n_drafts", [0, 1, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_text_is_the_same_where_steps_are_launched_ahead(tokenizer, fp8, n_drafts):
    plain = range(2)  # the third one samples from the most likely tokens
    expected, stats = texts_of(tokenizer, fp8, plain, n_drafts)
    ahead, stats_ahead = texts_of(tokenizer, fp8, plain, n_drafts, max_ahead=4)
    assert ahead == expected
    # steps that are launched ahead choose their numbers of drafts a step later
    assert (stats.drafted_tokens > 0) == (stats_ahead.drafted_tokens > 0) == (n_drafts > 0)


@pytest.mark.one_case
@pytest.mark.parametrize("max_ahead", [0, 4])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_text_is_the_same_where_passes_with_prompts_are_launched_ahead(tokenizer, batch_invariant, max_ahead):
    found = []
    for ahead in (False, True):
        runner = ModelRunner(new_model(fp8=False), 24, batch_invariant=batch_invariant)
        runner.max_ahead, runner.runs_ahead = max_ahead, ahead
        engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
        requests = [engine.add(text(n, seed=n), Sampling(9, 1.0, seed=n, ignore_eos=True)) for n in (3, 90, 33, 40, 2)]
        while engine.has_work:
            engine.step()
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    assert engine.stats().steps_ahead > 3


@pytest.mark.slow
@pytest.mark.parametrize("max_ahead", [0, 4])
def test_a_text_is_the_same_with_any_number_of_drafts_in_each_step(tokenizer, monkeypatch, max_ahead):
    draw = random.Random(5)
    monkeypatch.setattr(DraftCount, "record", lambda self, *_: setattr(self, "count", draw.randint(0, 2)))
    expected, _ = texts_of(tokenizer, False, range(2))
    found, stats = texts_of(tokenizer, False, range(2), n_drafts=2, max_ahead=max_ahead)
    assert found == expected
    assert stats.drafted_tokens > 0


OF_TEXT = (
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"bad_words": ((65,), (66, 67)), "min_tokens": 3, "logit_bias": ((70, 2.0),), "logprobs": 2},
    {"logprobs": 0},
    {},
)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [OF_TEXT, OF_TEXT[2:]], ids=["of_text", "logprobs"])
@pytest.mark.parametrize("n_drafts", [2, 1])
def test_texts_with_drafts_are_the_same_where_their_tokens_are_chosen_between_parts_of_steps(tokenizer, ways, n_drafts):
    found = []
    for ahead in (False, True):
        runner = ModelRunner(new_model(fp8=False), 16, batch_invariant=True, n_drafts=n_drafts)
        runner.max_ahead, runner.runs_ahead = 4, ahead
        engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32, n_drafts=n_drafts))
        texts: dict[int, list] = {}
        for i, fields in enumerate(ways):
            sampling = Sampling(20 + i, float(i % 2), seed=i, ignore_eos=True, **fields)
            texts[engine.add(text(5 + 9 * i, seed=i), sampling).id] = [(), ()]
        while engine.has_work:
            for output in engine.step():
                tokens, logprobs = texts[output.request_id]
                texts[output.request_id] = [tokens + output.tokens, logprobs + output.logprobs]
        found.append(texts)
    assert found[0] == found[1]
    assert engine.stats().steps_ahead > 10
    assert engine.stats().accepted_tokens > 0


def logprobs_of(tokenizer, fp8: bool, batch_invariant: bool, max_ahead: int) -> tuple[list[TokenLogprobs], int]:
    """The log-probabilities of all tokens of two texts, while a third is generated, and the steps launched ahead."""
    runner = ModelRunner(new_model(fp8), 16, batch_invariant=batch_invariant)
    runner.max_ahead = max_ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=128))
    for i, logprobs in enumerate((0, None, 0)):
        engine.add(PROMPTS[i], Sampling(12, (0.0, 1.0, 0.7)[i], seed=3, ignore_eos=True, logprobs=logprobs))
    found: dict[int, list[TokenLogprobs]] = {i: [] for i in range(3)}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.logprobs
    assert [len(entries) for entries in found.values()] == [12, 0, 12]
    return found[0] + found[2], engine.stats().steps_ahead


@pytest.mark.one_case
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_log_probabilities_are_the_same_where_steps_are_launched_ahead(tokenizer, monkeypatch, batch_invariant, fp8):
    if not batch_invariant:  # GEMMs of other numbers of rows may have other bits
        monkeypatch.setattr(decode_loop, "BLOCK_ROWS", 1)
    expected, steps_ahead = logprobs_of(tokenizer, fp8, batch_invariant, max_ahead=0)
    assert steps_ahead == 0
    found, steps_ahead = logprobs_of(tokenizer, fp8, batch_invariant, max_ahead=4)
    assert steps_ahead == 10
    assert found == expected


def micro_texts(tokenizer, model: DeepseekV3, n_pages: int, together: bool, n_drafts: int = 0) -> list[tuple[int, ...]]:
    """The tokens that requests of different lengths get, all together or one after another."""
    runner = ModelRunner(model, n_pages, batch_invariant=True)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=24, n_drafts=n_drafts))
    draw, found = random.Random(0), dict[int, tuple[int, ...]]()
    for seed in range(N_TEXTS):
        prompt = [draw.randrange(MICRO.vocab_size) for _ in range(45 + 5 * seed)]
        engine.add(prompt, Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=seed, ignore_eos=True))
        while engine.has_work and (not together or seed == N_TEXTS - 1):
            for output in engine.step():
                found[output.request_id] = found.get(output.request_id, ()) + output.tokens
    assert not together or engine.stats().preemptions > 0
    return [found[i] for i in range(N_TEXTS)]


@pytest.fixture(scope="module")
def micro_model() -> DeepseekV3:
    return apply_recipe(DeepseekV3(MICRO))


@pytest.fixture(scope="module")
def alone(tokenizer, micro_model) -> list[tuple[int, ...]]:
    """The texts of requests of which each runs alone, without drafts, which change no text."""
    return micro_texts(tokenizer, micro_model, 64, together=False)


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [2, 0])
def test_a_sampled_text_is_the_same_next_to_others_cut_into_chunks_and_preempted(
    tokenizer, micro_model, alone, n_drafts: int
):
    assert micro_texts(tokenizer, micro_model, 3, together=True, n_drafts=n_drafts) == alone
