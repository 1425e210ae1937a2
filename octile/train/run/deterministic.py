"""Deterministic runs: the same bits every time.

On a CPU, and in octile's own kernels, results are always deterministic. On a GPU two libraries are not by default: the
backward pass of attention adds in the order in which its thread blocks end, and cuBLAS may do so for small GEMMs.

    CUBLAS_WORKSPACE_CONFIG       cuBLAS reads it when it is first used in a process
    use_deterministic_algorithms  torch uses deterministic kernels, and raises for an operator that has none
    fill_uninitialized_memory     off, because octile reads no uninitialized memory, and filling it takes time

Source: https://pytorch.org/docs/stable/notes/randomness.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"  # eight buffers of 4 MiB, one of the two settings that cuBLAS documents for this


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Make the operators inside the context deterministic, if enabled; restore torch's settings after it.

    Raises:
        RuntimeError: raised by torch inside the context, for an operator without a deterministic kernel.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # type checkers do not see its property
    filled, workspace = memory.fill_uninitialized_memory, os.environ.get(WORKSPACE_VARIABLE)
    os.environ.setdefault(WORKSPACE_VARIABLE, FIXED_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        if workspace is None:
            del os.environ[WORKSPACE_VARIABLE]
