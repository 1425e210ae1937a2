"""The top-k positions that a row attends to: those with the K highest logits of the indexer among all that it sees.

The logits of few rows are in memory at once. On Hopper the logits have kernels for 32 and 64 heads; rows with fewer get
further heads of zeros, which change nothing. Queries and keys in FP32 are multiplied by torch, to compare with
transformers.

Shapes: T rows, G heads and E channels of the indexer, L positions, P pages, M pages of a text at most, K top-k
positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels.cuda.attention.mqa_logits import HEADS, why_unsupported
from octile.ops.latent_cache import PAGE
from octile.ops.mqa_logits import mqa_logits, paged_mqa_logits, paged_mqa_schedule
from octile.ops.top_keys import ABSENT, top_keys

MAX_LOGITS = 2**26  # that are in memory at the same time


class IndexQueries(NamedTuple):
    """The indexer's queries, [T, G, E] E4M3 or FP32, and the weights of their heads times their scales, [T, G]."""

    q: Tensor
    weights: Tensor

    def rows(self, first: int, n: int) -> "IndexQueries":
        """Return n rows."""
        return IndexQueries(self.q.narrow(0, first, n), self.weights.narrow(0, first, n))

    def padded(self) -> "IndexQueries":
        """Return these with as many heads as a kernel has on a GPU, if there are fewer."""
        n_heads = self.q.shape[1]
        wanted = next((heads for heads in HEADS if heads >= n_heads), n_heads)
        if not self.q.is_cuda or wanted == n_heads:
            return self
        q = F.pad(self.q.view(torch.uint8), (0, 0, 0, wanted - n_heads)).view(self.q.dtype)
        return IndexQueries(q, F.pad(self.weights, (0, wanted - n_heads)))


def why_not_captured(n_heads: int, head_dim: int, device: torch.device) -> str | None:
    """Return why the host waits for the logits of pages on a GPU, so that no graph can have them; None: it does not."""
    queries = IndexQueries(
        torch.empty(0, n_heads, head_dim, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(0, n_heads, device=device),
    )
    return why_unsupported(queries.padded().q)


def schedule(lengths_T: Tensor) -> Tensor:
    """Divide the keys of decode rows among the thread blocks of a GPU, for all layers of a step."""
    device = lengths_T.device
    n_blocks = torch.cuda.get_device_properties(device).multi_processor_count if lengths_T.is_cuda else 1
    return paged_mqa_schedule(lengths_T[:, None], n_blocks)


def top_k_of_pages(
    index: IndexQueries, cache: Tensor, pages_TM: Tensor, lengths_T: Tensor, schedule: Tensor, k: int
) -> Tensor:
    """Return the top-k of the first positions of each row's text: int32 [T, K], −1 where there are no more.

    Args:
        index: queries of the rows for the indexer.
        cache: a layer of `octile.serve.runner.kv_cache.IndexCache`.
        pages_TM, lengths_T: arguments of `octile.ops.paged_attention.paged_attention`.
        schedule: schedule of these lengths.
        k: K.
    """
    q, weights = index.padded()
    width = pages_TM.shape[1] * PAGE
    lengths_T1 = lengths_T[:, None]
    logits_TL = paged_mqa_logits(
        q[:, None].contiguous(), cache, weights, lengths_T1, pages_TM, schedule, width, False, torch.float32
    )
    return top_keys(logits_TL, torch.zeros_like(lengths_T), lengths_T, k)


def top_k_of_pages_in_fp32(
    index: IndexQueries, read: Callable[[Tensor], Tensor], pages_TM: Tensor, lengths_T: Tensor, k: int
) -> Tensor:
    """Return what `top_k_of_pages` does, of queries and keys in FP32, row after row.

    Args:
        index, pages_TM, lengths_T, k: arguments of `top_k_of_pages`.
        read: returns the keys [L, E] in slots [L].
    """
    slots_TL = (pages_TM.long()[:, :, None] * PAGE + torch.arange(PAGE, device=pages_TM.device)).flatten(1)
    logits = [_fp32_logits(index.rows(row, 1), read(slots_L)) for row, slots_L in enumerate(slots_TL)]
    return top_keys(torch.cat(logits), torch.zeros_like(lengths_T), lengths_T, k)


def top_k_of_prefix(index: IndexQueries, k_LE: Tensor, scale_L: Tensor, slots_L: Tensor, first: int, k: int) -> Tensor:
    """Return the top-k positions of consecutive rows of a text, of which row i sees first + i + 1 positions.

    Args:
        index: queries of the rows for the indexer.
        k_LE, scale_L: keys of all positions.
        slots_L: the slots of all positions.
        first: the position of the first row.
        k: K.

    Returns:
        slots of the cache, int32 [T, K], −1 where there are no more.
    """
    ends_T = torch.arange(first + 1, first + 1 + len(index.q), dtype=torch.int32, device=k_LE.device)
    starts_T = torch.zeros_like(ends_T)
    if k_LE.dtype == torch.float32:
        logits_TL = _fp32_logits(index, k_LE)
    else:
        q, weights = index.padded()
        logits_TL = mqa_logits(q.contiguous(), k_LE, scale_L, weights, starts_T, ends_T, 0, False, torch.float32)
    position_TK = top_keys(logits_TL, starts_T, ends_T, k)
    slot_TK = slots_L[position_TK.clamp(min=0).long()].int()
    return slot_TK.masked_fill_(position_TK == ABSENT, ABSENT)


def _fp32_logits(index: IndexQueries, k_LE: Tensor) -> Tensor:
    """Compute the logits [T, L] of queries and keys in FP32, head after head."""
    logits_TL = k_LE.new_zeros(len(index.q), len(k_LE))
    for q_TE, weight_T in zip(index.q.unbind(1), index.weights.unbind(1), strict=True):
        logits_TL += weight_T[:, None] * (q_TE @ k_LE.T).relu_()
    return logits_TL
