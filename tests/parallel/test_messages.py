"""Tests of messages between ranks: they come back as they are, and no bytes run code or make anything else."""

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.parallel import messages
from octile.parallel.messages import (
    DTYPES,
    ERRORS,
    MessageError,
    all_gather_messages,
    as_sent,
    broadcast_message,
    decode,
    encode,
    gather_messages,
    outcome_of,
    receive_message,
    send_message,
)
from octile.parallel.ranks import RanksError, world
from octile.serve.engine.request import Sampling
from octile.signals import Stopped
from tests.worlds import Outcomes, Work, each_work

SOURCE = Path(messages.__file__).parents[1]


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    label: str | None = None
    sizes: Sequence[float] = ()  # arrives as a list


@dataclass(frozen=True)
class Shape:
    points: tuple[Point, ...]
    color: Color
    counts: Mapping[int, tuple[int, ...]] | None

    def __post_init__(self) -> None:
        if len(self.points) > 8:
            raise ValueError("a shape has at most 8 points")


texts, ints, floats = st.text(max_size=8), st.integers(-(2**80), 2**80), st.floats(allow_nan=False)
points = st.builds(Point, ints, st.none() | texts, st.lists(floats, max_size=3))
shapes = st.builds(
    Shape,
    st.lists(points, max_size=3).map(tuple),
    st.sampled_from(Color),
    st.none() | st.dictionaries(ints, st.lists(ints, max_size=3).map(tuple), max_size=3),
)
paths = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=8).map(Path)
VALUES: Mapping[object, st.SearchStrategy] = {
    None: st.none(),
    bool: st.booleans(),
    int: ints,
    float: floats,
    str: texts,
    Path: paths,
    Color: st.sampled_from(Color),
    torch.dtype: st.sampled_from([*DTYPES.values()]),
    str | None: st.none() | texts,
    str | int | None: st.none() | texts | ints,
    list[bool | None]: st.lists(st.none() | st.booleans()),
    tuple[int, ...]: st.lists(ints).map(tuple),
    tuple[tuple[int, ...], torch.dtype, bool]: st.tuples(
        st.lists(ints).map(tuple), st.sampled_from([torch.float32, torch.int8]), st.booleans()
    ),
    list[list[list[float]]]: st.lists(st.lists(st.lists(floats, max_size=3), max_size=3), max_size=3),
    dict[str, dict[str, list[int]]]: st.dictionaries(texts, st.dictionaries(texts, st.lists(ints))),
    Point: points,
    Shape: shapes,
    list[tuple[str, Shape | None]]: st.lists(st.tuples(texts, st.none() | shapes), max_size=4),
}


@given(st.data(), st.sampled_from([*VALUES]))
def test_a_value_comes_back_with_its_type(data: st.DataObject, kind: object):
    value = data.draw(VALUES[kind])
    found = decode(encode(value, kind), kind, "it")
    assert found == value
    assert type(found) is type(value)


def test_a_number_that_is_not_finite_comes_back():
    assert str(decode(encode([float("nan"), float("-inf")], list[float]), list[float], "it")) == "[nan, -inf]"


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: list[int]):
    tensor = torch.randint(0, 2, shape).to(dtype)
    found = decode(encode(tensor, Tensor), Tensor, "it")
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


class Payload:
    """Runs code when it is unpickled."""

    ran: list[str] = []  # noqa: RUF012

    def __reduce__(self):
        return Payload.ran.append, ("code",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from([*ERRORS]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def check_decoded(data: bytes, kind: object) -> None:
    """Bytes are a value of the type, which can be sent, or a message error."""
    try:
        found = decode(data, kind, "what rank 1 has sent")
    except MessageError as error:
        refused = str(error)
    else:
        encode(found, kind)
        return
    assert refused.startswith("what rank 1 has sent must ")


@given(
    st.sampled_from([*VALUES, Tensor, Exception, Sampling, outcome_of(Shape), outcome_of(None)]),
    st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | st.just(pickle.dumps(Payload())),
)
def test_any_bytes_are_a_value_of_the_type_or_a_clear_error(kind: object, data: bytes):
    check_decoded(data, kind)
    assert not Payload.ran


@given(st.data(), st.sampled_from([*VALUES]))
def test_a_message_with_a_changed_byte_is_a_value_of_the_type_or_a_clear_error(data: st.DataObject, kind: object):
    message = bytearray(encode(data.draw(VALUES[kind]), kind))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    check_decoded(bytes(message), kind)


@pytest.mark.parametrize(
    ("data", "kind", "what"),
    [
        (b"[[1", int, "key k must be a message of type int, but b'[[1' came, which a process that is no rank"),
        (b'["1"]', int, "int is needed, not '1'"),
        (b"[true]", int, "int is needed, not True"),
        (b"[1, 2]", int, "too many values to unpack"),
        (b'{"points": []}', Shape, "Shape has the fields points, color, counts, but an object with points came"),
        (b"[[[1000000000], [1]]]", list[int], "not enough values to unpack"),
        (b"[[1000000000], [1]]", list[int], "the lists have [1000000000] items, but 1 came"),
        (b"[" * 100_000, int, "RecursionError"),
        (b"[" + b"9" * 5000 + b"]", int, "Exceeds the limit"),
        (b'[["SystemExit", [], []]]', Exception, "'SystemExit' is no exception that can be sent"),
        (b'[["os.system", ["true"], []]]', Exception, "'os.system' is no exception that can be sent"),
        (b'[["float32", [4611686018427387904, 4], ""]]', Tensor, "does not have 0 bytes"),
        (b"", int, "must have from 1 to 1,073,741,824 bytes, not 0"),
    ],
)
def test_what_is_no_message_of_the_type_is_named(data: bytes, kind: object, what: str):
    with pytest.raises(MessageError, match=re.escape(what)):
        decode(data, kind, "key k")


@pytest.mark.parametrize("data", [b'{"\\u001b[2J": 1}', json.dumps({"x" * 10**6: 1}).encode(), b'["\\u001b[2J"]'])
@pytest.mark.parametrize("kind", [Shape, Color, int])
def test_an_error_quotes_little_and_only_what_can_be_printed(data: bytes, kind: object):
    with pytest.raises(MessageError) as raised:
        decode(data, kind, "it")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 700


def test_a_message_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="a message must have at most 10 bytes, but that of str has 14"):
        encode("0123456789", str)
    with pytest.raises(MessageError, match="it must have from 1 to 10 bytes, not 14"):
        decode(b'["0123456789"]', str, "it")


@pytest.mark.parametrize("kind", [object, set[int], list[object], Callable, int | list[int], Payload])
def test_another_type_is_refused(kind: object):
    with pytest.raises(TypeError, match="no message can have the type"):
        encode(None, kind)


@pytest.mark.parametrize(("value", "kind"), [(1, str), ("1", list[str]), (None, Point), ({1}, list[int]), (True, int)])
def test_a_value_of_another_type_is_not_sent(value: object, kind: object):
    with pytest.raises(TypeError, match="is needed, not"):
        encode(value, kind)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a text"),
        KeyError("name"),
        FloatingPointError(),
        FileNotFoundError(2, "No such file or directory", "there"),
        OSError(18, "Invalid cross-device link", "a", None, "b"),
        OSError("the store is gone"),
        RanksError("rank 1 waited"),
        torch.OutOfMemoryError("out of memory"),
        dist.DistNetworkError("gone"),
    ],
)
def test_an_exception_comes_back_with_class_text_and_file(error: Exception):
    error.add_note("on rank 3")
    found = as_sent(error)
    assert type(found) is type(error)
    assert (str(found), found.__notes__) == (str(error), ["on rank 3"])
    assert getattr(found, "filename", None) == getattr(error, "filename", None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Stopped("stopped after step 3", 15), "Stopped: stopped after step 3"),
        (type("ValueError", (Exception,), {})("no built-in"), "ValueError: no built-in"),
    ],
)
def test_an_exception_of_another_class_is_a_runtime_error_with_its_name(error: Exception, text: str):
    found = as_sent(error)
    assert type(found) is RuntimeError
    assert str(found) == text


