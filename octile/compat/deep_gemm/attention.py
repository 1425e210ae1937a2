"""Logits of the lightning indexer under DeepGEMM's names, of contiguous keys and of pages.

FP4 operands and `indices` (sequences of several lengths in one batch) exist in DeepGEMM on Blackwell only, and are
refused.
"""

from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from octile.compat.deep_gemm.operands import check_pair_form, checked_integer
from octile.ops.mqa_logits import (
    PAGE,
    check_logits,
    check_paged_logits,
    check_paged_values,
    check_schedule,
    check_schedule_values,
    mqa_logits,
    paged_mqa_logits,
    paged_mqa_schedule,
)
from octile.ops.operator import check_tensor

RANGES = ("cu_seq_len_k_start", "cu_seq_len_k_end")
NAMES = {  # of the operators' arguments here
    "k": "kv's data", "k_scale": "kv's scale", "starts": RANGES[0], "ends": RANGES[1],
    "width": "max_seqlen_k", "clean": "clean_logits", "out_dtype": "logits_dtype",
}  # fmt: skip
PAGED_NAMES = {
    "cache": "kv_cache", "lengths": "context_lens", "pages": "block_table", "schedule": "schedule_meta",
    "width": "max_context_len", "n_blocks": "num_sms", "out_dtype": "logits_dtype",
}  # fmt: skip


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute logits [S, T]: k's scale times the sum over heads of weights · relu(q · k).

    Args:
        q: (data [S, H, D] float8_e4m3fn, None).
        kv: (data [T, D] float8_e4m3fn, scale [T] float32).
        weights: [S, H] float32.
        cu_seq_len_k_start, cu_seq_len_k_end: [S] int32, the first key of each query and the one after its last. A
            start below 0 counts as 0, an end beyond T as T.
        clean_logits: whether logits of other keys are −∞, otherwise they are unspecified.
        max_seqlen_k: 0, or the number of columns of compressed logits: column j is key cu_seq_len_k_start[s] + j. Keys
            beyond the last column are not stored.
        logits_dtype: float32 or bfloat16.

    Raises:
        TypeError, ValueError: an argument is wrong, or clean_logits comes with max_seqlen_k.
    """
    check_pair_form("kv", kv)
    data, (k, k_scale) = _fp8("q", q), kv
    tensors = k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end
    for name, t in zip(("kv's data", "kv's scale", "weights", *RANGES), tensors, strict=True):
        check_tensor(name, t)
    max_seqlen_k = _integer("max_seqlen_k", max_seqlen_k)
    check_logits(data, *tensors, max_seqlen_k, clean_logits, logits_dtype, NAMES)
    return cast(Tensor, mqa_logits(data, *tensors, max_seqlen_k, clean_logits, logits_dtype))


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Compute `fp8_fp4_mqa_logits` of q without a scale, in float32."""
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    return fp8_fp4_mqa_logits((q, None), kv, weights, *ranges, clean_logits, max_seqlen_k)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Divide the keys of all sequences among SMs, for `fp8_paged_mqa_logits`.

    Args:
        context_lens: [B, next_n] int32.
        block_kv: keys of a page, 64.
        num_sms: as many as `get_num_sms()`; on a CPU any number from 1 to 65,535 does.
        indices: None.

    Returns:
        int32 [num_sms + 1, 2].

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    check_tensor("context_lens", context_lens)
    _check_varlen(indices)
    if block_kv != PAGE:
        raise ValueError(f"block_kv must be {PAGE}, not {block_kv}")
    num_sms = _integer("num_sms", num_sms)
    check_schedule(context_lens, num_sms, PAGED_NAMES)
    if _has_values(context_lens):
        check_schedule_values(context_lens, PAGED_NAMES)
    return cast(Tensor, paged_mqa_schedule(context_lens, num_sms))


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """Compute logits [B·next_n, max_context_len] of keys in pages.

    Args:
        q: (data [B, next_n, H, D] float8_e4m3fn, None).
        kv_cache: [P, 64, 1, D + 4] uint8: the 64 · D bytes of a page's keys, then their 64 float32 scales.
        weights: [B·next_n, H] float32.
        context_lens: [B, next_n] int32: the keys that each query sees.
        block_table: [B, M] int32: the pages of each sequence.
        schedule_meta: the result of `get_paged_mqa_logits_metadata`.
        max_context_len: columns of the result.
        clean_logits: whether columns from context_lens on are −∞, otherwise they are unspecified. DeepGEMM refuses it.
        logits_dtype: float32 or bfloat16.
        indices: None.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    data = _fp8("q", q)
    tensors = {"kv_cache": kv_cache, "weights": weights, "context_lens": context_lens, "block_table": block_table}
    for name, t in (tensors | {"schedule_meta": schedule_meta}).items():
        check_tensor(name, t)
    _check_varlen(indices)
    if kv_cache.dim() != 4 or kv_cache.shape[1:3] != (PAGE, 1) or kv_cache.stride(1) != kv_cache.shape[3]:
        raise ValueError(
            f"kv_cache must be [P, {PAGE}, 1, D + 4] with contiguous pages, "
            f"not {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    max_context_len = _integer("max_context_len", max_context_len)
    arguments = data, kv_cache.flatten(1), weights, context_lens, block_table, schedule_meta, max_context_len
    check_paged_logits(*arguments, logits_dtype, PAGED_NAMES)
    if _has_values(context_lens):
        check_paged_values(arguments[1], context_lens, block_table, max_context_len, PAGED_NAMES)
    return cast(Tensor, paged_mqa_logits(*arguments, clean_logits, logits_dtype))


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Compute `fp8_fp4_paged_mqa_logits` of q without a scale, in float32."""
    sizes = context_lens, block_table, schedule_meta, max_context_len
    return fp8_fp4_paged_mqa_logits((q, None), kv_cache, weights, *sizes, clean_logits, torch.float32, indices)


def _fp8(name: str, pair: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the data of a pair (data, None)."""
    check_pair_form(name, pair)
    check_tensor(name, pair[0])
    if pair[1] is not None:
        raise ValueError(f"{name}'s scale must be None: FP4 is not supported")
    return pair[0]


def _integer(name: str, value: int) -> int:
    """Return an integer of Python; one of a trace is unchanged."""
    return value if isinstance(value, torch.SymInt) else checked_integer(name, value)


def _check_varlen(indices: Tensor | None) -> None:
    if indices is not None:
        raise ValueError("indices must be None: sequences of several lengths in a batch are not supported")


def _has_values(t: Tensor) -> bool:
    """Return whether values are on the host, and not those of a trace."""
    return t.is_cpu and type(t) is Tensor and not is_dynamo_compiling()
