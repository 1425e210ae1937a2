"""Guards: rules that check telemetry and act when their condition holds.

    [[rule]]
    when = "flushed > 5%"        # a statistic of telemetry's rows, and a bound
    product = "wgrad"            # or "fprop", "dgrad"; default: any GEMM
    layers = "*.experts.*"       # patterns of layer names, separated by commas; default: all layers
    for_steps = 50               # the condition must hold in every measured step for this long; default: 1
    then = "warn"                # or "capture": write the operands of the next step to a file;
                                 # or "bf16": compute this GEMM of this layer in BF16 from the next step on

A rule fires once for each GEMM of a layer, and again only after its condition has not held in between.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, Literal, get_args

from octile.lab.operand_stats import TelemetryRow
from octile.recipe import GEMMS, GemmName

Action = Literal["warn", "capture", "bf16"]
ACTIONS: tuple[Action, ...] = get_args(Action)
WHAT_FOLLOWS: Mapping[Action, str] = {
    "warn": "only a warning",
    "capture": "its operands are captured in the next step",
    "bf16": "from the next step on it is computed in BF16",
}
COMPARISONS = {">": gt, ">=": ge, "<": lt, "<=": le}
SHORT_NAMES = {"flushed": "underflows%", "saturated": "overflows%", "subnormal": "subnormals%", "amax": "cur_amax"}
STATISTICS = (
    *("underflows%", "overflows%", "subnormals%", "cur_amax", "dynamic_range", "max_blockwise_dynamic_range"),
    *("mean_blockwise_dynamic_range", "between_blocks_dynamic_range", "scale_inv_min", "scale_inv_max", "kurtosis"),
    *("outlier_channels", "mse", "snr_db", "worst_over_rms", "bias"),
    *("quantization_snr_db", "quantization_worst_over_rms", "quantization_bias"),
    *("accumulation_snr_db", "accumulation_worst_over_rms", "accumulation_bias"),
)
RATIOS = "worst_over_rms", "bias"  # ends of the names of statistics that are ratios
CONDITION = re.compile(r"\s*([a-z0-9_%]+)\s*(>=|<=|>|<)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Rule:
    """One rule; `statistic`, `comparison` and `bound` are parsed from `when`."""

    when: str
    then: Action
    product: str = "*"
    layers: str = "*"
    for_steps: int = 1
    statistic: str = field(init=False)
    comparison: str = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        texts = {"when": self.when, "then": self.then, "product": self.product, "layers": self.layers}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ValueError(f"{name} must be text, not {value!r}")
        if self.then not in ACTIONS:
            raise ValueError(f"then must be one of {', '.join(ACTIONS)}, not {self.then!r}")
        if self.product not in ("*", *GEMMS):
            raise ValueError(f"product must be one of {', '.join(GEMMS)}, or '*' for any, not {self.product!r}")
        if not isinstance(self.for_steps, int) or isinstance(self.for_steps, bool) or self.for_steps < 1:
            raise ValueError(f"for_steps must be a whole number of at least 1, not {self.for_steps!r}")
        for name, part in zip(("statistic", "comparison", "bound"), _condition(self.when), strict=True):
            object.__setattr__(self, name, part)

    def applies_to(self, row: TelemetryRow) -> bool:
        """Whether the rule applies to a row: to its layer and GEMM, and to a statistic that it has."""
        return (
            self.product in ("*", row["product"])
            and row.get(self.statistic) is not None
            and any(fnmatchcase(row["layer"], pattern.strip()) for pattern in self.layers.split(","))
        )

    def holds(self, row: TelemetryRow) -> bool:
        """Whether the condition holds in a row to which the rule applies."""
        return bool(COMPARISONS[self.comparison](row[self.statistic], self.bound))


@dataclass(frozen=True)
class Event:
    """A rule that fired at `step`, where the statistic was `value`; its condition has held since step `since`."""

    rule: Rule
    step: int
    since: int
    layer: str
    product: GemmName
    operand: str | None
    value: float

    def __str__(self) -> str:
        what = f"{self.product} of {self.layer}" + (f", operand {self.operand}" if self.operand else "")
        return (
            f"guard at step {self.step}: {self.rule.when} holds since step {self.since} in {what}, where it is "
            f"{self._shown_value()}: {WHAT_FOLLOWS[self.rule.then]}"
        )

    def _shown_value(self) -> str:
        """Return the value with its unit, and with so many digits that the condition holds for what is shown."""
        rule = self.rule
        is_share = rule.when.rstrip().endswith("%") and not rule.statistic.endswith("%")  # a ratio, compared with N%
        factor = 100.0 if is_share else 1.0
        unit = "%" if is_share or rule.statistic.endswith("%") else " dB" if rule.statistic.endswith("snr_db") else ""
        texts = [f"{factor * self.value:.{digits}g}" for digits in range(4, 18)]
        compare = COMPARISONS[rule.comparison]
        return next((text for text in texts if compare(float(text) / factor, rule.bound)), texts[-1]) + unit

    def record(self) -> dict[str, Any]:
        """Return the event as a line of metrics.jsonl stores it."""
        return {
            "when": self.rule.when,
            "then": self.rule.then,
            "since": self.since,
            "layer": self.layer,
            "product": self.product,
            "operand": self.operand,
            "value": self.value,
        }


Key = tuple[int, str, GemmName, str | None]  # rule, layer, GEMM, operand


class Guards:
    """Rules, and for each layer and GEMM since when their condition has held."""

    def __init__(self, rules: Iterable[Rule]):
        self.rules = tuple(rules)
        self._since: dict[Key, int] = {}
        self._fired: set[Key] = set()

    def check(self, rows: Iterable[TelemetryRow]) -> list[Event]:
        """Check the rows of a step, and return the rules that fire."""
        events = []
        for row in rows:
            for index, rule in enumerate(self.rules):
                if not rule.applies_to(row):
                    continue
                key: Key = index, row["layer"], row["product"], row.get("operand")
                if not rule.holds(row):
                    self._since.pop(key, None)
                    self._fired.discard(key)
                    continue
                since = self._since.setdefault(key, row["step"])
                if key not in self._fired and row["step"] - since + 1 >= rule.for_steps:
                    self._fired.add(key)
                    layer, product, operand = key[1:]
                    events.append(Event(rule, row["step"], since, layer, product, operand, row[rule.statistic]))
        return events

    def replay(self, rows: Iterable[TelemetryRow], recorded: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the rows of a run and the events that it recorded, as `Event.record` returns them.

        A rule that was added since has recorded nothing: it fires at the next measured step if its condition holds.
        """
        self.check(rows)
        fields = "when", "then", "since", "layer", "product", "operand"
        known = {tuple(event.get(name) for name in fields) for event in recorded}
        rules = ((key, self.rules[key[0]]) for key in self._fired)
        self._fired = {key for key, rule in rules if (rule.when, rule.then, self._since[key], *key[1:]) in known}


