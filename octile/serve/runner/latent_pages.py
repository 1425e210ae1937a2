"""The paged latent cache of all layers: pages of 64 positions, under the same page numbers in every layer.

    "bf16", "float32"    rows of C + R numbers
    "fp8"                rows of C bytes of E4M3, one float32 scale per 128 channels, and R rotary channels in BF16

Which pages belong to whom is the engine's business (`octile.serve.engine.pages`): a page number is an index of each
layer's tensor.

Shapes: P pages, C channels of a latent, R of the rotary key, T rows.
"""

from typing import Literal

import torch
from torch import Tensor

from octile.ops.latent_cache import PAGE, read_latents, row_bytes, write_latents

CacheFormat = Literal["bf16", "float32", "fp8"]
STORED_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "fp8": torch.uint8}


class LatentPages:
    """Latents and rotary keys of all layers.

    Attributes:
        layers: for each layer its cache [P, 64, C + R], or [P, 64, bytes] uint8.
        bytes_LPQ: the same memory, uint8 [layers, P, bytes of a page].

    Args:
        n_layers: layers, with that of multi-token prediction.
        n_pages: P.
        latent_dim, rope_dim: C and R.
        cache_format: "bf16", "float32" or "fp8".
        device: of the cache.

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
