"""Messages between ranks: JSON whose type the receiver names, and which is checked before anything is made of it.

    encode, decode           a value as bytes, and back
    all_gather_messages      all ranks of a group get the values of all
    gather_messages          the first rank gets them
    broadcast_message        all ranks get the value of the first
    send_message, receive_message

The collectives of torch for objects pickle, and whoever unpickles bytes runs the code that they name. The ports of
torchrun's store, of gloo and of NCCL ask nobody who they are, so octile never unpickles what comes from a socket: a
message names no class and no function, besides exceptions of a list.

A type is None, bool, int, float, str, Path, an Enum, torch.dtype, Tensor, Exception; a list, tuple, dict, Sequence or
Mapping of types; a type or None; a dataclass or NamedTuple whose fields are annotated so.
"""

from __future__ import annotations

import base64
import json
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from octile.validation import quoted

T = TypeVar("T")
E = TypeVar("E", bound=type[Exception])

MAX_BYTES = 2**30  # of a message: the prompts of a full server, or the chunks of a large checkpoint, are a tenth of it
MAX_SHOWN = 300  # characters that a message about a stranger's bytes quotes
DTYPES: Mapping[str, torch.dtype] = {  # quantized ones would need more than their bytes, and crash without it
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    )
}  # fmt: skip
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ArithmeticError, AssertionError, AttributeError, BlockingIOError, BrokenPipeError, BufferError,
        ChildProcessError, ConnectionAbortedError, ConnectionError, ConnectionRefusedError, ConnectionResetError,
        EOFError, Exception, FileExistsError, FileNotFoundError, FloatingPointError, ImportError, IndexError,
        InterruptedError, IsADirectoryError, KeyError, LookupError, MemoryError, ModuleNotFoundError, NameError,
        NotADirectoryError, NotImplementedError, OSError, OverflowError, PermissionError, ProcessLookupError,
        RecursionError, RuntimeError, TimeoutError, TypeError, UnicodeError, ValueError, ZeroDivisionError,
        torch.OutOfMemoryError, dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError,
    )
}  # fmt: skip
SENT_AS: Mapping[type[Exception], type[Exception]] = {  # whose arguments are all of a file
    json.JSONDecodeError: ValueError,
    UnicodeDecodeError: ValueError,
}


def sent_by_name(error: E) -> E:
    """Let exceptions of a class arrive as what they are: a class decorator. They are made of texts and numbers."""
    ERRORS[error.__name__] = error
    return error


@sent_by_name
class MessageError(Exception):
    """What another process has sent is not the message that this rank waits for."""

    exit_code = 1


def encode(value: object, kind: Any) -> bytes:
    """Return a value as a message, which is ASCII text.

    Raises:
        TypeError: the value is not of this type, or no message can have the type.
        ValueError: the message is too large.
    """
    data = json.dumps(_codec(kind).write([value]), separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"a message must have at most {MAX_BYTES:,} bytes, but that of {_name(kind)} has {len(data):,}"
        )
    return data


def decode(data: bytes, kind: Any, what: str) -> Any:
    """Return the value of a message.

    Args:
        data: bytes from anywhere.
        kind: the type that it must have.
        what: what the message is, and whose, for errors.

    Raises:
        MessageError: it is too large, no JSON, or of another type.
    """
    _check_size(len(data), what)
    try:
        (value,) = _codec(kind).read(json.loads(data.decode("ascii")))
        return value
    except Exception as error:
        raise MessageError(
            f"{what} must be a message of type {_name(kind)}, but {quoted(data)} came, which a process that is no rank "
            f"of this run may have sent ({shown(f'{type(error).__name__}: {error}')})"
        ) from None


def shown(text: str) -> str:
    """What a stranger may have sent, as a short line that no terminal takes for a command."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_SHOWN])
    return line if len(text) <= MAX_SHOWN else f"{line}…"


def outcome_of(kind: Any) -> Any:
    """The type of what became of work that returns a value of a type: (value, None), or (None, exception)."""
    return types.GenericAlias(tuple, ((kind or type(None)) | None, Exception | None))


def as_sent(error: Exception) -> Exception:
    """Return an exception as it arrives elsewhere: of its own class if that is in `ERRORS`, else a RuntimeError."""
    return _read_error(_write_error(error))


def all_gather_messages(own: T, kind: Any, group: dist.ProcessGroup) -> list[T]:
    """Return the values of all ranks of a group, in their order, on all of them.

    Args:
        own: the value of this rank.
        kind: its type, the same on all ranks.
        group: the ranks.

    Raises:
        MessageError: what came from a rank is no such message.
        TypeError, ValueError: as `encode`.
    """
    return all_gather_encoded(encode(own, kind), kind, group)


def all_gather_encoded(own: bytes, kind: Any, group: dist.ProcessGroup) -> list[Any]:
    """Do what `all_gather_messages` does, given what `encode` has made of this rank's value."""
    sizes, padded = _sizes(own, group)
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [_decode_from(rank, t[:size], kind) for rank, (t, size) in enumerate(zip(gathered, sizes, strict=True))]


