"""The command line. Each command is read by tyro from a frozen dataclass and imports what it needs when it runs.

Exit codes: 0, it worked; 2, the user can mend it (one line says how); 1, it failed otherwise; 130, stopped by a signal.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields, replace
from io import StringIO, TextIOWrapper
from itertools import dropwhile, takewhile, zip_longest
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypeVar

from octile import __version__
from octile.extras import require
from octile.train.config import TrainConfig, preset

with suppress(ImportError):  # `main` reports it when it is missing
    import tyro

Form = TypeVar("Form")

NOT_A = {  # how Python refuses a word that is no such number
    "invalid literal for int() with base 10: ": "a whole number",
    "could not convert string to float: ": "a number",
}

OPTIONAL = re.compile(r"no type matching \{None\}\|(INT|FLOAT) could be instantiated from \[(.*)\]")  # tyro's own

USER, FAILURE, INTERRUPTED = 2, 1, 130
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample.

    Attributes:
        resume: continue the run in --out from its newest checkpoint.
        telemetry_every: measure the 8-bit products of every n-th step, into telemetry.jsonl; 0 measures none.
        telemetry_layers: of layers whose names match one of these patterns, separated by commas.
        guards: a file of rules that watch the telemetry and warn, capture operands, or switch a product to BF16.
    """

    recipe_text: tyro.conf.Suppress[str | None] = None
    resume: bool = False
    telemetry_every: int = 0
    telemetry_layers: str = "*"
    guards: Path | None = None


