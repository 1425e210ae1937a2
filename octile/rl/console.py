"""What `octile rl` prints: a bar or a line now and then for the steps, and the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from octile.command_text import generate_command, quoted_path
from octile.report.run.lines import Record
from octile.rl.prompts import Prompt
from octile.text import format_duration
from octile.train.run.console import LOG_LINES, RunConsole

LAST = 10  # steps over which the reward at the end is averaged


class RLProgress:
    """The progress bar of a run, or its lines where the output is not a terminal."""

    def __init__(self, console: RunConsole, bar: Progress, steps: int, done: int):
        self._console, self._bar, self._steps, self._done = console, bar, steps, done
        self._task = bar.add_task("", total=steps, completed=done)
        self._seconds = 0.0  # of the steps of this process
        self._every = max(1, steps // LOG_LINES)

    def step(self, line: Record) -> None:
        """Show the metrics of a step."""
        number = line["step"]
        self._seconds += line["sampling_seconds"] + line["training_seconds"]
        kl = f" · KL {line['kl']:.3f}" if "kl" in line else ""
        text = f"reward {line['reward']:.3f} · {line['length']:.1f} tokens{kl} · entropy {line['entropy']:.3f}"
        if line["equal_groups"] == 1:  # only the penalty trains
            text += " · equal rewards in each group"
        self._bar.update(self._task, completed=number, description=text)
        if self._console.console.is_terminal or (number % self._every and number != 1):
            return
        left = (self._steps - number) * self._seconds / (number - self._done)
        self._console.print(
            f"step {number}/{self._steps}: {text} · {line['delta_equal']:,} of {line['delta_tokens']:,} log-probs "
            f"equal, {format_duration(left)} left"
        )


@contextmanager
def progress(console: RunConsole, steps: int, done: int) -> Iterator[RLProgress]:
    """The progress bar of a run of `steps` steps, `done` of which lie behind it."""
    columns = SpinnerColumn(), TextColumn("step {task.completed}/{task.total}"), TextColumn("{task.description}")
    with Progress(
        *columns, BarColumn(24), TimeRemainingColumn(), console=console.console, disable=not console.console.is_terminal
    ) as bar:
        yield RLProgress(console, bar, steps, done)


def summarize(lines: Sequence[Record]) -> Record:
    """Return what a run has reached: the reward of its first step, and the mean of its last ones.

    Args:
        lines: the metrics of its steps, at least one.
    """
    last = lines[-LAST:]
    deltas = [line["delta_tokens"] - line["delta_equal"] for line in lines]
    return {
        "first_reward": lines[0]["reward"],
        "last_reward": fmean(line["reward"] for line in last),
        "last_steps": len(last),
        "equal_groups": fmean(line["equal_groups"] for line in lines),
        "seconds": lines[-1]["seconds"],
        "tokens": lines[-1]["tokens"],
        "different_log_probs": sum(deltas),
        "largest_difference": max(line["delta_largest"] for line in lines),
    }


def print_result(console: RunConsole, run: Path, summary: Record, prompt: Prompt, report: Path) -> None:
    """Print what a run has reached, and where its results are."""
    console.print(
        f"reward: {summary['first_reward']:.3f} in step 1, {summary['last_reward']:.3f} in the mean of the last "
        f"{summary['last_steps']} steps, after {format_duration(summary['seconds'])} of steps"
    )
    if summary["equal_groups"] == 1:
        console.print(
            "groups: in each step all completions of a prompt had equal rewards, so no reward has trained the model"
        )
    console.print(
        f"log-probabilities: {summary['different_log_probs']:,} of {summary['tokens']:,} tokens have other bits in "
        f"sampling than in training, by up to {summary['largest_difference']:.2g} nats"
    )
    console.print(f"model:  {run / 'model'}")
    console.print(f"report: {report}")
    if prompt.tokens is not None:  # a conversation, whose special tokens would be text there
        console.print(f"chat:   octile serve {quoted_path(run)}")
        return
    console.print(f"more:   {generate_command(run, prompt.prompt)} --temperature 1")
