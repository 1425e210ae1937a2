"""Tests of the check of a batch before a step, and of a decode step's results."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from octile.serve.runner.batch import Batch, Chunk, Decoded, DecodedTokens
from octile.serve.runner.step import BatchCheck

N_PAGES = 40


@pytest.fixture
def check() -> BatchCheck:
    return BatchCheck(vocab_size=200, max_position=512, n_pages=N_PAGES)


def chunk(**changes) -> Chunk:
    return Chunk([1, 2], 63, array("i", [0, 1]), 1)._replace(**changes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": []}, "chunk 0 must have tokens"),
        ({"n_logits": 3}, "at most as many logits, not 2 tokens and n_logits 3"),
        ({"start": -1}, "positions -1 to 0"),
        ({"start": 511}, "must be from 0 to 511"),
        ({"pages": array("i", [0])}, "has 1 pages, but 65 positions need 2"),
        ({"pages": array("i", [0, N_PAGES])}, "must have pages from 0 to 39"),
        ({"tokens": [1, 200]}, "must have tokens from 0 to 199"),
    ],
)
def test_a_wrong_chunk_is_refused(check: BatchCheck, wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        check(Batch([chunk(**wrong)]))


def test_an_empty_batch_is_refused(check: BatchCheck):
    with pytest.raises(ValueError, match="at least one chunk"):
        check(Batch([]))


def test_the_chunk_that_is_wrong_is_named(check: BatchCheck):
    with pytest.raises(ValueError, match="chunk 1 must have tokens from 0 to 199, not -1 to 3"):
        check(Batch([chunk(), chunk(tokens=[3, -1])]))


@pytest.mark.parametrize("size", [2, 100], ids=["few", "many"])
def test_a_token_that_the_model_does_not_know_is_found_among_any_number(check: BatchCheck, size: int):
    with pytest.raises(ValueError, match="must have tokens from 0 to 199, not 1 to 200"):
        check(Batch([chunk(tokens=[1] * (size - 1) + [200], start=0, pages=array("i", [0, 1]))]))


def test_a_negative_token_is_one_that_the_pass_before_has_chosen(check: BatchCheck):
    chosen = torch.zeros(3, dtype=torch.int64)
    check(Batch([chunk(tokens=[-3])], chosen))
    with pytest.raises(ValueError, match="must have tokens from -3 to 199, not -4 to -4"):
        check(Batch([chunk(tokens=[-4])], chosen))


def test_a_token_beside_others_is_not_one_that_the_pass_before_has_chosen(check: BatchCheck):
    with pytest.raises(ValueError, match="must have tokens from 0 to 199, not -1 to 5"):
        check(Batch([chunk(tokens=[-1, 5])], torch.zeros(3, dtype=torch.int64)))


def test_pages_that_change_between_steps_are_checked_again(check: BatchCheck):
    pages = array("i", [0, 1])
    check(Batch([chunk(pages=pages)]))
    pages[1] = N_PAGES
    with pytest.raises(ValueError, match=r"chunk 0 must have pages from 0 to 39, not \[0, 40\]"):
        check(Batch([chunk(pages=pages)]))


def test_results_stay_when_a_later_step_writes_the_buffers_and_has_not_come_to_the_event():
    results, log_probs = torch.tensor([[3, 0]]), torch.tensor([-0.5])
    event = SimpleNamespace(is_reached=True, synchronize=lambda: None)
    event.query = lambda: event.is_reached
    decoded = DecodedTokens(results, event, 0, timeout=0.01, log_probs=log_probs)
    decoded.release_buffer(timeout=0.01)
    results.fill_(9), log_probs.fill_(9)
    event.is_reached = False
    assert decoded.is_computed
    assert decoded.wait() == [Decoded([3], 0, [], -0.5)]
