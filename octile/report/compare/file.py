"""compare.json: a comparison as a file that scripts read and the page can be drawn from again.

    bf16, bf16_other_seed, bf16_more_seeds[], recipes[]     the curves
    outcome[]      gap, intervals, divergence point and verdict of each recipe: what follows from the curves
    tokens[]       losses of held-out tokens beside BF16's, in groups
    gradients[]    angle and norms of each weight's gradient beside BF16's
    recipe_files   what the files said that recipes came from
    nudge[]        steps, and how far BF16 lies from itself there after a nudge, where that is the noise
    preset, bar, machine, measured_on, config

A number that is NaN or infinite is null, which JSON has. A file written before there were `bf16_more_seeds`, `outcome`,
`tokens`, `gradients`, `recipe_files`, `nudge` and what is newer in a curve is read as one that has none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from octile.checkpoint.files import write_text
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.report.compare.result import CompareResult, Curve
from octile.report.compare.token_differences import Group, TokenDifferences

COMPARE_FILE = "compare.json"
Record = TypeVar("Record")


def write_result(path: Path, result: CompareResult, measured_on: Mapping[str, Any]) -> None:
    """Writes a comparison. Its folder must exist."""
    outcomes = [result.outcome(name) for name in result.names]
    outcome = [{**asdict(o), "gap": o.gap, "verdict": o.verdict, "within_bar": o.within_bar} for o in outcomes]
    content = {**asdict(result), "outcome": outcome, "measured_on": dict(measured_on)}
    write_text(path, json.dumps(_finite(content), allow_nan=False, ensure_ascii=False, default=str) + "\n")


def read_result(path: Path) -> CompareResult:
    """Reads what `octile compare` wrote, now or before.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or no comparison.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return _record(
            CompareResult,
            found,
            bf16=_curve(found["bf16"]),
            bf16_other_seed=_curve(found["bf16_other_seed"]),
            bf16_more_seeds=tuple(map(_curve, found.get("bf16_more_seeds", ()))),
            recipes=tuple(map(_curve, found["recipes"])),
            tokens=tuple(map(_tokens, found.get("tokens", ()))),
            gradients=tuple(map(_check, found.get("gradients", ()))),
            nudge=tuple((step, noise) for step, noise in found.get("nudge", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no comparison that octile compare wrote: {error!r}") from None


def _curve(found: dict[str, Any]) -> Curve:
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


def _check(found: dict[str, Any]) -> GradientCheck:
    return _record(GradientCheck, found, weights=tuple(_record(WeightGradient, _known(w)) for w in found["weights"]))


def _record(kind: type[Record], found: dict[str, Any], **made: Any) -> Record:
    """The fields that the kind has, as found or as made from that; others are left out."""
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
