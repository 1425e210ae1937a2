"""The indexer's keys of all layers in pages of 64 positions, under the same page numbers as the latent cache.

A page holds its 64 keys, E channels of E4M3 each, and then their 64 scales, float32: 132 bytes a position with 128
channels. `octile.ops.mqa_logits.paged_mqa_logits` reads them. In the format "float32" the channels are float32, and the
scales 1.

Source: DeepGEMM's `fp8_paged_mqa_logits`, whose layout this is.
Shapes: P pages, E channels of a key, T rows.
"""

import torch
from torch import Tensor

from octile.models.config import ModelConfig
from octile.ops.latent_cache import PAGE
from octile.ops.mqa_logits import SCALE_BYTES
from octile.serve.engine.config import IndexFormat

DTYPES: dict[IndexFormat, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "float32": torch.float32}


class IndexPages:
    """The keys of all layers.

    Attributes:
        dtype: of the keys.
        layers: for each layer its keys, [P, 64·(E + 4)] uint8; in FP32 [P, 64·(4·E + 4)].
        bytes_LPQ: the same memory, uint8 [layers, P, bytes of a page].

    Args:
        n_layers: layers, with that of multi-token prediction.
        n_pages: P.
        head_dim: E.
        device: of the keys.
        index_format: of the keys.
    """

    def __init__(
        self, n_layers: int, n_pages: int, head_dim: int, device: torch.device, index_format: IndexFormat = "e4m3"
    ):
        self._spare, self._head_dim, self.dtype = n_pages * PAGE, head_dim, DTYPES[index_format]
        # rows without a place are written to one page more, which nobody reads
        shape = n_layers, n_pages + 1, PAGE * bytes_per_key(head_dim, index_format)
        stored = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._stored, self.bytes_LPQ = stored.unbind(), stored[:, :n_pages]
        self.layers = [stored[:n_pages] for stored in self._stored]

    def write(self, layer: int, slots: Tensor, k_TE: Tensor, scale_T: Tensor) -> None:
        """Write keys to slots [T] of a layer: page · 64 + the position in the page. Negative slots are left out."""
        slots = torch.where(slots < 0, self._spare, slots)
        keys_PSE, scales_PS = self._views(self._stored[layer])
        at = slots // PAGE, slots % PAGE
        keys_PSE.view(torch.uint8)[at] = k_TE.view(torch.uint8)
        scales_PS[at] = scale_T

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys from slots [T] of a layer: [T, E] and their scales [T]."""
        keys_PSE, scales_PS = self._views(self._stored[layer])
        at = slots // PAGE, slots % PAGE
        return keys_PSE.view(torch.uint8)[at].view(keys_PSE.dtype), scales_PS[at]

    def _views(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        keys, scales = stored.split([PAGE * self._head_dim * self.dtype.itemsize, PAGE * SCALE_BYTES], dim=1)
        return keys.view(self.dtype).unflatten(1, (PAGE, self._head_dim)), scales.view(torch.float32)


def needs_index(config: ModelConfig, max_position: int) -> bool:
    """Return whether a model chooses keys in texts of up to max_position positions; it attends to all of fewer ones."""
    return bool(config.index_head_dim) and config.index_topk is not None and config.index_topk < max_position


def bytes_per_key(head_dim: int, index_format: IndexFormat = "e4m3") -> int:
    """Return the bytes that one position takes in one layer."""
    return head_dim * DTYPES[index_format].itemsize + SCALE_BYTES


def check_index_format(index_format: IndexFormat, has_indexer: bool, name: str = "index_format") -> None:
    """Raise ValueError if the indexer is not to be computed as published, and the model has none."""
    if index_format != "e4m3" and not has_indexer:
        raise ValueError(f"{name} must be e4m3, not {index_format}: the model has no indexer")
