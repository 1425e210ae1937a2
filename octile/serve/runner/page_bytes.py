"""Whole pages as bytes, to copy them from one cache to another of the same layout, in this process or another.

Shapes: L layers, P pages, N pages that are copied, Q bytes of a page in all layers and stores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PageBytes:
    """The pages of several stores under the same page numbers, such as latents and the keys of an indexer.

    Args:
        stores: uint8 [L, P, bytes of a page in a layer], whose memory this object reads and writes.
    """

    def __init__(self, stores: Sequence[Tensor]):
        self._stores = stores
        self.device = stores[0].device

    @property
    def bytes_per_page(self) -> int:
        """Q."""
        return sum(self._sizes())

    def read(self, pages: Sequence[int]) -> Tensor:
        """Copy N pages: uint8 [N, Q]."""
        numbers_N = torch.tensor(pages, dtype=torch.int64, device=self.device)
        return torch.cat([store_LPQ[:, numbers_N].transpose(0, 1).flatten(1) for store_LPQ in self._stores], dim=1)

    def write(self, pages: Sequence[int], bytes_NQ: Tensor) -> None:
        """Replace N pages by what `read` has copied of stores of the same layout, on any device."""
        numbers_N = torch.tensor(pages, dtype=torch.int64, device=self.device)
        parts = bytes_NQ.to(self.device).split(self._sizes(), dim=1)
        for store_LPQ, part in zip(self._stores, parts, strict=True):
            store_LPQ[:, numbers_N] = part.unflatten(1, (len(store_LPQ), -1)).transpose(0, 1)

    def _sizes(self) -> list[int]:
        return [store_LPQ.shape[0] * store_LPQ.shape[2] for store_LPQ in self._stores]
