"""Numbers of decode steps: tokens that follow others, rows of texts, and what a step leaves."""

from operator import attrgetter

import pytest
import torch
from torch._subclasses import FakeTensorMode

from octile.ops.decode_step import (
    DRAFTS,
    FIELDS,
    NO_DRAFT,
    accepted_rows,
    continued_tokens,
    record_choices,
    text_rows,
)
from octile.ops.operator import Operator
from tests.ops.operators import assert_well_formed


def int64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def zeros(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=torch.int64) for shape in shapes)


def both_buffers(numbers: torch.Tensor, parity: int) -> torch.Tensor:
    """Numbers in the buffer of a parity; in the other one something else."""
    host = torch.full((2, *numbers.shape), 77)
    host[parity] = numbers
    return host


@pytest.mark.parametrize("parity", [0, 1])
def test_tokens_follow_a_request_of_the_step_before_or_are_given(parity: int):
    heats = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64).view(torch.int64).tolist()
    others = [[99, 99, 99]]  # seed, top_k, top_p and min_p are only returned
    rows = [-1, 1, 0], [7, 10, 20], [50, 12, 50], *2 * others, [1, 1, 1], heats, *2 * others
    numbers = int64([*rows, [4, -2, -2], [5, -2, -2]])
    host, steps = both_buffers(numbers, parity), int64([parity, -1])
    tokens, first, end, temperature, fields = continued_tokens(host, steps, int64([[31, 32], [41, 42]]), int64([2, 1]))
    assert tokens.tolist() == [[4, 5], [41, 42], [31, 32]]
    assert first.tolist() == [7, 11, 22]
    assert end.tolist() == [9, 12, 24]
    assert temperature.tolist() == [0.5, 0.0, 1.0]
    assert torch.equal(fields, numbers[:FIELDS])
    assert steps.tolist() == [parity, 1 - parity]


def test_a_request_has_no_more_drafts_than_it_is_to_have():
    numbers = torch.zeros(FIELDS + 3, 4, dtype=torch.int64)
    numbers[0] = int64([-1, 0, 0, 0])  # given, and three times what the step before has left, which had more drafts
    numbers[2], numbers[DRAFTS] = 50, int64([1, 0, 1, 2])
    numbers[FIELDS:] = int64([[4], [5], [6]])
    host = both_buffers(numbers, 0)
    tokens, _, end, _, _ = continued_tokens(host, int64([0, 1]), int64([[31, 32, 33, 34]]), int64([3]))
    assert tokens.tolist() == [[4, 5, NO_DRAFT], [31, NO_DRAFT, NO_DRAFT], [31, 32, NO_DRAFT], [31, 32, 33]]
    assert end.tolist() == [2, 4, 5, 6]


def test_rows_beyond_the_end_are_written_nowhere():
    pages = torch.tensor([[5, 9], [3, 0]], dtype=torch.int32)
    rows = text_rows(int64([[7, -1], [8, 9]]), int64([63, 1]), int64([65, 2]), pages)
    assert [t.tolist() for t in rows] == [[7, 0, 8, 9], [63, 64, 1, 1], [383, 576, 193, -1], [64, 65, 2, 0]]


def test_a_text_without_positions_attends_to_nothing():
    rows = text_rows(int64([[0]]), int64([0]), int64([0]), torch.tensor([[4]], dtype=torch.int32))
    assert [t.tolist() for t in rows] == [[0], [0], [-1], [0]]


