"""Attention of latent attention's absorbed form over chosen positions alone, as sparse attention computes it.

    s = scale · q · [latent; rotary key]      of the positions that were chosen for the query
    p = softmax(s)
    o = p · latent                            C channels a head: the caller multiplies them by the values' weight

All heads of a query attend to the same positions. With all positions of a causal mask chosen, this is dense attention.
Positions of a paged cache are read by `octile.ops.latent_cache.read_latents`.

Source: DeepSeek-V3.2-Exp §2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp); FlashMLA's sparse attention.
Shapes: S queries, H heads, C channels of a latent, W = C + those of the rotary key, T positions, K chosen ones.
"""

import torch
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype
from octile.ops.top_keys import ABSENT

MAX_ELEMENTS = 2**26  # of latents that are gathered at the same time


@operator()
def sparse_attention(q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int, scale: float) -> Tensor:
    """Attend from each query to its chosen positions.

    Args:
        q: [S, H, W], float32, bfloat16 or float16: queries times the keys' weight, then rotary queries.
        latents: [T, W], float32, bfloat16 or float16: latents, then rotary keys.
        positions: [S, K] int32, as `octile.ops.top_keys.top_keys` returns them: rows of latents, each at most once;
            −1 stands for none. Their order does not matter.
        latent_dim: C.
        scale: the factor of the scores.

    Returns:
        o [S, H, C] in q's dtype; zeros where no position was chosen.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together; on a CPU, a position is not from −1 to below T.
    """
    _check(q, latents, positions, latent_dim)
    s, h, _ = q.shape
    k = positions.shape[1]
    o_SHC = q.new_zeros(s, h, latent_dim)
    if not k or not len(latents):
        return o_SHC
    rows = max(MAX_ELEMENTS // (k * latents.shape[1]), 1)
    with without_autocast(q.device):
        for first in range(0, s, rows):
            part = slice(first, first + rows)
            absent_SK = positions[part] == ABSENT
            keys_SKW = latents[positions[part].clamp(min=0).long()].float()
            keys_SKW = keys_SKW.masked_fill_(absent_SK[..., None], 0.0)  # a NaN there is not read
            scores_SHK = torch.bmm(q[part].float() * scale, keys_SKW.mT)
            p_SHK = scores_SHK.masked_fill_(absent_SK[:, None], -torch.inf).softmax(-1)
            p_SHK = p_SHK.masked_fill_(absent_SK.all(1)[:, None, None], 0.0)
            o_SHC[part] = torch.bmm(p_SHK, keys_SKW[..., :latent_dim]).to(q.dtype)
    return o_SHC


@sparse_attention.register_fake
def _(q, latents, positions, latent_dim, scale):
    return q.new_empty(*q.shape[:2], latent_dim)


def _check(q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int) -> None:
    for name, t, dims in (("q", q, "[S, H, W]"), ("latents", latents, "[T, W]")):
        check_input_dtype(name, t)
        if t.dim() != dims.count(",") + 1:
            raise ValueError(f"{name} must be {dims}, not {tuple(t.shape)}")
    if q.shape[2] != latents.shape[1]:
        raise ValueError(f"q must have the {latents.shape[1]} channels of latents, not {q.shape[2]}")
    if not 1 <= latent_dim <= q.shape[2]:
        raise ValueError(f"latent_dim must be from 1 to the {q.shape[2]} channels, not {latent_dim}")
    if positions.dtype != torch.int32:
        raise TypeError(f"positions must be int32, not {positions.dtype}")
    if positions.dim() != 2 or len(positions) != len(q):
        raise ValueError(f"positions must be ({len(q)}, K), a row for each query, not {tuple(positions.shape)}")
    check_device("q", q, "latents", latents)
    check_device("q", q, "positions", positions)
    if positions.device.type == "cpu" and positions.numel():
        least, most = int(positions.min()), int(positions.max())
        if least < ABSENT or most >= len(latents):
            raise ValueError(f"positions must be from -1 to below {len(latents)}, not from {least} to {most}")
