"""`octile lab capture`: write the operands of a step's GEMMs to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octile.lab.capture import parse_gemm_names
from octile.lab.run import capture_run
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


def run(options: Options) -> None:
    """Capture the step, and print the path of the file.

    Raises:
        FileNotFoundError, ValueError: as in `octile.lab.run.capture_run`.
    """
    path = capture_run(options.run, options.step, options.layers, parse_gemm_names(options.products), options.out)
    print(f"captured: {path}")
