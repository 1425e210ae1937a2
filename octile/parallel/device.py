"""The device of a run, and of each of its ranks."""

from __future__ import annotations

import os

import torch

from octile.torchrun import count_ranks


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
    return take_own_gpu("a rank needs a GPU", ": start fewer, or use --device cpu")


def take_own_gpu(what: str, advice: str = "") -> torch.device:
    """Make the GPU with this rank's number on its machine the current one, and return it.

    Args:
        what: who needs a GPU for each rank: the beginning of the error's message.
        advice: what to do where they are too few: its end.

    Raises:
        ValueError: torchrun has started more ranks on a machine than it has GPUs.
    """
    started, gpus = int(os.environ.get("LOCAL_WORLD_SIZE") or 1), torch.cuda.device_count()
    if started > gpus:
        raise ValueError(f"{what}, but torchrun has started {started} processes on a machine with {gpus}{advice}")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
