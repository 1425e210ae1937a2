"""Two passes that are interleaved: in which order they run, and what becomes of errors."""

import threading
from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.nn.dispatcher import InFlight
from octile.nn.interleave import is_first, is_interleaved, run_interleaved, switch

VALUE: ContextVar[int] = ContextVar("value", default=0)


def passes(log: list[str], name: str, parts: int) -> Callable[[], None]:
    """A pass that waits for an exchange after each of its parts."""

    def work() -> None:
        for part in range(parts):
            log.append(f"{name}{part}")
            InFlight(None, lambda: None).wait()

    return work


@given(first=st.integers(0, 4), second=st.integers(0, 4))
def test_each_pass_runs_until_it_waits_and_the_rest_of_the_longer_one_follows(first: int, second: int):
    log: list[str] = []
    run_interleaved(passes(log, "a", first), passes(log, "b", second))
    both = min(first, second)
    expected = [f"{name}{part}" for part in range(both) for name in "ab"]
    expected += [f"a{part}" for part in range(both, first)] + [f"b{part}" for part in range(both, second)]
    assert log == expected


@pytest.mark.parametrize("wait", [lambda: InFlight(None).wait(), lambda: InFlight(None, int).wait(switches=False)])
def test_a_result_that_is_here_switches_to_no_other_pass(wait: Callable[[], None]):
    log: list[str] = []
    run_interleaved(lambda: (log.append("a0"), wait(), log.append("a1")), lambda: log.append("b"))
    assert log == ["a0", "a1", "b"]


def test_which_pass_is_the_first():
    seen: list[bool] = []
    run_interleaved(
        lambda: (seen.append(is_first()), switch(), seen.append(is_first())), lambda: seen.append(is_first())
    )
    assert [is_first(), *seen] == [False, True, False, True]


def test_an_exchange_outside_of_a_pair_is_only_waited_for():
    assert InFlight(3, int).wait() == 3
    assert not is_interleaved()


def test_the_first_pass_sees_the_context_of_the_caller_and_the_second_one_its_thread():
    seen: list[object] = []
    VALUE.set(7)
    run_interleaved(lambda: seen.append(VALUE.get()), lambda: seen.append(threading.current_thread()))
    assert seen == [7, threading.current_thread()]


@pytest.mark.parametrize("fails", [0, 1])
def test_when_a_pass_fails_the_other_one_ends_at_its_next_exchange(fails: int):
    log: list[str] = []

    def failing() -> None:
        switch()
        raise ZeroDivisionError("wrong")

    works = [passes(log, "x", 9), passes(log, "x", 9)]
    works[fails] = failing
    with pytest.raises(ZeroDivisionError, match="wrong"):
        run_interleaved(*works)
    assert len(log) < 9
    assert not is_interleaved()


def test_an_error_in_autograd_abandons_the_forward_pass():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            switch()
            raise ZeroDivisionError("wrong")

    log: list[str] = []
    y = Failing.apply(torch.ones((), requires_grad=True))
    with pytest.raises(ZeroDivisionError, match="wrong"):
        run_interleaved(y.backward, passes(log, "f", 9))
    assert log == ["f0"]


def test_pairs_cannot_be_nested():
    with pytest.raises(RuntimeError, match="interleaved passes cannot be interleaved again"):
        run_interleaved(lambda: None, lambda: run_interleaved(int, int))
