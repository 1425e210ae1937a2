"""Reads the results of tensor cores that `octile.lab.probe.golden` has recorded."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from octile.lab.probe.compare import InstructionChain
from octile.lab.probe.golden import DTYPES


def replay(path: Path) -> Iterator[tuple[InstructionChain, Tensor, Tensor, Tensor, Tensor]]:
    """Yield each case with a, b, c, and the d that the hardware computed."""
    with safe_open(path, "pt") as file:
        for key in sorted({name.rpartition(".")[0] for name in file.keys()}):  # noqa: SIM118, it is not a mapping
            name, a, b, steps, *suffix = key.split(" ")
            case = InstructionChain(name, DTYPES[a], DTYPES[b], int(steps), bool(suffix))
            yield case, *(file.get_tensor(f"{key}.{x}") for x in "abcd")
