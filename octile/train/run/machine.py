"""What decides the bits of a run besides its configuration: the device, the versions, and the threads of a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from octile import __version__
from octile.train.source_digest import source_digest

OCTILE = f"{__version__} (source {source_digest()})"  # as it was imported: the files may change during a run
BITS_ADVICE = {"threads": "; OMP_NUM_THREADS sets the number of threads"}


def warn_of_another_machine(checkpoint: str, state: Mapping[str, Any], device: torch.device) -> None:
    """Warn if the state of a checkpoint was computed where the bits differ from those of this machine.

    Raises:
        ValueError: the state does not say it as an object.
    """
    before = state.get("computed_on", {})
    if not isinstance(before, dict):
        raise ValueError(f"state.computed_on of {checkpoint} must be an object, not {before!r}")
    for name, value in computed_on(device).items():
        if before.get(name, value) != value:
            warnings.warn(
                f"{checkpoint} was computed with {name} {before[name]}, this machine has {value}: steps that it "
                f"computes {'may not be' if name == 'octile' else 'are not'} bit-identical to those of an "
                f"uninterrupted run{BITS_ADVICE.get(name, '')}",
                stacklevel=2,
            )


def computed_on(device: torch.device) -> dict[str, Any]:
    """What decides the bits of a run besides its configuration: the device, octile, torch, and on a CPU the threads.

    Sums on a CPU are split among its threads, so another number adds in another order.
    """
    threads = {"threads": torch.get_num_threads()} if device.type == "cpu" else {}
    return {"device": device.type, "octile": OCTILE, "torch": torch.__version__, **threads}
