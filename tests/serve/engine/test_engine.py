"""Tests of the engine over a fake model: each request gets the text that it gets alone."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from octile.serve.engine import drafts, sampler
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine, FirstToken
from octile.serve.engine.request import FinishReason, PromptLatents, Request, RequestFactory, Sampling
from tests.serve.engine.test_request import WithTypicalP
from tests.serve.fake_runner import FakeRunner


def run(engine, most_steps=10_000):
    """Step to the end, and return {request id: (tokens, text, last output)}."""
    found: dict[int, tuple] = {}
    while engine.has_work and (most_steps := most_steps - 1):
        for output in engine.step():
            tokens, text, last = found.get(output.request_id, ((), "", None))
            assert last is None or last.finish_reason is None, "an output follows the last one"
            found[output.request_id] = (tokens + output.tokens, text + output.text, output)
    assert not engine.has_work
    return found


@pytest.fixture
def engine_of(tokenizer):
    def make(runner=None, **limits):
        return Engine(
            runner or FakeRunner(), tokenizer, EngineConfig(**{"max_batch": 4, "max_step_tokens": 32, **limits})
        )

    return make


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("max_ahead", [0, 4])
@pytest.mark.parametrize("n_drafts", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_the_text_that_it_gets_alone(engine_of, seed, n_drafts, max_ahead):
    draw = random.Random(seed)
    runner = FakeRunner(n_pages=20, scale=draw.choice([1.0, 4.0]), max_ahead=max_ahead, n_drafts=n_drafts)
    engine = engine_of(runner, n_drafts=n_drafts)
    expected, found = {}, {}
    for _ in range(25):
        prompt = [7] * draw.randint(0, 9) + [draw.randint(0, 3) for _ in range(draw.randint(1, 20))]
        sampling = Sampling(
            draw.randint(1, 30),
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randint(0, 5),
            ignore_eos=True,
        )
        expected[engine.add(prompt, sampling).id] = runner.text_of(prompt, sampling)
        for _ in range(draw.randint(0, 5)):
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.tokens)
    for request_id, (tokens, _, _) in run(engine).items():
        found.setdefault(request_id, []).extend(tokens)
    assert found == expected
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.shared_tokens > 0
    assert (stats.used_pages, stats.waiting, stats.running, stats.finished) == (0, 0, 0, 25)
    assert (stats.acceptance_rate or 0) > (0.3 if n_drafts else -1)
    assert (runner.decode_steps > 0) == (max_ahead > 0)


class Clock:
    """The engine's clock, which a test sets."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("engine", "scheduler"):
        monkeypatch.setattr(f"octile.serve.engine.{module}.time", clock)
    return clock


def test_the_time_of_prefill_begins_at_the_admission(engine_of, clock):
    engine = engine_of(max_batch=1, max_step_tokens=8)
    for prompt in ([1] * 4, [2] * 20):  # one chunk, and three chunks of 8 tokens at most
        engine.add(prompt, Sampling(2, ignore_eos=True))
    found = []
    while engine.has_work:
        found += [(output.request_id, output.prefill_seconds) for output in engine.step()]
        clock.now += 1
    assert found == [(0, 0.0), (0, 0.0), (1, 2.0), (1, 0.0)]


def test_the_time_of_prefill_contains_that_of_another_engine(engine_of, clock):
    engine, request = engine_of(), Request(0, [1, 2, 3], Sampling(2, ignore_eos=True), 0)
    engine.adopt(request, FirstToken(9, None, prefill_seconds=5.0), Mock(spec=PromptLatents))
    clock.now += 1
    first, *_ = engine.step()
    assert (first.tokens, first.prefill_seconds) == ((9,), 6.0)


def test_drafts_take_fewer_steps(engine_of):
    steps = []
    for n_drafts in (0, 2):
        engine = engine_of(n_drafts=n_drafts)
        engine.add([1, 2, 3], Sampling(60, ignore_eos=True))
        run(engine)
        steps.append(engine.stats().steps)
    assert steps[0] == 60
    assert steps[1] < 40


@pytest.mark.parametrize("max_ahead", [0, 4])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 12])
def test_no_draft_is_made_that_the_text_has_no_room_for(engine_of, max_new_tokens, max_ahead):
    engine = engine_of(FakeRunner(max_ahead=max_ahead, n_drafts=3), n_drafts=3)
    request = engine.add([1, 2, 3], Sampling(max_new_tokens, ignore_eos=True))
    while engine.has_work:
        engine.step()
        # a pass chooses one token more than it verifies drafts
        assert len(request.drafts) == (0 if request.finish_reason else min(3, request.n_remaining - 1))
    assert request.n_generated == max_new_tokens


