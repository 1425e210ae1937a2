"""The command line of octile: its commands, and what runs them.

A command is a module with a dataclass `Options` and a function `run`, imported when it runs (`octile.options.command`),
so that `octile --help` answers at once. `octile.exit_codes` says how a command ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from typing import TYPE_CHECKING

from octile import __version__
from octile.exit_codes import run_and_exit
from octile.extras import require
from octile.options import Command, CommandGroup
from octile.options.command import find
from octile.options.help import overview_text
from octile.options.parse import HELP, HELP_ALL
from octile.signals import quiet_exit

if TYPE_CHECKING:
    from octile.train.config import TrainConfig
    from octile.train.run.recorder import RunHook


def _observer(config: TrainConfig) -> RunHook:
    from octile.lab.run import observer

    return observer(config)


COMMANDS: Mapping[str, Command | CommandGroup] = {
    "train": Command(
        "octile.train.command",
        "Train a model: from text to a run folder with checkpoints, the model, a report and a sample.",
        arguments=(_observer,),
    ),
    "compare": Command(
        "octile.train.compare.command",
        "Train recipes and BF16 with its noise band, and report the loss that each recipe costs.",
    ),
    "eval": Command(
        "octile.train.evaluation.command",
        "Measure the loss of a model on a text, and what FP8 costs there.",
        runs_in="octile.train.evaluation.evaluate",
    ),
    "rl": Command(
        "octile.rl.command", "Train a model by rewards (GRPO): sample with the engine, score, train, in one process."
    ),
    "generate": Command(
        "octile.serve.generate_command", "Continue a prompt with a trained model and print the text as it is generated."
    ),
    "serve": Command(
        "octile.serve.http.command", "Serve a model over HTTP with OpenAI's protocol, and a page to try it."
    ),
    "convert": Command(
        "octile.report.convert_command",
        "Convert a checkpoint between BF16 and FP8, or predict the size from a configuration.",
    ),
    "bench": Command(
        "octile.bench.command",
        "Measure GEMMs, quantization, a training step, training or serving on this machine, compared with a peer.",
    ),
    "lab": CommandGroup("octile.lab_options", "Study FP8 numerics: number formats, accumulation, the GEMMs of a run."),
    "plan": CommandGroup(
        "octile.plan.commands",
        "Plan training on many GPUs: time, memory and cost on a cluster, and pipeline schedules.",
    ),
    "doctor": Command("octile.bench.doctor_command", "Report this machine, which kernel runs each operator, and why."),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its exit code. The entry point of the `octile` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console without UTF-8 shows "?" for "…"
    if "OMP_WAIT_POLICY" not in os.environ:  # spinning threads delay one another if a core is busy
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    words = list(sys.argv[1:] if argv is None else argv)
    with quiet_exit() if argv is None else nullcontext():
        run_and_exit(lambda: _run(*(words or ["--help"])))


def _run(name: str, *words: str) -> None:
    if name in (*HELP, HELP_ALL):
        summaries = {each: command.summary for each, command in COMMANDS.items()}
        print(overview_text("", "octile: DeepSeek-V3-style models in fine-grained FP8", summaries), flush=True)
    elif name == "--version":
        print(f"octile {__version__}", flush=True)
    else:
        command = find(COMMANDS, name, "command")
        require("rich", extra="lab" if name == "lab" else "train")
        command.run(name, words)


def run_script(main: Callable[[], object]) -> None:
    """Run the main function of a script; an exception becomes one line and an exit code, as in octile's commands."""
    run_and_exit(main)