def gather_messages(own: T, kind: Any, group: dist.ProcessGroup) -> list[T] | None:
    """Return the values of all ranks of a group on the first of them, and None on the others.

    Args, Raises: as `all_gather_messages`.
    """
    data = encode(own, kind)
    sizes, padded = _sizes(data, group)
    gathered = [torch.empty_like(padded) for _ in sizes] if dist.get_rank(group) == 0 else None
    dist.gather(padded, gathered, group=group, group_dst=0)
    if gathered is None:
        return None
    return [_decode_from(rank, t[:size], kind) for rank, (t, size) in enumerate(zip(gathered, sizes, strict=True))]


def broadcast_message(own: T | None, kind: Any, group: dist.ProcessGroup) -> T:
    """Return the value of the first rank of a group on all of them.

    Args:
        own: the value, on the first rank; the others' is not read.
        kind, group: as in `all_gather_messages`.

    Raises:
        MessageError, TypeError, ValueError: as `all_gather_messages`.
    """
    is_first, device = dist.get_rank(group) == 0, _device(group)
    data = encode(own, kind) if is_first else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    message = _tensor(data, device) if is_first else _empty(size, 0)
    dist.broadcast(message, group=group, group_src=0)
    return own if is_first else _decode_from(0, message, kind)  # type: ignore[return-value]


def send_message(own: object, kind: Any, group: dist.ProcessGroup, to: int) -> None:
    """Send a value to a rank of a group, which calls `receive_message`.

    Raises:
        TypeError, ValueError: as `encode`.
    """
    message = _tensor(encode(own, kind), _device(group))
    dist.send(torch.tensor([len(message)], device=message.device), group=group, group_dst=to)
    dist.send(message, group=group, group_dst=to)


def receive_message(kind: Any, group: dist.ProcessGroup, source: int) -> Any:
    """Return the value that a rank of a group sends by `send_message`.

    Raises:
        MessageError: what came is no such message.
    """
    size = torch.zeros(1, dtype=torch.int64, device=_device(group))
    dist.recv(size, group=group, group_src=source)
    message = _empty(size, source)
    dist.recv(message, group=group, group_src=source)
    return _decode_from(source, message, kind)


