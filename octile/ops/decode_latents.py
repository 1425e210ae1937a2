"""What decode rows do between the projections of latent attention (MLA) and attention over the pages, in one launch.

    latent        RMSNorm, rounded, then written to the row's slot of the paged cache
    rotary key    rotated, rounded, then written there, too
    queries       the rotary channels are rotated into the absorbed queries, whose other channels a GEMM writes

In separate operators these are five launches of some microseconds each, in which a GPU computes next to nothing.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.
Shapes: T rows, H heads, X channels of a query, C of a latent, R rotary ones.
"""

import torch
from torch import Tensor

from octile.ops.latent_cache import check_write, write_latents
from octile.ops.norm import check_operands, rms_norm
from octile.ops.operator import operator
from octile.ops.quantize import check_device
from octile.ops.rope import rotated


@operator(writes=("cache", "absorbed"))
def write_and_rotate(
    cache: Tensor,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    absorbed: Tensor,
) -> None:
    """Normalize latents, rotate keys and write both to a cache; rotate queries into the absorbed ones.

    Args:
        cache, slots: as in `octile.ops.latent_cache.write_latents`.
        latent: [T, C], float32, bfloat16 or float16, rows contiguous, before the norm.
        rope: [T, R] in latent's dtype, rows contiguous, not rotated.
        weight: weight of the norm [C], float32, bfloat16 or float16.
        eps: what the norm adds to the mean of the squares.
        cos, sin: float32 [T, R/2], contiguous, as in `octile.ops.rope.rotate_`.
        q: [T, H, X] in latent's dtype, channels contiguous, of which the last R are rotated.
        absorbed: [T, H, C + R] in latent's dtype, contiguous, of which the last R channels are written.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together.
        IndexError: on a CPU, a slot is not in the cache. A GPU does not write such a row.
    """
    _check(cache, slots, latent, rope, weight, cos, sin, q, absorbed)
    r = rope.shape[1]
    rotated_key = rotated(rope[:, None], cos, sin)[:, 0].to(rope.dtype)
    write_latents(cache, slots, rms_norm(latent, weight, eps)[0], rotated_key)
    absorbed[..., absorbed.shape[-1] - r :] = rotated(q[..., q.shape[-1] - r :], cos, sin)


@write_and_rotate.register_fake
def _(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed):
    return None


@write_and_rotate.register_kernel("cuda")
def _(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed):
    from octile.kernels.triton import decode_latents as kernel  # late: a machine without a GPU has no Triton

    _check(cache, slots, latent, rope, weight, cos, sin, q, absorbed)
    kernel.launch(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed)


def _check(
    cache: Tensor,
    slots: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    absorbed: Tensor,
) -> None:
    check_write(cache, slots, latent, rope)
    check_operands(latent, weight)
    (t, c), r = latent.shape, rope.shape[1]
    for name, factor in (("cos", cos), ("sin", sin)):
        if factor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {factor.dtype}")
        if 2 * factor.shape[-1] != r or factor.shape[:-1] != (t,) or not factor.is_contiguous():
            raise ValueError(f"{name} must be ({t}, {r} / 2), contiguous, not {tuple(factor.shape)}")
    for name, queries in (("q", q), ("absorbed", absorbed)):
        if queries.dtype != latent.dtype:
            raise TypeError(f"{name} must be {latent.dtype} as latent, not {queries.dtype}")
    if q.dim() != 3 or len(q) != t or q.shape[2] < r or (q.numel() and q.stride(2) != 1):
        raise ValueError(f"q must be ({t}, H, at least {r}), channels contiguous, not {tuple(q.shape)}")
    if absorbed.shape != (*q.shape[:2], c + r) or not absorbed.is_contiguous():
        raise ValueError(f"absorbed must be {(*q.shape[:2], c + r)}, contiguous, not {tuple(absorbed.shape)}")
    for name, other in (("cos", cos), ("sin", sin), ("q", q), ("absorbed", absorbed)):
        check_device("cache", cache, name, other)
