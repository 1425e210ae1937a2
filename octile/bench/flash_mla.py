"""FlashMLA's attention on octile's operands, where it can be imported: latent attention of decoding, and sparse.

Its tile schedule is made at the first call, as a model makes it once for all layers, so it is in no measured time. In
the sparse form it reads slots of the cache, which are looked up here; octile looks pages up in its kernel.

Source: https://github.com/deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py.
Shapes: S queries, H heads, W = 576 channels, K top-k positions, T texts, P pages, M pages of a text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from octile.bench.goals import FLASH_MLA
from octile.bench.model_shapes import LATENT
from octile.ops.latent_cache import PAGE

HEADS = (64, 128)  # of its sparse kernels
MAX_DIFFERENCE = 2**-6  # of the results' largest values: both round the softmax's weights to BF16
Call = Callable[[], Tensor]


def prefill(ours: Call, q: Tensor, latents: Tensor, positions: Tensor, scale: float) -> dict[str, Call]:
    """Return attention from q [S, H, W] to rows [T, W] in BF16 at positions [S, K]; nothing if it cannot compute it.

    Args:
        ours: octile's call, whose result is compared once.
    """

    def make(library: ModuleType) -> Call:
        arguments = q, latents.unsqueeze(1), positions.unsqueeze(1), scale, LATENT
        return lambda: library.flash_mla_sparse_fwd(*arguments)[0]

    return _checked(make, ours) if q.shape[1] in HEADS else {}


def sparse_decoding(ours: Call, q: Tensor, cache: Tensor, slots: Tensor, texts: int, scale: float) -> dict[str, Call]:
    """Return attention from q [S, H, W], of `texts` texts, to FP8 rows of cache [P, 64, 656] at slots [S, K]."""

    def make(library: ModuleType) -> Call:
        schedule = library.get_mla_metadata()
        queries = q.unflatten(0, (texts, -1))
        # no pages or lengths; not causal, FP8
        arguments = queries, cache.unsqueeze(2), None, None, LATENT, *schedule, scale, False, True
        return lambda: library.flash_mla_with_kvcache(*arguments, slots.unflatten(0, (texts, -1)))[0].flatten(0, 1)

    return _checked(make, ours) if q.shape[1] in HEADS else {}


def decoding(ours: Call, q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, scale: float) -> dict[str, Call]:
    """Return attention from q [T, H, W] to the first positions of its text in a cache [P, 64, W] in BF16.

    Args:
        pages: int32 [T, M].
        lengths: int32 [T], how many positions.
    """

    def make(library: ModuleType) -> Call:
        arguments = q.unsqueeze(1), cache.unsqueeze(2), pages, lengths, LATENT, *library.get_mla_metadata(), scale
        return lambda: library.flash_mla_with_kvcache(*arguments)[0].squeeze(1)

    return _checked(make, ours)


def look_up(pages: Tensor, positions: Tensor) -> Tensor:
    """Return the slots int32 [S, K] of positions [S, K] of the texts whose pages are int32 [S, M]."""
    return (pages.gather(1, positions.long() // PAGE) * PAGE + positions % PAGE).int()


def _checked(make: Callable[[ModuleType], Call], ours: Call) -> dict[str, Call]:
    """Return FlashMLA's call if it computes the same as ours; why it is missing is printed to stderr."""
    if not torch.cuda.is_available():
        return {}
    try:
        call = make(import_module("flash_mla"))
        found, expected = call().float(), ours().float()
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"its result differs by {difference:.2g} of the largest value")
    except Exception as error:
        print(f"no {FLASH_MLA}: {type(error).__name__}: {' '.join(str(error).split())[:160]}", file=sys.stderr)
        return {}
    return {FLASH_MLA: call}
