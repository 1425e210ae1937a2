"""Tests of the scheduler alone: a loop pretends to compute what is scheduled, and appends tokens."""

import random
from collections import Counter

import pytest

from octile.serve.engine import scheduler as scheduler_module
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.pages import PageAllocator, page_key
from octile.serve.engine.request import Request, Sampling
from octile.serve.engine.scheduler import Scheduler

PAGE = 4


def scheduler_of(n_pages=100, **limits):
    config = EngineConfig(**{"max_batch": 8, "max_step_tokens": 16, **limits})
    return Scheduler(PageAllocator(n_pages), PAGE, config)


def add(scheduler, n_prompt, max_new_tokens=4, first=None, request_id=None):
    request_id = len(scheduler.running) + len(scheduler.waiting) if request_id is None else request_id
    prompt = [1000 + request_id if first is None else first] * n_prompt
    request = Request(request_id, prompt, Sampling(max_new_tokens=max_new_tokens), seed=0)
    scheduler.add(request)
    return request


def step(scheduler):
    """Compute what is scheduled, and return {id: tokens read}."""
    scheduled = scheduler.schedule()
    assert sum(s.n_tokens for s in scheduled) <= scheduler.config.max_step_tokens
    for request, n_tokens in scheduled:
        end = request.n_computed + n_tokens
        assert len(request.pages) * PAGE >= end, "a token has no page"
        if end == len(request.tokens):
            request.tokens.append(len(request.tokens))
        scheduler.advance(request, end)
        if request.n_remaining == 0:
            scheduler.remove(request)
    return {s.request.id: s.n_tokens for s in scheduled}


def run_to_the_end(scheduler, max_steps=10_000):
    for _ in range(max_steps):
        if not (scheduler.waiting or scheduler.running):
            return
        assert step(scheduler), "requests wait, but nothing is scheduled"
    pytest.fail(f"{len(scheduler.waiting)} requests still wait")


def test_a_request_joins_while_others_decode():
    scheduler = scheduler_of()
    add(scheduler, 3)
    step(scheduler)
    add(scheduler, 5)
    assert step(scheduler) == {0: 1, 1: 5}


def test_a_long_prompt_is_read_in_chunks_while_others_decode():
    scheduler = scheduler_of()
    add(scheduler, 3, max_new_tokens=9)
    step(scheduler)
    add(scheduler, 40)
    assert [step(scheduler) for _ in range(4)] == [{0: 1, 1: 15}, {0: 1, 1: 15}, {0: 1, 1: 10}, {0: 1, 1: 1}]


def test_at_most_max_batch_requests_run():
    scheduler = scheduler_of(max_batch=2)
    requests = [add(scheduler, 2) for _ in range(3)]
    assert step(scheduler).keys() == {0, 1}
    run_to_the_end(scheduler)
    assert [request.n_remaining for request in requests] == [0, 0, 0]


def test_a_request_that_does_not_fit_holds_back_those_behind_it():
    scheduler = scheduler_of(n_pages=6)
    add(scheduler, 12, max_new_tokens=2)
    step(scheduler)
    add(scheduler, 13, max_new_tokens=2)
    add(scheduler, 1, max_new_tokens=2)
    assert step(scheduler).keys() == {0}
    assert step(scheduler).keys() == {1, 2}


def test_the_newest_request_is_put_back_when_pages_run_out_and_keeps_its_tokens():
    scheduler = scheduler_of(n_pages=5)
    requests = [add(scheduler, 4, max_new_tokens=12), add(scheduler, 4, max_new_tokens=12)]
    while not scheduler.preemptions:
        step(scheduler)
    assert (list(scheduler.running), list(scheduler.waiting)) == ([0], [requests[1]])
    assert len(requests[1].tokens) > 4
    run_to_the_end(scheduler)
    assert [request.tokens[4:].tolist() for request in requests] == [list(range(4, 16))] * 2


