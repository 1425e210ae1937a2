"""Attention of decoding in latent attention's absorbed form, over a paged cache, and the products of each head.

    q = query · W_UK                          C channels a head, `heads_nt_out`
    s = scale · q · [latent; rotary key]      of the first `length` positions of a row's text, `paged_attention`
    p = softmax(s)
    o = p · latent                            C channels a head
    v = o · W_UV                              `heads_nt_out`, or `heads_nt_quantize` for an FP8 projection of the output

A row is one query position with all its heads. Several rows may belong to one text, as where drafts are verified: each
has its own length. The cache is read once for all heads of a row, which is what decoding's time goes into, or once for
all rows of a text. On a GPU a NaN in the cache then reaches all rows of its text, also those whose length ends before.

On a GPU the positions of a row are divided among thread blocks (split-KV), whose partial results are merged in the
order of the positions. If parts are given, a row is divided at their multiples, and its bits depend on its query, its
keys and its length alone: not on other rows, nor on those of its text that are computed together with it. Otherwise the
lengths of all rows may decide how they are divided, so that thread blocks have equally much to do. The order of sums is
unspecified otherwise. The softmax's weights are rounded to q's dtype, or to FP16 with a scale, before they are
multiplied, and with more than 32 heads a GPU may round the latents of FP8 rows to q's dtype, too.

The products of a head sum in unspecified order. Those of few rows are short, and most of their time is launching and
waiting: on Hopper they have kernels of their own, which load the weights while the previous kernel still runs. These
kernels sum over K in the order of `octile.ops.row_invariant`. Results are rounded to the rows' dtype before they are
quantized, so one call has the bits of two.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.2; Flash-Decoding; FlashMLA (https://github.com/deepseek-ai/FlashMLA).
Shapes: R rows, in products T; H heads, K and N the columns of a head's rows and of its results; C channels of a latent,
W = C + those of the rotary key, P pages, M pages of a text at most.
"""

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels import backends, cpu
from octile.kernels.cuda.gemm import request
from octile.kernels.memory_layout import new_scale
from octile.ops.latent_cache import PAGE, check_cache, rope_dim_of, rows_in_float32
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, quantize

MAX_PART = 2**20  # positions
MAX_ROWS = 256  # of the kernels of products: more fill a GPU, and a library's GEMM is as fast


@operator()
def paged_attention(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int = 0,
    rows_per_text: int = 1,
) -> Tensor:
    """Attend from each row to the first positions of its text.

    Args:
        q: [R, H, W], float32, bfloat16 or float16, contiguous: queries times the keys' weight, then rotary queries.
        cache: [P, 64, W] or FP8 rows, as in `octile.ops.latent_cache.write_latents`.
        pages: int32 [R, M], the pages of each row's text in their order; those after the length are not read.
        lengths: int32 [R], positions that a row attends to, at most 64·M; 0 gives zeros.
        latent_dim: C.
        scale: the factor of the scores.
        part: positions of a part, a multiple of 64, if bits must not depend on other rows; 0: a GPU divides rows by the
            shapes and all lengths.
        rows_per_text: consecutive rows that belong to one text and have the same pages; a GPU reads those of the first,
            once for all rows that one thread block has.

    Returns:
        o [R, H, C] in q's dtype.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, part is no multiple of 64 or above 2**20, or R is no multiple
            of rows_per_text. On a CPU, a length is negative or more than 64·M, a page that is read is not in the cache,
            or rows of a text have different pages.
    """
    check_attention(q, cache, pages, lengths, latent_dim, part, rows_per_text)
    _check_values(cache, pages, lengths, rows_per_text)
    return _paged_attention(q, cache, pages, lengths, latent_dim, scale)[0]