def test_drafts_count_until_the_first_that_is_not_chosen():
    chosen, tokens = int64([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), int64([[0, 1, 2], [0, 1, 9], [0, 9, 2]])
    parity, last, advance, results = zeros((2,), (3, 3), (3,), (2, 3, 6))
    parity[1] = 1
    record_choices(chosen, tokens, int64([[71, 72], [81, 82], [91, 92]]), parity, last, advance, results)
    assert last.tolist() == [[3, 71, 72], [2, 81, 82], [1, 91, 92]]
    assert advance.tolist() == [3, 2, 1]
    assert results[0].tolist() == [[1, 2, 3, 2, 71, 72], [1, 2, 3, 1, 81, 82], [1, 2, 3, 0, 91, 92]]
    assert not results[1].any()
    assert parity.tolist() == [1, 1]


def test_the_last_row_that_counts_is_after_the_accepted_drafts():
    chosen, tokens = int64([[1, 2, -1], [1, 2, 3], [-1, 2, 3]]), int64([[0, 1, 2], [0, 1, 9], [0, 9, 2]])
    next_tokens, positions, rows = accepted_rows(chosen, tokens, int64([10, 20, 30]))
    assert next_tokens.tolist() == [1, 2, 0, 1, 2, 3, 0, 2, 3]
    assert positions.tolist() == [12, 21, 30]
    assert rows.tolist() == [2, 4, 6]


def test_drafts_of_a_later_step_stay_in_wider_rows():
    left = torch.full((1, 4), 9)
    record_choices(int64([[1, 2]]), int64([[0, 1]]), int64([[71]]), *zeros((2,)), left[:, :2], *zeros((1,), (2, 1, 4)))
    assert left.tolist() == [[2, 71, 9, 9]]


def test_without_drafts_the_choice_is_the_last_token():
    parity, last, advance, results = int64([1, 0]), *zeros((2, 1), (2,), (2, 2, 2))
    record_choices(int64([[6], [-1]]), int64([[1], [2]]), *zeros((2, 0)), parity, last, advance, results)
    assert (last.tolist(), advance.tolist(), results[1].tolist()) == ([[6], [-1]], [1, 1], [[6, 0], [-1, 0]])
    assert parity.tolist() == [0, 0]


CALLS = {
    "continued tokens": lambda: (continued_tokens, zeros((2, 11, 3), (2,), (4, 2), (4,))),
    "rows of texts": lambda: (text_rows, (*zeros((2, 2), (2,), (2,)), torch.tensor([[1, 0], [0, 1]]).int())),
    "accepted rows": lambda: (accepted_rows, zeros((3, 2), (3, 2), (3,))),
    "choices": lambda: (record_choices, zeros((3, 2), (3, 2), (3, 1), (2,), (3, 2), (3,), (2, 3, 4))),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())


HOST_ARGUMENTS = {"continued tokens": 0, "choices": 6}


def on_devices(name: str, device: str, host_device: str) -> tuple[Operator, list[torch.Tensor]]:
    """An operator, and its arguments, of which the one that may be in pinned memory is on another device."""
    operator, arguments = CALLS[name]()
    return operator, [t.to(host_device if i == HOST_ARGUMENTS[name] else device) for i, t in enumerate(arguments)]


@pytest.mark.parametrize("device", ["cuda:0", "meta"])
@pytest.mark.parametrize("name", HOST_ARGUMENTS)
def test_fakes_accept_memory_of_the_host_and_return_tensors_on_the_others_device(name: str, device: str):
    with FakeTensorMode():
        operator, arguments = on_devices(name, device, "cpu")
        results = operator(*arguments) or ()
    expected = operator(*CALLS[name]()[1]) or ()
    layout = attrgetter("shape", "dtype")
    assert [(*layout(t), str(t.device)) for t in results] == [(*layout(t), device) for t in expected]


@pytest.mark.parametrize("name", HOST_ARGUMENTS)
def test_fakes_refuse_memory_of_another_gpu(name: str):
    with FakeTensorMode():
        operator, arguments = on_devices(name, "cuda:0", "cuda:1")
        with pytest.raises(ValueError, match=r"is on cuda:[01] but .* on cuda:[01]"):
            operator(*arguments)


def test_numbers_that_do_not_fit_are_refused():
    host, parity, last, advance = zeros((2, 11, 3), (2,), (4, 2), (4,))
    with pytest.raises(TypeError, match=r"last must be int64, not torch\.int32"):
        continued_tokens(host, parity, last.int(), advance)
    with pytest.raises(TypeError, match=r"host must be int64, not torch\.int32"):
        continued_tokens(host.int(), parity, last, advance)
    for wrong in (host[:, :9], host[:, [*range(11), 0]], host[:1]):
        with pytest.raises(ValueError, match=r"host and last must be \[2, 9 \+ k, B\] and \[R, m\], m at least k"):
            continued_tokens(wrong, parity, last, advance)
    with pytest.raises(ValueError, match=r"parity must be \(2,\), contiguous, not \(1,\)"):
        continued_tokens(host, parity[:1], last, advance)
    with pytest.raises(ValueError, match=r"advance must be \(4,\)"):
        continued_tokens(host, parity, last, advance[:3])
    tokens, pages = torch.zeros(3, 2).long(), torch.zeros(3, 5, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"pages must be int32, not torch\.int64"):
        text_rows(tokens, tokens[:, 0], tokens[:, 0], pages.long())
    with pytest.raises(ValueError, match=r"end must be \(3,\)"):
        text_rows(tokens, tokens[:, 0], tokens[:2, 0], pages)
    with pytest.raises(ValueError, match=r"pages must be \(3, M\), M at least 1"):
        text_rows(tokens, tokens[:, 0], tokens[:, 0], pages[:, :0])
    with pytest.raises(TypeError, match=r"tokens must be int64, not torch\.int32"):
        accepted_rows(tokens, tokens.int(), tokens[:, 0].clone())
    with pytest.raises(ValueError, match=r"first must be \(3,\) for chosen \(3, 2\), not \(3, 2\)"):
        accepted_rows(tokens, tokens, tokens)
    results = torch.zeros(2, 3, 4).long()
    with pytest.raises(ValueError, match=r"drafts must be \(3, 1\)"):
        record_choices(tokens, tokens, tokens, parity, tokens.clone(), tokens[:, 0].clone(), results)
    with pytest.raises(ValueError, match="advance must be contiguous"):
        record_choices(tokens, tokens, tokens[:, :1].clone(), parity, tokens.clone(), tokens[:, 0], results)
    rows = torch.zeros(2, 3, 5).long()[:, :, :4]
    with pytest.raises(ValueError, match="each buffer of results must be contiguous"):
        record_choices(tokens, tokens, tokens[:, :1].clone(), parity, tokens.clone(), tokens[:, 0].clone(), rows)
