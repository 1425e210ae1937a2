"""A CUDA stream on which the shared experts of a decode step are computed while its rows travel between GPUs.

Few rows leave most of a GPU idle while they travel. The stream is one of a GPU, made when it is first needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms
from octile.nn.dispatcher import InFlight


def begin(compute: Callable[[], Tensor], device: torch.device) -> InFlight[Tensor]:
    """Begin to compute shared experts, after what the current stream was asked to do before.

    What they read must stay until the result is waited for. Memory of their stream is used again by later work of that
    stream alone, which waits for what has read it.

    Args:
        compute: launches the kernels, whose GEMMs leave half of the SMs to the exchange.
        device: of the rows. On a CPU the result is computed at once.
    """
    if device.type != "cuda":
        return InFlight(compute())
    current, stream = torch.cuda.current_stream(device), _stream(device)
    stream.wait_stream(current)
    restore = num_sms.leave_free(num_sms.multiprocessors(device) // 2, math.inf)
    try:
        with torch.cuda.stream(stream):
            result = compute()
    finally:
        restore()
    return InFlight(result, lambda: current.wait_stream(stream))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
