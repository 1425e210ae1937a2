"""`octile compare`: recipes vs. BF16 and its noise band."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from octile.models.config import ModelConfig
from octile.options import Given, Hidden, Section
from octile.signals import importing
from octile.torchrun import check_one_process
from octile.train.config import COMPARE_RESUMABLE, TrainConfig
from octile.train.shared_options import (
    MODEL_SECTIONS,
    ModelFile,
    announce,
    begin_config,
    build,
    describe_new_run,
    shown_config,
)

RESUMABLE = COMPARE_RESUMABLE
SHARED = ("preset", "steps", "sequence_length", "data", "seed", "device", "allow_slow", "model")  # with `TrainConfig`


@dataclass(frozen=True)
class Options:
    """Train BF16 with two or more seeds (the noise band) and each recipe from the same weights on the same batches.

    Attributes:
        preset: tiny, small, medium, v2_lite_16b, v2_236b or v3_671b.
        model_file: a config.json of Hugging Face, or a folder with one: the model has its shape instead of a preset's.
            What it says about stored weights, such as their quantization, is not used.
        recipes: names of recipes, separated by commas.
        steps: steps of each run.
        sequence_length: tokens per sequence.
        data: a text file, a folder, hf:NAME (a Hugging Face dataset), stdlib: the source of Python's library, or
            packages: source and documentation of that library and of every package installed here.
        seed: the first seed. BF16 and each recipe are trained with it, and BF16 with the following seed too.
        seeds: the number of seeds of BF16 and each recipe, from --seed on; or the seeds themselves, such as 0,7,9.
        gradient_steps: steps at which gradients are compared with BF16's: numbers, start, middle, end, or none.
        out: folder for the report and the curves; chosen under runs/ if not given.
        device: auto uses a GPU if there is one.
        allow_slow: begin also a comparison whose GEMMs alone take more than four hours on this CPU.
        resume: continue the comparison in --out, with the settings that are stored there.
        model: the shape of the model.
        base: the configuration of a run, of which the options change the settings that they have.
    """

    preset: str = "tiny"
    model_file: ModelFile = None
    recipes: str = "deepseek_v3"
    steps: int = TrainConfig.steps
    sequence_length: int = TrainConfig.sequence_length
    data: str = "stdlib"
    seed: int = 0
    seeds: str = "1"
    gradient_steps: str = "start,middle,end"
    out: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    allow_slow: bool = False
    resume: bool = False
    model: ModelConfig = field(default_factory=ModelConfig.tiny)

    base: Hidden[TrainConfig] = field(default_factory=TrainConfig)

    @classmethod
    def of(cls, config: TrainConfig, **others: Any) -> Options:
        """Make options of the configuration of a run, and of others."""
        return cls(**{name: getattr(config, name) for name in SHARED}, **others, base=config)

    @property
    def config(self) -> TrainConfig:
        """The configuration of the runs."""
        return replace(self.base, **{name: getattr(self, name) for name in SHARED})


SECTIONS = (
    Section("model", ("preset", "model_file")),
    Section("runs", ("recipes", "steps", "sequence_length", "data", "seed", "seeds", "gradient_steps")),
    Section("folder", ("out", "resume")),
    Section("device", ("device", "allow_slow")),
    *MODEL_SECTIONS,
)


def defaults(given: Given) -> Options:
    """Return the options of a new comparison, as the help shows them.

    Raises:
        ValueError: the preset is unknown.
    """
    return Options.of(shown_config(given))


def read(given: Given) -> Options:
    """Make the options of a comparison: what is not given is that of the comparison to resume, or of the preset.

    Raises:
        FileNotFoundError: there is no comparison to resume.
        ValueError: torchrun has started several processes, which would write the same runs, or no recipe is named; or
            as for `Given.build`.
    """
    check_one_process("octile compare")
    out = given.get("out")
    if given.is_set("resume") and out:
        announce(f"resumes {out}")
        with importing():
            from octile.train.compare.comparison import Comparison, seeds_text

        stored = Comparison.read(Path(out))
        recipes, seeds = ",".join(stored.recipes) or "bf16", seeds_text(stored.seeds, stored.config.seed)
        default = Options.of(stored.config, recipes=recipes, seeds=seeds, gradient_steps=stored.gradient_steps)
    else:
        default = Options.of(begin_config(given))
    options: Options = build(given, default)
    if not options.recipes.replace(",", "").strip():
        raise ValueError("recipes is empty: name recipes, separated by commas")
    if not options.resume:
        others = [f", {name} {getattr(options, name)}" for name in ("seeds", "gradient_steps") if name in given]
        run = describe_new_run(options.config, given, "seed")
        announce(f"compares bf16 and {options.recipes}: {run}{''.join(others)}")
    return options


def run(options: Options) -> None:
    """Compare.

    Raises:
        Exception: what `octile.train.compare.compare.compare` raises.
    """
    with importing():
        from octile.train.compare.compare import compare
        from octile.train.compare.comparison import parse_seeds
        from octile.train.run.console import RunConsole

    seeds, recipes = parse_seeds(options.seeds, options.seed), tuple(options.recipes.split(","))
    compare(options.config, recipes, options.out, RunConsole(), seeds, options.gradient_steps, options.resume)
