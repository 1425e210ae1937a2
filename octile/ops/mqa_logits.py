"""Logits of the lightning indexer: how much a query wants each key, by which sparse attention chooses its keys.

    logits[s, t] = k_scale[t] · sum over h of weights[s, h] · relu(q[s, h] · k[t])

Queries have many heads, keys have one (multi-query attention). Both are E4M3. A key has an FP32 scale; the scale of a
query's head belongs into its weight. Each query sees a range of keys. Keys lie in a matrix, or in the pages of a cache.

Sums are in FP32 in unspecified order. A NaN of a query, key, scale or weight appears in the logits that it belongs to.

Source: DeepSeek-V3.2-Exp §2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp), whose `fp8_index` is this function;
DeepGEMM's `fp8_mqa_logits` and `fp8_paged_mqa_logits`, whose layouts these are.
Shapes: S queries, H heads, D channels of a head, T keys, B sequences of next_n queries each, P pages of 64 keys.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from octile.kernels.cuda.attention import mqa_logits as kernel
from octile.ops.matmul import OUT_DTYPES, without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device

PAGE = 64  # keys of a page
SPLIT = 256  # keys that a thread block takes at a time of a paged cache
SCALE_BYTES = 4
MAX_BLOCKS, MAX_WIDTH = 2**16 - 1, 2**31 - 1


@operator()
def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    width: int,
    clean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the logits of each query for its keys, from starts[s] to before ends[s].

    Args:
        q: [S, H, D] float8_e4m3fn, contiguous.
        k: [T, D] float8_e4m3fn, contiguous.
        k_scale: [T] float32, contiguous.
        weights: [S, H] float32, contiguous rows.
        starts, ends: [S] int32, contiguous. A start below 0 counts as 0, an end beyond T as T.
        width: 0: column t of the result is key t; otherwise the number of columns, of which column j of query s is key
            starts[s] + j. Keys beyond the last column are not stored.
        clean: whether logits of keys that a query does not see are −∞; otherwise they are unspecified. Needs width 0.
        out_dtype: float32 or bfloat16.

    Returns:
        logits [S, T], or [S, width].

    On Hopper, 32 or 64 heads of 32, 64 or 128 channels have a kernel; torch computes others.

    Raises:
        TypeError: a tensor or out_dtype is of another dtype.
        ValueError: shapes, strides or devices do not fit, width is negative, or clean comes with a width.
    """
    check_logits(q, k, k_scale, weights, starts, ends, width, clean, out_dtype)
    return _mqa_logits(q, k, k_scale, weights, starts, ends, width, out_dtype)


def _mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    width: int,
    out_dtype: torch.dtype,
) -> Tensor:
    t = len(k)
    logits_ST = _scores(q, k, k_scale, weights)
    first_S, end_S = starts.clamp(min=0).long()[:, None], ends.clamp(max=t).long()[:, None]
    if width:
        keys_SW = first_S + torch.arange(width, device=q.device)
        logits_ST = torch.cat((logits_ST, logits_ST.new_zeros(len(q), 1)), 1).gather(1, keys_SW.clamp(max=t))
    else:
        keys_SW = torch.arange(t, device=q.device).expand(len(q), t)
    return logits_ST.masked_fill_((keys_SW < first_S) | (keys_SW >= end_S), -torch.inf).to(out_dtype)


def _scores(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor) -> Tensor:
    """Return the logits [S, T] of all keys, head by head, since [S, H, T] may not fit in memory."""
    logits_ST, k_DT = q.new_zeros(len(q), len(k), dtype=torch.float32), k.float().mT
    with without_autocast(q.device):
        for head in range(q.shape[1]):
            scores_ST = torch.mm(q[:, head].float(), k_DT)
            logits_ST.addcmul_(scores_ST.relu_(), weights[:, head, None])
    return logits_ST.mul_(k_scale)


@mqa_logits.register_fake
def _(q, k, k_scale, weights, starts, ends, width, clean, out_dtype):
    return q.new_empty(q.shape[0], width or k.shape[0], dtype=out_dtype)


