"""How many drafts a request has: simulated texts of which drafts are accepted always, never, or now and then."""

import itertools
from collections.abc import Callable, Sequence
from random import Random

import pytest

from octile.serve.engine.draft_count import DraftCount, best_count, shared_count

COSTS = [1.0, *(1.45 + 0.3 * i for i in range(7))]  # of steps with 0 to 7 drafts
JUMP = [1.0, 1.2, 1.72, 1.92]  # two drafts are rows for another kernel

Accepts = Callable[[int], Sequence[bool]]  # of a step's number, whether each draft is accepted if those before it are


def counts_of(most: int, steps: int, accepts: Accepts, ahead: bool = False) -> tuple[list[int], float]:
    """The count of each step, and the tokens per time, where a step without drafts takes 1.

    With `ahead`, a step is launched before the one before it is collected, and verifies no more drafts than that one
    has made.
    """
    costs = COSTS[: 1 + most]
    request, counts, tokens, made = DraftCount(costs), list[int](), 0, most
    not_collected: list[tuple[int, int]] = []
    for step in range(steps):
        counts.append(request.count)
        offered, made = min(request.count, made) if ahead else request.count, request.count
        rejected = [i for i, is_accepted in enumerate(accepts(step)[:offered]) if not is_accepted]
        accepted = min(rejected, default=offered)
        tokens += 1 + accepted
        not_collected.append((offered, accepted))
        if len(not_collected) > ahead:
            request.record(*not_collected.pop(0), costs)
    return counts, tokens / sum(COSTS[count] for count in counts)


def random_accepts(rates: Sequence[float], seed: int = 0) -> Accepts:
    draw = Random(seed)
    return lambda step: [draw.random() < rate for rate in rates]


AHEAD = pytest.mark.parametrize("ahead", [False, True])
MOST = pytest.mark.parametrize("most", [1, 2, 7])


@AHEAD
@MOST
def test_drafts_that_are_always_accepted_become_the_most_and_stay(most, ahead):
    counts, _ = counts_of(most, 200, lambda _: [True] * most, ahead)
    assert counts[0] == min(most, 3)
    assert counts[32:] == [most] * 168


@AHEAD
@MOST
def test_without_acceptance_there_are_no_drafts_but_those_of_trials(most, ahead):
    counts, speed = counts_of(most, 4000, lambda _: [False] * most, ahead)
    n_first = counts.index(0)
    assert n_first == 4 + ahead
    drafting = [step for step, count in enumerate(counts[n_first:]) if count]
    begins = [step for step in drafting if step - 1 not in drafting]
    waits = [b - a for a, b in itertools.pairwise(begins)]
    assert 16 <= waits[0] < 2 * 16 + 9
    assert waits == sorted(waits)
    assert 512 <= waits[-1] < 512 + 9
    assert speed > 0.98


@AHEAD
@MOST
def test_a_text_whose_drafts_become_right_has_them_all_again(most, ahead):
    counts, _ = counts_of(most, 300, lambda step: [step >= 40] * most, ahead)
    assert counts[39] == 0
    assert counts[-100:] == [most] * 100


@AHEAD
@MOST
def test_a_text_whose_drafts_become_wrong_has_none_soon(most, ahead):
    counts, _ = counts_of(most, 250, lambda step: [step < 200] * most, ahead)
    assert counts[199] == most
    drafting = [count for count in counts[220:] if count]
    assert drafting in ([], [1] * (1 + 2 * ahead))  # one trial, with one draft


def test_only_the_first_drafts_are_made_where_later_ones_are_rejected():
    counts, _ = counts_of(4, 1000, lambda _: [True, True, False, False])
    assert sum(count == 2 for count in counts) > 960


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.45, 0.68, 0.85, 0.95])
def test_the_speed_is_near_that_of_the_best_fixed_count(rate):
    expected = [sum(rate**i for i in range(1 + k)) for k in range(3)]
    best = max(tokens / cost for tokens, cost in zip(expected, COSTS, strict=False))
    _, speed = counts_of(2, 4000, random_accepts([rate] * 2), ahead=True)
    assert speed > 0.95 * best


def test_texts_of_both_kinds_are_faster_than_with_any_fixed_count():
    draw = Random(1)
    rates = [0.95 if step // 200 % 2 else 0.1 for step in range(4000)]
    _, speed = counts_of(4, 4000, lambda step: [draw.random() < rates[step] for _ in range(4)], ahead=True)
    fixed = [sum(r**i for r in (0.1, 0.95) for i in range(1 + k)) / 2 / COSTS[k] for k in range(5)]
    assert speed > 1.1 * max(fixed)


def test_a_step_without_verified_drafts_changes_no_rate():
    request = DraftCount(COSTS[:4])
    expected = request.expected
    for _ in range(10):
        request.record(0, 0, COSTS[:4])
    assert (request.expected, request.count) == (expected, 3)


def test_the_count_has_the_most_tokens_per_time_and_of_equal_ones_is_the_largest():
    assert best_count([1.0], COSTS) == 0
    assert best_count([1.0, 1.44], COSTS) == 0
    assert best_count([1.0, 1.45], COSTS) == 1
    assert best_count([1.0, 1.9, 2.71, 2.71], COSTS) == 2
    assert best_count([1.0, 1.9, 2.71, 3.44], JUMP) == 3


def test_requests_of_one_count_share_a_step_of_it():
    assert shared_count([], COSTS) == 0
    assert shared_count([DraftCount(COSTS[:4]), DraftCount(COSTS[:4])], COSTS) == 3


def rejected(costs: Sequence[float]) -> DraftCount:
    request = DraftCount(costs)
    while request.count:
        request.record(request.count, 0, costs)
    return request


@pytest.mark.parametrize(("n_right", "n_wrong", "count"), [(3, 1, 2), (1, 3, 0)])
def test_a_shared_step_has_the_count_with_which_all_requests_have_the_most_tokens(n_right, n_wrong, count):
    requests = [DraftCount(COSTS[:3]) for _ in range(n_right)] + [rejected(COSTS[:3]) for _ in range(n_wrong)]
    assert shared_count(requests, COSTS) == count


@pytest.mark.parametrize(("second", "count"), [(1.5, 2), (1.9, 1)])
def test_a_shared_step_has_the_costs_of_as_many_requests(second, count):
    requests = [DraftCount(COSTS[:3]), rejected(COSTS[:3]), DraftCount(COSTS[:3])]
    assert shared_count(requests, [1.0, 1.2, second]) == count


def test_a_request_has_more_drafts_where_they_cost_less_and_fewer_where_they_cost_more():
    request, counts = DraftCount(COSTS[:4]), []
    for costs in ([1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0], [1.0, 1.2, 1.4, 2.2], COSTS[:4]):
        request.record(0, 0, costs)
        counts.append(request.count)
    assert counts == [3, 0, 2, 3]


def test_a_trial_that_costs_put_off_leaves_its_rate_as_it_was():
    request = rejected([1.0, 1.45])
    rate = request.expected[1]
    while not request.count:
        request.record(0, 0, [1.0, 1.45])
    assert request.expected[1] == pytest.approx(1.45)
    for _ in range(64):  # twice the steps before the next trial: no draft can pay then
        request.record(0, 0, [1.0, 2.1])
    assert (request.count, request.expected[1]) == (0, rate)
    while not request.count:
        request.record(0, 0, [1.0, 1.45])
    request.record(1, 0, [1.0, 1.45])
    assert (request.count, request.expected[1] < rate) == (0, True)