def test_a_request_that_was_put_back_shares_what_is_still_cached():
    scheduler = scheduler_of(n_pages=5)
    requests = [add(scheduler, 4, max_new_tokens=12), add(scheduler, 4, max_new_tokens=12)]
    while not scheduler.preemptions:
        step(scheduler)
    cached = scheduler.pages.n_cached
    while 1 not in scheduler.running:
        read = step(scheduler)
    assert cached > 0
    assert read[1] < len(requests[1].tokens) - 1


def test_drafts_put_nobody_back():
    scheduler = scheduler_of(n_pages=5, n_drafts=4, max_step_tokens=40)
    requests = [add(scheduler, 7, max_new_tokens=8), add(scheduler, 7, max_new_tokens=8)]
    step(scheduler)
    for request in requests:
        request.drafts = [1, 2, 3, 4]
    assert step(scheduler) == {0: 5, 1: 1}
    assert scheduler.preemptions == 0


def test_a_common_prefix_is_computed_once():
    scheduler = scheduler_of()
    add(scheduler, 14, first=7)
    step(scheduler)
    add(scheduler, 14, first=7)
    assert step(scheduler) == {0: 1, 1: 2}
    assert (scheduler.prompt_tokens, scheduler.shared_tokens) == (28, 12)


def test_equal_prompts_that_arrive_together_are_computed_once():
    scheduler = scheduler_of(max_step_tokens=40)
    for _ in range(3):
        add(scheduler, 14, first=7)
    add(scheduler, 5)
    assert step(scheduler) == {0: 14, 3: 5}
    assert step(scheduler) == {0: 1, 3: 1, 1: 2, 2: 2}
    assert (scheduler.prompt_tokens, scheduler.shared_tokens) == (3 * 14 + 5, 2 * 12)


def test_requests_that_are_held_back_keep_their_order():
    scheduler = scheduler_of(max_step_tokens=15)
    requests = [add(scheduler, 14, first=7) for _ in range(3)] + [add(scheduler, 5)]
    assert step(scheduler) == {0: 14, 3: 1}
    assert list(scheduler.waiting) == requests[1:3]


def spare_pages(n_running, n_free, n_tokens):
    """Whether a request of n_tokens joins n_running ones, which decode within their pages, with n_free free pages."""
    scheduler = scheduler_of(n_pages=n_running + n_free)
    for _ in range(n_running):
        add(scheduler, 2, max_new_tokens=2)
    step(scheduler)
    assert scheduler.pages.n_free == n_free
    add(scheduler, n_tokens)
    assert scheduler.can_admit() == (len(step(scheduler)) > n_running)
    return n_running in scheduler.running


def test_a_page_for_each_running_request_stays_free_when_another_joins():
    assert [spare_pages(1, n_free, 2 * PAGE) for n_free in (1, 2, 3)] == [False, False, True]
    assert [spare_pages(3, n_free, 2 * PAGE) for n_free in (3, 4, 5)] == [False, False, True]


def test_the_tokens_of_a_request_that_is_preempted_in_a_step_are_left_for_prompts():
    scheduler = scheduler_of(n_pages=2 + 25 + 2)
    add(scheduler, 1, max_new_tokens=40, request_id=5)  # as one that was preempted and came back has it: new, but first
    step(scheduler)
    add(scheduler, 4, max_new_tokens=40, request_id=0)
    add(scheduler, 100, request_id=3)
    while not scheduler.preemptions:
        read = step(scheduler)
    assert list(scheduler.running) == [0, 3]
    assert read == {0: 1, 3: 15}


def test_equal_prompts_that_wait_are_not_all_hashed_in_one_step(monkeypatch):
    hashed = []
    monkeypatch.setattr(scheduler_module, "page_key", lambda *page: hashed.append(page) or page_key(*page))
    scheduler = scheduler_of(max_step_tokens=100, max_batch=8)
    for _ in range(100):
        add(scheduler, 41, first=7, max_new_tokens=1)
    assert step(scheduler) == {0: 41}
    assert len(hashed) == 10 + 7  # the pages of the first one, and one page of each that has a place in the batch
    assert len(step(scheduler)) == 8


