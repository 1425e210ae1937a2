"""The paged caches: latents of all layers, and keys of the layers that have an indexer, in pages of 64 positions.

A row of the latent cache is, by its format,

    "bf16", "float32"    rows of C + R numbers
    "fp8"                rows of C bytes of E4M3, one float32 scale per 128 channels, and R rotary channels in BF16

The same page numbers hold in all layers and in both caches. Which pages belong to whom is the engine's business
(`octile.serve.engine.pages`): a page number is an index of each layer's tensor.

Shapes: P pages, C channels of a latent, R of the rotary key, E of an indexer's key, T rows, L layers, N pages that are
copied, Q bytes of a page in all layers and stores.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from octile.models.config import ModelConfig
from octile.ops.latent_cache import PAGE, read_latents, row_bytes, write_latents
from octile.ops.mqa_logits import SCALE_BYTES
from octile.serve.engine.config import IndexFormat

CacheFormat = Literal["bf16", "float32", "fp8"]
STORED_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "fp8": torch.uint8}
INDEX_DTYPES: dict[IndexFormat, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "float32": torch.float32}


class KVCache:
    """The KV cache: latents and rotary keys of all layers.

    Attributes:
        layers: for each layer its cache [P, 64, C + R], or [P, 64, bytes] uint8.
        bytes_LPQ: the same memory, uint8 [layers, P, bytes of a page].

    Args:
        n_layers: layers, with that of multi-token prediction.
        n_pages: P.
        latent_dim, rope_dim: C and R.
        cache_format: "bf16", "float32" or "fp8".
        device: device of the cache.

    Raises:
        ValueError: cache_format is another one, there is no page, or FP8 rows of these sizes would not be aligned.
    """

    def __init__(
        self,
        n_layers: int,
        n_pages: int,
        latent_dim: int,
        rope_dim: int,
        cache_format: CacheFormat,
        device: torch.device,
    ):
        if n_pages < 1:
            raise ValueError(f"n_pages must be at least 1, not {n_pages}")
        width = bytes_per_row(latent_dim, rope_dim, cache_format)
        dtype = STORED_DTYPES[cache_format]
        self.latent_dim = latent_dim
        shape = n_layers, n_pages, PAGE, width // dtype.itemsize
        stored = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = stored.unbind()
        self.bytes_LPQ = stored.view(n_layers, n_pages, -1).view(torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.bytes_LPQ.nbytes

    def write(self, layer: int, slots: Tensor, latent_TC: Tensor, rope_TR: Tensor) -> None:
        """Write rows to slots [T] of a layer: page · 64 + the position in the page. Negative slots are left out."""
        write_latents(self.layers[layer], slots, latent_TC, rope_TR)

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Read rows from slots [T] of a layer: latents [T, C] and rotary keys [T, R]."""
        rows = read_latents(self.layers[layer], slots, self.latent_dim, dtype)
        return rows[:, : self.latent_dim], rows[:, self.latent_dim :]


def bytes_per_row(latent_dim: int, rope_dim: int, cache_format: CacheFormat) -> int:
    """Return the bytes that one position takes in one layer.

    Raises:
        ValueError: cache_format is unknown, or FP8 rows of these sizes would not be aligned.
    """
    if cache_format not in STORED_DTYPES:
        raise ValueError(f"cache_format must be {', '.join(map(repr, STORED_DTYPES))}, not {cache_format!r}")
    if cache_format != "fp8":
        return (latent_dim + rope_dim) * STORED_DTYPES[cache_format].itemsize
    if latent_dim % 4 or rope_dim % 2:
        raise ValueError(
            f"a cache in FP8 needs a kv_lora_rank that is a multiple of 4 and an even qk_rope_head_dim, "
            f"not {latent_dim} and {rope_dim}"
        )
    return row_bytes(latent_dim, rope_dim)


class IndexCache:
    """The keys of the indexers, of the layers that have one.

    A page holds its 64 keys, E channels of E4M3 each, and then their 64 scales, float32: 132 bytes a position with 128
    channels. `octile.ops.mqa_logits.paged_mqa_logits` reads them. In the format "float32" the channels are float32, and
    the scales 1. Source: DeepGEMM's `fp8_paged_mqa_logits`, whose layout this is.

    Attributes:
        dtype: dtype of the keys.
        layers: number of a layer → its keys, [P, 64·(E + 4)] uint8; in FP32 [P, 64·(4·E + 4)].
        bytes_LPQ: the same memory, uint8 [layers, P, bytes of a page].

    Args:
        layers: the numbers of the layers that have an indexer, with that of multi-token prediction.
        n_pages: P.
        head_dim: E.
        device: device of the keys.
        index_format: format of the keys.
    """

    def __init__(
        self,
        layers: Sequence[int],
        n_pages: int,
        head_dim: int,
        device: torch.device,
        index_format: IndexFormat = "e4m3",
    ):
        self._spare, self._head_dim, self.dtype = n_pages * PAGE, head_dim, INDEX_DTYPES[index_format]
        # rows without a slot are written to one page more, which nobody reads
        shape = len(layers), n_pages + 1, PAGE * bytes_per_key(head_dim, index_format)
        stored = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._stored, self.bytes_LPQ = dict(zip(layers, stored.unbind(), strict=True)), stored[:, :n_pages]
        self.layers = {layer: stored[:n_pages] for layer, stored in self._stored.items()}

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
    """Return whether a model attends to top-k keys where texts have up to max_position positions, and not to all."""
    return bool(config.index_head_dim) and config.index_topk is not None and config.index_topk < max_position


def bytes_per_key(head_dim: int, index_format: IndexFormat = "e4m3") -> int:
    """Return the bytes that one position takes in one layer."""
    return head_dim * INDEX_DTYPES[index_format].itemsize + SCALE_BYTES


def check_index_format(index_format: IndexFormat, has_indexer: bool, name: str = "index_format") -> None:
    """Raise ValueError if the indexer is not to be computed as published, and the model has none."""
    if index_format != "e4m3" and not has_indexer:
        raise ValueError(f"{name} must be e4m3, not {index_format}: the model has no indexer")


class PageBytes:
    """The pages of several stores under the same page numbers, such as latents and the keys of an indexer.

    Whole pages are copied as bytes to another cache of the same layout, in this process or another.

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
