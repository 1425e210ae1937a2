"""The options of `octile lab recompute`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octile.options import Positional


@dataclass(frozen=True)
class Options:
    """Recompute on this machine's CPU what `octile lab rollout --record` has recorded on another one.

    Attributes:
        model: the run or Hugging Face folder that was recorded.
        recording: the file.
        functions: a file of the approximate functions of that GPU (.npz), with which its exponential, reciprocals and
            orders of sums are computed, too.
        json: print JSON.
    """

    model: Positional[Path]
    recording: Positional[Path]
    functions: Path | None = None
    json: bool = False
