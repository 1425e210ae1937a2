"""Paged latent caches for tests, filled with known rows."""

import torch
from torch import Tensor

from octile.ops.latent_cache import PAGE, read_latents, row_bytes, write_latents


def new_cache(n_pages: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """Make a cache [P, 64, ·] of zeros; its dtype uint8 means FP8 rows."""
    width = row_bytes(latent_dim, rope_dim) if dtype == torch.uint8 else latent_dim + rope_dim
    return torch.zeros(n_pages, PAGE, width, dtype=dtype)


def random_rows(t: int, latent_dim: int, rope_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Draw latents [T, C], whose sizes differ by row, and rotary keys [T, R]."""
    generator = torch.Generator().manual_seed(t)
    sizes = torch.exp2(torch.randint(-3, 4, (t, 1), generator=generator).float())
    latent = torch.randn(t, latent_dim, generator=generator) * sizes
    return latent.to(dtype), torch.randn(t, rope_dim, generator=generator).to(dtype)


def filled_cache(n_pages: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """Make a cache all of whose rows are `random_rows`."""
    cache = new_cache(n_pages, latent_dim, rope_dim, dtype)
    write_latents(cache, torch.arange(n_pages * PAGE), *random_rows(n_pages * PAGE, latent_dim, rope_dim))
    return cache


def write_nan(cache: Tensor, slot: int, channel: int, latent_dim: int) -> None:
    """Write a row again, with NaN in a channel of its latent or its rotary key."""
    at = torch.tensor([slot], device=cache.device)
    row = read_latents(cache, at, latent_dim, torch.float32)
    row[0, channel] = torch.nan
    write_latents(cache, at, row[:, :latent_dim], row[:, latent_dim:])
