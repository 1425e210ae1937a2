"""The options of `octile lab capture`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octile.options import Positional


@dataclass(frozen=True)
class Options:
    """Write the operands of a step's GEMMs to a file, by repeating the step from the run's checkpoint.

    Attributes:
        run: the run's folder.
        step: the step, counted from 1; by default the one after the newest checkpoint.
        layers: patterns of layer names, separated by commas.
        products: the GEMMs to capture, fprop, dgrad or wgrad, separated by commas.
        out: the file to write; by default captures/step_N.safetensors in the run's folder.
    """

    run: Positional[Path]
    step: int | None = None
    layers: str = "*"
    products: str = "fprop,dgrad,wgrad"
    out: Path | None = None
