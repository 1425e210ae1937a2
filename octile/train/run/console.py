"""What `octile train` and `octile compare` print: the model, the data, progress, and where the results are."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from octile.models.counts import count_parameters
from octile.report.console import Console
from octile.report.run.lines import Record
from octile.signals import Stopped
from octile.text import escape_control_characters, format_count, format_duration, format_flops
from octile.train.data.spans import SPAN
from octile.train.data.token_store import LEFT_OUT, TokenStore, describe_truncated
from octile.train.run.folder import RunFolder

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.text import Text

    from octile.train.run.best_model import BestModel
    from octile.train.trainer import Trainer

NAMED = 3  # files left out that are named, of each reason
MIN_TIME_WIDTH = 80  # characters of a terminal; a narrower one has room for a text of progress and nothing else
MIN_FLOPS_WIDTH = 100  # the same for FLOP/s and MFU; a narrower one shows MFU, their share of the GPU's peak
MIN_BAR_WIDTH = 120  # for the bar next to the metrics of a step
MIN_ELAPSED_WIDTH = 140  # and for the time elapsed
LOG_LINES = 20  # lines of progress in a log file
FIRST_LOG_STEP = 10  # the step of the first one, counted from where the run begins
MAX_LOG_SECONDS = 600  # between two of them
SIGPIPE = 13  # also where Python's `signal` does not have it


class RunConsole:
    """Prints a run to a terminal, with a progress bar, or to a file, with a line now and then."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()

    @classmethod
    def silent(cls) -> RunConsole:
        """A console that prints nothing: of a rank that is not the first, or of a run that a benchmark measures."""
        return cls(Console(quiet=True))

    @contextmanager
    def stopped_by_its_reader(self, stop: list[int]) -> Iterator[None]:
        """Add SIGPIPE to `stop` if the reader of the output ends, as in `octile train | head`; nothing is lost then."""
        self.console.reader_left = lambda: stop.append(SIGPIPE)
        try:
            yield
        finally:
            self.console.reader_left = None

    @staticmethod
    @contextmanager
    def stopped_before(what: str) -> Iterator[None]:
        """Raise Stopped if the reader of the output ends before anything was trained: the command has not succeeded."""
        try:
            yield
        except BrokenPipeError:
            raise Stopped(f"stopped before {what}: the reader of the output has ended", SIGPIPE) from None

    def acknowledge_stop(self, number: int) -> None:
        """Say what a signal does: launched steps are finished first.

        On a CPU that is one step, which takes minutes for a large model; on a GPU it is at most 20.
        """
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.print(
            f"{name}: stopping after the steps that have begun, and saving the last; a second signal stops at once, "
            "and what was saved before stays"
        )

    def print(self, text: str) -> None:
        """Print a text without rich's markup and with its control characters escaped, as a pipe may lead to a terminal.

        Lines are wrapped on a terminal only. In a file, a path or a figure stays on the line that names it.
        """
        self.console.print(self._text(text), soft_wrap=not self.console.is_terminal)

    def _text(self, text: str) -> Text:
        from rich.text import Text

        return Text(escape_control_characters(text))

    def print_model(self, trainer: Trainer) -> None:
        """Print the size of the model and how many layers were converted to its recipe."""
        counts = count_parameters(trainer.config.model)
        mtp = sum(counts.mtp.values()) / 1e6
        ranks_text = f", {trainer.ranks.size} ranks" if trainer.ranks.size > 1 else ""
        mtp_text = f", and {mtp:.1f}M for multi-token prediction" if mtp else ""
        self.print(
            f"model: {counts.total / 1e6:.1f}M parameters, {counts.active / 1e6:.1f}M active per token with the "
            f"embedding{mtp_text}, on {trainer.device.type}{ranks_text}"
        )
        self.print(str(trainer.model.conversion_summary))

    def print_data(self, store: TokenStore, val_data: str | None = None) -> None:
        """Print the amount of training and held-out text, and what was left out.

        Args:
            store: the text.
            val_data: the source of the held-out text; None if it is a part of the text.
        """
        m = store.manifest
        share = f"{m.held_out_share:.1%} of the text" if val_data is None else f"all of {val_data}"
        self.print(
            f"data: {m.source}, {m.tokens['train']:,} tokens of "
            f"{format_count(m.documents['train'], m.unit.removesuffix('s'))} to train on, "
            f"{m.tokens['val']:,} held out ({share}, "
            f"{m.bytes_per_token:.2f} bytes per token)"
        )
        if m.cut_tokens:
            self.print(
                f"cut out of the training text: {m.cut_tokens:,} tokens ({m.cut_share:.1%}), in spans of {SPAN} or "
                "more that are held out, too"
            )
        if m.span is not None:
            count = format_count(m.documents["train"] + m.documents["val"], "span")
            self.print(
                f"the documents are too few to hold some out, so they were cut into {count} of {m.span:,} to "
                f"{2 * m.span:,} characters, at the ends of lines if there are some"
            )
        self._print_left_out(store)

    def _print_left_out(self, store: TokenStore) -> None:
        m = store.manifest
        for reason, names in store.left_out(NAMED).items():
            more = f" and {m.skipped[reason] - len(names):,} more" if m.skipped[reason] > len(names) else ""
            self.print(f"left out: {m.skipped[reason]:,} {reason.replace('_', ' ')}: {', '.join(names)}{more}")
        if any(count > NAMED for count in m.skipped.values()):
            self.print(f"all that is left out is named in {store.folder / LEFT_OUT}")

    def print_examples(self, store: TokenStore, context: int, val_data: str | None = None) -> None:
        """Print the amount of examples, how they are packed, and what was cut and left out.

        Args:
            store: the examples.
            context: the most tokens that a sequence of the model may have.
            val_data: the source of the held-out examples; None if they are a part of the others.
        """
        m, p = store.manifest, store.manifest.packed
        assert p is not None
        self.print(
            f"data: {m.source}, {format_count(m.documents['train'], 'text')} of {m.tokens['train']:,} tokens to train "
            f"on, {p.labels['train']:,} of them with a loss; {format_count(m.documents['val'], 'text')} of "
            f"{m.tokens['val']:,} tokens held out, {p.labels['val']:,} of them with a loss"
            f"{'' if val_data is None else f' (all of {val_data})'}"
        )
        if p.shared_prompts:
            shared = f"{p.shared_prompts:,} of the {format_count(m.documents['val'], 'text')} of val_data"
            self.print(f"{shared} {'has' if p.shared_prompts == 1 else 'have'} the prompt of a text that is trained on")
        sequences = len(store.train) // p.sequence_length
        self.print(
            f"packed into {format_count(sequences, 'sequence')} of {p.sequence_length:,} tokens, up to {p.max_texts:,} "
            f"texts in one; {p.padding['train'] / len(store.train):.1%} of the tokens are padding"
        )
        if p.truncated:
            longer = min(p.longest, context)
            advice = f"; to keep more of them, use --sequence-length {longer}" if longer > p.sequence_length else ""
            self.print(
                f"truncated: {describe_truncated(m)} longer than a sequence, the longest {p.longest:,} tokens{advice}"
            )
        if p.has_plain_template:
            self.print(
                "the tokenizer has no chat template, like a base model's: messages are written by a plain one "
                "(User: … Assistant:), as octile serve does"
            )
        if p.empty_answers:
            are, have = ("is", "has") if p.empty_answers == 1 else ("are", "have")
            first = "" if p.empty_answers == 1 else "the first "
            self.print(
                f"{format_count(p.empty_answers, 'answer')} {are} empty ({first}in {p.first_empty_answer}) and {have} "
                "the loss of the end alone"
            )
        self._print_left_out(store)

    def print_results(
        self,
        run: RunFolder,
        sample: str,
        report: Path,
        best: BestModel,
        steps: int,
        more: str,
        ema_val_loss: float | None = None,
    ) -> None:
        """Print a sample of generated text, where the results are, of which step the model is, and a command for more.

        Without a best validation, as in a warm-up of indexers, it is that of the last of the `steps` steps. Of averaged
        weights the folder and the held-out loss in nats per token are printed. The last line is a warning if training
        has not lowered the held-out loss.
        """
        from rich.panel import Panel

        self.console.print(Panel(self._text(sample), title="a sample of generated text", title_align="left"))
        found, before = best.best, best.initial_val_loss
        lowest = "the lowest held-out loss of its steps" if best.is_above_start else "the lowest held-out loss"
        which = f"{found.step:,}: {lowest}, {found.val_loss:.4f}" if found else f"{steps:,}: the last"
        start = "" if found is None or before is None else f"; before the first step it was {before:.4f}"
        self.print(f"model:  {run.model}, after step {which}{start}")
        if ema_val_loss is not None:
            self.print(
                f"ema:    {run.model_ema}, the weights averaged up to step {steps:,}: held-out loss {ema_val_loss:.4f}"
            )
        self.print(f"report: {report}\nmore:   {more}")
        if best.is_above_start:
            self.print(
                "warning: training has not lowered the held-out loss: model/ is no better on held-out text than the "
                "weights that the run began with; a lower --optim.lr or more data may help"
            )

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, float], None]]:
        """A progress bar of named stages, or their lines where the output is not a terminal.

        The function takes a stage's name and its progress from 0 to 1. A line is printed when a stage begins, and for
        each quarter of it.
        """
        printed: set[tuple[str, int]] = set()

        def show(stage: str, share: float) -> None:
            bar.update(task, description=stage, completed=share)
            quarter = stage, int(4 * share)
            if not self.console.is_terminal and quarter not in printed:
                printed.add(quarter)
                self.print(f"preparing the data: {stage}{f', {share:.0%} done' if share else ''}")

        with self._bar("{task.description}", bar_from=MIN_TIME_WIDTH, elapsed_from=MIN_TIME_WIDTH) as bar:
            task = bar.add_task("preparing the data", total=1.0)
            yield show
            bar.update(task, visible=False)

    @contextmanager
    def steps(self, steps: int, done: int, stage: str | None = None) -> Iterator[StepProgress]:
        """The progress bar of a training run of `steps` steps, `done` of which lie behind it.

        With a stage of training indexers it shows the stage and the loss of the indexers before the other loss.
        """
        with self._bar("step {task.completed}/{task.total}", "{task.description}") as bar:
            yield StepProgress(self, bar, steps, done, stage)

    def _bar(self, *texts: str, bar_from: int = MIN_BAR_WIDTH, elapsed_from: int = MIN_ELAPSED_WIDTH) -> Progress:
        from rich.progress import (
            BarColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        wrapping = Column()  # between words, where a terminal is too narrow
        columns: list[ProgressColumn] = [SpinnerColumn(), *map(TextColumn, texts[:-1])]
        columns.append(TextColumn(texts[-1], table_column=wrapping))
        if self.console.width >= bar_from:
            columns.append(BarColumn(bar_width=24))
        if self.console.width >= elapsed_from:
            columns += [TimeElapsedColumn(), TextColumn("elapsed,")]
        if self.console.width >= MIN_TIME_WIDTH:
            columns += [TimeRemainingColumn(), TextColumn("left")]
        return Progress(
            *columns,
            console=self.console,
            disable=not self.console.is_terminal,
        )


class StepProgress:
    """The progress bar of a run, or its lines where the output is not a terminal."""

    def __init__(self, console: RunConsole, bar: Progress, steps: int, done: int, stage: str | None):
        self.console, self.bar, self.steps, self.stage = console, bar, steps, stage
        self.task = bar.add_task("", total=steps, completed=done)
        self.every = max(1, steps // LOG_LINES)
        self._first_log_step, self._last_printed = done + FIRST_LOG_STEP, time.perf_counter()
        self._seconds: list[float] = []  # of training, after each step until the first line is printed
        self._has_step = self._is_compiled = self._says_compiling = False
        self._first_line: tuple[int, float, float] | None = None  # its step, seconds of training, when it was printed

    def compiling(self, done: int, total: int) -> None:
        """Show how many kernels of the first step are compiled; in a file once, if there are some left."""
        if self._has_step or self._is_compiled:
            return
        self._is_compiled = done == total
        text = "" if self._is_compiled else f"compiling kernels: {done} of {total}"
        self.bar.update(self.task, description=text)
        if text and not self.console.console.is_terminal and not self._says_compiling:
            self.console.print(text)
            self._says_compiling = True

    def step(self, line: Record) -> None:
        """Show the metrics of a step."""
        self._has_step = True
        if "skipped_for" in line:
            total = f"{line['skipped']:,} step{'s' * (line['skipped'] != 1)} skipped so far"
            self.console.print(f"step {line['step']} was skipped: {line['skipped_for']}; {total}")
        flops, mfu = format_flops(line["flops_per_s"]), f"{line['mfu']:.1%} MFU" if "mfu" in line else None
        head = f"loss {line['main_loss']:.3f} · {line['tokens_per_s']:,.0f} tokens/s"
        if self.stage is not None:
            head = f"{self.stage} · indexer loss {line['indexer_loss']:.4f} · {head}"
        text = " · ".join(filter(None, (head, flops, mfu)))
        has_room = self.console.console.width >= MIN_FLOPS_WIDTH
        self.bar.update(self.task, completed=line["step"], description=text if has_room else f"{head} · {mfu or flops}")
        if self.console.console.is_terminal:
            return
        if self._first_line is None:
            self._seconds.append(line["seconds"])
        now = time.perf_counter()
        is_late = now - self._last_printed > MAX_LOG_SECONDS
        if line["step"] % self.every == 0 or line["step"] == self._first_log_step or is_late:
            left = (self.steps - line["step"]) * self._seconds_per_step(line)
            self.console.print(f"step {line['step']}/{self.steps}: {text}, {format_duration(left)} left")
            self._first_line, self._last_printed = self._first_line or (line["step"], line["seconds"], now), now

    def _seconds_per_step(self, line: Record) -> float:
        """Estimate the time that a later step takes, with its share of validations and checkpoints.

        What was measured before the first line contains the compilation of kernels: the median leaves it out. The lines
        of steps whose metrics are read together are printed at once: then the steps' own time counts.
        """
        if self._first_line is not None:
            step, seconds, printed = self._first_line
            return max(time.perf_counter() - printed, line["seconds"] - seconds) / (line["step"] - step)
        step_times = [after - before for before, after in pairwise(self._seconds)]
        return statistics.median(step_times) if step_times else line["seconds"] / line["step"]

    def validation(self, line: Record) -> None:
        """Show a held-out loss; that of step 0 is that of the initial weights."""
        if line["step"] == 0:
            self.console.print(f"held-out loss before the first step: {line['val_loss']:.4f} nats per token")
        else:
            average = f", {line['ema_val_loss']:.4f} with the averaged weights" if "ema_val_loss" in line else ""
            self.console.print(f"step {line['step']}: held-out loss {line['val_loss']:.4f} nats per token{average}")
