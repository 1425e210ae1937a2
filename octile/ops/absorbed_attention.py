"""Latent attention in the absorbed form, by operators whose rows do not depend on each other.

    q' = (q · W_UK, rotary q)                  of each head
    o' = softmax(scale · q' · row) · latent    over the cached rows up to the query's own, which heads share
    o  = o' · W_UVᵀ

It is one definition for two programs: for `octile serve` in batch-invariant mode, where a row is a position of any
request, and for training whose forward pass has the bits of serving (`octile.nn.fused.served_attention`).

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.2.
Shapes: T rows, H heads, N channels of a head's key, R of the rotary key, X = N + R, V of a value, C of a latent,
W = C + R.
"""

from collections.abc import Callable

from torch import Tensor

from octile.ops.paged_attention import has_product_kernel, heads_nt_out, paged_attention, paged_attention_with_lse
from octile.ops.row_invariant import row_invariant_matmul_nt_out

MultiplyHeads = Callable[[Tensor, Tensor, Tensor], None]  # see `multiply_heads`

PART = 2048  # positions of a row that a GPU attends to without a break, wherever other rows end
ROWS = 4  # of a text that a GPU's thread block takes together, with 16 heads, if the text's rows are a multiple of it


def multiply_heads(x_THK: Tensor, w_HNK: Tensor, out_THN: Tensor) -> None:
    """Multiply each head of rows by its own weight, and write the results to out; all in one dtype.

    The kernel of few rows sums over K in the order of the others.
    """
    if has_product_kernel(out_THN, x_THK, w_HNK):
        heads_nt_out(out_THN, x_THK, w_HNK)
    else:
        row_invariant_matmul_nt_out(out_THN.transpose(0, 1), x_THK.transpose(0, 1), w_HNK)


def absorb(q_THX: Tensor, w_k_HCN: Tensor, multiply: MultiplyHeads = multiply_heads) -> Tensor:
    """Multiply queries by W_UK, and copy their rotary channels: [T, H, W] in q's dtype."""
    (c, n), rope_dim = w_k_HCN.shape[1:], q_THX.shape[2] - w_k_HCN.shape[2]
    q_THW = q_THX.new_empty(*q_THX.shape[:2], c + rope_dim)
    multiply(q_THX[..., :n], w_k_HCN, q_THW[..., :c])
    q_THW[..., c:] = q_THX[..., n:]
    return q_THW


def attend(
    q_THW: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    w_v_HVC: Tensor,
    scale: float,
    out_THV: Tensor,
    rows_per_text: int = 1,
) -> None:
    """Attend from absorbed queries to the rows' pages, and write the result times W_UV to out.

    Args:
        q_THW: what `absorb` returns.
        cache, pages, lengths, scale, rows_per_text: as in `octile.ops.paged_attention`; bits depend on no other rows.
        w_v_HVC: in q's dtype.
        out_THV: in q's dtype.
    """
    o_THC = attend_to_latents(q_THW, cache, pages, lengths, w_v_HVC.shape[2], scale, rows_per_text)
    multiply_heads(o_THC, w_v_HVC, out_THV)


def attend_to_latents(
    q_THW: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, latent_dim: int, scale: float, rows_per_text: int = 1
) -> Tensor:
    """Attend as `attend`, and return the results before W_UV: [T, H, C] in q's dtype."""
    return paged_attention(q_THW, cache, pages, lengths, latent_dim, scale, PART, rows_per_text)


def attend_with_lse(
    q_THW: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    w_v_HVC: Tensor,
    scale: float,
    out_THV: Tensor,
    rows_per_text: int = 1,
) -> Tensor:
    """Attend as `attend`, with the same bits; return the logarithms of the softmax's denominators, float32 [T, H]."""
    texts = cache, pages, lengths, w_v_HVC.shape[2]
    o_THC, lse_TH = paged_attention_with_lse(q_THW, *texts, scale, PART, rows_per_text)
    multiply_heads(o_THC, w_v_HVC, out_THV)
    return lse_TH
