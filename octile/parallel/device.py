"""The device of a run, and of each of its ranks."""

from __future__ import annotations

import os

import torch

from octile.parallel.ranks import count_ranks


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU here: use --device cpu or auto")
    return torch.device(name)


def pick_own_device(name: str) -> torch.device:
    """The device of this rank: on a machine with GPUs the one with the rank's number on this machine.

    Raises:
        ValueError: as `pick_device`, or there are more ranks than GPUs.
    """
    device = pick_device(name)
    if device.type != "cuda" or count_ranks() == 1:
        return device
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > gpus:
        raise ValueError(
            f"a rank needs a GPU, but torchrun has started {os.environ['LOCAL_WORLD_SIZE']} processes on a machine "
            f"with {gpus}: start fewer, or use --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