def test_a_value_error_whose_arguments_are_a_file_comes_back_with_its_text():
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        json.loads("{")
    found = as_sent(raised.value)
    assert type(found) is ValueError
    assert str(found) == str(raised.value)


# Ranks


def messages_of_all(rank: int, folder: Path) -> None:
    own = {f"rank {rank}": list(range(rank * 100))}
    expected = [{f"rank {other}": list(range(other * 100))} for other in range(2)]
    assert all_gather_messages(own, dict[str, list[int]], world()) == expected
    found = gather_messages(own, dict[str, list[int]], world())
    assert found == (None if rank else expected)


def messages_of_one(rank: int, folder: Path) -> None:
    assert broadcast_message(Point(3, "first", [0.5]) if rank == 0 else None, Point, world()) == Point(
        3, "first", [0.5]
    )
    if rank == 1:
        send_message("to the first", str, world(), 0)
    else:
        assert receive_message(str, world(), 1) == "to the first"


def a_pickle_instead_of_a_message(rank: int, folder: Path) -> None:
    """What torch's collective for objects sends runs no code here."""
    if rank == 1:
        data = pickle.dumps(Payload())
        dist.send(torch.tensor([len(data)]), 0)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
        return
    with pytest.raises(MessageError, match="what rank 1 of the group has sent must be a message of type int, but b'"):
        receive_message(int, world(), 1)
    assert not Payload.ran


def a_size_that_no_message_has(rank: int, folder: Path) -> None:
    """It is refused before memory is asked for."""
    for size in (2**62, -1, 0):
        if rank == 1:
            dist.send(torch.tensor([size]), 0)
        else:
            with pytest.raises(MessageError, match=f"what rank 1 of the group has sent must have .* not {size:,}"):
                receive_message(int, world(), 1)


WORKS = (messages_of_all, messages_of_one, a_pickle_instead_of_a_message, a_size_that_no_message_has)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "messages", WORKS)


@each_work(WORKS)
def test_on_two_ranks(outcomes: Outcomes, work: Work):
    outcomes.assert_passed(work)


# Sources

UNPICKLES = re.compile(
    r"\b(pickle|_pickle|cPickle|dill|cloudpickle|marshal|shelve)\b.*\bimport\b|\bimport\b.*\b(pickle|dill|marshal|shelve)\b"
    r"|\w+_object(_list)?\(|ForkingPickler|torch\.load\(|allow_pickle=True|\bconnection\b.*\bListener\b|AF_INET"
    r"|\bdcp\.|async_save|checkpoint\.state_dict\b"
)
PIPES = "serve/disaggregated/page_pool.py"  # a handle of memory, over pipes that a process has made for its children


@pytest.mark.parametrize("dtype", ["qint8", "quint4x2", "uint4", "complex64"])
def test_a_tensor_that_needs_more_than_its_bytes_is_refused(dtype: str):
    with pytest.raises(MessageError, match="is needed, not"):
        decode(json.dumps([[dtype, [2], "AQE="]]).encode(), Tensor, "the message")


def test_no_module_unpickles_what_comes_from_a_socket():
    found = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        for line in file.read_text().splitlines()
        if UNPICKLES.search(line) and not re.search(r"def \w+_object\(|py_object\(|_read_object\(", line)
    }
    assert found == {PIPES}
