"""The console on which commands print tables and progress."""

import os
from collections.abc import Callable

from octile.extras import require

require("rich", extra="train")
import rich.console  # noqa: E402  a missing package is reported above


class Console(rich.console.Console):
    """rich's console, which raises BrokenPipeError if its reader stops reading, as in `octile doctor | head`.

    Attributes:
        reader_left: called instead, if it is not None; what is printed later is discarded.
    """

    reader_left: Callable[[], object] | None = None

    def on_broken_pipe(self) -> None:
        """Call `reader_left`, or raise BrokenPipeError, instead of exiting silently."""
        if self.reader_left is None:
            raise BrokenPipeError
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        self.reader_left()
