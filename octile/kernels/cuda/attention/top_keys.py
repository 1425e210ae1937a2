"""Launcher of Hopper's choice of keys, as `octile.ops.top_keys` specifies it.

A launch depends on shapes and strides, never on values, so it can be captured in a CUDA graph; the first call of a kind
compiles and loads a kernel, which cannot be captured.
"""

import math

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit.launch import launch as launch_kernel
from octile.kernels.hopper import SHARED_BYTES

MAX_SORTED = 4096  # columns that are chosen and sorted
SAMPLES = 2048  # of a row
THREADS, FEW_ROWS_THREADS = 512, 1024


def why_unsupported(logits: Tensor, k: int) -> str | None:
    """Return why this kernel does not choose k of the columns of logits [S, W]; None: it does."""
    s, w = logits.shape
    if min(k, w) > MAX_SORTED:
        return f"{min(k, w)} columns are chosen, more than {MAX_SORTED}"
    if not s or not w:
        return "there are no rows or columns"
    return request.why_not_on(logits.device)


def launch(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> Tensor:
    """Choose the k highest of the columns starts[s] … ends[s] − 1 of each row of logits [S, W] → int32 [S, k]."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    s, w = logits.shape
    top_k = torch.empty(s, k, dtype=torch.int32, device=logits.device)
    constants = plan(s, w, k, logits.dtype, num_sms.multiprocessors(logits.device))
    arguments = (
        logits.data_ptr(), logits.stride(0) * logits.itemsize, starts.data_ptr(), ends.data_ptr(), top_k.data_ptr(),
        w, k, starts.stride(0), ends.stride(0), target(constants, k),
    )  # fmt: skip
    launch_kernel("top_keys", constants, logits.device, s, constants["threads"], constants["shared_bytes"], *arguments)
    return top_k


def plan(rows: int, width: int, k: int, dtype: torch.dtype, n_sms: int) -> dict[str, int | bool]:
    """Return the constants of the kernel that chooses k of `width` columns."""
    size = max(1 << (min(k, width) - 1).bit_length(), 128)
    candidates = max(3 * size, 2 * SAMPLES)
    few = rows <= n_sms
    threads = FEW_ROWS_THREADS if few or size > 4 * THREADS else THREADS
    shared = 8 * (candidates + size) + 4 * (2048 + threads // 32 + 6)  # top_keys.cu divides it
    return {
        "element_bytes": dtype.itemsize, "bfloat16": dtype == torch.bfloat16, "threads": threads, "sorted": size,
        "candidates": candidates, "samples": SAMPLES, "shared_bytes": shared,
        "blocks": 1 if few else min(SHARED_BYTES // (shared + 1024), 2048 // threads),
    }  # fmt: skip


def target(constants: dict[str, int | bool], k: int) -> int:
    """Return how many candidates the sampled bound aims at: by ratio as far from k as from too many."""
    return math.isqrt(min(k, constants["sorted"]) * constants["candidates"])
