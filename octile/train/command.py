"""`octile train`: train a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from octile.options import Given, Hidden, Section
from octile.signals import importing
from octile.torchrun import own_rank
from octile.train.config import RESUMABLE, TrainConfig
from octile.train.shared_options import (
    MODEL_SECTIONS,
    ModelFile,
    announce,
    begin_config,
    build,
    describe_new_run,
    shown_config,
)
from octile.validation import Range, check_fields

if TYPE_CHECKING:
    from octile.train.run.recorder import RunHook

__all__ = ["RESUMABLE", "SECTIONS", "Options", "defaults", "read", "run"]

OF_RANKS = {  # fields of `parallel` without effect where another one is 1, and what is missing then
    "schedule": ("pp", "a pipeline"),
    "exchange": ("ep", "expert parallelism"),
    "reduce": ("dp", "data-parallel ranks"),
}
SETTINGS = tuple(field.name for field in fields(TrainConfig))


@dataclass(frozen=True)
class Options(TrainConfig):
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample.

    Attributes:
        model_file: a config.json of Hugging Face, or a folder with one: the model has its shape instead of a preset's.
            What it says about stored weights, such as their quantization, is not used.
        resume: continue the run in --out from its newest checkpoint, with the settings that are stored there.
        tokens: tokens to read, instead of steps; rounded up to whole steps.
        profile: record a few steps after warm-up with torch's profiler, and write trace.json.gz and profile.txt, the
            ten largest costs, into the run folder.
    """

    recipe_text: Hidden[str | None] = None
    guards_text: Hidden[str | None] = None
    model_file: ModelFile = None
    resume: bool = False
    tokens: Annotated[int, Range(at_least=1, at_most=2**53)] | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens is not None:
            object.__setattr__(self, "steps", self.steps_for(self.tokens))
        super().__post_init__()

    @classmethod
    def of(cls, config: TrainConfig) -> Options:
        """Make options of a configuration."""
        return cls(**{name: getattr(config, name) for name in SETTINGS})

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run."""
        return TrainConfig(**{name: getattr(self, name) for name in SETTINGS})


SECTIONS = (
    Section("model", ("preset", "model_file", "init_from"), ("indexer_stage",)),
    Section("number formats", ("recipe",)),
    Section("data", ("data", "val_data", "sequence_length"), ("val_sequences",)),
    Section(
        "steps",
        ("steps", "tokens", "batch_size", "micro_batches", "seed"),
        ("initial_batch_size", "batch_ramp", "skip_limit", "deterministic"),
    ),
    Section("optimizer", ("optim.name", "optim.lr"), ("optim",)),
    Section("run folder", ("out", "resume", "checkpoint_every"), ("checkpoints",)),
    Section(
        "measurements",
        ("validate_every", "log", "prompt", "telemetry_every", "profile"),
        ("patience", "telemetry_layers", "guards"),
    ),
    Section("devices", ("device", "allow_slow", "parallel.dp", "parallel.ep", "parallel.pp"), ("parallel",)),
    *MODEL_SECTIONS,
)


def defaults(given: Given) -> Options:
    """Return the options of a new run, as the help shows them.

    Raises:
        ValueError: the preset is unknown.
    """
    return Options.of(shown_config(given))


def read(given: Given) -> Options:
    """Make the options of a run: what is not given is that of the run to resume, of the weights to begin with, or of
    the preset.

    Raises:
        FileNotFoundError: there is no run to resume, or no weights.
        ValueError: options exclude each other, or have no effect; or as for `Given.build`.
    """
    given.check_one_of("steps", "tokens")
    given.check_one_of("model_file", "init_from")
    out, begin = given.get("out"), given.get("init_from")
    if given.is_set("resume") and out:
        announce(f"resumes {out}")
        with importing():
            from octile.train.run.resume import open_run

        config = open_run(Path(out), given.get("checkpoints")).config
    else:
        config = begin_config(given)
        if begin:
            from octile.train.run.fine_tune import OPTIM, fine_tuning

            warmup = given.get("optim.warmup") if "optim.decay" not in given else None
            config = fine_tuning(config, Path(begin), OPTIM.warmup if warmup is None else float(warmup))
    options: Options = build(given, Options.of(config))
    for name, (ranks, without) in OF_RANKS.items():  # a resumed run may have them from more ranks
        if getattr(options.parallel, ranks) == 1 and f"parallel.{name}" in given:
            raise ValueError(f"parallel.{name} has no effect without {without}: add --parallel.{ranks} N")
    if not options.resume:
        announce(f"trains: {describe_new_run(options.config, given, 'recipe', 'seed')}")
    return options


def run(options: Options, observer: Callable[[TrainConfig], RunHook]) -> None:
    """Train.

    Args:
        options: the options of the run.
        observer: returns what measures the run, such as `octile.lab.run.observer`.

    Raises:
        Exception: what `octile.train.loop.train` and the observer raise.
    """
    config = options.config
    with importing():
        from octile.train.loop import train
        from octile.train.run.console import RunConsole

        hook = observer(config)
    is_first = own_rank() == 0
    console = RunConsole() if is_first else RunConsole.silent()
    if options.profile and is_first:
        from octile.train.run.profile import profiling

        hook = profiling(config, hook, console)
    train(config, options.resume, console, hook)
