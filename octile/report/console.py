"""Where commands print tables and progress."""

from typing import NoReturn

from octile.extras import require

require("rich", extra="train")
import rich.console  # noqa: E402  a missing package is reported above


class Console(rich.console.Console):
    """rich's console, but a reader who has seen enough (`octile doctor | head`) is no failure."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