def train(arguments: list[str]) -> None:
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample."""
    out = _value_of("--out", arguments)
    if "--resume" in arguments and out is not None:
        from octile.train.run_folder import RunFolder

        default = RunFolder.open(Path(out)).read_config()
    else:
        name, begin = _value_of("--preset", arguments), _value_of("--init-from", arguments)
        default = preset("tiny" if name is None else name)
        if begin is not None:
            from octile.train.fine_tune import fine_tuning

            default = fine_tuning(default, Path(begin))
    names = [f.name for f in fields(TrainConfig)]
    asked = _parse(Train, arguments, "train", Train(**{name: getattr(default, name) for name in names}))
    from octile.lab.guards import read_rules
    from octile.lab.run import observer
    from octile.train.console import RunConsole
    from octile.train.loop import train as run

    config = TrainConfig(**{name: getattr(asked, name) for name in names})
    rules = read_rules(asked.guards) if asked.guards else ()
    watched = observer(config, asked.telemetry_every, asked.telemetry_layers, rules)
    run(config, asked.resume, RunConsole(), watched)


@dataclass(frozen=True)
class Compare:
    """Train BF16 twice or more (the noise band) and each recipe from its initialisation on the same batches.

    Attributes:
        preset: tiny, small, v2_lite_16b, v2_236b or v3_671b.
        recipes: names, separated by commas.
        steps: of each run; the preset's if not given.
        data: as for train.
        seed: of the first BF16 run and of every recipe; the second BF16 run has the next one.
        seeds: how many each recipe and BF16 are trained with (5), counted on from --seed, or which (0,7,9).
        gradient_steps: where each recipe's gradients are held against BF16's: steps, start, middle, end, or none.
        out: folder for the report and the curves; chosen under runs/ if not given.
        device: auto takes a GPU where there is one.
    """

    preset: str = "tiny"
    recipes: str = "deepseek_v3"
    steps: int | None = None
    data: str = "stdlib"
    seed: int = 0
    seeds: str = "1"
    gradient_steps: str = "start,middle,end"
    out: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


def compare(arguments: list[str]) -> None:
    """Train recipes beside BF16 and its noise band, and say what each one costs in loss."""
    asked = _parse(Compare, arguments, "compare")
    config = replace(preset(asked.preset), data=asked.data, seed=asked.seed, device=asked.device)
    if asked.steps is not None:
        config = replace(config, steps=asked.steps)
    from octile.train.compare import compare as run
    from octile.train.compare import parse_seeds
    from octile.train.console import RunConsole

    seeds = parse_seeds(asked.seeds, asked.seed)
    run(config, tuple(asked.recipes.split(",")), asked.out, RunConsole(), seeds, asked.gradient_steps)


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a trained model.

    Attributes:
        run: a run folder, or a Hugging Face folder of a DeepSeek-V3 model; the newest under runs/ if not given.
        prompt: the text to continue.
        max_new_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest token, 1 draws from the model's distribution.
        top_p: draw only from the likeliest tokens that together have this probability.
        seed: of the drawing.
    """

    run: tyro.conf.Positional[Path | None] = None
    prompt: str = "def "
    max_new_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate(arguments: list[str]) -> None:
    """Continue a prompt with a trained model, printing as it goes."""
    asked = _parse(Generate, arguments, "generate")
    run = asked.run
    if run is None:
        run = _newest_run()
        print(f"octile: {run}, the newest run", file=sys.stderr)
    from octile.train.generate import Sampling, generate_from

    sampling = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, asked.seed)
    pieces = generate_from(run, asked.prompt, sampling)
    first = next(pieces, "")  # a prompt that cannot be continued is refused before it is printed
    print(asked.prompt + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


@dataclass(frozen=True)
class Convert:
    """Turn a BF16 Hugging Face checkpoint into FP8 (128×128 blocks), or an FP8 one into BF16 or FP32, shard by shard.

    Attributes:
        src: a Hugging Face folder; or one with only a config.json (or that file), to predict the size.
        dst: the folder to write. Not needed for a prediction.
        to: fp8, bf16, or float32, which keeps every value of FP8 weights to train on.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path | None] = None
    to: Literal["fp8", "bf16", "float32"] = "fp8"


def convert(arguments: list[str]) -> None:
    """Convert a checkpoint between BF16 and FP8, or predict the size from a configuration."""
    asked = _parse(Convert, arguments, "convert")
    from octile.report.conversion import run_conversion

    run_conversion(asked.src, asked.dst, asked.to)


@dataclass(frozen=True)
class Bench:
    """Measure this machine.

    Attributes:
        what: gemm (GEMMs), casts (quantization), step (training: speed, memory, checkpoint size), lab (the tensor core
            model); tune, which searches for the fastest GEMM kernels on a Hopper GPU and stores them; or tune-casts,
            which prints the fastest settings of quantization kernels there.
        json: also write the rows to this file.
        shape: M,N,K of one GEMM to tune; all shapes of gemm if not given.
        minutes: the time after which tune begins no further shape.
    """

    what: tyro.conf.Positional[Literal["gemm", "casts", "step", "lab", "tune", "tune-casts"]] = "step"
    json: Path | None = None
    shape: str | None = None
    minutes: float | None = None


def bench(arguments: list[str]) -> None:
    """Measure GEMMs, quantization or a training step on this machine, compared with a peer."""
    asked = _parse(Bench, arguments, "bench")
    from octile.bench import run, search, search_casts

    if asked.what != "tune" and (asked.shape is not None or asked.minutes is not None):
        raise ValueError(f"shape and minutes are of tune, not of {asked.what}")
    if asked.what.startswith("tune") and asked.json is not None:
        raise ValueError(f"{asked.what} writes no rows: json is of gemm, casts and step")
    if asked.what == "tune-casts":
        search_casts()
    elif asked.what == "tune":
        search(asked.shape, asked.minutes)
    else:
        run(asked.what, asked.json)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine is and which kernel serves which operator.

    Attributes:
        kernels: compile the kernels and list their registers, stack and shared memory; needs no GPU.
        compile: for which architecture: sm_80, sm_86, sm_89, sm_90 or sm_100; the GPU here, or sm_90, if not given.
        json: print JSON.
    """

    kernels: bool = False
    compile: str | None = None
    json: bool = False


def doctor(arguments: list[str]) -> None:
    """Say what this machine is, which kernel serves which operator, and why."""
    asked = _parse(Doctor, arguments, "doctor")
    from octile.bench.doctor import compile_kernels, examine, show

    found = examine()
    if asked.kernels or asked.compile:
        found["kernels"] = compile_kernels(asked.compile)
    show(found, as_json=asked.json)


def lab(arguments: list[str]) -> None:
    """See what 8 bits do: number formats, accumulation, what a run's products look like."""
    from octile.lab.commands import run

    run(arguments, _parse)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "compare": compare,
    "generate": generate,
    "convert": convert,
    "bench": bench,
    "lab": lab,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point; leaves with an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console without UTF-8 shows "?" for "…" and goes on
    if "OMP_WAIT_POLICY" not in os.environ:  # threads that spin starve one another when a core is busy: LOG.md
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        _run(lambda _: print(_overview(), flush=True), [])
    elif name == "--version":
        _run(lambda _: print(f"octile {__version__}", flush=True), [])
    elif name not in COMMANDS:
        _fail(f"unknown command {name!r}; there are {', '.join(COMMANDS)}", USER)
    else:
        _run(lambda rest: _call(name, rest), arguments[1:])


def _call(name: str, arguments: list[str]) -> None:
    require("tyro", "rich", extra="lab" if name == "lab" else "train")
    COMMANDS[name](arguments)


def _parse(form: type[Form], arguments: list[str], command: str, default: Form | None = None) -> Form:
    """Reads arguments into a dataclass. What tyro says in a box about a mistake becomes one line.

    Raises:
        ValueError: the arguments are not such a command's.
    """
    said = StringIO()
    marks = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
    try:
        with redirect_stderr(said):
            usual = tyro.MISSING_NONPROP if default is None else default
            return tyro.cli(form, args=arguments, prog=f"octile {command}", default=usual, config=marks)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise ValueError(f"{_mistake(said.getvalue())} (see octile {command} --help)") from None


def _mistake(box: str) -> str:
    """The first paragraph of the box in which tyro explains a mistake, without words of its own and of Python's."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]  # without its title
    first = " ".join(takewhile(_is_text, dropwhile(lambda line: not _is_text(line), lines))) or box
    where, _, what = first.removeprefix("Error parsing ").partition(": ")
    if where == first.partition(": ")[0]:
        return first
    for python, kind in NOT_A.items():
        what = what.replace(python, f"{where} must be {kind}, not ")
    if none_of := OPTIONAL.match(what):
        kind, given = none_of.groups()
        return f"{where} must be {'a whole number' if kind == 'INT' else 'a number'}, not {given}"
    return what


def _is_text(line: str) -> bool:
    """Not a rule, which is drawn with hyphens where the terminal has no UTF-8."""
    return bool(line.strip("─-"))


def _run(command: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Turns exceptions into one line and an exit code. OCTILE_TRACEBACK=1 shows where they came from."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            command(arguments)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if os.environ.get("OCTILE_TRACEBACK"):
            raise
        _fail(*_explain(error))


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Ours are a line like an error's; others keep Python's form."""
    ours = Path(filename).is_relative_to(Path(__file__).parent)
    text = f"octile: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)


def _explain(error: Exception) -> tuple[str, int]:
    from octile.train.run_folder import Stopped

    if isinstance(error, Stopped):
        return str(error), INTERRUPTED
    if isinstance(error, OSError) and error.errno in DISK:
        return f"{error.strerror}: {error.filename or 'while writing'}; what was complete is kept", FAILURE
    if isinstance(error, FloatingPointError) or (isinstance(error, MemoryError) and _raised_by_us(error)):
        return str(error), FAILURE
    if isinstance(error, OSError) and error.filename is not None:  # the system's own words, without its number
        return f"{str(error.filename)!r}: {error.strerror}", USER
    if isinstance(error, OSError) or (isinstance(error, ValueError | ImportError) and _raised_by_us(error)):
        return str(error), USER
    return f"{type(error).__name__}: {error} (OCTILE_TRACEBACK=1 shows where)", FAILURE


def _raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame is octile's own: a check that says what the user can mend, not a defect."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and Path(frames[-1].f_code.co_filename).is_relative_to(Path(__file__).parent)


def _fail(message: str, code: int) -> NoReturn:
    print(f"octile: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _overview() -> str:
    lines = [f"  {name:10}{command.__doc__}" for name, command in COMMANDS.items()]
    head = "octile: DeepSeek-V3-style models in fine-grained FP8\n\nusage: octile COMMAND [--help] …\n\n"
    return head + "\n".join(lines)


def _newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise FileNotFoundError("no finished run under runs/: name one, or make one with octile train")
    return runs[-1].parent.parent


def _value_of(option: str, arguments: list[str]) -> str | None:
    """What follows an option, or stands behind its equals sign: of several the last one, which is tyro's choice too."""
    value = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, behind = argument.partition("=")
        if name.replace("_", "-") == option:  # tyro reads --init_from too
            value = behind if equals else following
    return value
