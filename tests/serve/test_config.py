"""Tests of the limits of an engine."""

import pytest

from octile.serve.config import EngineConfig, ParallelConfig


def test_a_step_of_fewer_tokens_than_its_batch_is_refused():
    with pytest.raises(ValueError, match=r"max_step_tokens must be at least .* = 96, not 95"):
        EngineConfig(max_batch=32, n_drafts=2, max_step_tokens=95)


@pytest.mark.parametrize("window", [4, 12])
def test_a_window_that_is_no_multiple_of_8_is_refused(window):
    with pytest.raises(ValueError, match=f"expert_window must be a multiple of 8, not {window}"):
        EngineConfig(expert_window=window)


@pytest.mark.parametrize("name", ["redundant_experts", "active_experts", "micro_batches"])
def test_options_of_ranks_in_one_process_are_refused(name):
    with pytest.raises(ValueError, match=f"parallel.{name} has no effect in one process: parallel.ep must be at lea"):
        ParallelConfig(**{name: 2})


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match=r"parallel.ep must be at least 1, not 0"):
        ParallelConfig(0)
