"""`octile rl`: train a model by rewards."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from octile.options import Given, Hidden, Positional, Section
from octile.rl.config import RESUMABLE, RLConfig
from octile.serve.newest_run import newest_run
from octile.signals import importing
from octile.text import format_count
from octile.torchrun import check_one_process
from octile.train.shared_options import announce
from octile.validation import check_fields

__all__ = ["RESUMABLE", "SECTIONS", "Options", "read", "run"]

SETTINGS = tuple(field.name for field in fields(RLConfig))


@dataclass(frozen=True)
class Options(RLConfig):
    """Train a model by rewards, with group relative policy optimization (GRPO), in one process.

    Attributes:
        resume: continue the run in --out from its newest checkpoint, with the settings that are stored there.
    """

    model: Positional[Path | None] = None
    resume: bool = False
    prompts_sha256: Hidden[str | None] = None
    reward_sha256: Hidden[str | None] = None

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()
        if self.resume and self.out is None:
            raise ValueError("out is not given: --resume needs --out RUN, the run to continue")

    @property
    def config(self) -> RLConfig:
        """The configuration of the run."""
        return RLConfig(**{name: getattr(self, name) for name in SETTINGS})


SECTIONS = (
    Section("task", ("model", "prompts", "reward")),
    Section("sampling", ("prompts_per_step", "group_size", "max_new_tokens", "seed")),
    Section("steps", ("steps", "lr", "kl_coefficient"), ("updates", "clip", "importance_limit", "micro_batches")),
    Section("run folder", ("out", "resume", "checkpoint_every", "log")),
    Section("devices", ("device",), ("deterministic",)),
)


def read(given: Given) -> Options:
    """Make the options of a run: what is not given is that of the run to resume, or the default.

    Raises:
        FileNotFoundError: there is no run to resume, or no model is given and there is no run under runs/.
        ValueError: an option is invalid, or the run to resume is damaged.
    """
    out = given.get("out")
    if given.is_set("resume") and out:
        with importing():
            from octile.rl.run import read_config

        saved = read_config(Path(out))
        default = Options(**{name: getattr(saved, name) for name in SETTINGS})
        options: Options = given.build(default)
        return options
    options = given.build()
    return options if options.model is not None else replace(options, model=newest_run())


def run(options: Options) -> None:
    """Train.

    Raises:
        ValueError: torchrun has started several processes; or as for `octile.rl.loop.train`, which raises the other
            exceptions, too.
    """
    check_one_process("octile rl")
    config = options.config
    if options.resume:
        announce(f"resumes {config.out}")
    else:
        announce(f"trains {config.model} by rewards, seed {config.seed}, {format_count(config.steps, 'step')}")
    with importing():
        from octile.rl.loop import train
        from octile.train.run.console import RunConsole

    train(config, options.resume, RunConsole())