@mqa_logits.register_kernel("cuda")
def _(q, k, k_scale, weights, starts, ends, width, clean, out_dtype):
    check_logits(q, k, k_scale, weights, starts, ends, width, clean, out_dtype)
    if kernel.why_unsupported(q):
        return _mqa_logits(q, k, k_scale, weights, starts, ends, width, out_dtype)
    out = q.new_empty(len(q), width or len(k), dtype=out_dtype)
    if not len(k):
        out.fill_(-torch.inf)
    elif out.numel():
        kernel.launch(q, k, k_scale, weights, starts, ends, out, width > 0, clean)
    return out


@operator()
def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    pages: Tensor,
    schedule: Tensor,
    width: int,
    clean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute the logits of each query for the first keys of its sequence, which lie in pages of 64.

    Args:
        q: [B, next_n, H, D] float8_e4m3fn, contiguous.
        cache: [P, 64·(D + 4)] uint8, contiguous rows at multiples of 16 bytes of its storage: the 64 keys of a page,
            E4M3, then their 64 scales, float32.
        weights: [B·next_n, H] float32, contiguous rows.
        lengths: [B, next_n] int32, contiguous: the keys that a query sees, from 0 to the width and to 64·M.
        pages: [B, M] int32, contiguous rows: the pages of each sequence in their order; those after its longest length
            are not read.
        schedule: the result of `paged_mqa_schedule` for the same lengths.
        width: columns of the result.
        clean: whether columns from a query's length on are −∞; otherwise they are unspecified.
        out_dtype: float32 or bfloat16.

    Returns:
        logits [B·next_n, width].

    On Hopper, 32 or 64 heads of 32, 64 or 128 channels have a kernel; torch computes others.

    Raises:
        TypeError: a tensor or out_dtype is of another dtype.
        ValueError: shapes, strides or devices do not fit, or width is negative; on a CPU, a length is out of its range,
            or a page that is read is not in the cache.
    """
    check_paged_logits(q, cache, weights, lengths, pages, schedule, width, out_dtype)
    check_paged_values(cache, lengths, pages, width)
    return _paged_mqa_logits(q, cache, weights, lengths, pages, width, out_dtype)


def _paged_mqa_logits(
    q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, pages: Tensor, width: int, out_dtype: torch.dtype
) -> Tensor:
    b, next_n, _, d = q.shape
    logits = q.new_full((b, next_n, width), -torch.inf, dtype=out_dtype)
    keys, scales = cache[:, : PAGE * d].view(q.dtype), cache[:, PAGE * d :].contiguous().view(torch.float32)
    for i, query_lengths in enumerate(lengths.tolist()):
        t = max(query_lengths, default=0)
        rows = pages[i, : -(-t // PAGE)].long()
        k_TD, scale_T = keys[rows].reshape(-1, d)[:t], scales[rows].flatten()[:t]
        found = _scores(q[i], k_TD, scale_T, weights.view(b, next_n, -1)[i])
        seen = torch.arange(t, device=q.device) < lengths[i, :, None]
        logits[i, :, :t] = found.masked_fill_(~seen, -torch.inf)
    return logits.flatten(0, 1)


@paged_mqa_logits.register_fake
def _(q, cache, weights, lengths, pages, schedule, width, clean, out_dtype):
    return q.new_empty(q.shape[0] * q.shape[1], width, dtype=out_dtype)


@paged_mqa_logits.register_kernel("cuda")
def _(q, cache, weights, lengths, pages, schedule, width, clean, out_dtype):
    check_paged_logits(q, cache, weights, lengths, pages, schedule, width, out_dtype)
    if kernel.why_unsupported(q):
        return _paged_mqa_logits(q, cache, weights, lengths, pages, width, out_dtype)
    shape = len(q) * q.shape[1], width
    # A block writes the columns that its queries see; where sequences are short, none writes the others.
    reads = pages.numel() and len(cache)
    out = q.new_empty(shape, dtype=out_dtype)
    if clean or not reads:
        out.fill_(-torch.inf)
    if reads and out.numel():
        kernel.launch_paged(q, cache, weights, lengths, pages, schedule, out)
    return out


@operator()
def paged_mqa_schedule(lengths: Tensor, n_blocks: int) -> Tensor:
    """Divide the keys of all sequences evenly among thread blocks, in units of 256 keys of one sequence.

    Args:
        lengths: [B, next_n] int32: the keys that each query sees. A sequence counts with its longest.
        n_blocks: thread blocks, from 1 to 65,535; as a rule the number of SMs.

    Returns:
        int32 [n_blocks + 1, 2]: (sequence, unit of it) at which each block begins; the next block's is where it ends.

    Raises:
        TypeError: lengths are not int32.
        ValueError: lengths are no matrix, n_blocks is out of its range, or, on a CPU, a length is less than 0.
    """
    check_schedule(lengths, n_blocks)
    check_schedule_values(lengths)
    b = len(lengths)
    if not lengths.numel():
        return lengths.new_zeros(n_blocks + 1, 2)
    units = (lengths.amax(1).long() + SPLIT - 1) // SPLIT
    ends = units.cumsum(0)
    first = ends[-1] * torch.arange(n_blocks + 1, device=lengths.device) // n_blocks
    sequence = torch.searchsorted(ends, first, right=True)
    inside = sequence < b
    last = sequence.clamp(max=b - 1)
    unit = torch.where(inside, first - (ends - units)[last], 0)
    return torch.stack((sequence, unit), 1).int()


@paged_mqa_schedule.register_fake
def _(lengths, n_blocks):
    return lengths.new_empty(n_blocks + 1, 2)


def check_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    width: int,
    clean: bool,
    out_dtype: torch.dtype,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise what `mqa_logits` raises; `names` are other names of its arguments for messages."""
    name = _Names(names)
    _check_queries(q, weights, ("S", "H", "D"), out_dtype, name)
    s, _, d = q.shape
    if k.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name['k']} must be float8_e4m3fn, not {k.dtype}")
    if k.dim() != 2 or k.shape[1] != d or not k.is_contiguous():
        raise ValueError(f"{name['k']} must be [T, {d}], contiguous, not {tuple(k.shape)} with strides {k.stride()}")
    if k_scale.dtype != torch.float32:
        raise TypeError(f"{name['k_scale']} must be float32, not {k_scale.dtype}")
    if k_scale.shape != (len(k),) or not k_scale.is_contiguous():
        raise ValueError(f"{name['k_scale']} must be ({len(k)},), contiguous, not {tuple(k_scale.shape)}")
    check_device(name["q"], q, name["k"], k)
    check_device(name["q"], q, name["k_scale"], k_scale)
    for t, which in ((starts, name["starts"]), (ends, name["ends"])):
        _check_int32(which, t, 1, name["q"], q)
        if len(t) != s:
            raise ValueError(f"{which} must be ({s},), one for each query, not {tuple(t.shape)}")
    _check_integer(name["width"], width, 0, MAX_WIDTH)
    if width and clean:
        raise ValueError(f"{name['clean']} must be False where {name['width']} is {width}, not True")


