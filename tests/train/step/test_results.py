"""Tests of the ring buffer through which the host collects the results of steps."""

from types import SimpleNamespace

import pytest
import torch

from octile.train.step.results import StepResults


def new() -> StepResults:
    return StepResults(3, 2, torch.device("cpu"))


def test_results_are_collected_in_the_order_of_their_steps_also_past_the_end_of_the_buffer():
    results, seen = new(), []
    for number in range(7):
        results.append(torch.tensor([number, -number], dtype=torch.float32))
        if number % 3:
            seen.append(results.pop())
    seen += [results.pop() for _ in range(3)]
    assert seen == [[number, -number] for number in range(7)]


def test_a_full_buffer_is_refused():
    results = new()
    for _ in range(3):
        results.append(torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"3 steps were launched and not collected: call collect\(\)"):
        results.append(torch.zeros(2))


def test_an_empty_buffer_has_nothing_to_read():
    with pytest.raises(IndexError, match="no result"):
        new().pop()


def test_cleared_results_are_not_collected():
    results = new()
    results.append(torch.ones(2))
    results.append(torch.ones(2))
    results.clear()
    results.append(torch.full((2,), 7.0))
    assert results.pop() == [7.0, 7.0]
    with pytest.raises(IndexError):
        results.pop()


def test_a_gpu_that_waits_for_another_rank_is_not_waited_for_forever():
    results = StepResults(3, 2, torch.device("cpu"), timeout=0.01)
    results.append(torch.zeros(2))
    results._written = [SimpleNamespace(query=lambda: False)] * 3
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 s for the GPU to finish a step"):
        results.pop()