@operator()
def paged_attention_with_lse(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int,
    rows_per_text: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attend as `paged_attention` with parts, with the same bits, and return what attention's backward pass needs.

    Args:
        q, cache, pages, lengths, latent_dim, scale, rows_per_text: as there.
        part: as there, and not 0.

    Returns:
        o [R, H, C] in q's dtype, and lse [R, H] float32: log Σ exp(s), or −∞ of no positions.

    Raises:
        TypeError, ValueError: as there.
    """
    _check_with_lse(q, cache, pages, lengths, latent_dim, part, rows_per_text)
    _check_values(cache, pages, lengths, rows_per_text)
    return _paged_attention(q, cache, pages, lengths, latent_dim, scale)


def _paged_attention(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    o_RHC = q.new_zeros(*q.shape[:2], latent_dim)
    lse_RH = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    q_RHW = q.float() * scale
    with without_autocast(q.device):
        for row, length in enumerate(lengths.tolist()):
            if not length:
                continue
            keys_TW = rows_in_float32(cache[pages[row, : -(-length // PAGE)].long()], latent_dim).flatten(0, 1)[:length]
            s_HT = torch.mm(q_RHW[row], keys_TW.mT)
            o_RHC[row] = torch.mm(s_HT.softmax(-1), keys_TW[:, :latent_dim])
            lse_RH[row] = s_HT.logsumexp(-1)
    return o_RHC, lse_RH


@paged_attention.register_fake
def _(q, cache, pages, lengths, latent_dim, scale, part=0, rows_per_text=1):
    return q.new_empty(*q.shape[:2], latent_dim)


@paged_attention_with_lse.register_fake
def _(q, cache, pages, lengths, latent_dim, scale, part, rows_per_text=1):
    return q.new_empty(*q.shape[:2], latent_dim), q.new_empty(q.shape[:2], dtype=torch.float32)


@paged_attention.register_kernel("cpu")
def _(q, cache, pages, lengths, latent_dim, scale, part=0, rows_per_text=1):
    check_attention(q, cache, pages, lengths, latent_dim, part, rows_per_text)
    _check_values(cache, pages, lengths, rows_per_text)
    if not cpu.can_attend(cache):
        return _paged_attention(q, cache, pages, lengths, latent_dim, scale)[0]
    return cpu.paged_attention(q, cache, pages, lengths, latent_dim, scale).to(q.dtype)


@paged_attention.register_kernel("cuda")
def _(q, cache, pages, lengths, latent_dim, scale, part=0, rows_per_text=1):
    check_attention(q, cache, pages, lengths, latent_dim, part, rows_per_text)
    return backends.run("paged_attention", q, cache, pages, lengths, latent_dim, scale, part, rows_per_text)


@paged_attention_with_lse.register_kernel("cpu")
def _(q, cache, pages, lengths, latent_dim, scale, part, rows_per_text=1):
    _check_with_lse(q, cache, pages, lengths, latent_dim, part, rows_per_text)
    _check_values(cache, pages, lengths, rows_per_text)
    if not cpu.can_attend(cache):
        return _paged_attention(q, cache, pages, lengths, latent_dim, scale)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return cpu.paged_attention(q, cache, pages, lengths, latent_dim, scale, lse).to(q.dtype), lse


@paged_attention_with_lse.register_kernel("cuda")
def _(q, cache, pages, lengths, latent_dim, scale, part, rows_per_text=1):
    _check_with_lse(q, cache, pages, lengths, latent_dim, part, rows_per_text)
    return backends.run("paged_attention_with_lse", q, cache, pages, lengths, latent_dim, scale, part, rows_per_text)


def _check_with_lse(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, latent_dim: int, part: int, rows_per_text: int
) -> None:
    if not part:
        raise ValueError(f"part must be a multiple of {PAGE} from {PAGE} to {MAX_PART}, not 0")
    check_attention(q, cache, pages, lengths, latent_dim, part, rows_per_text)


def check_attention(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, latent_dim: int, part: int, rows_per_text: int
) -> None:
    """Raise TypeError or ValueError if the arguments do not fit together, as `paged_attention` says."""
    check_input_dtype("q", q)
    if q.dim() != 3 or not q.is_contiguous():
        raise ValueError(f"q must be [R, H, W], contiguous, not {tuple(q.shape)} with strides {q.stride()}")
    check_cache(cache, latent_dim)
    width = latent_dim + rope_dim_of(cache, latent_dim)
    if q.shape[2] != width:
        raise ValueError(f"q must have the {width} channels of the cache, not {q.shape[2]}")
    for name, t, dims in (("pages", pages, 2), ("lengths", lengths, 1)):
        if t.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {t.dtype}")
        if t.dim() != dims or len(t) != len(q):
            shape = f"({len(q)}, M)" if dims == 2 else f"({len(q)},)"
            raise ValueError(f"{name} must be {shape}, a row for each of q's, not {tuple(t.shape)}")
        check_device("q", q, name, t)
    check_device("q", q, "cache", cache)
    if pages.numel() and pages.stride(1) != 1:
        raise ValueError(f"rows of pages must be contiguous, not have strides {pages.stride()}")
    if not 0 <= part <= MAX_PART or part % PAGE:
        raise ValueError(f"part must be a multiple of {PAGE} from 0 to {MAX_PART}, not {part}")
    if rows_per_text < 1 or len(q) % rows_per_text:
        raise ValueError(f"rows_per_text must be at least 1 and divide q's {len(q)} rows, not be {rows_per_text}")


def _check_values(cache: Tensor, pages: Tensor, lengths: Tensor, rows_per_text: int) -> None:
    """Check what a GPU does not, since the values are not on the host."""
    longest = pages.shape[1] * PAGE
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= longest:
        raise ValueError(f"lengths must be from 0 to the {longest} positions of the pages, not {lengths.tolist()}")
    used = torch.arange(pages.shape[1]) < (lengths[:, None] + PAGE - 1) // PAGE
    read = pages[used]
    if read.numel() and not 0 <= int(read.min()) <= int(read.max()) < cache.shape[0]:
        raise ValueError(f"pages must be from 0 to below {cache.shape[0]}, not {sorted(set(read.tolist()))}")
    if rows_per_text > 1 and bool(((pages != pages[::rows_per_text].repeat_interleave(rows_per_text, 0)) & used).any()):
        raise ValueError(f"pages must be the same for each {rows_per_text} rows of a text")


@operator(writes=("out",))
def heads_nt_out(out: Tensor, x: Tensor, w: Tensor) -> None:
    """Write x [T, H, K] · w [H, N, K]ᵀ of each head to out [T, H, N].

    Args:
        out, x, w: float32, bfloat16 or float16, all the same, any strides; out does not overlap x.

    Raises:
        TypeError: a dtype is another one.
        ValueError: shapes or devices do not fit together.
    """
    _check_out(out, x, w)
    torch.bmm(x.transpose(0, 1), w.mT, out=out.transpose(0, 1))


@heads_nt_out.register_fake
def _(out, x, w):
    return None


@heads_nt_out.register_kernel("cuda")
def _(out, x, w):
    _check_out(out, x, w)
    if has_product_kernel(out, x, w):
        from octile.kernels.triton import heads as kernel  # late: a machine without a GPU has no Triton

        return kernel.launch_out(out, x, w)
    return heads_nt_out.reference(out, x, w)


@operator()
def heads_nt_quantize(x: Tensor, w: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Multiply x [T, H, K] · w [H, N, K]ᵀ of each head, and quantize rows [T, H·N] to E4M3 in tiles of 1×128.

    Args:
        x, w: float32, bfloat16 or float16, both the same, any strides.
        power_of_2: whether scales are rounded up to powers of two.

    Returns:
        data float8_e4m3fn [T, H·N] and scale float32 [T, ⌈H·N/128⌉], as `octile.ops.quantize`.

    Raises:
        TypeError, ValueError: as for `heads_nt_out`.
    """
    _check_heads(x, w)
    out = x.new_empty(*x.shape[:2], w.shape[1])
    heads_nt_out(out, x, w)
    return quantize(out.flatten(1), *TILE, "e4m3", power_of_2)


@heads_nt_quantize.register_fake
def _(x, w, power_of_2):
    data = x.new_empty(len(x), x.shape[1] * w.shape[1], dtype=torch.float8_e4m3fn)
    return data, new_scale(data, *TILE)


@heads_nt_quantize.register_kernel("cuda")
def _(x, w, power_of_2):
    _check_heads(x, w)
    if has_quantizing_kernel(x, w):
        from octile.kernels.triton import heads as kernel

        return kernel.launch_quantized(x, w, power_of_2)
    return heads_nt_quantize.reference(x, w, power_of_2)


def has_product_kernel(out: Tensor, x: Tensor, w: Tensor) -> bool:
    """Return whether octile's kernel computes a call of `heads_nt_out`, and not torch's."""
    if not x.is_cuda or not _has_few_rows(x):
        return False
    from octile.kernels.triton import heads as kernel

    return kernel.why_no_product(out, x, w) is None


def has_quantizing_kernel(x: Tensor, w: Tensor) -> bool:
    """Return whether octile's kernel computes a call of `heads_nt_quantize`, and not what it consists of."""
    if not x.is_cuda or not _has_few_rows(x):
        return False
    from octile.kernels.triton import heads as kernel

    return kernel.why_not_quantized(x, w) is None


def _has_few_rows(x: Tensor) -> bool:
    return len(x) <= MAX_ROWS and request.why_not_on(x.device) is None


def _check_heads(x: Tensor, w: Tensor) -> None:
    check_input_dtype("x", x)
    if w.dtype != x.dtype:
        raise TypeError(f"w must be {x.dtype} as x, not {w.dtype}")
    if x.dim() != 3 or w.dim() != 3 or (x.shape[1], x.shape[2]) != (w.shape[0], w.shape[2]):
        raise ValueError(f"x and w must be [T, H, K] and [H, N, K], not {tuple(x.shape)} and {tuple(w.shape)}")
    check_device("x", x, "w", w)


def _check_out(out: Tensor, x: Tensor, w: Tensor) -> None:
    _check_heads(x, w)
    expected = *x.shape[:2], w.shape[1]
    if out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} as x, not {out.dtype}")
    if out.shape != expected:
        raise ValueError(f"out must be {expected}, not {tuple(out.shape)}")
    check_device("x", x, "out", out)
