"""The run that a command takes where none is named."""

import sys
from pathlib import Path

from octile.torchrun import own_rank


def newest_run() -> Path:
    """Return the finished run under runs/ whose model was written last; rank 0 prints it.

    Raises:
        FileNotFoundError: there is none.
    """
    runs = sorted(Path("runs").glob("*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise FileNotFoundError("no finished run under runs/: name one, or make one with octile train")
    run = runs[-1].parent.parent
    if not own_rank():
        print(f"octile: {run}, the newest run", file=sys.stderr)
    return run
