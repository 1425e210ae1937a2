"""Tests of passes with prompts, and of decode steps before and after them, that are launched before the step before is
collected, over a fake model.
"""

import contextlib
import random
import signal
from array import array
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from octile.serve.engine import launched_steps, sampler
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import FinishReason, Sampling
from octile.serve.engine.sampler import ChosenTokens, Row, choose_tokens
from octile.serve.runner.batch import DecodedTokens
from tests.serve.fake_runner import FakeRunner

PLAIN = ({}, {"temperature": 1.0}, {"temperature": 1.0, "stop": ("e",)})
WAYS = (
    *PLAIN,
    *PLAIN,
    *PLAIN,
    *PLAIN,
    {"logprobs": 0},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"temperature": 1.0, "presence_penalty": 0.5},
)
OF_TEXT = (  # whose tokens are chosen once the host knows those before
    *PLAIN,
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "frequency_penalty": 0.5, "stop": ("e",)},
    {"bad_words": ((65,), (66, 67)), "min_tokens": 1, "logit_bias": ((70, 2.0),)},
    {"temperature": 1.0, "grammar": "start: /[a-f]{1,9}(g|h)/"},
)


@pytest.fixture
def engine_of(tokenizer):
    def make(ahead=True, runner=None, **limits):
        engine = Engine(
            runner or FakeRunner(n_pages=40, scale=2.0, max_ahead=4),
            tokenizer,
            EngineConfig(**{"max_batch": 4, "max_step_tokens": 16, **limits}),
        )
        engine.steps.runs_ahead = ahead
        return engine

    return make


def passes_ahead(engine):
    """How many passes had tokens of the one before that nobody had collected."""
    return sum(batch.chosen is not None for batch in engine._runner.batches)


def run(engine):
    """Step to the end, and return {request id: [tokens, text, log-probabilities, those of the prompt, reason]}."""
    found: dict[int, list] = {}
    while engine.has_work:
        add_to(found, engine.step())
    return found


def add_to(found, outputs):
    for output in outputs:
        new = output.tokens, output.text, output.logprobs, output.prompt_logprobs
        before = found.get(output.request_id, ((), "", (), (), None))
        assert before[-1] is None, "an output follows the last one"
        found[output.request_id] = [*(a + b for a, b in zip(before, new, strict=False)), output.finish_reason]


def test_the_next_pass_is_launched_before_the_host_waits_for_tokens(engine_of, monkeypatch):
    events = []
    runner = FakeRunner(n_pages=40, max_ahead=4)
    launch, wait = runner.run, ChosenTokens.wait
    monkeypatch.setattr(runner, "run", lambda batch: events.append("launch") or launch(batch))
    monkeypatch.setattr(ChosenTokens, "wait", lambda self: events.append("wait") or wait(self))
    engine = engine_of(runner=runner)
    for i in range(3):
        engine.add([i] * 16, Sampling(1))
    run(engine)
    assert events == ["launch", "launch", "wait", "launch", "wait", "wait"]


def test_decode_steps_and_passes_are_launched_before_the_host_waits_for_each_other(engine_of, monkeypatch):
    events = []
    runner = FakeRunner(n_pages=40, max_ahead=4)
    launch, decode = runner.run, runner.decode
    monkeypatch.setattr(runner, "decode", lambda *args: events.append("decode") or decoded(*args))

    def decoded(*args):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "run", launch)  # by which this runner decodes
            return decode(*args)

    monkeypatch.setattr(runner, "run", lambda batch: events.append("pass") or launch(batch))
    for kind in ChosenTokens, DecodedTokens:
        monkeypatch.setattr(kind, "wait", lambda self, wait=kind.wait: events.append("wait") or wait(self))
    engine = engine_of(runner=runner)
    requests = [engine.add([1, 2], Sampling(5, ignore_eos=True))]
    engine.step()
    engine.step()
    assert events == ["pass", "decode", "wait", "decode", "wait"]
    requests.append(engine.add([3, 4], Sampling(3, ignore_eos=True)))
    events.clear()
    engine.step()
    assert events[:2] == ["pass", "wait"]  # the decode step, whose tokens the pass reads, is collected after its launch
    events.clear()
    engine.step()
    assert events == ["decode", "wait"]
    run(engine)
    for request in requests:
        assert request.tokens.tolist() == [*request.prompt, *runner.text_of([*request.prompt], request.sampling)]


