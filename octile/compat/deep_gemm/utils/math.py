"""`deep_gemm.utils.math`: quantization to E4M3 under DeepGEMM's names.

The functions call `octile.quantize`, whose scale is amax / 448. DeepGEMM's scale is at least 1e-4 / 448. A block of
zeros has scale 1.
"""

from torch import Tensor

import octile.scaled as scaled
from octile.compat.deep_gemm.operands import Pair, checked_integer
from octile.ops.scale_layouts import pack_ue8m0

__all__ = ["align", "ceil_div", "per_block_cast_to_fp8", "per_channel_cast_to_fp8", "per_token_cast_to_fp8"]


def ceil_div(x: int, y: int) -> int:
    """Return ⌈x/y⌉."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return x rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False) -> Pair:
    """Quantize x[M, K] in 1×gran_k tiles, to E4M3 and scales float32 [M, ⌈K/gran_k⌉], powers of two with use_ue8m0.

    With use_packed_ue8m0 the scales are int32 [M, ⌈⌈K/gran_k⌉/4⌉], four UE8M0 values in each.

    Raises:
        TypeError, ValueError: an argument has another type; gran_k is less than 1; use_packed_ue8m0 comes without
            use_ue8m0, since only powers of two can be packed.
    """
    _check_flag("use_packed_ue8m0", use_packed_ue8m0)
    if use_packed_ue8m0 and not use_ue8m0:
        raise ValueError("use_packed_ue8m0 must come with use_ue8m0: only powers of two can be packed")
    data, scale = _quantize(x, (1, _checked_gran_k(gran_k)), use_ue8m0)
    return data, pack_ue8m0(scale) if use_packed_ue8m0 else scale


def per_channel_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> Pair:
    """Quantize x[K, N] in gran_k×1 tiles, to E4M3 and scales float32 [⌈K/gran_k⌉, N]."""
    return _quantize(x, (_checked_gran_k(gran_k), 1), use_ue8m0)


def per_block_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> Pair:
    """Quantize x[N, K] in gran_k×gran_k blocks, to E4M3 and scales float32 [⌈N/gran_k⌉, ⌈K/gran_k⌉]."""
    gran_k = _checked_gran_k(gran_k)
    return _quantize(x, (gran_k, gran_k), use_ue8m0)


def _quantize(x: Tensor, block: tuple[int, int], use_ue8m0: bool) -> Pair:
    _check_flag("use_ue8m0", use_ue8m0)
    q = scaled.quantize(x, block, scale="power_of_2" if use_ue8m0 else "float32")
    return q.data, q.scale


def _checked_gran_k(gran_k: int) -> int:
    gran_k = checked_integer("gran_k", gran_k)
    if gran_k < 1:
        raise ValueError(f"gran_k must be at least 1, not {gran_k}")
    return gran_k


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, not {flag!r}")
