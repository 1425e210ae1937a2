"""The backward pass of attention over top-k positions in latent attention's absorbed form.

    p  = exp(scale · q · k − lse)      dp = do · latent      ds = scale · p · (dp − Σ do · o)
    dq = ds · k                        dk[position] += Σ over heads of ds · q
                                       its first C channels also += Σ over heads of p · do

A row k is [latent; rotary key]: its first C channels are key and value. p is recomputed from q, the rows and `lse`, so
what a forward pass saves grows with the queries and not with the positions they attend to.

A row's gradient is the sum of what all queries add to it, in float32, in the order of the queries. So it is the same
bits at every call on a CPU, and at every call on a GPU.

On Hopper, kernels compute latents of 512 + 64 channels in BF16; torch computes the rest. They round p, ds and what a
query adds to a row to BF16, and add the latter up by groups of queries and of 64 heads.

Source: Dao et al. (arXiv 2205.14135); DeepSeek-V3.2-Exp §2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp).
Shapes: S queries, H heads, C channels of a latent, W = C + those of the rotary key, T rows, K top-k positions.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_mla_backward as kernel
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device
from octile.ops.sparse_attention import check_lse, check_operands, check_positions, gathered_keys, query_blocks


@operator()
def sparse_attention_backward(
    do: Tensor,
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    o: Tensor,
    lse: Tensor,
    latent_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the queries and of the rows.

    Args:
        do: [S, H, C] in q's dtype, the gradient of o.
        q, positions, latent_dim, scale: as in `octile.ops.sparse_attention.sparse_attention`.
        latents: [T, W], float32, bfloat16 or float16.
        o, lse: the results of `octile.ops.sparse_attention.sparse_attention_with_lse`, [S, H, C] in q's dtype and
            [S, H] float32.

    Returns:
        dq [S, H, W] in q's dtype and dlatents [T, W] float32, zeros for queries without a position and for rows that
        no query has among its positions.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together; on a CPU, a position is not from −1 to below T. A GPU
            attends to none of those.
    """
    _check(do, q, latents, positions, o, lse, latent_dim)
    check_positions(positions, len(latents))
    dq_SHW = q.new_zeros(q.shape)
    dlatents_TW = latents.new_zeros(latents.shape, dtype=torch.float32)
    with without_autocast(q.device):
        for part in query_blocks(q, latents, positions):
            keys_SKW, is_absent_SK = gathered_keys(latents, positions[part], latent_dim)
            q_SHW, do_SHC, absent_S1K = q[part].float() * scale, do[part].float(), is_absent_SK[:, None]
            p_SHK = torch.bmm(q_SHW, keys_SKW.mT).sub_(lse[part, :, None]).exp_().masked_fill_(absent_S1K, 0.0)
            ds_SHK = torch.bmm(do_SHC, keys_SKW[..., :latent_dim].mT)
            ds_SHK = ds_SHK.sub_((do_SHC * o[part].float()).sum(-1, keepdim=True)).mul_(p_SHK)
            ds_SHK.masked_fill_(absent_S1K, 0.0)
            dq_SHW[part] = torch.bmm(ds_SHK, keys_SKW).mul_(scale).to(q.dtype)
            dkeys_SKW = torch.bmm(ds_SHK.mT, q_SHW)
            dkeys_SKW[..., :latent_dim].baddbmm_(p_SHK.mT, do_SHC)
            dkeys_SKW.masked_fill_(is_absent_SK[..., None], 0.0)  # a NaN of the query's, too
            zeros_K = torch.arange(positions.shape[1], device=q.device) % len(latents)  # many at one row would queue
            add_rows(dlatents_TW, positions[part].where(~is_absent_SK, zeros_K), dkeys_SKW)
    return dq_SHW, dlatents_TW


def add_rows(total_TW: Tensor, positions_SK: Tensor, added_SKW: Tensor) -> None:
    """Add rows to those at positions, one after the other, so that the sums are the same bits at every call."""
    positions, added = positions_SK.flatten().long(), added_SKW.flatten(0, 1)
    if total_TW.is_cuda:
        total_TW.index_put_((positions,), added, accumulate=True)  # sorts positions; index_add_ adds in any order
    else:
        total_TW.index_add_(0, positions, added)


@sparse_attention_backward.register_fake
def _(do, q, latents, positions, o, lse, latent_dim, scale):
    return q.new_empty(q.shape), latents.new_empty(latents.shape, dtype=torch.float32)


@sparse_attention_backward.register_kernel("cuda")
def _(do, q, latents, positions, o, lse, latent_dim, scale):
    _check(do, q, latents, positions, o, lse, latent_dim)
    do, q, latents, o = (t.contiguous() for t in (do, q, latents, o))
    if kernel.why_unsupported(do, q, latents, positions, o, latent_dim):
        return sparse_attention_backward.reference(do, q, latents, positions, o, lse, latent_dim, scale)
    return kernel.launch(do, q, latents, positions, o, lse, scale)


def _check(do: Tensor, q: Tensor, latents: Tensor, positions: Tensor, o: Tensor, lse: Tensor, latent_dim: int) -> None:
    if latents.dtype == torch.uint8:
        raise TypeError("latents must be float32, bfloat16 or float16, not FP8 rows (uint8), which have no gradient")
    check_operands(q, latents, positions, latent_dim)
    for name, t in (("do", do), ("o", o)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
        if t.shape != (*q.shape[:2], latent_dim):
            raise ValueError(f"{name} must be {(*q.shape[:2], latent_dim)}, not {tuple(t.shape)}")
        check_device("q", q, name, t)
    check_lse(lse, q)