def test_a_pass_is_launched_before_the_tokens_that_its_own_depend_on_are_known(engine_of, monkeypatch):
    events = []
    runner = FakeRunner(n_pages=40, max_ahead=4)
    launch, wait, choose = runner.run, ChosenTokens.wait, sampler.choose
    monkeypatch.setattr(runner, "run", lambda batch: events.append("pass") or launch(batch))
    monkeypatch.setattr(ChosenTokens, "wait", lambda self: events.append("wait") or wait(self))
    monkeypatch.setattr(sampler, "choose", lambda *args: events.append("choose") or choose(*args))
    engine = engine_of(runner=runner)
    for seed in range(2):
        engine.add([seed, 2], Sampling(4, 1.0, seed=seed, presence_penalty=1.0, ignore_eos=True))
    run(engine)
    assert events == ["pass", "choose", *3 * ["pass", "wait", "choose"], "wait"]


def test_a_pass_of_plain_requests_is_chosen_at_once_beside_one_that_depends_on_its_text(engine_of):
    """A prompt with a penalty begins beside a decode row whose token is not known: neither needs it."""
    engine = engine_of()
    plain = engine.add([1, 2], Sampling(9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    penalized = engine.add([3] * 5, Sampling(3, 1.0, seed=1, presence_penalty=1.0, ignore_eos=True))
    engine.step()
    assert isinstance(engine.steps.launched[0], launched_steps.ChosenPass)
    engine.step()
    assert isinstance(engine.steps.launched[0], launched_steps.LogitsPass)  # its next token depends on the first one
    run(engine)
    for request in (plain, penalized):
        assert request.tokens.tolist() == [*request.prompt, *engine._runner.text_of(request.prompt, request.sampling)]


def test_a_prompt_of_which_a_pass_leaves_one_token_is_not_left_out_of_the_decode_steps_after_it(engine_of):
    engine = engine_of()
    engine.add([1, 2], Sampling(40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    late = engine.add([3] * 16, Sampling(3, ignore_eos=True))  # 15 fit into the pass beside the row that decodes
    for _ in range(7):
        engine.step()
    assert late.finish_reason is not None
    run(engine)
    assert late.tokens.tolist() == [3] * 16 + engine._runner.text_of([3] * 16, Sampling(3))


def test_a_pass_with_more_requests_than_a_decode_step_may_have_is_collected_before_it(engine_of):
    engine = engine_of(max_batch=8, runner=FakeRunner(n_pages=40, scale=2.0, max_ahead=2))
    requests = [engine.add([i, 2], Sampling(20, ignore_eos=True)) for i in range(4)]
    last = engine.add([5] * 60, Sampling(2))
    while last.tokens[-1] >= 0:
        engine.step()
    for request in requests[1:]:  # two requests are left of five whose tokens the pass in flight chooses
        engine.cancel(request.id)
    run(engine)
    assert requests[0].tokens.tolist() == [0, 2, *engine._runner.text_of([0, 2], Sampling(20))]


def passes_after_decode_steps(runner, monkeypatch):
    """Count, in a list, the passes whose tokens a decode step has chosen that nobody had collected."""
    found, run, decode = [], runner.run, runner.decode
    last = []

    def decoded(*args):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "run", run)
            step = decode(*args)
        last[:] = [step.on_device]
        return step

    monkeypatch.setattr(runner, "decode", decoded)
    monkeypatch.setattr(runner, "run", lambda batch: found.extend(t for t in last if t is batch.chosen) or run(batch))
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("ways", [PLAIN, (*PLAIN, {"logprobs": 0})], ids=["plain", "scored"])
@pytest.mark.parametrize("n_pages", [40, 24], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_one_by_one_get_what_they_get_where_each_step_is_collected_at_once(
    engine_of, monkeypatch, seed, n_pages, ways
):
    expected = random_run(engine_of(ahead=False, runner=FakeRunner(n_pages=60, scale=2.0)), seed, ways, pause=9)
    runner = FakeRunner(n_pages=n_pages, scale=2.0, max_ahead=4)
    found = passes_after_decode_steps(runner, monkeypatch)
    engine = engine_of(runner=runner)
    assert random_run(engine, seed, ways, pause=9) == expected
    assert found
    assert runner.continued_passes > 0
    assert engine.stats().used_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_requests_that_are_canceled_between_decode_steps_and_passes_change_no_other(engine_of, seed):
    expected = random_run(engine_of(ahead=False), seed, PLAIN, pause=9)
    engine = engine_of()
    found = random_run(engine, seed, PLAIN, n_cancel=10, pause=9)
    assert engine.stats().canceled > 0
    assert engine._runner.continued_passes > 0
    assert engine.stats().used_pages == 0
    for request_id, result in found.items():
        if result[-1] is not None:
            assert result[0] == expected[request_id][0]


def test_tokens_are_not_lost_if_no_pass_can_be_launched_after_a_decode_step(engine_of, monkeypatch):
    engine = engine_of()
    runner = engine._runner
    requests = [engine.add([1, 2], Sampling(9, ignore_eos=True))]
    for _ in range(2):
        engine.step()
    requests.append(engine.add([3, 4], Sampling(3, ignore_eos=True)))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    run(engine)
    assert requests[0].tokens.tolist() == [1, 2, *runner.text_of([1, 2], Sampling(9))]
    assert requests[1].tokens.tolist() == [3, 4, *runner.text_of([3, 4], Sampling(3))]


def random_run(engine, seed, ways, n_cancel=0, max_new=12, pause=3):
    """Requests that come, after up to `pause` steps each, and are canceled at random, and what their outputs have."""
    draw, cancels, found = random.Random(seed), random.Random(seed), {}
    for i in range(30):
        prompt = [7] * draw.randint(0, 9) + [draw.randint(0, 3) for _ in range(draw.randint(1, 40))]
        ignore_eos = draw.random() < 0.5
        engine.add(prompt, Sampling(draw.randint(1, max_new), seed=i, ignore_eos=ignore_eos, **draw.choice(ways)))
        for _ in range(draw.randint(0, pause)):
            add_to(found, engine.step())
        if cancels.random() * 30 < n_cancel and engine._requests:
            canceled = cancels.choice([*engine._requests])
            engine.cancel(canceled)
            found.pop(canceled, None)
    while engine.has_work:
        add_to(found, engine.step())
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("ways", [PLAIN, WAYS, OF_TEXT], ids=["plain", "mixed", "of_text"])
@pytest.mark.parametrize("seed", range(4))
def test_each_request_gets_what_it_gets_where_each_pass_is_collected_at_once(engine_of, seed, ways):
    expected = random_run(engine_of(ahead=False), seed, ways)
    engine = engine_of()
    assert random_run(engine, seed, ways) == expected
    assert passes_ahead(engine) > 0
    stats = engine.stats()
    assert (stats.finished, stats.used_pages, stats.running, stats.waiting) == (30, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS, OF_TEXT], ids=["mixed", "of_text"])
@pytest.mark.parametrize("seed", range(4))
def test_texts_that_were_preempted_are_the_same(engine_of, seed, ways):
    expected = random_run(engine_of(ahead=False), seed, ways, max_new=40)
    engine = engine_of(runner=FakeRunner(n_pages=24, scale=2.0, max_ahead=4))
    assert random_run(engine, seed, ways, max_new=40) == expected
    assert passes_ahead(engine) > 0
    assert engine.stats().preemptions > 0
    assert engine.stats().used_pages == 0


@pytest.mark.one_case
@pytest.mark.parametrize("ways", [WAYS, OF_TEXT], ids=["mixed", "of_text"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_canceled_request_changes_no_other(engine_of, seed, ways):
    expected = random_run(engine_of(ahead=False), seed, ways)
    engine = engine_of()
    found = random_run(engine, seed, ways, n_cancel=8)
    ended = {i: result for i, result in found.items() if result[-1] is not None}
    assert engine.stats().canceled > 0
    assert engine.stats().used_pages == 0
    for request_id, result in ended.items():
        assert result[0] == expected[request_id][0]


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [1, 3])
@pytest.mark.parametrize("ways", [WAYS, OF_TEXT], ids=["mixed", "of_text"])
@pytest.mark.parametrize("seed", range(3))
def test_texts_with_drafts_are_those_of_steps_that_are_collected_at_once(engine_of, seed, ways, n_drafts):
    expected = random_run(engine_of(ahead=False), seed, ways, max_new=40, pause=9)
    runner = FakeRunner(n_pages=24, scale=2.0, max_ahead=4, n_drafts=n_drafts)
    engine = engine_of(runner=runner, n_drafts=n_drafts)
    assert random_run(engine, seed, ways, max_new=40, pause=9) == expected
    stats = engine.stats()
    assert runner.divided_steps > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps_ahead > 0
    assert stats.preemptions > 0
    assert (stats.finished, stats.used_pages, stats.running, stats.waiting) == (30, 0, 0, 0)


@pytest.mark.one_case
@pytest.mark.parametrize("ways", [WAYS, OF_TEXT], ids=["mixed", "of_text"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_canceled_request_with_drafts_changes_no_other(engine_of, seed, ways):
    expected = random_run(engine_of(ahead=False), seed, ways, pause=9)
    runner = FakeRunner(n_pages=40, scale=2.0, max_ahead=4, n_drafts=2)
    engine = engine_of(runner=runner, n_drafts=2)
    found = random_run(engine, seed, ways, n_cancel=10, pause=9)
    assert engine.stats().canceled > 0
    assert runner.divided_steps > 0
    assert engine.stats().used_pages == 0
    for request_id, result in found.items():
        if result[-1] is not None:
            assert result == expected[request_id]


def test_logits_of_a_step_with_drafts_are_launched_before_the_text_that_its_tokens_depend_on_is_known(
    engine_of, monkeypatch
):
    events, runner = [], FakeRunner(n_pages=40, max_ahead=4, n_drafts=2)
    for kind, name in ((runner, "decode_logits"), (runner, "decode_chosen"), (DecodedTokens, "wait")):
        call = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, call=call, name=name: events.append(name) or call(*args))
    engine = engine_of(runner=runner, n_drafts=2)
    request = engine.add([1, 2], Sampling(9, 1.0, presence_penalty=1.0, ignore_eos=True))
    engine.add([3, 4], Sampling(9, ignore_eos=True))
    for _ in range(4):  # the first one prefills
        engine.step()
    assert events == ["decode_logits", *3 * ["decode_chosen", "decode_logits", "wait"]]
    run(engine)
    assert request.tokens.tolist() == [1, 2, *runner.text_of([1, 2], request.sampling)]


def test_steps_whose_requests_depend_on_no_text_any_more_choose_their_tokens_themselves(engine_of):
    runner = FakeRunner(n_pages=40, max_ahead=4, n_drafts=2)
    engine = engine_of(runner=runner, n_drafts=2)
    penalized = engine.add([1, 2], Sampling(9, 1.0, presence_penalty=1.0, ignore_eos=True))
    plain = engine.add([3, 4], Sampling(40, ignore_eos=True))
    while penalized.finish_reason is None:
        engine.step()
    n_divided = runner.divided_steps
    run(engine)
    assert runner.divided_steps == n_divided < runner.decode_steps - 5
    assert plain.tokens.tolist() == [3, 4, *runner.text_of([3, 4], plain.sampling)]


@pytest.mark.filterwarnings("ignore:a draft cannot be chosen")
def test_an_exception_between_the_parts_of_a_step_with_drafts_ends_only_the_request_that_raises_it(
    engine_of, monkeypatch
):
    def raising(logits, rows):
        if any(row.seed == 3 and row.position > 6 and row.text is not None for row in rows):
            raise RuntimeError("no choice")
        return choose(logits, rows)

    choose, runner = sampler.choose, FakeRunner(n_pages=40, scale=2.0, max_ahead=4, n_drafts=2)
    monkeypatch.setattr(sampler, "choose", raising)
    engine = engine_of(runner=runner, n_drafts=2)
    biased = Sampling(20, ignore_eos=True, logit_bias=((70, 1.0),))
    samplings = [replace(biased, seed=seed) if seed % 2 else Sampling(20, ignore_eos=True) for seed in range(4)]
    for seed, sampling in enumerate(samplings):
        engine.add([seed, 1, 2], sampling)
    found = run(engine)
    assert {i for i, result in found.items() if result[-1] == FinishReason.ERROR} == {3}
    assert runner.divided_steps > 3
    for seed, sampling in enumerate(samplings[:3]):
        assert [*found[seed][0]] == runner.text_of([seed, 1, 2], sampling)


def test_a_step_with_drafts_whose_logits_alone_are_launched_is_forgotten_with_its_requests(engine_of):
    engine = engine_of(runner=FakeRunner(n_pages=40, max_ahead=4, n_drafts=2), n_drafts=2)
    request = engine.add([1, 2], Sampling(9, presence_penalty=1.0, ignore_eos=True))
    for _ in range(2):
        engine.step()
    assert isinstance(engine.steps.launched[-1], launched_steps.LogitsStep)
    engine.cancel(request.id)
    other = engine.add([5] * 3, Sampling(12, presence_penalty=1.0, ignore_eos=True))
    run(engine)
    assert other.tokens.tolist() == [5] * 3 + engine._runner.text_of([5] * 3, other.sampling)


def test_a_prefix_is_shared_while_the_pass_that_computes_it_is_not_collected(engine_of):
    engine = engine_of(max_step_tokens=32)
    engine.add([1] * 12, Sampling(1))
    engine.add([2] * 33, Sampling(1))
    engine.step()
    assert isinstance(engine.steps.launched[0], launched_steps.ChosenPass)
    engine.add([2] * 33, Sampling(1))
    run(engine)
    assert engine.stats().shared_tokens == 32


def test_pages_of_generated_tokens_are_shared_once_these_are_known(engine_of):
    runner = FakeRunner(n_pages=60, max_ahead=4)
    engine = engine_of(runner=runner, max_step_tokens=8)
    first = engine.add([1, 2], Sampling(12, ignore_eos=True))
    others = [engine.add([3] * 60, Sampling(1)) for _ in range(2)]
    while others[1].finish_reason is None:
        engine.step()
    run(engine)
    assert passes_ahead(engine) > 8
    before = engine.stats().shared_tokens
    engine.add([*first.tokens, 5], Sampling(1))
    run(engine)
    assert engine.stats().shared_tokens - before == 12  # of 13 positions, in pages of 4


def test_logits_that_are_not_finite_end_only_their_request(engine_of):
    runner = FakeRunner(n_pages=60, max_ahead=4)
    right = runner.logits_after
    runner.logits_after = lambda tokens: (
        torch.full((320,), torch.nan) if tokens[0] == 9 and len(tokens) == 4 else right(tokens)
    )
    engine = engine_of(runner=runner, max_step_tokens=8)
    for prompt in ([9, 1], [8, 1], [7] * 60):
        engine.add(prompt, Sampling(8, ignore_eos=True))
    found = run(engine)
    assert [reason for *_, reason in found.values()].count(FinishReason.ERROR) == 1
    assert len(found[0][0]) == 2
    assert [*found[1][0]] == runner.text_of([8, 1], Sampling(8))
    assert passes_ahead(engine) > 0


@pytest.mark.parametrize("logit_bias", [(), ((70, 1.0),)], ids=["plain", "of_text"])
def test_an_exception_when_tokens_are_chosen_ends_only_the_request_that_raises_it(engine_of, monkeypatch, logit_bias):
    def raising(logits, rows):
        if any(row.seed == 3 for row in rows):
            raise RuntimeError("no choice")
        return choose(logits, rows)

    choose = sampler.choose
    monkeypatch.setattr(sampler, "choose", raising)
    engine = engine_of(max_step_tokens=8)
    for seed in range(5):
        engine.add([seed] * 20, Sampling(6, seed=seed, ignore_eos=True, logit_bias=logit_bias))
    found = run(engine)
    assert {i for i, result in found.items() if result[-1] == FinishReason.ERROR} == {3}
    for i in (0, 1, 2, 4):
        assert [*found[i][0]] == engine._runner.text_of([i] * 20, Sampling(6, seed=i, logit_bias=logit_bias))


@pytest.mark.parametrize("changes", [{}, {"presence_penalty": 0.1}], ids=["plain", "of_text"])
@pytest.mark.parametrize("in_flight", ["finish", "recompute", "continue"])
def test_weights_are_updated_after_the_pass_in_flight(engine_of, in_flight, changes):
    runner = FakeRunner(n_pages=60, max_ahead=4)
    engine = engine_of(runner=runner, max_step_tokens=8)
    first = engine.add([1, 2], Sampling(12, ignore_eos=True, **changes))
    engine.add([3] * 60, Sampling(1))
    for _ in range(3):
        engine.step()
    assert not isinstance(engine.steps.launched[0], launched_steps.DecodeStep)
    n_before = first.n_generated - (first.tokens[-1] < 0)
    outputs = engine.update_weights(in_flight)
    new = [token for output in outputs if output.request_id == first.id for token in output.tokens]
    assert min(first.tokens) >= 0
    assert len(new) == (12 - n_before if in_flight == "finish" else 1)
    run(engine)
    assert [version for _, version in first.weights_versions] == ([0] if in_flight == "finish" else [0, 1])


@pytest.mark.parametrize("in_flight", ["finish", "recompute", "continue"])
def test_weights_are_updated_after_the_step_with_drafts_whose_logits_are_in_flight(engine_of, in_flight):
    runner = FakeRunner(n_pages=60, scale=2.0, max_ahead=4, n_drafts=2)
    engine, sampling = engine_of(runner=runner, n_drafts=2), Sampling(30, ignore_eos=True, logit_bias=((70, 1.0),))
    request, old = engine.add([1, 2], sampling), [1, 2, *runner.text_of([1, 2], sampling)]
    for _ in range(4):
        engine.step()
    assert isinstance(engine.steps.launched[0], launched_steps.LogitsStep)
    n_before = len(request.tokens)
    engine.update_weights(in_flight)
    end = len(request.tokens)  # of what the old weights have chosen
    assert n_before < end
    run(engine)
    new = runner.text_of(old[:end], replace(sampling, max_new_tokens=32 - end)) if end < 32 else []
    assert request.tokens.tolist() == old[:end] + new
    assert [version for _, version in request.weights_versions] == ([0] if in_flight == "finish" else [0, 1])


def test_a_prompt_whose_first_token_ends_its_text_is_scored_once(engine_of, tokenizer):
    runner = FakeRunner(n_pages=60, max_ahead=4)
    right = runner.logits_after
    runner.logits_after = lambda tokens: (
        torch.nn.functional.one_hot(torch.tensor(tokenizer.end), 320).float() if tokens[0] == 9 else right(tokens)
    )
    engine = engine_of(runner=runner, max_step_tokens=8)
    engine.add([9] * 9, Sampling(5, prompt_logprobs=0))
    engine.add([3] * 7, Sampling(5, ignore_eos=True))
    engine.add([4] * 8, Sampling(5, logprobs=2, ignore_eos=True))
    found = run(engine)
    assert len(found[0][3]) == 8
    assert [len(result[0]) for result in found.values()] == [0, 5, 5]


def test_a_request_that_is_canceled_during_a_decode_step_keeps_the_tokens_that_are_known(engine_of):
    engine = engine_of()
    request, other = (engine.add([i, 2], Sampling(9, ignore_eos=True)) for i in range(2))
    for _ in range(3):
        engine.step()
    engine.cancel(request.id)
    known = [0, 2, *engine._runner.text_of([0, 2], Sampling(3))]
    assert request.tokens.tolist() == known
    engine.add([3, 4], Sampling(3))
    engine.step()  # a pass after the decode step
    assert other.tokens[-1] < 0
    assert request.tokens.tolist() == known
    run(engine)
    assert other.tokens.tolist() == [1, 2, *engine._runner.text_of([1, 2], Sampling(9))]


def test_a_canceled_request_keeps_the_tokens_that_are_known(engine_of):
    engine = engine_of(max_step_tokens=8)
    request = engine.add([1, 2], Sampling(9, ignore_eos=True))
    engine.add([3] * 60, Sampling(1))
    for _ in range(3):
        engine.step()
    assert request.tokens[-1] < 0
    engine.cancel(request.id)
    assert request.tokens.tolist() == [1, 2, *engine._runner.text_of([1, 2], Sampling(3))]
    run(engine)


def test_the_last_full_page_of_a_text_that_ends_is_shared(engine_of):
    engine = engine_of(max_step_tokens=8)
    request = engine.add([1, 2], Sampling(3, ignore_eos=True))  # in the last pass its first page becomes full
    engine.add([3] * 60, Sampling(1))
    while request.finish_reason is None:
        engine.step()
    engine.add([*request.tokens], Sampling(1))
    run(engine)
    assert engine.stats().shared_tokens == 4


def test_tokens_are_not_lost_if_the_next_pass_cannot_be_launched(engine_of, monkeypatch):
    runner = FakeRunner(n_pages=60, max_ahead=4)
    engine = engine_of(runner=runner, max_step_tokens=8)
    engine.add([1, 2], Sampling(9, ignore_eos=True))
    engine.add([3] * 60, Sampling(1, ignore_eos=True))
    with monkeypatch.context() as patch:
        launch = runner.run
        patch.setattr(runner, "run", lambda batch: launch(batch) if batch.chosen is None else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    found = run(engine)
    assert [*found[0][0]] == runner.text_of([1, 2], Sampling(9))
    assert [*found[1][0]] == runner.text_of([3] * 60, Sampling(1))


def test_a_pass_whose_requests_have_all_ended_is_forgotten(engine_of):
    engine = engine_of(max_step_tokens=8)
    requests = [engine.add([i] * 20, Sampling(2)) for i in range(2)]
    engine.step()
    for request in requests:
        engine.cancel(request.id)
    engine.add([5] * 3, Sampling(2, ignore_eos=True))
    assert [*run(engine)[2][0]] == engine._runner.text_of([5] * 3, Sampling(2))


def test_a_request_that_is_preempted_before_its_pass_is_collected_goes_on(engine_of):
    engine = engine_of(max_step_tokens=8)
    request = engine.add([1, 2], Sampling(9, ignore_eos=True))
    engine.add([3] * 60, Sampling(1))
    while len(request.tokens) < 5:  # of which the pass in flight chooses the last one, and fills a page
        engine.step()
    assert request.tokens[-1] < 0
    engine._scheduler.recompute([request])
    assert [*run(engine)[request.id][0]] == engine._runner.text_of([1, 2], Sampling(9))[-7:]
    assert engine.stats().used_pages == 0


def interrupt(monkeypatch, seed):
    """Have each third wait for tokens, on average, end with an exception, and return a list with an entry for each."""
    draw, found = random.Random(seed), []

    def interrupted(wait):
        def wait_or_raise(*args):
            if draw.random() < 1 / 3:
                found.append(args)
                raise KeyboardInterrupt
            return wait(*args)

        return wait_or_raise

    for kind in ChosenTokens, DecodedTokens:
        monkeypatch.setattr(kind, "wait", interrupted(kind.wait))
    for name in "choose_tokens", "token_logprobs":
        monkeypatch.setattr(launched_steps, name, interrupted(getattr(launched_steps, name)))
    return found


def go_on(call):
    """Call something until no interrupt ends it."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return call()


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [0, 2])
@pytest.mark.parametrize("ways", [PLAIN, WAYS, OF_TEXT], ids=["plain", "mixed", "of_text"])
@pytest.mark.parametrize("seed", range(2))
def test_interrupted_waits_lose_no_tokens(engine_of, monkeypatch, seed, ways, n_drafts):
    expected = random_run(engine_of(ahead=False), seed, ways, pause=9)
    runner = FakeRunner(n_pages=40, scale=2.0, max_ahead=4, n_drafts=n_drafts)
    engine = engine_of(runner=runner, n_drafts=n_drafts)
    found, step = interrupt(monkeypatch, seed), engine.step
    monkeypatch.setattr(engine, "step", lambda: go_on(step))
    assert random_run(engine, seed, ways, pause=9) == expected
    assert found
    assert engine.stats().used_pages == 0


@pytest.mark.parametrize("in_flight", ["finish", "recompute", "continue"])
def test_an_update_that_an_interrupted_wait_ends_can_be_called_again(engine_of, monkeypatch, in_flight):
    engine = engine_of(max_step_tokens=8)
    engine.add([1, 2], Sampling(12, ignore_eos=True))
    engine.add([3] * 30, Sampling(9, ignore_eos=True))
    found = {}
    for _ in range(3):
        add_to(found, engine.step())
    with monkeypatch.context() as patch:
        interrupt(patch, 0)
        add_to(found, go_on(lambda: engine.update_weights(in_flight)))
    while engine.has_work:
        add_to(found, engine.step())
    assert [len(result[0]) for result in found.values()] == [12, 9]
    assert engine.weights_version == 1


@pytest.mark.one_case
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ways", [PLAIN, WAYS, OF_TEXT], ids=["plain", "mixed", "of_text"])
def test_interrupts_within_steps_lose_no_tokens(engine_of, monkeypatch, ways):
    expected = random_run(engine_of(ahead=False), 0, ways, pause=9)
    engine, draw, due, interrupts = engine_of(), random.Random(0), [], []
    extend, step = engine._extend, engine.step

    def interrupted(*args, **options):
        if due and draw.random() < 1 / 3:
            due.clear()
            interrupts.append(args)
            signal.raise_signal(signal.SIGINT)
        return extend(*args, **options)

    def step_with_an_interrupt():
        due.append(True)  # one a step: a second one takes effect at once
        return step()

    monkeypatch.setattr(engine, "_extend", interrupted)
    monkeypatch.setattr(engine, "step", lambda: go_on(step_with_an_interrupt))
    assert random_run(engine, 0, ways, pause=9) == expected
    assert interrupts


def test_outputs_that_no_call_has_returned_are_work(engine_of, monkeypatch):
    engine = engine_of(max_step_tokens=8)
    engine.add([1, 2], Sampling(5, ignore_eos=True))
    found = engine.step()
    monkeypatch.setattr(engine._runner, "update_weights", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights()
    assert engine.has_work
    found += engine.step()
    assert [token for output in found for token in output.tokens] == engine._runner.text_of([1, 2], Sampling(5))
    assert not engine.has_work


def test_no_output_follows_a_cancel_after_an_interrupt(engine_of, monkeypatch):
    engine = engine_of(max_step_tokens=8)
    request = engine.add([1, 2], Sampling(9, ignore_eos=True))
    engine.step()
    monkeypatch.setattr(engine._runner, "update_weights", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights("continue")
    assert engine.cancel(request.id)
    assert not engine.has_work
    assert min(request.tokens) >= 0


@pytest.mark.parametrize("logprobs", [(None, 2, 0, 1), (1, 2, 0, 1), (0, 0, 0, 0)], ids=["some", "all", "tokens"])
def test_chosen_tokens_are_those_of_the_device(logprobs):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.nan
    rows = [Row(Sampling(logprobs=n), 0, 3) for n in logprobs]
    chosen = ChosenTokens(logits, rows)
    expected = choose_tokens(logits, rows)
    logits.zero_()  # by the next pass
    assert chosen.on_device.tolist() == expected.tokens
    assert chosen.wait() == [(token, expected.logprobs.get(i)) for i, token in enumerate(expected.tokens)]
    assert expected.tokens[1] < 0


def test_tokens_of_a_request_are_an_array_to_its_end(engine_of):
    engine = engine_of(max_step_tokens=8)
    requests = [engine.add([i] * 20, Sampling(5, ignore_eos=True)) for i in range(3)]
    run(engine)
    for i, request in enumerate(requests):
        assert request.tokens == array("q", [*[i] * 20, *engine._runner.text_of([i] * 20, Sampling(5))])
