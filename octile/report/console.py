"""Where commands print tables and progress."""

from typing import NoReturn

import rich.console


class Console(rich.console.Console):
    """rich's console, but a reader who has seen enough (`octile doctor | head`) is no failure."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
