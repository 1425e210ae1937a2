"""`octile lab capture`: write the operands of a step's GEMMs to a file."""

from __future__ import annotations

from octile.lab.capture import parse_gemm_names
from octile.lab.run import capture_run
from octile.lab_options.capture import Options


def run(options: Options) -> None:
    """Capture the step, and print the path of the file.

    Raises:
        FileNotFoundError, ValueError: as in `octile.lab.run.capture_run`.
    """
    path = capture_run(options.run, options.step, options.layers, parse_gemm_names(options.products), options.out)
    print(f"captured: {path}")
