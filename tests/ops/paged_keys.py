"""Keys of the lightning indexer in pages, and their logits in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octile.ops.mqa_logits import PAGE


def int32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scored(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor) -> Tensor:
    """The logits [S, T] of all keys in float64."""
    scores = torch.einsum("shd,td->hst", q.double(), k.double()).relu_()
    return (scores * weights.double().mT[..., None]).sum(0) * k_scale.double()


def filled_pages(k: Tensor, scale: Tensor) -> Tensor:
    """A cache [P, 64·(D + 4)] with the keys [64·P, D] and their scales [64·P]."""
    pages = len(k) // PAGE
    return torch.cat([t.view(torch.uint8).reshape(pages, -1) for t in (k, scale)], 1)


def in_order(cache: Tensor, pages: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """The keys and scales of a sequence's pages."""
    rows = cache[pages.long()]
    keys = rows[:, : PAGE * d].reshape(-1, d).view(torch.float8_e4m3fn)
    return keys, rows[:, PAGE * d :].contiguous().view(torch.float32).flatten()
