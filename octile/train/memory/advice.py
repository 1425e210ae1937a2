"""What to change in a run that needs more memory than there is: micro-batches, sequence length, or the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.pipeline_layout import held_share

MIN_MEASURED_TOKENS = 16  # the shortest sequence that is measured
USABLE_SHARE = 0.9  # of the memory; fragmentation takes the rest


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a run needs, in bytes.

    Attributes:
        fixed: what every step needs, whatever its batch: weights, gradients, optimizer state, and what is cached.
        sequence: what the passes of one sequence of the run's length take in addition.
        available: what this process can allocate on the device.
        half_sequence: what one sequence of half the length takes; None: half as much.
        update: what the optimizer's step takes in addition to `fixed`, when no sequence is in memory.
    """

    fixed: int
    sequence: int
    available: int
    half_sequence: int | None = None
    update: int = 0

    def share_within(self, budget: float) -> float:
        """The share of a sequence's length with which it takes at most `budget` bytes.

        Some of its bytes grow with the length, and attention's scores with its square.
        """
        if budget <= 0:
            return 0.0
        half = self.sequence / 2 if self.half_sequence is None else self.half_sequence
        square = min(max(2 * self.sequence - 4 * half, 0.0), self.sequence)
        linear = self.sequence - square
        return 2 * budget / (linear + math.sqrt(linear**2 + 4 * square * budget))


def advice(config: TrainConfig, need: MemoryNeed | None, has_begun: bool = True, is_train: bool = True) -> str:
    """What to change in a run that runs out of memory.

    Args:
        config: the configuration of the run.
        need: what the run needs; None if even the shortest measured sequence did not fit.
        has_begun: whether there is a run to continue.
        is_train: as in `check_memory`.
    """
    if need is None:
        return _too_large_model(config, is_train)
    free = USABLE_SHARE * need.available - need.fixed
    if need.update and need.update > free:
        return f"{describe_update(need.update, need.fixed)}: choose a smaller model"
    at_once = config.micro_batch_size
    explanation = (
        f"a sequence of {config.sequence_length} tokens takes {format_memory(need.sequence)} in addition to "
        f"{format_memory(need.fixed)} for weights, gradients, optimizer, token ids and what else stays"
    )
    if has_begun:  # otherwise the refusal says it
        explanation += f", of {format_memory(need.available)}"
    finer = list(_finer(config)) if is_train else []
    fitting = [division for division in finer if division.taken * need.sequence <= free]
    if fitting:
        micro_batches, n, _ = fitting[0]
        change = (
            f"{explanation}: use --micro-batches {micro_batches} (now {config.micro_batches}), {n} at a time "
            f"instead of {at_once}"
        )
        if not has_begun:
            return change
        return f"{change}; to continue: {config.resume_command} --micro-batches {micro_batches}"
    divisions = [_Division(config.micro_batches, at_once, at_once), *finer]
    least = min(divisions, key=lambda division: division.taken)
    share = need.share_within(free / least.taken)
    length = min(int(config.sequence_length * share), config.sequence_length // 2)
    if length < config.advisable_length:
        return _too_large_model(config, is_train)
    finest = f" and --micro-batches {least.micro_batches}" if least.at_once < at_once else ""
    where = " in a new run" if has_begun else ""
    return f"{explanation}: use --sequence-length {length} (now {config.sequence_length}){finest}{where}"


def describe_update(update: int, fixed: int) -> str:
    """Say how much an update by the optimizer takes in addition to what stays, both in bytes."""
    return (
        f"an update by the optimizer takes {format_memory(update)} in addition to {format_memory(fixed)} for weights, "
        "gradients, optimizer, token ids and what else stays"
    )


class _Division(NamedTuple):
    """A division of a rank's sequences into micro-batches.

    Attributes:
        micro_batches: how many there are.
        at_once: the sequences of each.
        taken: what their passes take, in units of what one sequence of each micro-batch takes now.
    """

    micro_batches: int
    at_once: int
    taken: float


def _finer(config: TrainConfig) -> Iterator[_Division]:
    """The divisions into more micro-batches that a run, and the schedule of its pipeline, can have, the coarsest first.

    A pipeline may have more of them in flight: GPipe all.
    """
    sequences, held = config.batch_size // config.parallel.dp, held_share(config)
    for at_once in range(config.micro_batch_size - 1, 0, -1):
        if sequences % at_once == 0:
            with suppress(ValueError):  # the schedule does not fit so many
                finer = replace(config, micro_batches=sequences // at_once)
                taken = at_once * held_share(finer) / held
                yield _Division(finer.micro_batches, at_once, taken)


def _too_large_model(config: TrainConfig, is_train: bool) -> str:
    choices = "a smaller model or a device with more memory"
    if is_train and config.load_recipe().optimizer != Recipe.fp8_lm().optimizer:  # a recipe file may have it, too
        choices = (
            "a smaller model, a device with more memory, or --recipe fp8_lm, which needs half the bytes per parameter"
        )
    return (
        "weights, gradients and optimizer leave too little memory for a sequence of "
        f"{MIN_MEASURED_TOKENS} tokens: choose {choices}"
    )


def format_memory(n: float) -> str:
    """Bytes in GB or MB, with digits enough to compare a need with what is available: 52_340_000_000 → "52.34 GB"."""
    return f"{n / 1e9:,.2f} GB" if abs(n) >= 1e8 else f"{n / 1e6:,.1f} MB"