def test_the_acceptance_rate_counts_verified_drafts(engine_of):
    engine = engine_of(n_drafts=1)
    engine.add([1, 2, 3], Sampling(60, ignore_eos=True))
    run(engine)
    stats = engine.stats()
    assert stats.generated_tokens == stats.steps + stats.accepted_tokens
    assert stats.acceptance_rate == stats.accepted_tokens / stats.drafted_tokens


@pytest.mark.parametrize("max_ahead", [0, 8])
def test_drafts_cost_what_they_do_with_as_many_requests_as_run(engine_of, max_ahead, monkeypatch):
    runner = FakeRunner(max_ahead=max_ahead, n_drafts=2)
    monkeypatch.setattr(runner, "step_costs", lambda n, n_drafts: (1.0, 1.1, 1.2) if n == 2 else (1.0, 3.0, 5.0))
    engine = engine_of(runner, n_drafts=2)
    engine.add([1, 2, 3], Sampling(60, ignore_eos=True))
    counts = list[tuple[int, int]]()  # of running requests, and the drafts of a step
    for step in range(30):
        if step == 10:
            engine.add([4, 5, 6], Sampling(10, ignore_eos=True))
        engine.step()
        counts.append((engine.steps.n_running, engine.steps.n_drafts))
    assert [counts[step] for step in (9, 14, 29)] == [(1, 0), (2, 2), (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("max_ahead", [0, 4])
def test_each_request_has_the_drafts_that_its_own_acceptance_pays_for(engine_of, max_ahead):
    runner = FakeRunner(n_pages=400, max_ahead=max_ahead, n_drafts=2)
    runner.drafts_well = lambda tokens: tokens[0] == 1 or (tokens[0] == 3 and len(tokens) > 60)
    engine = engine_of(runner, n_drafts=2, max_step_tokens=64)
    sampling = Sampling(250, seed=3, ignore_eos=True)
    always, never, later = requests = [engine.add([first, 5, 6], sampling) for first in (1, 2, 3)]
    run(engine)
    for request in requests:
        assert request.tokens[3:].tolist() == runner.text_of(request.prompt, sampling)
    # steps that are launched ahead have as many rows for each request: drafts of one have to pay for all
    assert always.accepted_tokens == always.drafted_tokens > (100 if max_ahead else 160)
    assert never.accepted_tokens == 0 < never.drafted_tokens < 20
    assert later.accepted_tokens > 80
    assert later.drafted_tokens - later.accepted_tokens < 20
    stats = engine.stats()
    assert stats.drafted_tokens == sum(request.drafted_tokens for request in requests)
    assert (stats.steps_ahead > 0) == (max_ahead > 0)


def test_a_preempted_request_keeps_its_draft_count(engine_of):
    runner = FakeRunner(n_pages=20, n_drafts=2)
    runner.drafts_well = lambda tokens: False
    engine = engine_of(runner, n_drafts=2)
    requests = [engine.add([i, 5, 6], Sampling(50, seed=i, ignore_eos=True)) for i in range(4)]
    run(engine)
    assert engine.stats().preemptions > 0
    # four steps and a trial with one draft, of which none is repeated
    assert [request.drafted_tokens for request in requests] == [4 * 2 + 1] * 4


@pytest.mark.slow
def test_sampled_tokens_have_the_distribution_of_the_model_with_drafts(engine_of):
    runner = FakeRunner(n_pages=4096, vocab_size=3)
    runner.logits_after = lambda tokens: torch.tensor([0.0, 1.0, -1.0] if sum(tokens) % 2 else [1.0, 0.5, 0.0])
    engine = engine_of(runner, n_drafts=2, max_batch=64, max_step_tokens=1000)
    for seed in range(200):
        engine.add([1], Sampling(40, temperature=1.0, seed=seed, ignore_eos=True))
    counts = torch.zeros(2, 3)
    for tokens, _, _ in run(engine).values():
        parity = 1
        for token in tokens:
            counts[parity, token] += 1
            parity = (parity + token) % 2
    expected = counts.sum(1, keepdim=True) * torch.stack([runner.logits_after([i]).softmax(-1) for i in (0, 1)])
    assert 0.2 < engine.stats().acceptance_rate < 0.99
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 99.9% of 4 degrees of freedom


def test_a_request_without_a_seed_draws_one(engine_of):
    engine = engine_of()
    requests = [engine.add([1], Sampling(20, temperature=1.0, seed=None, ignore_eos=True)) for _ in range(2)]
    found = run(engine)
    assert requests[0].seed != requests[1].seed
    assert found[0][0] != found[1][0]


def test_a_canceled_request_frees_its_pages_at_once_and_has_no_output(engine_of):
    engine = engine_of()
    running = engine.add([1] * 9, Sampling(20))
    engine.step()
    waiting = engine.add([2] * 9, Sampling(20))
    assert engine.stats().used_pages > 0
    assert [engine.cancel(request.id) for request in (running, waiting)] == [True, True]
    assert (engine.stats().used_pages, engine.stats().canceled, engine.has_work) == (0, 2, False)
    assert engine.step() == []
    assert not engine.cancel(running.id)


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_a_request_that_is_canceled_in_flight_changes_no_other(engine_of, n_drafts):
    runner = FakeRunner(n_pages=40, max_ahead=4, n_drafts=n_drafts)
    engine = engine_of(runner, n_drafts=n_drafts)
    sampling = Sampling(30, temperature=1.0, seed=3, ignore_eos=True)
    requests = [engine.add([i] * 5, sampling) for i in range(4)]
    for _ in range(4):
        engine.step()
    assert runner.decode_steps == 4, "a step is in flight"
    engine.cancel(requests[1].id)
    late = engine.add([9] * 5, sampling)  # takes the freed pages
    run(engine)
    for request in (requests[0], *requests[2:], late):
        assert request.tokens[5:].tolist() == runner.text_of(request.prompt, sampling)
    assert (engine.stats().used_pages, engine.stats().canceled, engine.stats().finished) == (0, 1, 4)


def test_a_text_that_ends_in_flight_has_no_further_tokens(engine_of, tokenizer):
    runner = FakeRunner(max_ahead=4)
    right = runner.logits_after
    runner.logits_after = lambda tokens: (
        torch.nn.functional.one_hot(torch.tensor(tokenizer.end), 320).float() if len(tokens) == 9 else right(tokens)
    )
    engine = engine_of(runner)
    engine.add([1, 2], Sampling(20))
    ((tokens, _, last),) = run(engine).values()
    assert (len(tokens), last.finish_reason) == (7, FinishReason.STOP)
    assert not engine.has_work
    assert engine.stats().used_pages == 0


def results_of(engine, draw):
    """Add requests of which two of three ask for log-probabilities, and return what all their outputs have."""
    found: dict[int, tuple] = {}
    for i in range(20):
        prompt = [7] * draw.randint(0, 9) + [draw.randint(0, 3) for _ in range(draw.randint(1, 20))]
        sampling = Sampling(
            draw.randint(1, 40), draw.choice([0.0, 1.0]), seed=i, stop=("e",) * (i % 2), logprobs=(0, None, 0)[i % 3]
        )
        found[engine.add(prompt, sampling).id] = ((), (), "", None)
        for _ in range(draw.randint(0, 5)):
            extend(found, engine.step())
    while engine.has_work:
        extend(found, engine.step())
    return found


def extend(found, outputs):
    for output in outputs:
        tokens, logprobs, text, _ = found[output.request_id]
        found[output.request_id] = (
            (*tokens, *output.tokens),
            (*logprobs, *output.logprobs),
            text + output.text,
            output.finish_reason,
        )


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [0, 2])
@pytest.mark.parametrize("seed", range(1, 3))
def test_log_probabilities_of_steps_launched_ahead_are_those_that_the_host_asks_for(engine_of, seed, n_drafts):
    runners = [FakeRunner(n_pages=20, max_ahead=max_ahead, n_drafts=n_drafts) for max_ahead in (0, 4)]
    engines = [engine_of(runner, n_drafts=n_drafts) for runner in runners]
    expected, found = (results_of(engine, random.Random(seed)) for engine in engines)
    assert found == expected
    for request_id, (tokens, logprobs, _, _) in found.items():
        assert [entry.token for entry in logprobs] == [*tokens] * (request_id % 3 != 1)
    assert {reason for *_, reason in found.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    stats = engines[1].stats()
    assert stats.preemptions > 0
    assert stats.steps_ahead > 0
    assert (0 < runners[1].scored_steps < runners[1].decode_steps) == (n_drafts == 0)
    assert (runners[1].divided_steps > 0) == (n_drafts > 0)  # between whose parts they are computed


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_the_end_of_a_text_has_no_log_probability_in_steps_launched_ahead(engine_of, tokenizer, n_drafts):
    runner = FakeRunner(max_ahead=4, n_drafts=n_drafts)
    right = runner.logits_after
    runner.logits_after = lambda tokens: (
        9.0 * torch.nn.functional.one_hot(torch.tensor(tokenizer.end), 320) if len(tokens) == 9 else right(tokens)
    )
    engine = engine_of(runner, n_drafts=n_drafts)
    engine.add([1, 2], Sampling(20, logprobs=0))
    found = {0: ((), (), "", None)}
    while engine.has_work:
        extend(found, engine.step())
    ((tokens, logprobs, _, reason),) = found.values()
    assert (len(tokens), reason) == (7, FinishReason.STOP)
    assert [entry.token for entry in logprobs] == [*tokens]
    assert 0 < runner.decode_steps == (runner.divided_steps if n_drafts else runner.scored_steps)


def test_only_steps_with_requests_that_ask_for_them_compute_log_probabilities(engine_of):
    runner = FakeRunner(max_ahead=4)
    engine = engine_of(runner)
    engine.add([1, 2], Sampling(20, ignore_eos=True))
    run(engine)
    assert (runner.decode_steps, runner.scored_steps) == (19, 0)
    engine.add([1, 2], Sampling(20, ignore_eos=True))
    engine.add([1, 2], Sampling(10, ignore_eos=True, logprobs=0))
    run(engine)
    assert (runner.decode_steps, runner.scored_steps) == (38, 9)


def test_alternatives_are_read_at_once(engine_of):
    runner = FakeRunner(max_ahead=4)
    engine = engine_of(runner)
    engine.add([1, 2], Sampling(9, logprobs=1))
    run(engine)
    assert runner.decode_steps == 0


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [0, 2])
@pytest.mark.parametrize("limits", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_steps_of_truncated_sampling_are_launched_ahead(engine_of, limits, n_drafts):
    runner = FakeRunner(max_ahead=4, n_drafts=n_drafts)
    engine = engine_of(runner, n_drafts=n_drafts)
    samplings = Sampling(20, 1.0, ignore_eos=True, **limits), Sampling(20, 1.0, ignore_eos=True)
    requests = [engine.add([1, 2, i], sampling) for i, sampling in enumerate(samplings)]
    run(engine)
    assert engine.stats().steps_ahead > 0
    expected = [runner.text_of(request.prompt, request.sampling) for request in requests]
    assert [request.tokens[3:].tolist() for request in requests] == expected


def test_steps_are_launched_ahead_while_the_first_that_waits_has_no_room(engine_of):
    runner = FakeRunner(n_pages=64, max_ahead=16)
    engine = engine_of(runner, max_batch=16)
    sampling = Sampling(20, ignore_eos=True)
    requests = [engine.add(random.Random(i).choices(range(320), k=20), sampling) for i in range(30)]
    run(engine)
    stats = engine.stats()
    assert stats.steps_ahead > stats.steps // 3
    assert all(request.tokens[20:].tolist() == runner.text_of(request.prompt, sampling) for request in requests[::10])


def test_steps_are_launched_ahead_until_no_page_is_free(engine_of):
    engine = engine_of(FakeRunner(n_pages=7, page_size=4, max_ahead=4))
    for i in range(4):
        engine.add([i], Sampling(4, ignore_eos=True))  # one page each; three are left, and none needed
    run(engine)
    stats = engine.stats()
    assert (stats.steps, stats.steps_ahead) == (4, 3)  # all but the first


def test_a_request_that_can_join_is_not_kept_waiting_by_steps_ahead(engine_of):
    engine = engine_of(FakeRunner(max_ahead=4))
    engine.add([1, 2], Sampling(40, ignore_eos=True))
    for _ in range(5):
        engine.step()
    late = engine.add([3, 4], Sampling(4))
    for _ in range(2):
        engine.step()
    assert len(late.tokens) == 3


def test_a_sampling_field_that_no_decode_step_honors_keeps_its_request_from_decode_steps(engine_of):
    engine = engine_of(FakeRunner(max_ahead=4))
    engine.add([1, 2], WithTypicalP(9, temperature=1.0, ignore_eos=True, typical_p=0.9))
    run(engine)
    assert engine._runner.decode_steps == 0


def test_with_a_request_that_decode_steps_cannot_sample_passes_are_launched_ahead(engine_of):
    runner = FakeRunner(max_ahead=4)
    engine = engine_of(runner)
    plain = engine.add([1, 2], Sampling(20, 1.0, seed=0, ignore_eos=True))
    penalized = engine.add([3, 4], Sampling(20, 1.0, seed=1, presence_penalty=0.5, ignore_eos=True))
    run(engine)
    for request in (plain, penalized):
        assert request.tokens[2:].tolist() == runner.text_of(request.prompt, request.sampling)
    assert runner.decode_steps == 0
    assert (engine.stats().steps, engine.stats().steps_ahead) == (20, 19)


def test_closing_frees_everything(engine_of):
    engine = engine_of()
    for _ in range(9):
        engine.add([1] * 9, Sampling(20))
    engine.step()
    engine.close()
    assert (engine.stats().used_pages, engine.has_work) == (0, False)


def test_the_end_token_ends_the_text_and_is_not_shown(engine_of, tokenizer):
    runner = FakeRunner()
    runner.logits_after = lambda tokens: torch.nn.functional.one_hot(
        torch.tensor(tokenizer.end if len(tokens) == 5 else 65), 320
    ).float()
    engine = engine_of(runner)
    engine.add([1, 2], Sampling(20))
    ((tokens, text, last),) = run(engine).values()
    assert (tokens, text, last.finish_reason) == ((65,) * 3, tokenizer.decode([65] * 3), FinishReason.STOP)


def test_max_new_tokens_end_the_text(engine_of):
    engine = engine_of()
    engine.add([1, 2], Sampling(3, ignore_eos=True))
    assert run(engine)[0][2].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("n_drafts", [0, 3])
def test_a_stop_string_ends_the_text_before_it(engine_of, tokenizer, n_drafts):
    runner = FakeRunner()
    said = tokenizer.encode("one two three four")
    runner.logits_after = lambda tokens: torch.nn.functional.one_hot(
        torch.tensor(said[min(len(tokens) - 2, len(said) - 1)]), 320
    ).float()
    engine = engine_of(runner, n_drafts=n_drafts)
    engine.add([1, 2], Sampling(len(said), stop=("ee fo", "xyz"), ignore_eos=True))
    ((tokens, text, last),) = run(engine).values()
    assert (text, last.finish_reason) == ("one two thr", FinishReason.STOP)
    assert len(tokens) < len(said)


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_log_probabilities_are_those_of_each_new_token(engine_of, n_drafts):
    runner = FakeRunner()
    engine = engine_of(runner, n_drafts=n_drafts)
    engine.add([1, 2], Sampling(9, temperature=1.0, logprobs=2, ignore_eos=True))
    engine.add([1, 2], Sampling(9, temperature=1.0, ignore_eos=True))
    found, prefix = [], [1, 2]
    while engine.has_work:
        for output in engine.step():
            found += output.logprobs
    assert len(found) == 9
    for token, logprob, top, _ in found:
        expected = runner.logits_after(prefix).log_softmax(-1)
        assert logprob == pytest.approx(expected[token].item(), abs=1e-5)
        assert [token for token, _ in top] == expected.topk(2).indices.tolist()
        prefix.append(token)


@pytest.mark.parametrize("max_ahead", [0, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("wrong", "what"),
    [("nan", "NaN"), ("inf", r"+Inf"), ("-inf", "-Inf for all tokens")],
    ids=["NaN", "positive infinity", "all masked"],
)
def test_logits_that_are_not_finite_end_only_their_request(engine_of, wrong, what, temperature, max_ahead):
    runner = FakeRunner(max_ahead=max_ahead, n_drafts=1)
    right = runner.logits_after

    def logits_after(tokens):
        logits = right(tokens)
        if tokens[0] == 9 and len(tokens) == 6:
            logits[0 if wrong != "-inf" else slice(None)] = float(wrong)
        return logits

    runner.logits_after = logits_after
    engine = engine_of(runner, n_drafts=1)
    engine.add([9, 1], Sampling(20, temperature, ignore_eos=True))
    engine.add([8, 1], Sampling(20, temperature, ignore_eos=True))
    found = run(engine)
    assert found[0][2].finish_reason == FinishReason.ERROR
    assert found[0][2].error.startswith(
        f"the model's logits are not finite: {what}, for the token at position 6 of the text (4 generated before)"
    )
    assert len(found[0][0]) == 4
    assert found[1][2].finish_reason == FinishReason.LENGTH
    assert engine.stats().failed == 1


@pytest.mark.parametrize("max_ahead", [0, 4])
@pytest.mark.parametrize(
    ("wrong", "bad_words", "shared"),
    [("nan", (), 0), ("inf", (), 0), ("-inf", (), 0), ("-inf", ((7,),), 8)],
    ids=["NaN", "positive infinity", "all masked", "all masked by the request"],
)
def test_pages_of_logits_that_are_not_finite_are_not_shared(engine_of, wrong, bad_words, shared, max_ahead):
    """A fault of a moment would otherwise fail each later request that has the prefix."""
    runner = FakeRunner(max_ahead=max_ahead)
    right = runner.logits_after
    runner.logits_after = lambda tokens: torch.full((runner.vocab_size,), float(wrong))
    engine, prompt = engine_of(runner, max_step_tokens=8), [9] + 9 * [1]  # whose second pass chooses a token
    engine.add(prompt, Sampling(2, bad_words=bad_words))
    assert run(engine)[0][2].finish_reason == FinishReason.ERROR
    runner.logits_after = right
    engine.add(prompt, Sampling(2, ignore_eos=True))
    assert run(engine)[1][2].finish_reason == FinishReason.LENGTH
    assert engine.stats().shared_tokens == shared


@pytest.mark.filterwarnings("ignore:a draft cannot be chosen")
@pytest.mark.parametrize("n_drafts", [0, 2])
@pytest.mark.parametrize("raising", ["choose", "log_probabilities"])
def test_an_exception_while_a_token_is_chosen_ends_only_its_request(engine_of, monkeypatch, raising, n_drafts):
    right = getattr(sampler, raising)

    def wrong(*arguments):
        if any(row.seed == 13 and row.position == 5 for row in arguments[-1]):
            raise ArithmeticError("thirteen")
        return right(*arguments)

    def add_all(engine):
        for seed in (12, 13, 14):
            engine.add([seed, 1], Sampling(8, 1.0, seed=seed, logprobs=1, ignore_eos=True))
        return run(engine)

    alone = add_all(engine_of(n_drafts=n_drafts))
    monkeypatch.setattr(sampler, raising, wrong)
    engine = engine_of(n_drafts=n_drafts)
    found = add_all(engine)
    tokens, _, last = found[1]
    assert (last.finish_reason, tokens) == (FinishReason.ERROR, alone[1][0][:3])
    assert last.error == "ArithmeticError when its next token was chosen: thirteen"
    assert (found[0][:2], found[2][:2]) == (alone[0][:2], alone[2][:2])
    stats = engine.stats()
    assert (stats.failed, stats.finished, stats.used_pages) == (1, 2, 0)


def test_an_exception_that_no_row_raises_alone_is_a_warning(engine_of, monkeypatch):
    right = sampler.choose

    def wrong(logits, rows):
        if len(rows) > 1:
            raise MemoryError("too many rows")
        return right(logits, rows)

    monkeypatch.setattr(sampler, "choose", wrong)
    engine = engine_of(FakeRunner())
    for seed in range(2):
        engine.add([seed, 1], Sampling(3, ignore_eos=True, logprobs=0))
    with pytest.warns(RuntimeWarning, match="one by one, which is slower: MemoryError: too many rows"):
        found = run(engine)
    assert [last.finish_reason for _, _, last in found.values()] == [FinishReason.LENGTH] * 2


def test_a_draft_that_cannot_be_chosen_is_a_warning(engine_of, monkeypatch):
    monkeypatch.setattr(drafts, "choose_each", lambda logits, rows: [ArithmeticError("a draft")] * len(rows))
    engine = engine_of(n_drafts=1)
    engine.add([5, 1], Sampling(3, ignore_eos=True))
    with pytest.warns(RuntimeWarning, match=r"a draft cannot be chosen: ArithmeticError\('a draft'\)"):
        run(engine)
    assert engine.stats().finished == 1


def test_the_next_turn_of_a_conversation_shares_the_answer_before_it(engine_of):
    engine = engine_of()
    first = engine.add([1, 2, 3], Sampling(14, ignore_eos=True))
    run(engine)
    engine.add([*first.tokens, 5, 5], Sampling(1, ignore_eos=True))
    run(engine)
    assert engine.stats().shared_tokens == 16


@pytest.mark.parametrize("token", [-1, 320])
def test_a_token_outside_the_vocabulary_is_refused(engine_of, token):
    with pytest.raises(ValueError, match=f"prompt has the token {token}, but the model's vocabulary has 320"):
        engine_of().add([1, token], Sampling(1))


def test_a_request_with_the_id_of_one_that_runs_is_refused_and_changes_nothing(engine_of):
    runner, sampling = FakeRunner(), Sampling(5, ignore_eos=True)
    engine = engine_of(runner)
    first = engine.add([1, 2, 3], sampling)
    engine.step()
    (other,) = RequestFactory(320, 128).make([4, 5], sampling)
    with pytest.raises(ValueError, match=rf"^request\.id must differ from .*, not {first.id}, .* one RequestFactory"):
        engine.submit(other)
    run(engine)
    assert first.tokens[3:].tolist() == runner.text_of([1, 2, 3], sampling)
    assert (engine.stats().requests, engine.stats().finished, other.n_generated) == (1, 1, 0)


def test_the_id_of_a_request_that_has_ended_may_come_again(engine_of):
    runner, sampling = FakeRunner(), Sampling(5, ignore_eos=True)
    engine = engine_of(runner)
    engine.cancel(engine.add([1, 2, 3], sampling).id)
    (other,) = RequestFactory(320, 128).make([4, 5], sampling)
    engine.submit(other)
    run(engine)
    assert other.tokens[2:].tolist() == runner.text_of([4, 5], sampling)


def test_an_empty_prompt_is_refused(engine_of):
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        engine_of().add([], Sampling())


def test_a_prompt_longer_than_the_context_is_refused(engine_of):
    with pytest.raises(ValueError, match=r"prompt has 120 tokens and max_new_tokens is 9.* context of 128"):
        engine_of(FakeRunner(max_position=128)).add([1] * 120, Sampling(9))


def test_a_request_larger_than_the_cache_is_refused(engine_of):
    with pytest.raises(
        ValueError, match=r"prompt has 120 tokens and max_new_tokens is 9.* context of 128 .the model's"
    ):
        engine_of(FakeRunner(n_pages=32)).add([1] * 120, Sampling(9))


def test_drafts_of_a_model_without_the_layer_are_refused(engine_of):
    runner = FakeRunner()
    runner.can_draft = False
    with pytest.raises(ValueError, match=r"^engine.n_drafts must be 0, not 1: .*--model.num-nextn-predict-layers 1"):
        engine_of(runner, n_drafts=1)


PENALTIES = Sampling(
    30,
    temperature=1.0,
    ignore_eos=True,
    repetition_penalty=1.3,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logit_bias=((9, 3.0), (11, 2.5)),
    bad_words=((9, 9), (11, 9)),
    min_p=0.01,
)


@pytest.mark.slow
@pytest.mark.parametrize("n_drafts", [0, 1, 3])
def test_penalties_give_the_same_text_in_a_batch_with_drafts_and_preemption(engine_of, n_drafts):
    runner = FakeRunner(n_pages=20, scale=2.0, max_ahead=4, n_drafts=n_drafts)
    engine = engine_of(runner, n_drafts=n_drafts)
    samplings = [replace(PENALTIES, seed=seed) if seed % 3 else Sampling(30, 1.0, seed=seed) for seed in range(9)]
    samplings = [replace(sampling, ignore_eos=True) for sampling in samplings]
    expected = [runner.text_of([3, 1, seed], sampling) for seed, sampling in enumerate(samplings)]
    for seed, sampling in enumerate(samplings):
        engine.add([3, 1, seed], sampling)
    assert [list(tokens) for tokens, _, _ in run(engine).values()] == expected
    assert engine.stats().preemptions > 0


def test_bad_words_do_not_appear(engine_of):
    engine = engine_of(FakeRunner(scale=0.1))
    likely = {"logit_bias": ((9, 20.0), (11, 20.0)), "bad_words": ((9, 9), (11, 11))}
    engine.add([1], Sampling(100, 1.0, ignore_eos=True, **likely))
    ((tokens, _, _),) = run(engine).values()
    assert {(9, 11), (11, 9)} <= set(pairwise(tokens))
    assert not {(9, 9), (11, 11)} & set(pairwise(tokens))


@pytest.mark.parametrize("max_ahead", [0, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_the_text_before_it(engine_of, ignore_eos, max_ahead):
    runner = FakeRunner(scale=4.0, max_ahead=max_ahead)
    whole = runner.text_of([1, 2], Sampling(20))
    engine = engine_of(runner)
    engine.add([1, 2], Sampling(20, stop_token_ids=(whole[7], 300), ignore_eos=ignore_eos))
    ((tokens, _, last),) = run(engine).values()
    assert (list(tokens), last.finish_reason) == (whole[: whole.index(whole[7])], FinishReason.STOP)
    assert runner.decode_steps > 0 or not max_ahead


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_no_token_that_ends_a_text_is_chosen_before_min_tokens(engine_of, tokenizer, n_drafts):
    sampling = Sampling(40, 1.0, logit_bias=((tokenizer.end, 20.0), (7, 18.0)), stop_token_ids=(7,), min_tokens=12)
    engine = engine_of(FakeRunner(n_drafts=n_drafts), n_drafts=n_drafts)
    engine.add([1, 2], sampling)
    ((tokens, _, last),) = run(engine).values()
    assert (len(tokens), last.finish_reason) == (12, FinishReason.STOP)
    assert not {tokenizer.end, 7} & set(tokens)


def test_no_stop_string_ends_a_text_before_min_tokens(engine_of, tokenizer):
    (letter,) = tokenizer.encode("x")
    engine = engine_of()
    engine.add([1, 2], Sampling(40, logit_bias=((letter, 100.0),), stop=("xx",), min_tokens=9))
    ((tokens, text, last),) = run(engine).values()
    assert (len(tokens), text, last.finish_reason) == (10, "x" * 8, FinishReason.STOP)


def test_special_tokens_are_shown_by_name_or_skipped(engine_of, tokenizer):
    texts = []
    for skips in (False, True):
        engine = engine_of()
        how = {"logit_bias": ((tokenizer.end, 100.0),), "ignore_eos": True, "skip_special_tokens": skips}
        engine.add([1, 2], Sampling(2, **how))
        texts += [text for _, text, _ in run(engine).values()]
    assert texts == ["<|end|><|end|>", ""]


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "bad_words"])
def test_a_token_that_the_model_does_not_know_is_refused(engine_of, field):
    value = {"logit_bias": ((320, 1.0),), "stop_token_ids": (1, 320), "bad_words": ((1, 320),)}[field]
    message = f"{field} has the token 320, but the model's vocabulary has 320, from 0 to 319"
    with pytest.raises(ValueError, match=message):
        engine_of().add([1], Sampling(**{field: value}))


def test_outputs_name_what_has_stopped_a_text(engine_of, tokenizer):
    (letter,) = tokenizer.encode("x")
    likely = {"logit_bias": ((letter, 100.0),)}
    engine = engine_of()
    for sampling in (
        Sampling(9, **likely, stop=("xx", "xxx")),
        Sampling(9, **likely, stop_token_ids=(letter,)),
        Sampling(3, **likely, stop=("y",)),
        Sampling(9, logit_bias=((tokenizer.end, 100.0),)),
    ):
        engine.add([1, 2], sampling)
    assert [last.stopped_by for _, _, last in run(engine).values()] == ["xx", letter, None, None]


@pytest.mark.parametrize(("n_drafts", "max_ahead"), [(0, 0), (2, 0), (0, 4), (2, 4)])
def test_a_token_that_ends_the_text_has_log_probabilities(engine_of, tokenizer, n_drafts, max_ahead):
    runner = FakeRunner(scale=4.0, max_ahead=max_ahead, n_drafts=n_drafts if max_ahead else 0)
    whole = runner.text_of([1, 2], Sampling(20))
    length = whole.index(whole[7])
    engine = engine_of(runner, n_drafts=n_drafts)
    for sampling in (
        Sampling(20, logprobs=0, stop_token_ids=(whole[7],)),
        Sampling(20, stop_token_ids=(whole[7],)),
        Sampling(length, logprobs=0),
    ):
        engine.add([1, 2], sampling)
    (_, _, ended), (_, _, unasked), (_, _, cut) = run(engine).values()
    logits = runner.logits_after([1, 2, *whole[:length]]).double()
    assert ended.end_logprobs.token == ended.end_token == unasked.end_token == whole[7]
    assert math.isclose(ended.end_logprobs.logprob, logits.log_softmax(0)[whole[7]].item(), rel_tol=1e-5)
    assert (unasked.end_logprobs, cut.end_logprobs, cut.end_token) == (None, None, None)


def test_outputs_say_how_many_tokens_of_the_prompt_were_cached(engine_of):
    engine = engine_of()
    found = []
    for prompt in ([7] * 11, [7] * 11, [8] * 11):
        engine.add(prompt, Sampling(2, ignore_eos=True))
        found += [last.cached_tokens for _, _, last in run(engine).values()]
    assert found == [0, 8, 0]  # pages of 4 positions, and one token is left to compute
