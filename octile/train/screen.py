"""What a person sees while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octile.models.counts import count_parameters
from octile.report.console import Console
from octile.train.run_folder import Metrics, RunFolder

if TYPE_CHECKING:
    from rich.progress import Progress

    from octile.train.token_store import TokenStore
    from octile.train.trainer import Trainer

PLAIN_LINES = 20  # lines of progress in a log file


class Screen:
    """Progress on a terminal: a moving bar; in a file: a line now and then."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()

    def say(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(text))

    def model(self, trainer: Trainer) -> None:
        """What is going to be trained."""
        counts = count_parameters(trainer.config.model)
        mtp = sum(counts.mtp.values()) / 1e6
        self.say(
            f"model: {counts.total / 1e6:.1f}M parameters, {counts.active / 1e6:.1f}M active a token, and {mtp:.1f}M "
            f"for multi-token prediction, on {trainer.device.type}"
        )
        self.say(str(trainer.model.conversion_summary))

    def data(self, store: TokenStore) -> None:
        """What it is going to be trained on."""
        m = store.manifest
        self.say(
            f"data: {m.source}, {m.tokens['train']:,} tokens of {m.documents['train']:,} documents to train on, "
            f"{m.tokens['val']:,} held out, {m.bytes['train'] / m.tokens['train']:.2f} bytes a token"
        )
        if sum(m.skipped.values()):
            self.say(
                "left out: " + ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in m.skipped.items() if n)
            )

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, float], None]]:
        """Progress of named stages, each from 0 to 1."""
        with self._bar("{task.description}") as bar:
            task = bar.add_task("preparing the data", total=1.0)
            yield lambda stage, share: bar.update(task, description=stage, completed=share)
            bar.update(task, visible=False)

    @contextmanager
    def progress(self, steps: int, done: int) -> Iterator[ShownProgress]:
        """The bar of a training run."""
        with self._bar("step {task.completed}/{task.total}", "{task.description}") as bar:
            yield ShownProgress(self, bar, steps, done)

    def _bar(self, *texts: str) -> Progress:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = [TextColumn(text) for text in texts]
        return Progress(
            SpinnerColumn(),
            *columns,
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def finish(self, run: RunFolder, sample: str, report: Path) -> None:
        """What came of it, and where it lies."""
        from rich.panel import Panel
        from rich.text import Text

        self.console.print(Panel(Text(sample), title="a sample of what the model learned", title_align="left"))
        self.say(f"model:  {run.model}\nreport: {report}\nmore:   octile generate {run.path} --prompt 'class '")


class ShownProgress:
    """A run's progress bar, or its lines where there is no terminal."""

    def __init__(self, screen: Screen, bar: Progress, steps: int, done: int):
        self.screen, self.bar, self.steps = screen, bar, steps
        self.task = bar.add_task("", total=steps, completed=done)
        self.every = max(1, steps // PLAIN_LINES)

    def step(self, line: Metrics) -> None:
        if "skipped_for" in line:
            total = f"{line['skipped']:,} step{'s' * (line['skipped'] != 1)} skipped so far"
            self.screen.say(f"step {line['step']} changed no weight: {line['skipped_for']}; {total}")
        text = f"loss {line['main_loss']:.3f} · {line['tokens_per_s']:,.0f} tokens/s"
        self.bar.update(self.task, completed=line["step"], description=text)
        if not self.screen.console.is_terminal and line["step"] % self.every == 0:
            left = (self.steps - line["step"]) * line["seconds"] / line["step"]
            self.screen.say(f"step {line['step']}/{self.steps}: {text}, {left:.0f} s left")

    def validation(self, line: Metrics) -> None:
        self.screen.say(f"step {line['step']}: held-out loss {line['val_loss']:.4f} nats a token")
