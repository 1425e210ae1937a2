"""Requests that have two numbers: an engine's own, and that of the process that has sent them."""

import pytest

from octile.serve.engine.request import FinishReason, Output, Sampling, make_request
from octile.serve.process.sent_requests import SentRequests


def output(request_id: int, reason: FinishReason | None = None) -> Output:
    return Output(request_id, (1,), "a", finish_reason=reason)


@pytest.fixture
def sent() -> SentRequests:
    """Requests 0 and 1 of an engine, which were sent as 8 and 7."""
    requests = SentRequests()
    for own, number in enumerate((8, 7)):
        requests.add(number, make_request(own, [1, 2], Sampling(3, seed=0)))
    return requests


def test_outputs_have_the_numbers_of_the_process_that_sent_the_requests(sent):
    assert [o.request_id for o in sent.renumber([output(1), output(0), output(1)])] == [7, 8, 7]


def test_a_request_is_forgotten_after_its_last_output(sent):
    assert [o.request_id for o in sent.renumber([output(0, FinishReason.LENGTH)])] == [8]
    assert sent.get(8) is None
    assert sent.get(7).id == 1


def test_outputs_of_a_request_that_was_canceled_are_left_out(sent):
    assert sent.pop(7).id == 1
    assert [o.request_id for o in sent.renumber([output(0), output(1)])] == [8]


def test_a_request_that_has_ended_is_not_found(sent):
    sent.pop(7)
    assert sent.pop(7) is None


def test_it_is_true_while_there_are_requests(sent):
    assert sent
    sent.pop(7)
    sent.pop(8)
    assert not sent