def _sizes(data: bytes, group: dist.ProcessGroup) -> tuple[list[int], Tensor]:
    """Return the bytes of the messages of all ranks, and this rank's message with as many as the longest has."""
    device = _device(group)
    own = torch.tensor([len(data)], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    sizes = torch.cat(gathered).tolist()
    for rank, size in enumerate(sizes):
        _check_size(size, _message_of(rank))
    return sizes, _tensor(data.ljust(max(sizes)), device)


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the messages of a group lie: on the CPU if it has a backend for that."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _empty(size: Tensor, source: int) -> Tensor:
    _check_size(n_bytes := int(size.item()), _message_of(source))
    return torch.empty(n_bytes, dtype=torch.uint8, device=size.device)


def _check_size(n_bytes: int, what: str) -> None:
    if not 0 < n_bytes <= MAX_BYTES:
        raise MessageError(f"{what} must have from 1 to {MAX_BYTES:,} bytes, not {n_bytes:,}")


def _decode_from(rank: int, message: Tensor, kind: Any) -> Any:
    return decode(message.cpu().numpy().tobytes(), kind, _message_of(rank))


def _message_of(rank: int) -> str:
    return f"what rank {rank} of the group has sent"


# Types


class _Codec(NamedTuple):
    """How values of a type are written and read: many at a time, as the columns of a table, which takes few calls.

    Attributes:
        write: values → what JSON represents. Raises TypeError if one of them is not of the type.
        read: what JSON represents → values. Raises any exception if it is not what `write` returns.
    """

    write: Callable[[Sequence[Any]], Any]
    read: Callable[[Any], list[Any]]


@cache
def _codec(kind: Any) -> _Codec:
    """The codec of a type.

    Raises:
        TypeError: no message can have it.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return _scalars(kind, [SCALARS[kind]])
    if kind in _OTHERS:
        return _each(kind, *_OTHERS[kind])
    if origin in (Union, types.UnionType):
        if all(member in SCALARS and member is not float for member in arguments):
            return _scalars(kind, [SCALARS[member] for member in arguments])
        if len(arguments) == 2 and type(None) in arguments:
            return _optional(_codec(next(member for member in arguments if member is not type(None))))
    if origin in (list, Sequence):
        return _lists(kind, list, _codec(arguments[0]))
    if origin is tuple and arguments[1:] == (...,):
        return _lists(kind, tuple, _codec(arguments[0]))
    if origin is tuple:
        return _records(kind, tuple, [_codec(argument) for argument in arguments])
    if origin in (dict, Mapping):
        return _dicts(kind, _codec(types.GenericAlias(tuple, arguments)))
    if isinstance(kind, type):
        if issubclass(kind, tuple) and (names := getattr(kind, "_fields", ())):
            hints = get_type_hints(kind)
            return _records(kind, lambda row: kind(*row), [_codec(hints[name]) for name in names])
        if is_dataclass(kind) and all(field.init for field in fields(kind)):
            hints, names = get_type_hints(kind), [field.name for field in fields(kind)]
            return _dataclasses(kind, names, _codec(types.GenericAlias(tuple, tuple(hints[name] for name in names))))
        if issubclass(kind, Enum):
            return _each(kind, lambda member: member.value, kind)
    raise TypeError(f"no message can have the type {_name(kind)}")


def _wrong(kind: Any, value: object) -> TypeError:
    return TypeError(f"{_name(kind)} is needed, not {quoted(value)}")


def _name(kind: Any) -> str:
    return "None" if kind in (None, type(None)) else kind.__name__ if type(kind) is type else str(kind)


def _check_types(kind: Any, column: Any, known: set[type]) -> None:
    if type(column) is not list:
        raise TypeError(f"a list of {_name(kind)} is needed, not {quoted(column)}")
    if not set(map(type, column)) <= known:
        raise _wrong(kind, next(value for value in column if type(value) not in known))


def _scalars(kind: Any, members: Sequence[type]) -> _Codec:
    known = {*members}

    def write(values: Sequence[Any]) -> Any:
        if set(map(type, values)) <= known:
            return values
        return [_scalar(kind, value, members) for value in values]

    def read(column: Any) -> list[Any]:
        if known == {float}:
            _check_types(kind, column, {float, int})
            return [*map(float, column)]
        _check_types(kind, column, known)
        return list(column)

    return _Codec(write, read)


def _scalar(kind: Any, value: Any, members: Sequence[type]) -> Any:
    """Make a number of an IntEnum or NumPy, or a text of a StrEnum, what it is for JSON."""
    for member in members:
        base = int | float if member is float else member
        if isinstance(value, base) and (member is bool or not isinstance(value, bool)):
            return value if member is type(None) else member(value)
    raise _wrong(kind, value)


def _each(kind: type, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> _Codec:
    """The codec of values that are converted one by one."""

    def write_all(values: Sequence[Any]) -> Any:
        for value in values:
            if not isinstance(value, kind):
                raise _wrong(kind, value)
        return [write(value) for value in values]

    def read_all(column: Any) -> list[Any]:
        _check_types(kind, column, {str, int, list})
        return [read(value) for value in column]

    return _Codec(write_all, read_all)


def _optional(codec: _Codec) -> _Codec:
    """The codec of values that may be None: which of them are, and the others."""

    def write(values: Sequence[Any]) -> Any:
        return [[value is None for value in values], codec.write([value for value in values if value is not None])]

    def read(column: Any) -> list[Any]:
        is_none, others = column
        _check_types(bool, is_none, {bool})
        found = codec.read(others)
        if len(found) != is_none.count(False):
            raise ValueError(f"{is_none.count(False)} values are not None, but {len(found)} came")
        rest = iter(found)
        return [None if none else next(rest) for none in is_none]

    return _Codec(write, read)


def _lists(kind: Any, makes: Callable[[Any], Any], items: _Codec) -> _Codec:
    """The codec of lists: their lengths, and the items of all."""

    def write(values: Sequence[Any]) -> Any:
        for value in values:
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                raise _wrong(kind, value)
        return [[*map(len, values)], items.write([*chain.from_iterable(values)])]

    def read(column: Any) -> list[Any]:
        lengths, flat = column
        _check_types(int, lengths, {int})
        found = items.read(flat)
        if min(lengths, default=0) < 0 or sum(lengths) != len(found):
            raise ValueError(f"the lists have {quoted(lengths)} items, but {len(found)} came")
        rest = iter(found)
        return [makes(islice(rest, length)) for length in lengths]

    return _Codec(write, read)


def _records(kind: Any, makes: Callable[[Any], Any], codecs: Sequence[_Codec]) -> _Codec:
    """The codec of tuples or NamedTuples whose items have types of their own: a column for each item."""

    def write(values: Sequence[Any]) -> Any:
        for value in values:
            if not isinstance(value, tuple) or len(value) != len(codecs):
                raise _wrong(kind, value)
        columns = zip(*values, strict=True) if values else [()] * len(codecs)
        return [codec.write(column) for codec, column in zip(codecs, columns, strict=True)]

    def read(columns: Any) -> list[Any]:
        if type(columns) is not list or len(columns) != len(codecs):
            raise _wrong(kind, columns)
        found = [codec.read(column) for codec, column in zip(codecs, columns, strict=True)]
        return [makes(row) for row in zip(*found, strict=True)]

    return _Codec(write, read)


def _dicts(kind: Any, pair: _Codec) -> _Codec:
    """The codec of dictionaries: their items, since an object of JSON has only texts as keys."""
    pairs = _lists(kind, list, pair)

    def write(values: Sequence[Any]) -> Any:
        for value in values:
            if not isinstance(value, Mapping):
                raise _wrong(kind, value)
        return pairs.write([[*value.items()] for value in values])

    return _Codec(write, lambda column: [dict(items) for items in pairs.read(column)])


def _dataclasses(kind: type, names: Sequence[str], records: _Codec) -> _Codec:
    """The codec of dataclasses, which check their fields themselves when they are made."""

    def write(values: Sequence[Any]) -> Any:
        for value in values:
            if type(value) is not kind:
                raise _wrong(kind, value)
        return dict(zip(names, records.write([tuple(getattr(v, name) for name in names) for v in values]), strict=True))

    def read(columns: Any) -> list[Any]:
        if type(columns) is not dict or [*columns] != [*names]:
            came = f"an object with {', '.join(columns)}" if isinstance(columns, dict) else quoted(columns)
            raise TypeError(f"{kind.__name__} has the fields {', '.join(names)}, but {came} came")
        return [kind(**dict(zip(names, row, strict=True))) for row in records.read([*columns.values()])]

    return _Codec(write, read)


def _read_dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in DTYPES:
        raise _wrong(torch.dtype, name)
    return DTYPES[name]


def _write_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_tensor(t: Tensor) -> list[Any]:
    data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return [_write_dtype(t.dtype), list(t.shape), base64.b64encode(data).decode()]


def _read_tensor(value: Any) -> Tensor:
    name, shape, text = value
    _check_types(int, shape, {int})
    dtype, data = _read_dtype(name), base64.b64decode(text, validate=True)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a tensor {quoted(shape)} of {dtype} does not have {len(data):,} bytes")
    values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return values.reshape(shape)


def _write_error(error: Exception) -> list[Any]:
    text, kind = str(error), SENT_AS.get(type(error), type(error))
    arguments: tuple[Any, ...] = error.args
    if isinstance(error, OSError) and error.filename is not None:
        names = [name if type(name) is int else os.fsdecode(name) for name in (error.filename, error.filename2 or "")]
        arguments = (error.errno, error.strerror, names[0], *((None, names[1]) if names[1] else ()))
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    if ERRORS.get(kind.__name__) is kind:
        for attempt in (arguments, (text,)):
            are_sent = all(type(argument) in (str, int, type(None)) for argument in attempt)
            if are_sent and str(_made(kind, attempt)) == text:
                return [kind.__name__, list(attempt), notes]
    return ["RuntimeError", [f"{type(error).__name__}: {text}"], notes]


def _made(kind: type[Exception], arguments: Sequence[Any]) -> Exception | None:
    try:
        return kind(*arguments)
    except Exception:  # its class takes other arguments
        return None


def _read_error(value: Any) -> Exception:
    name, arguments, notes = value
    if type(name) is not str or name not in ERRORS:
        raise ValueError(f"{quoted(name)} is no exception that can be sent")
    _check_types(str | int | None, arguments, {str, int, type(None)})
    _check_types(str, notes, {str})
    error = ERRORS[name](*arguments)
    for note in notes:
        error.add_note(note)
    return error


SCALARS: Mapping[Any, type] = {kind: kind for kind in (bool, int, float, str, type(None))} | {None: type(None)}
_OTHERS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    Path: (str, Path),
    torch.dtype: (_write_dtype, _read_dtype),
    Tensor: (_write_tensor, _read_tensor),
    Exception: (_write_error, _read_error),
}
