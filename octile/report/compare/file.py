"""Reads and writes compare.json, from which scripts read a comparison and its page can be drawn again.

    bf16, bf16_other_seed, bf16_more_seeds[], recipes[]     the curves
    outcome[]      gap, intervals, step of leaving the noise and verdict of each recipe, computed from the curves
    tokens[]       losses of held-out tokens compared with BF16's, in groups
    gradients[]    angle and norms of each weight's gradient compared with BF16's
    recipe_files   the contents of the recipes' files
    nudge[]        steps, and the difference that a nudge of BF16 makes there, if that is the noise
    preset, bar, machine, measured_on, config

NaN and infinity are written as null. A file of an earlier version, without `bf16_more_seeds`, `outcome`, `tokens`,
`gradients`, `recipe_files`, `nudge` or the newer fields of a curve, can still be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from octile.atomic_files import write_text
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.report.compare.result import CompareResult, Curve
from octile.report.compare.token_differences import Group, TokenDifferences

COMPARE_FILE = "compare.json"
Record = TypeVar("Record")


def write_result(path: Path, result: CompareResult, measured_on: Mapping[str, Any]) -> None:
    """Write a comparison. The folder must exist."""
    outcomes = [result.outcome(name) for name in result.names]
    outcome = [{**asdict(o), "gap": o.gap, "verdict": o.verdict, "within_bar": o.within_bar} for o in outcomes]
    content = {**asdict(result), "outcome": outcome, "measured_on": dict(measured_on)}
    write_text(path, json.dumps(_finite(content), allow_nan=False, ensure_ascii=False, default=str) + "\n")


def read_result(path: Path) -> CompareResult:
    """Read the file that `octile compare` wrote, in this version or an earlier one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or not a comparison.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return _record(
            CompareResult,
            found,
            bf16=read_curve(found["bf16"]),
            bf16_other_seed=read_curve(found["bf16_other_seed"]),
            bf16_more_seeds=tuple(map(read_curve, found.get("bf16_more_seeds", ()))),
            recipes=tuple(map(read_curve, found["recipes"])),
            tokens=tuple(map(_tokens, found.get("tokens", ()))),
            gradients=tuple(map(read_gradient_check, found.get("gradients", ()))),
            nudge=tuple((step, noise) for step, noise in found.get("nudge", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a comparison that octile compare wrote: {error!r}") from None


def read_curve(found: dict[str, Any]) -> Curve:
    """Read the JSON object of a `Curve`."""
    lists = ("steps", "train_loss", "val_steps", "val_loss", "window_loss")
    quartiles = found.get("speed_quartiles")
    return _record(
        Curve,
        found | {"tokens_per_s": math.nan if found["tokens_per_s"] is None else found["tokens_per_s"]},
        **{name: _numbers(found[name]) for name in lists if name in found},
        speed_quartiles=quartiles and tuple(quartiles),
    )


def _tokens(found: dict[str, Any]) -> TokenDifferences:
    groups = ("worst", "best", "positions", "frequencies")
    made = {name: tuple(_record(Group, _known(group)) for group in found[name]) for name in groups}
    return _record(TokenDifferences, found, **made, passage=tuple((text, value) for text, value in found["passage"]))


def read_gradient_check(found: dict[str, Any]) -> GradientCheck:
    """Read the JSON object of a `GradientCheck`."""
    return _record(GradientCheck, found, weights=tuple(_record(WeightGradient, _known(w)) for w in found["weights"]))


def _record(kind: type[Record], found: dict[str, Any], **made: Any) -> Record:
    """Build a dataclass from the keys of `found` that are its fields; `made` overrides them."""
    return kind(**{f.name: found[f.name] for f in fields(kind) if f.name in found} | made)  # type: ignore[arg-type]


def _known(found: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in found.items()}


def _numbers(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
