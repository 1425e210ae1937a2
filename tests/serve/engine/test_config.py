"""Tests of the limits of an engine."""

import pytest

from octile.serve.engine.config import EngineConfig, ParallelConfig, check_micro_batches, window_of


def test_a_step_of_fewer_tokens_than_its_batch_is_refused():
    with pytest.raises(ValueError, match=r"max_step_tokens must be at least .* = 96, not 95"):
        EngineConfig(max_batch=32, n_drafts=2, max_step_tokens=95)


@pytest.mark.parametrize("window", [4, 12])
def test_a_window_that_is_no_multiple_of_8_is_refused(window):
    with pytest.raises(ValueError, match=f"expert_window must be a multiple of 8, not {window}"):
        EngineConfig(expert_window=window)


@pytest.mark.parametrize("name", ["tp", "redundant_experts", "active_experts", "rebalance", "micro_batches"])
def test_options_of_ranks_in_one_process_are_refused(name):
    with pytest.raises(ValueError, match=f"parallel.{name} has no effect in one process: parallel.ep must be at lea"):
        ParallelConfig(**{name: 2})


def test_routed_shared_experts_in_one_process_or_with_dynamic_redundancy_are_refused():
    with pytest.raises(ValueError, match=r"parallel.shared_experts has no effect in one process"):
        ParallelConfig(shared_experts="routed")
    with pytest.raises(ValueError, match=r"must be replicated, not routed, with parallel.active_experts"):
        ParallelConfig(2, shared_experts="routed", active_experts=4)
    with pytest.raises(ValueError, match=r"parallel.shared_experts must be replicated or routed, not 'ninth'"):
        ParallelConfig(2, shared_experts="ninth")


def test_groups_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"parallel.tp must divide parallel.ep, but 3 does not divide 4 ranks"):
        ParallelConfig(4, 3)


def test_micro_batches_of_rows_that_ranks_share_are_refused():
    with pytest.raises(ValueError, match=r"parallel.micro_batches must be 1, not 2, if parallel.tp is 2"):
        ParallelConfig(4, 2, micro_batches=2)


def test_micro_batches_with_dynamic_redundancy_are_refused():
    with pytest.raises(ValueError, match=r"parallel.micro_batches must be 1, not 2, with parallel.active_experts"):
        ParallelConfig(4, active_experts=9, micro_batches=2)


def test_exact_mode_is_batch_invariant():
    assert EngineConfig(exact=True).batch_invariant
    with pytest.raises(ValueError, match=r"engine.index_format must be e4m3, not float32, with engine.batch_invariant"):
        EngineConfig(exact=True, index_format="float32")


@pytest.mark.parametrize(
    ("device", "batch_invariant", "where"), [("cpu", False, "on a CPU"), ("cuda", True, "with engine.batch_invariant")]
)
def test_micro_batches_where_no_step_is_divided_are_refused(device, batch_invariant, where):
    engine = EngineConfig(batch_invariant=batch_invariant)
    with pytest.raises(ValueError, match=f"parallel.micro_batches must be 1, not 2, {where}$"):
        check_micro_batches(engine, ParallelConfig(2, micro_batches=2), device)
    check_micro_batches(engine, ParallelConfig(2), device)
    check_micro_batches(EngineConfig(), ParallelConfig(2, micro_batches=2), "cuda")


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match=r"parallel.ep must be at least 1, not 0"):
        ParallelConfig(0)
    with pytest.raises(ValueError, match=r"parallel.tp must be at least 1, not 0"):
        ParallelConfig(2, 0)


@pytest.mark.parametrize(
    ("parallel", "given", "window"),
    [
        ({}, None, 0),
        ({"ep": 2}, None, 0),
        ({"ep": 2, "redundant_experts": 2}, None, 4096),
        ({"ep": 2, "rebalance": 60}, None, 4096),
        ({"ep": 2, "rebalance": 60}, 8, 8),
        ({}, 16, 16),
        ({"ep": 2}, 0, 0),
    ],
)
def test_experts_that_are_placed_anew_are_counted(parallel, given, window):
    assert window_of(EngineConfig(expert_window=given), ParallelConfig(**parallel)) == window


@pytest.mark.parametrize("name", ["rebalance", "redundant_experts"])
def test_experts_cannot_be_placed_by_tokens_that_are_not_counted(name):
    message = rf"engine.expert_window must be at least 8, not 0, with parallel.{name}: the copies of experts are placed"
    with pytest.raises(ValueError, match=message):
        window_of(EngineConfig(expert_window=0), ParallelConfig(2, **{name: 2}))
