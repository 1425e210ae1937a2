"""The lines of metrics.jsonl and telemetry.jsonl: a JSON object each, whose keys decide what their values are."""

import json
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
IsWhole = Callable[[Any], bool]


def parse_line(text: str | bytes, is_telemetry: bool = False) -> Record | None:
    """Return a line's object; None if the line is damaged.

    Args:
        text: the line; as bytes it must be UTF-8.
        is_telemetry: whether it is of telemetry.jsonl, whose lines are of one layer's GEMM each.
    """
    try:
        line = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        return None
    if not isinstance(line, dict) or not _is_int(line.get("step")):
        return None
    is_whole = _is_telemetry(line) if is_telemetry else _is_metrics(line)
    return line if is_whole else None


def _is_metrics(line: Record) -> bool:
    return all(_METRICS.get(key, _is_plain)(value) for key, value in line.items())


def _is_telemetry(line: Record) -> bool:
    has_names = line.keys() >= {"layer", "product"}
    return has_names and all(_TELEMETRY.get(key, _is_number)(value) for key, value in line.items())


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))  # NaN is stored as null


def _is_plain(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_histogram(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_is_numbers(value.get(key)) and None not in value[key] for key in ("log2", "count"))
        and len(value["log2"]) == len(value["count"])
    )


def _is_of(is_whole: IsWhole) -> IsWhole:
    """Whether a value is an object whose values are whole."""
    return lambda value: isinstance(value, dict) and all(map(is_whole, value.values()))


def _is_guard(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_int(value.get("since"))
        and all(isinstance(value.get(key), str) for key in ("when", "then", "layer", "product"))
    )


_METRICS: dict[str, IsWhole] = {  # of the keys whose values are no numbers
    "main_loss": _is_number,
    "guard": _is_guard,
    "expert_load": _is_of(_is_numbers),
    "tile_scales": _is_of(_is_histogram),
    "spike": lambda value: isinstance(value, dict),
    "stopped": lambda value: isinstance(value, str),
    "texts": lambda value: isinstance(value, list),  # of a run of `octile rl`
}
_TELEMETRY: dict[str, IsWhole] = {
    "layer": lambda value: isinstance(value, str),
    "product": lambda value: isinstance(value, str),
    "operand": lambda value: value is None or isinstance(value, str),
    "top_channels": lambda value: isinstance(value, list),
    "scale_histogram": lambda value: isinstance(value, dict),
}