def parse_rules(text: str, path: Path) -> tuple[Rule, ...]:
    """Parse the rules in the text of a TOML file.

    Args:
        text: text of the file.
        path: path of the file, for messages.

    Raises:
        ValueError: the text is not TOML or holds anything but rules, or a rule is invalid; the message says which.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} must be TOML: {error}") from None
    rules = content.pop("rule", [])
    if content or not isinstance(rules, list) or not rules:
        found = f"; it has {', '.join(content)}" if content else ""
        raise ValueError(f"{path} must hold [[rule]] tables and nothing else{found}")
    return tuple(_rule(path, number, rule) for number, rule in enumerate(rules, start=1))


def _rule(path: Path, number: int, rule: Any) -> Rule:
    names = [f.name for f in fields(Rule) if f.init]
    if not isinstance(rule, dict):
        raise ValueError(f"{path}: rule {number} must be a [[rule]] table")
    for name in rule:
        if name not in names:
            raise ValueError(f"{path}: rule {number} has {name!r}, but a rule has only {', '.join(names)}")
    for name in ("when", "then"):
        if name not in rule:
            raise ValueError(f"{path}: rule {number} has no {name!r}")
    try:
        return Rule(**rule)
    except ValueError as error:
        raise ValueError(f"{path}: rule {number}: {error}") from None


def _condition(when: str) -> tuple[str, str, float]:
    """Parse a condition: 'flushed > 5%' → ("underflows%", ">", 5.0).

    A statistic in percent needs a bound with a percent sign, from 0% to 100%. For a ratio, N% means N / 100. No other
    statistic has a percentage.
    """
    match = CONDITION.fullmatch(when)
    if match is None:
        raise ValueError(
            f"when must be a statistic, one of > >= < <=, and a number, as in 'flushed > 5%', not {when!r}"
        )
    name, comparison, number, percent = match.groups()
    statistic = SHORT_NAMES.get(name, name)
    if statistic not in STATISTICS:
        raise ValueError(
            f"when names the unknown statistic {name!r}; there are {', '.join((*SHORT_NAMES, *STATISTICS))}"
        )
    try:
        bound = float(number)
    except ValueError:
        raise ValueError(f"when must contain a number, not {when!r}") from None
    if statistic.endswith("%") and not percent:
        raise ValueError(f"when compares {name}, which is in percent: write {number}%")
    if percent and not statistic.endswith(("%", *RATIOS)):
        raise ValueError(f"when compares {name}, which is not in percent: write a number without %, not {number}%")
    if statistic.endswith("%") and not 0 <= bound <= 100:
        raise ValueError(f"when compares {name}, which is from 0% to 100%, with {number}%")
    return statistic, comparison, bound / 100 if percent and not statistic.endswith("%") else bound
