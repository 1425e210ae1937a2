"""Tests of updates of the weights over a fake model: what becomes of requests and of cached prefixes."""

import random
from typing import get_args

import pytest

from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine, FirstToken, InFlight
from octile.serve.engine.request import Request, Sampling
from tests.serve.fake_runner import FakeRunner

WAYS = get_args(InFlight)


@pytest.fixture
def engine_of(tokenizer):
    def make(runner, **limits):
        return Engine(runner, tokenizer, EngineConfig(**{"max_batch": 4, "max_step_tokens": 32, **limits}))

    return make


def expected_tokens(runner: FakeRunner, request: Request) -> list[int]:
    """What the weights that a request's marks name write, each after the tokens of those before."""
    ends = [start for start, _ in request.weights_versions[1:]] + [len(request.tokens)]
    tokens = list(request.prompt)
    for (start, runner.version), end in zip(request.weights_versions, ends, strict=True):
        assert len(tokens) == start
        sampling = request.sampling
        tokens += runner.text_of(tokens, Sampling(end - start, sampling.temperature, seed=sampling.seed))
    return tokens


@pytest.mark.one_case
@pytest.mark.parametrize("in_flight", WAYS)
@pytest.mark.parametrize(("n_drafts", "max_ahead"), [(0, 0), (0, 4), (2, 4), (1, 0)])
def test_each_piece_of_a_text_is_that_of_the_weights_which_its_marks_name(engine_of, in_flight, n_drafts, max_ahead):
    draw = random.Random(n_drafts)
    runner = FakeRunner(n_pages=20, max_ahead=max_ahead, n_drafts=n_drafts)
    engine = engine_of(runner, n_drafts=n_drafts)
    requests, outputs = [], []
    for _ in range(3):
        for i in range(6):
            prompt = [7] * draw.randint(0, 9) + [draw.randint(0, 3) for _ in range(draw.randint(1, 20))]
            sampling = Sampling(draw.randint(1, 30), float(i % 2), seed=i, ignore_eos=True)
            requests.append(engine.add(prompt, sampling))
            for _ in range(draw.randint(0, 5)):
                outputs += engine.step()
        outputs += engine.update_weights(in_flight)
    while engine.has_work:
        outputs += engine.step()
    stats = engine.stats()
    assert (stats.weights_version, stats.finished, stats.used_pages) == (3, 18, 0)
    assert (max(len(request.weights_versions) for request in requests) > 1) == (in_flight != "finish")
    for request in requests:
        own = [output for output in outputs if output.request_id == request.id]
        assert [token for output in own for token in output.tokens] == request.tokens[len(request.prompt) :].tolist()
        versions = [output.weights_version for output in own if output.tokens]
        assert sorted(set(versions)) == [version for _, version in request.weights_versions]
        assert request.tokens.tolist() == expected_tokens(runner, request)


def test_requests_that_wait_begin_with_the_new_weights_and_delay_no_step_of_those_that_finish(engine_of):
    engine = engine_of(FakeRunner(max_ahead=4))
    first = engine.add([0], Sampling(9, ignore_eos=True))
    engine.step()
    second = engine.add([1], Sampling(5, ignore_eos=True))
    outputs = engine.update_weights("finish")
    assert {output.request_id for output in outputs} == {first.id}
    assert (first.n_generated, second.n_generated) == (9, 0)
    assert engine.stats().steps_ahead == 8, "a step was not launched ahead because the second request could join"
    while engine.has_work:
        engine.step()
    assert (first.weights_versions, second.weights_versions) == ([(1, 0)], [(1, 1)])


