"""The command line. Each command is read by tyro from a frozen dataclass and imports what it needs when it runs.

Exit codes: 0, it worked; 2, the user can mend it (one line says how); 1, it failed otherwise; 130, stopped by a signal.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from io import StringIO
from itertools import chain, takewhile
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import tyro

from octile import __version__
from octile.train.config import TrainConfig, preset

Form = TypeVar("Form")

USER, FAILURE, INTERRUPTED = 2, 1, 130
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample.

    Attributes:
        resume: continue the run in --out from its newest checkpoint.
    """

    resume: bool = False


def train(arguments: list[str]) -> None:
    """Train a model: from text to a run folder with checkpoints, the model, a report and a sample."""
    out = _value_of("--out", arguments)
    if "--resume" in arguments and out is not None:
        from octile.train.run_folder import RunFolder

        default = RunFolder.open(Path(out)).read_config()
    else:
        default = preset(_value_of("--preset", arguments) or "tiny")
    names = [f.name for f in fields(TrainConfig)]
    asked = _parse(Train, arguments, "train", Train(**{name: getattr(default, name) for name in names}))
    from octile.train.loop import train as run
    from octile.train.screen import Screen

    run(TrainConfig(**{name: getattr(asked, name) for name in names}), asked.resume, Screen())


@dataclass(frozen=True)
class Compare:
    """Train BF16 twice (the noise band) and each recipe from one initialisation on the same batches.

    Attributes:
        preset: tiny, small, v2_lite_16b, v2_236b or v3_671b.
        recipes: names, separated by commas.
        steps: of each run; the preset's if not given.
        data: as for train.
        seed: of the first BF16 run and of every recipe; the second BF16 run has the next one.
        out: folder for the report and the curves; chosen under runs/ if not given.
        device: auto takes a GPU where there is one.
    """

    preset: str = "tiny"
    recipes: str = "deepseek_v3"
    steps: int | None = None
    data: str = "stdlib"
    seed: int = 0
    out: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


def compare(arguments: list[str]) -> None:
    """Train recipes beside BF16 and its noise band, and say what each one costs in loss."""
    asked = _parse(Compare, arguments, "compare")
    config = replace(preset(asked.preset), data=asked.data, seed=asked.seed, device=asked.device)
    if asked.steps is not None:
        config = replace(config, steps=asked.steps)
    from octile.train.compare import compare as run
    from octile.train.screen import Screen

    run(config, tuple(asked.recipes.split(",")), asked.out, Screen())


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
    run = asked.run or _newest_run()
    from octile.train.generate import Sampling, generate_from

    sampling = Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, asked.seed)
    pieces = generate_from(run, asked.prompt, sampling)
    for piece in chain([asked.prompt], pieces):
        print(piece, end="", flush=True)
    print()


@dataclass(frozen=True)
class Convert:
    """Turn a BF16 Hugging Face checkpoint into FP8 (128×128 blocks), or an FP8 one into BF16, shard by shard.

    Attributes:
        src: a Hugging Face folder; or one with only a config.json (or that file), to predict the size.
        dst: the folder to write. Not needed for a prediction.
        to: fp8 or bf16.
    """

    src: tyro.conf.Positional[Path]
    dst: tyro.conf.Positional[Path | None] = None
    to: Literal["fp8", "bf16"] = "fp8"


def convert(arguments: list[str]) -> None:
    """Convert a checkpoint between BF16 and FP8, or predict the size from a configuration."""
    asked = _parse(Convert, arguments, "convert")
    from octile.report.conversion import convert_on_screen

    convert_on_screen(asked.src, asked.dst, asked.to)


@dataclass(frozen=True)
class Bench:
    """Measure this machine.

    Attributes:
        what: gemm (products), casts (quantisation) or step (training: speed, memory, checkpoint size).
        json: also write the rows to this file.
    """

    what: tyro.conf.Positional[Literal["gemm", "casts", "step"]] = "step"
    json: Path | None = None


def bench(arguments: list[str]) -> None:
    """Measure products, casts or a training step on this machine, beside a peer."""
    asked = _parse(Bench, arguments, "bench")
    from octile.bench import run

    run(asked.what, asked.json)


@dataclass(frozen=True)
class Doctor:
    """Say what this machine is and which kernel serves which operator.

    Attributes:
        kernels: compile the kernels and list their registers, stack and shared memory; needs no GPU.
        compile: for which architecture: sm_80, sm_86, sm_89, sm_90a or sm_100; the GPU here, or sm_90a, if not given.
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


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "compare": compare,
    "generate": generate,
    "convert": convert,
    "bench": bench,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point; leaves with an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
        sys.exit(0)
    if name == "--version":
        print(f"octile {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        _fail(f"unknown command {name!r}; there are {', '.join(COMMANDS)}", USER)
    _run(COMMANDS[name], arguments[1:])


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
        lines = [line.strip("│ ") for line in said.getvalue().splitlines() if line.startswith("│")]
        first = " ".join(takewhile(lambda line: not line.startswith("─"), lines)) or said.getvalue()
        raise ValueError(f"{first} (see octile {command} --help)") from None


def _run(command: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Turns exceptions into one line and an exit code. OCTILE_TRACEBACK=1 shows where they came from."""
    try:
        command(arguments)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if os.environ.get("OCTILE_TRACEBACK"):
            raise
        _fail(*_explain(error))


def _explain(error: Exception) -> tuple[str, int]:
    from octile.train.run_folder import Stopped

    if isinstance(error, Stopped):
        return str(error), INTERRUPTED
    if isinstance(error, OSError) and error.errno in DISK:
        return f"{error.strerror}: {error.filename or 'while writing'}; what was complete is kept", FAILURE
    if isinstance(error, FloatingPointError):
        return str(error), FAILURE
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
    """The value that follows an option, or stands behind its equals sign."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None
