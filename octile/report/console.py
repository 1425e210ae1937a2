"""The console on which commands print tables and progress."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from octile.extras import require
from octile.text import escape_control_characters

require("rich", extra="train")
import rich.console  # noqa: E402  a missing package is reported above


class Console(rich.console.Console):
    """rich's console without markup, which raises BrokenPipeError if its reader stops, as in `octile doctor | head`.

    Texts are printed as given: with rich's markup a path such as "runs/[old]" would lose its brackets.

    Args:
        options: options of rich's console.

    Attributes:
        reader_left: called instead of raising, if it is not None; what is printed later is discarded.
    """

    reader_left: Callable[[], object] | None = None

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, **options)

    def print_line(self, text: str) -> None:
        """Print a text; on a terminal wrapped between words, and with its control characters escaped.

        In a file a path or a figure stays on its line.
        """
        self.print(escape_control_characters(text) if self.is_terminal else text, soft_wrap=not self.is_terminal)

    def on_broken_pipe(self) -> None:
        """Call `reader_left`, or raise BrokenPipeError, instead of exiting silently."""
        if self.reader_left is None:
            raise BrokenPipeError
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        self.reader_left()


@contextmanager
def progress_bar(what: str, total: int | None, is_hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal; what it yields is called with how much is done in addition.

    Args:
        what: the name of the work.
        total: how much there is; None: nobody knows, and the bar shows that the work goes on.
        is_hidden: show nothing, as for a command that prints JSON.
    """
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=is_hidden or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)