def test_few_pages_of_waiting_requests_are_hashed_in_a_step(monkeypatch):
    hashed = []
    monkeypatch.setattr(scheduler_module, "page_key", lambda *page: hashed.append(page) or page_key(*page))
    monkeypatch.setattr(scheduler_module, "MAX_HASHED", 12)
    scheduler = scheduler_of(max_step_tokens=100, max_batch=8)
    for _ in range(8):
        add(scheduler, 41, first=7, max_new_tokens=1)
    step(scheduler)
    counts = []
    while scheduler.waiting:
        before = len(hashed)
        step(scheduler)
        counts.append(len(hashed) - before)
    assert max(counts) == 2 * 9  # each has hashed its first page already; 9 are fewer than 12
    assert sum(counts) == 7 * 9


def test_an_equal_prompt_that_is_read_in_chunks_is_computed_once():
    scheduler = scheduler_of()
    add(scheduler, 24, first=7)
    add(scheduler, 24, first=7)
    assert [step(scheduler) for _ in range(3)] == [{0: 16}, {0: 8}, {0: 1, 1: 4}]


def test_a_request_is_not_held_back_for_a_page_that_is_not_computed_any_more():
    scheduler = scheduler_of()
    first = add(scheduler, 24, first=7)
    add(scheduler, 24, first=7, request_id=1)
    step(scheduler)
    scheduler.remove(first)
    assert step(scheduler) == {1: 8}


def test_prompts_shorter_than_a_page_do_not_wait_for_each_other():
    scheduler = scheduler_of()
    add(scheduler, 4, first=7)
    add(scheduler, 4, first=7)
    assert step(scheduler) == {0: 4, 1: 4}


def test_a_cached_prompt_still_computes_its_last_token():
    scheduler = scheduler_of()
    add(scheduler, 12, first=7, max_new_tokens=1)
    run_to_the_end(scheduler)
    add(scheduler, 12, first=7, max_new_tokens=1)
    assert step(scheduler) == {0: 4}


def test_a_removed_request_frees_its_pages_at_once():
    scheduler = scheduler_of(n_pages=10)
    running = add(scheduler, 8)
    step(scheduler)
    waiting = add(scheduler, 8)
    scheduler.remove(running)
    scheduler.remove(waiting)
    assert scheduler.pages.n_free == 10
    assert not scheduler.schedule()


@pytest.mark.parametrize("seed", range(5))
def test_under_overload_every_request_ends_and_no_page_is_lost(seed):
    draw = random.Random(seed)
    scheduler = scheduler_of(n_pages=12, max_batch=4, max_step_tokens=9)
    requests = []
    for i in range(40):
        requests.append(add(scheduler, draw.randint(1, 20), draw.randint(1, 25), draw.randint(0, 2), request_id=i))
        if draw.random() < 0.5 and (scheduler.waiting or scheduler.running):
            step(scheduler)
        if draw.random() < 0.2 and scheduler.running:
            scheduler.remove(draw.choice(list(scheduler.running.values())))
            requests = [r for r in requests if r.id in scheduler.running or r in scheduler.waiting or not r.n_remaining]
    run_to_the_end(scheduler)
    assert Counter(request.n_remaining for request in requests) == {0: len(requests)}
    assert scheduler.pages.n_free == 12


def test_requests_of_one_size_end_in_the_order_of_arrival():
    scheduler = scheduler_of(n_pages=12, max_batch=4)
    requests = [add(scheduler, 6, 10, request_id=i) for i in range(20)]
    ended = []
    while scheduler.waiting or scheduler.running:
        step(scheduler)
        ended += [request.id for request in requests if not request.n_remaining and request.id not in ended]
    assert ended == sorted(ended)
    assert scheduler.preemptions > 0