def test_the_step_that_is_launched_counts(engine_of):
    engine = engine_of(FakeRunner(max_ahead=4))
    request = engine.add([0], Sampling(9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    (output,) = engine.update_weights("continue")
    assert (len(output.tokens), output.weights_version) == (1, 0)
    assert request.n_generated == engine.stats().steps == 4


def test_requests_that_were_preempted_finish_with_the_old_weights(engine_of):
    engine = engine_of(FakeRunner(n_pages=6))
    requests = [engine.add([i] * 5, Sampling(12, ignore_eos=True)) for i in range(2)]
    while not engine.stats().preemptions:
        engine.step()
    engine.update_weights("finish")
    assert [request.weights_versions for request in requests] == [[(5, 0)], [(5, 0)]]
    assert [request.n_generated for request in requests] == [12, 12]


@pytest.mark.parametrize("in_flight", WAYS)
def test_no_prefix_of_old_weights_is_shared(engine_of, in_flight):
    engine = engine_of(FakeRunner())
    prompt, sampling = [5] * 13, Sampling(8, ignore_eos=True)
    for _ in range(2):
        engine.add(prompt, sampling)
        while engine.has_work:
            engine.step()
    assert engine.stats().shared_tokens == 12
    engine.add(prompt, sampling)  # shares three pages, and holds them during the update
    engine.step()
    engine.update_weights(in_flight)
    assert engine.stats().cached_pages == 0
    engine.add(prompt, sampling)
    while engine.has_work:
        engine.step()
    # recomputed, the one in flight computes pages of the new weights, which the last one shares
    assert engine.stats().shared_tokens == 24 + (12 if in_flight == "recompute" else 0)


def test_pages_that_a_request_fills_over_old_latents_are_not_shared(engine_of):
    engine = engine_of(FakeRunner(), max_step_tokens=4)
    first = engine.add([5] * 13, Sampling(20, ignore_eos=True))
    engine.step()
    engine.update_weights("continue")
    engine.add([5] * 13, Sampling(9, ignore_eos=True))
    while first.n_pending > 1 or engine.stats().waiting:
        engine.step()
    for _ in range(4):
        engine.step()
    third = engine.add([5] * 13, Sampling(9, ignore_eos=True))
    engine.step()
    assert engine.stats().shared_tokens == 12, "pages of the second request, which began after the update, are shared"
    assert not set(third.pages) & set(first.pages)


def test_a_request_that_continues_and_is_preempted_has_new_latents_from_then_on(engine_of):
    engine = engine_of(FakeRunner(n_pages=6))
    requests = [engine.add([i] * 5, Sampling(12, ignore_eos=True)) for i in range(2)]
    engine.step()
    engine.update_weights("continue")
    assert [request.has_old_latents for request in requests] == [True, True]
    while not engine.stats().preemptions:
        engine.step()
    assert [request.has_old_latents for request in requests] == [True, False]


def test_recomputed_requests_are_not_counted_as_preempted_and_keep_their_order(engine_of):
    engine = engine_of(FakeRunner(), max_batch=2, max_step_tokens=2)
    requests = [engine.add([i], Sampling(9, ignore_eos=True)) for i in range(2)]
    engine.step()
    engine.update_weights("recompute")
    assert (engine.stats().running, engine.stats().waiting, engine.stats().preemptions) == (0, 2, 0)
    engine.step()  # two tokens of the first one
    assert [request.n_generated for request in requests] == [2, 1]


class Latents:
    """The latents of a prompt that another engine has prefilled with the old weights."""

    released = False

    def write(self, pages, first):
        raise AssertionError("latents of old weights are written to the cache")

    def release(self):
        self.released = True


def test_a_prompt_that_another_engine_has_prefilled_with_the_old_weights_is_computed_anew(engine_of):
    runner, latents = FakeRunner(), Latents()
    engine = engine_of(runner)
    request = Request(0, [1, 2, 3], Sampling(4, ignore_eos=True), 0)
    engine.adopt(request, FirstToken(9, None), latents)
    (output,) = engine.update_weights("continue")
    assert (output.tokens, output.weights_version, latents.released) == ((9,), 0, True)
    while engine.has_work:
        engine.step()
    assert request.weights_versions == [(3, 0), (4, 1)]


@pytest.mark.parametrize("in_flight", ["abort", None])
def test_an_unknown_way_is_refused(engine_of, in_flight):
    with pytest.raises(ValueError, match=r"^in_flight must be one of finish, recompute, continue, not "):
        engine_of(FakeRunner()).update_weights(in_flight)


def test_weights_that_are_refused_leave_the_engine_as_it_is(engine_of, monkeypatch):
    runner = FakeRunner()
    engine = engine_of(runner)
    request = engine.add([1], Sampling(9, ignore_eos=True))
    engine.step()

    def refuse():
        raise ValueError("model must have finite weights")

    monkeypatch.setattr(runner, "check_weights", refuse)
    with pytest.raises(ValueError, match="finite"):
        engine.update_weights("recompute")
    assert (engine.weights_version, runner.version, request.n_generated) == (0, 0, 1)
    assert engine.stats().running == 1
