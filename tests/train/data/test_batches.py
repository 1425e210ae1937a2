"""Tests that the order of training depends on seed and step only and that an epoch visits every window once."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.optim import BatchRamp
from octile.train.data.batches import Batches, PreparedBatches, permute, validation_windows

S = 4
TOKENS = np.arange(100 * S + 1, dtype=np.uint16)  # 100 windows, each known by its first token


def windows(batches: Batches, steps: range) -> list[int]:
    return [int(first) // S for step in steps for first in batches.batch(step)[:, 0]]


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 100))
def test_a_permutation_contains_every_index_once(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, (seed, epoch))), np.arange(n))


def test_a_permutation_may_be_larger_than_memory():
    n = 10**15
    image = permute(np.arange(n - 1000, n), n, (0, 0))
    assert len(set(image.tolist())) == 1000
    assert 0 <= image.min() < image.max() < n


def test_a_permutation_separates_neighbors():
    image = permute(np.arange(10_000), 10_000, (0, 0))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


def test_a_batch_is_int64_and_one_token_longer_than_the_sequence():
    batch = Batches(TOKENS, 3, S, seed=0).batch(0)
    assert (batch.dtype, batch.shape) == (torch.int64, (3, S + 1))


def test_a_row_is_a_window_of_the_text():
    for row in Batches(TOKENS, 8, S, seed=0).batch(0).tolist():
        assert row == list(range(row[0], row[0] + S + 1))
        assert row[0] % S == 0


@given(seed=st.integers(0, 2**63), step=st.integers(0, 10**6))
def test_a_batch_does_not_depend_on_the_steps_before_it(seed, step):
    before, after = (Batches(TOKENS, 7, S, seed) for _ in range(2))
    before.batch(0)
    assert torch.equal(before.batch(step), after.batch(step))


def test_a_batch_does_not_depend_on_another_that_a_thread_asks_for_meanwhile():
    class ReplacedWhenSeen(dict):
        def __contains__(self, key):
            batches._window_numbers = {}  # as another thread's call replaces them, between the look and the use
            return super().__contains__(key)

    batches = Batches(TOKENS, 7, S, seed=0)
    expected = batches.batch(0)
    batches._window_numbers = ReplacedWhenSeen(batches._window_numbers)
    assert batches.batch(0).equal(expected)


def test_the_order_is_the_same_in_every_version():
    assert windows(Batches(TOKENS, 4, S, seed=0), range(2)) == [36, 81, 76, 13, 46, 51, 34, 74]


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_visits_every_window_once(epoch):
    assert sorted(windows(Batches(TOKENS, 10, S, seed=0), range(10 * epoch, 10 * epoch + 10))) == list(range(100))


def test_every_token_but_the_first_is_a_target_once_an_epoch():
    batches = Batches(TOKENS, 10, S, seed=0)
    targets = torch.cat([batches.batch(step)[:, 1:].flatten() for step in range(10)])
    assert targets.sort().values.tolist() == list(range(1, len(TOKENS)))


def test_epochs_have_different_orders():
    batches = Batches(TOKENS, 10, S, seed=0)
    assert windows(batches, range(10)) != windows(batches, range(10, 20))


def test_seeds_have_different_orders():
    one, two = (windows(Batches(TOKENS, 10, S, seed), range(10)) for seed in (0, 1))
    assert one != two


def test_a_batch_may_extend_into_the_next_epochs():
    flat = windows(Batches(TOKENS, 250, S, seed=0), range(2))
    assert [sorted(flat[start : start + 100]) for start in range(0, 500, 100)] == [list(range(100))] * 5


def test_tokens_are_read_from_a_memory_map(tmp_path):
    np.save(tmp_path / "tokens.npy", TOKENS)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    assert torch.equal(Batches(mapped, 8, S, 0).batch(3), Batches(TOKENS, 8, S, 0).batch(3))


def test_validation_windows_are_evenly_spaced():
    assert (validation_windows(TOKENS, S, 4)[:, 0] // S).tolist() == [0, 25, 50, 75]


def test_validation_uses_all_windows_where_there_are_fewer():
    assert validation_windows(TOKENS, S, 1000).shape == (100, S + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, not 0"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"sequence_length": len(TOKENS)}, r"tokens must be \[T\] with T > sequence_length = 401, not \[401\]"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batches(**{"tokens": TOKENS, "batch_size": 2, "sequence_length": S, "seed": 0} | arguments)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        Batches(TOKENS, 2, S, seed=0).batch(-1)


def test_zero_validation_windows_are_refused():
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        validation_windows(TOKENS, S, 0)


def test_a_growing_batch_visits_every_window_of_an_epoch_once():
    batches = Batches(TOKENS, BatchRamp(2, 14, 12), S, seed=0)
    assert [len(batches.batch(step)) for step in (0, 6, 12)] == [2, 8, 14]
    seen = windows(batches, range(15))
    assert sorted(seen[:100]) == list(range(100))


def test_a_growing_batch_reads_the_windows_in_the_order_of_a_constant_one():
    seen = windows(Batches(TOKENS, BatchRamp(2, 14, 12), S, seed=0), range(12))
    assert seen == windows(Batches(TOKENS, 1, S, seed=0), range(len(seen)))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_the_parts_of_the_ranks_are_the_batch(n_ranks):
    batches = Batches(TOKENS, BatchRamp(5, 14, 12), S, seed=0)
    for step in (0, 6, 12):
        parts = [batches.batch(step, rank, n_ranks) for rank in range(n_ranks)]
        assert torch.equal(torch.cat(parts), batches.batch(step))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


# Batches that are prepared ahead


class Counted(Batches):
    """Batches that note the steps for which they were asked."""

    def __init__(self):
        super().__init__(TOKENS, BatchRamp(1, 3, 4), S, seed=0)
        self.asked: list[int] = []

    def batch(self, step: int) -> torch.Tensor:
        self.asked.append(step)
        if step == 7:
            raise OSError("the disk failed")
        return super().batch(step)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("steps", [range(7), [0, 1, 5, 6, 2, 3, 3]], ids=["in order", "resumed and repeated"])
def test_prepared_batches_are_those_of_their_steps(ahead, steps):
    prepared, plain = PreparedBatches(Counted().batch, ahead), Batches(TOKENS, BatchRamp(1, 3, 4), S, seed=0)
    for step in steps:
        assert torch.equal(prepared.batch(step), plain.batch(step))
        prepared.prepare()
    prepared.close()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_batches_are_prepared_when_that_is_asked_for(ahead):
    batches = Counted()
    prepared = PreparedBatches(batches.batch, ahead)
    for step in range(max(2, ahead)):
        prepared.batch(step)
    assert not prepared._prepared
    for _ in range(2):
        prepared.prepare()
        for future in prepared._prepared:
            future.result()
        assert batches.asked == [*range(max(2, ahead) + ahead)]
    prepared.close()


def test_an_error_is_raised_in_the_step_that_needs_the_batch():
    prepared = PreparedBatches(Counted().batch, 3)
    for step in range(7):
        prepared.batch(step)
        prepared.prepare()
    for _ in range(2):  # and again
        with pytest.raises(OSError, match="the disk failed"):
            prepared.batch(7)
    prepared.close()


def test_closing_ends_the_thread_and_a_later_batch_starts_another():
    before = threading.active_count()
    prepared = PreparedBatches(Counted().batch, 2)
    prepared.batch(0)
    assert threading.active_count() == before + 1
    prepared.close()
    assert threading.active_count() == before
    assert torch.equal(prepared.batch(1), Counted().batch(1))
    prepared.close()


@pytest.mark.slow
@given(asked=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([(0, 1), (0, 3), (2, 3)])), max_size=30))
def test_a_batch_does_not_depend_on_those_before(asked):
    """Windows of several steps are found together, and over several epochs."""
    ramp = BatchRamp(1, 30, 20)
    batches = Batches(TOKENS, ramp, S, seed=5)
    for step, part in asked:
        assert torch.equal(batches.batch(step, *part), Batches(TOKENS, ramp, S, seed=5).batch(step, *part))


def test_fewer_than_no_batches_are_refused():
    with pytest.raises(ValueError, match="ahead must be at least 0, not -1"):
        PreparedBatches(Counted().batch, -1)