def check_paged_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    pages: Tensor,
    schedule: Tensor,
    width: int,
    out_dtype: torch.dtype,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise what `paged_mqa_logits` raises, except of values; `names` are other names of its arguments for messages."""
    name = _Names(names)
    _check_queries(q, weights, ("B", "next_n", "H", "D"), out_dtype, name)
    b, next_n, _, d = q.shape
    row = PAGE * (d + SCALE_BYTES)
    if cache.dtype != torch.uint8:
        raise TypeError(f"{name['cache']} must be uint8, not {cache.dtype}")
    if cache.dim() != 2 or cache.shape[1] != row:
        raise ValueError(f"{name['cache']} must have {row} bytes a page for q's {d} channels, not {tuple(cache.shape)}")
    if cache.stride(1) != 1 or cache.stride(0) % 16 or cache.stride(0) < row:
        raise ValueError(
            f"pages of {name['cache']} must be contiguous, at multiples of 16 bytes, not have strides {cache.stride()}"
        )
    # not the address, which tensors without data do not have; a trace has neither, and the operator checks again
    if not is_dynamo_compiling() and cache.storage_offset() % 16:
        raise ValueError(
            f"{name['cache']} must begin at a multiple of 16 bytes of its storage, not at {cache.storage_offset()}"
        )
    check_device(name["q"], q, name["cache"], cache)
    for which, t in (("lengths", lengths), ("pages", pages), ("schedule", schedule)):
        _check_int32(name[which], t, 2, name["q"], q)
    if lengths.shape != (b, next_n):
        raise ValueError(f"{name['lengths']} must be ({b}, {next_n}), one for each query, not {tuple(lengths.shape)}")
    if len(pages) != b:
        raise ValueError(f"{name['pages']} must be ({b}, M), a row for each sequence, not {tuple(pages.shape)}")
    if len(schedule) < 2 or schedule.shape[1] != 2:
        raise ValueError(f"{name['schedule']} must be [blocks + 1, 2], not {tuple(schedule.shape)}")
    _check_integer(name["width"], width, 0, MAX_WIDTH)


def check_schedule(lengths: Tensor, n_blocks: int, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise what `paged_mqa_schedule` raises; `names` are other names of its arguments for messages."""
    name = _Names(names)
    _check_int32(name["lengths"], lengths, 2, name["lengths"], lengths)
    _check_integer(name["n_blocks"], n_blocks, 1, MAX_BLOCKS)


