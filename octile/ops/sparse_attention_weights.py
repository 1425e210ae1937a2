"""The weights of attention over top-k positions: what the indexer of sparse attention learns to predict.

    weight[s, j] = mean over heads of exp(scale · q[s, h] · k[j-th position] − lse[s, h])

They are those with which `octile.ops.sparse_attention` adds up the latents, and are computed from its `lse`, so that no
score of another position is needed. The weights of a query with a position sum to 1.

Source: DeepSeek-V3.2-Exp §2.1 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp), whose target they are.
Shapes: S queries, H heads, C channels of a latent, W = C + those of the rotary key, T rows, K top-k positions.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_weights as kernel
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.sparse_attention import check_lse, check_operands, check_positions, gathered_keys, query_blocks


@operator()
def sparse_attention_weights(
    q: Tensor, latents: Tensor, positions: Tensor, lse: Tensor, latent_dim: int, scale: float
) -> Tensor:
    """Compute the softmax's weight of each top-k position, the mean over the heads.

    Args:
        q, latents, positions, latent_dim, scale: as in `octile.ops.sparse_attention.sparse_attention`.
        lse: [S, H] float32, from `octile.ops.sparse_attention.sparse_attention_with_lse`.

    Returns:
        [S, K] float32, 0 where a list has no position.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together; on a CPU, a position is not from −1 to below T. A GPU
            attends to none of those.
    """
    _check(q, latents, positions, lse, latent_dim)
    check_positions(positions, len(latents))
    weights_SK = q.new_zeros(positions.shape, dtype=torch.float32)
    with without_autocast(q.device):
        for part in query_blocks(q, latents, positions):
            keys_SKW, is_absent_SK = gathered_keys(latents, positions[part], latent_dim)
            p_SHK = torch.bmm(q[part].float() * scale, keys_SKW.mT).sub_(lse[part, :, None]).exp_()
            weights_SK[part] = p_SHK.mean(1).masked_fill_(is_absent_SK, 0.0)
    return weights_SK


@sparse_attention_weights.register_fake
def _(q, latents, positions, lse, latent_dim, scale):
    return q.new_empty(positions.shape, dtype=torch.float32)


@sparse_attention_weights.register_kernel("cuda")
def _(q, latents, positions, lse, latent_dim, scale):
    _check(q, latents, positions, lse, latent_dim)
    q, latents = q.contiguous(), latents.contiguous()
    if kernel.why_unsupported(q, latents, positions, latent_dim):
        return sparse_attention_weights.reference(q, latents, positions, lse, latent_dim, scale)
    return kernel.launch(q, latents, positions, lse, scale)


def _check(q: Tensor, latents: Tensor, positions: Tensor, lse: Tensor, latent_dim: int) -> None:
    check_operands(q, latents, positions, latent_dim)
    check_lse(lse, q)
