"""The console on which commands print tables and progress."""

from typing import NoReturn

from octile.extras import require

require("rich", extra="train")
import rich.console  # noqa: E402  a missing package is reported above


class Console(rich.console.Console):
    """rich's console, which raises BrokenPipeError if its reader stops reading, as in `octile doctor | head`."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError instead of exiting silently."""
        raise BrokenPipeError