def check_schedule_values(lengths: Tensor, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise what `paged_mqa_schedule` raises of lengths that are on the host."""
    if lengths.is_cpu and lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"{_Names(names)['lengths']} must be at least 0, not {lengths.tolist()}")


class _Names(dict[str, str]):
    """Names of arguments for messages: an argument's own where no other is given."""

    def __missing__(self, name: str) -> str:
        return name


def _check_queries(q: Tensor, weights: Tensor, sides: tuple[str, ...], out_dtype: torch.dtype, name: _Names) -> None:
    if q.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name['q']} must be float8_e4m3fn, not {q.dtype}")
    if q.dim() != len(sides) or not q.is_contiguous() or not q.shape[-1]:
        expected = ", ".join(sides)
        raise ValueError(
            f"{name['q']} must be [{expected}], contiguous, not {tuple(q.shape)} with strides {q.stride()}"
        )
    if weights.dtype != torch.float32:
        raise TypeError(f"{name['weights']} must be float32, not {weights.dtype}")
    shape = (q.shape[:-2].numel(), q.shape[-2])
    if weights.shape != shape or weights.stride(1) != 1:
        raise ValueError(
            f"{name['weights']} must be {shape} with contiguous rows, "
            f"not {tuple(weights.shape)} with strides {weights.stride()}"
        )
    check_device(name["q"], q, name["weights"], weights)
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"{name['out_dtype']} must be bfloat16 or float32, not {out_dtype}")


def _check_int32(name: str, t: Tensor, dims: int, other_name: str, other: Tensor) -> None:
    if t.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, not {t.dtype}")
    if t.dim() != dims or (t.numel() and not t[0].is_contiguous()) or (dims == 1 and not t.is_contiguous()):
        raise ValueError(
            f"{name} must have {dims} dimensions and contiguous rows, not be {tuple(t.shape)} with strides {t.stride()}"
        )
    check_device(other_name, other, name, t)


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most:,}, not {value}")


def check_paged_values(
    cache: Tensor, lengths: Tensor, pages: Tensor, width: int, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise what `paged_mqa_logits` raises of values, which a GPU does not check since they are not on the host."""
    name = _Names(names)
    longest = min(width, PAGE * pages.shape[1])
    if not lengths.numel():
        return
    if not 0 <= int(lengths.min()) <= int(lengths.max()) <= longest:
        holders = f"{name['width']} and {name['pages']}"
        raise ValueError(f"{name['lengths']} must be from 0 to the {longest} keys of {holders}, not {lengths.tolist()}")
    read = pages[torch.arange(pages.shape[1]) < (lengths.amax(1)[:, None] + PAGE - 1) // PAGE]
    if read.numel() and not 0 <= int(read.min()) <= int(read.max()) < len(cache):
        limit = f"the {len(cache)} pages of {name['cache']}"
        raise ValueError(f"{name['pages']} must be from 0 to below {limit}, not {sorted(set(read.tolist()))}")
