"""Runs that give the same bits when they are run again.

On a CPU, and in our own kernels, that is always so. On a GPU two libraries take liberties unless they are told: the
backward pass of attention adds in the order in which its blocks end, and cuBLAS may do the same with small products.

    CUBLAS_WORKSPACE_CONFIG       cuBLAS reads it when it is first used in a process
    use_deterministic_algorithms  torch then refuses an operator that has no such form
    fill_uninitialized_memory     off: everything that is read was written, and filling it first takes time

Source: https://pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = ":4096:8"  # eight buffers of 4 MiB, one of the two settings that cuBLAS documents for this


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Inside, two runs of the same operators give the same bits, if that is asked; after it all is as it was.

    Raises:
        RuntimeError: inside, by torch, where an operator can't do so.
    """
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its setting is a property, which type checkers don't see
    filled, workspace = memory.fill_uninitialized_memory, os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, FIXED)
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        if workspace is None:
            del os.environ[WORKSPACE]
