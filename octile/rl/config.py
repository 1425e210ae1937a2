"""The configuration of a run of reinforcement learning as plain data. This module imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from octile.command_text import quoted_path
from octile.tokenizer import check_text
from octile.train.config import Count, Logger, Positive
from octile.validation import Range, Seed, check_fields, from_json

COMMAND = "octile rl"  # the entry "command" of config.json, by which other commands know such a run
DIGESTS = {"prompts_sha256": "prompts", "reward_sha256": "reward"}  # the checksum of a file: the setting that names it
RESUMABLE = frozenset({
    *("steps", "checkpoint_every", "log", "out", "device", "micro_batches"),
    *DIGESTS.values(),  # files with the same checksums
})  # fmt: skip


@dataclass(frozen=True)
class RLConfig:
    """The configuration of a run of reinforcement learning.

    Attributes:
        model: a run or a Hugging Face folder, FP8 or BF16, with whose weights and tokenizer the run begins; the newest
            run under runs/ if not given.
        prompts: a JSONL file of prompts: a line is an object with "prompt" or "messages", and "answer". If not given,
            additions of numbers of two digits, as in `octile train --data arithmetic`.
        reward: a Python file that defines reward(prompt, completion, answer), which returns a number. If not given, 0.9
            for the right answer after </think> and 0.1 for the format <think>…</think> and an answer.
        steps: sampling steps; each samples completions, scores them, and trains on them.
        prompts_per_step: prompts of a step.
        group_size: completions of a prompt, whose rewards are compared.
        max_new_tokens: maximum number of tokens of a completion.
        seed: a whole number that determines prompts and samples.
        lr: the learning rate of AdamW, which is constant.
        updates: optimizer steps on the completions of a step, each on as many groups.
        clip: by how much the ratio of the new and the old probability of a token may differ from 1.
        kl_coefficient: factor of the divergence from the model that the run begins with; 0 needs no copy of it.
        importance_limit: the largest truncated importance weight of a token, which corrects that the engine's
            probabilities are not the trainer's. If not given, nothing is corrected. With the recipe exact all weights
            are 1.
        micro_batches: parts of the completions of an optimizer step that pass the model one after another, to save
            memory.
        out: the run's folder; chosen under runs/ if not given.
        checkpoint_every: steps between checkpoints; 0 writes only the last one.
        log: where the metrics go as well: tensorboard (event files in the run's folder), wandb (Weights & Biases) or
            mlflow. Each needs the extra of its name, and several may be named. A resumed run continues there.
        device: auto uses a GPU if there is one.
        deterministic: have two runs give the same bits on a GPU too, which takes longer; on a CPU they always do, with
            the same number of threads.
        prompts_sha256, reward_sha256: checksums of the files when the run began, of which a resumed run needs the same.

    Raises:
        TypeError, ValueError: a field has another type or is outside its range, updates does not divide
            prompts_per_step, or micro_batches is above the completions of an optimizer step.
    """

    model: Path | None = None
    prompts: Path | None = None
    reward: Path | None = None
    steps: Positive = 100
    prompts_per_step: Positive = 16
    group_size: Annotated[int, Range(at_least=2, at_most=2**16)] = 16
    max_new_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 64
    seed: Seed = 0
    lr: Annotated[float, Range(at_least=0, at_most=1)] = 2e-4
    updates: Positive = 1
    clip: Annotated[float, Range(above=0, below=1)] = 0.2
    kl_coefficient: Annotated[float, Range(at_least=0, at_most=1000)] = 0.01
    importance_limit: Annotated[float, Range(above=0, at_most=1e6)] | None = None
    micro_batches: Positive = 1
    out: Path | None = None
    checkpoint_every: Count = 20
    log: tuple[Logger, ...] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    prompts_sha256: str | None = None
    reward_sha256: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("model", "prompts", "reward", "out"):
            check_text(name, str(getattr(self, name)))  # config.json is UTF-8
        if self.prompts_per_step % self.updates:
            raise ValueError(
                f"prompts_per_step must be divisible by the {self.updates} updates of a step, but is "
                f"{self.prompts_per_step}"
            )
        completions = self.prompts_per_step // self.updates * self.group_size
        if self.micro_batches > completions:
            raise ValueError(
                f"micro_batches must be at most the {completions} completions of an optimizer step, but is "
                f"{self.micro_batches}"
            )

    @property
    def resume_command(self) -> str:
        """What continues the run in `out`."""
        assert self.out is not None
        return f"{COMMAND} --resume --out {quoted_path(self.out)}"

    def with_digests(self) -> RLConfig:
        """Return this configuration with the checksums of its files.

        Raises:
            FileNotFoundError: a file does not exist.
        """
        prompts, reward = _digest("prompts", self.prompts), _digest("reward", self.reward)
        return replace(self, prompts_sha256=prompts, reward_sha256=reward)

    def to_values(self) -> dict[str, Any]:
        """Return this configuration as a JSON object."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return {"command": COMMAND, **values}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RLConfig:
        """Make a configuration from the object that `to_values` returned.

        Raises:
            ValueError: it is not the configuration of such a run.
        """
        if values.get("command") != COMMAND:
            raise ValueError(f"not the configuration of a run of {COMMAND}")
        return from_json(cls, {name: value for name, value in values.items() if name != "command"})


def changed_settings(saved: RLConfig, requested: RLConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configurations, but may not when a run is resumed."""
    old, new = asdict(saved), asdict(requested)
    return {name: (old[name], new[name]) for name in old if name not in RESUMABLE and old[name] != new[name]}


def _digest(setting: str, file: Path | None) -> str | None:
    """Return the SHA-256 of a file."""
    if file is None:
        return None
    if not file.is_file():
        raise FileNotFoundError(f"{setting} {str(file)!r} does not exist, or is no file")
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
