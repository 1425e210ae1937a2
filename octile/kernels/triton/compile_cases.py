"""What the compile cases of kernels are made of: the sizes of a large model, and tensors without data.

Each module of kernels lists its own cases in `compile_cases`: the launches of training and serving, by name.
`compile_all.py` calls them and compiles what they launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octile.kernels.memory_layout import new_scale

T, N, K, GROUPS = 8192, 4096, 7168, 32  # rows, columns and inner size of a GEMM, and experts of a rank
BF16, FP32, E4M3, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8

CompileCases = dict[str, Callable[[], object]]
Quantized = tuple[Tensor, Tensor, tuple[int, int]]  # data, scale and block


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def quantized(
    rows: int, cols: int, block: tuple[int, int], dtype: torch.dtype = E4M3, groups: int | None = None
) -> Quantized:
    """A quantized matrix [rows, cols], or one for each group, without data."""
    batch = () if groups is None else (groups,)
    data = empty(*batch, rows, cols, dtype=dtype)
    return data, new_scale(data, *block), block


def ragged() -> Tensor:
    """A matrix whose elements are loaded one by one, since its rows begin at no multiple of 16 bytes."""
    return empty(700, 1000, dtype=FP32)


def group_tiles() -> Tensor:
    """The tiles of aligned groups."""
    return empty(T // 128 + GROUPS, 2, dtype=torch.int32)


def rows_of_tokens() -> Tensor:
    """The rows of each token's experts."""
    return empty(T, 8, dtype=torch.int32)


def latent_cache(dtype: torch.dtype) -> Tensor:
    """A cache of 4,096 blocks of 64 positions: 512 + 64 channels, or the bytes of FP8 latents (uint8)."""
    return empty(4096, 64, 656 if dtype == torch.uint8 else 576, dtype=dtype)
