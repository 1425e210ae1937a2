"""The weights of a model's blocks as serving multiplies by them.

Weights that read one input are joined to one matrix, those in FP8 where their blocks allow it, so that they are one
GEMM. The weights of experts are stacked.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.2, DeepSeek-V3 (arXiv 2412.19437) §2.1 and §2.2.
Shapes: D model, H heads of this rank, C latent, R rotary key, N the rest of a head's key, V a head's value, E experts;
G heads of the indexer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.formats import BLOCK
from octile.scaled import ScaledTensor

Weight = ScaledTensor | Tensor  # [N, K]; of experts [E, N, K]
NORM_EPS = 1e-6  # of the norms of compressed queries and latents, as in `octile.nn.MLA` and published models


@dataclass(frozen=True)
class Projections:
    """Weights that read one input: matrices whose results, side by side, are split into sizes."""

    weights: tuple[Weight, ...]
    sizes: tuple[tuple[int, ...], ...]

    @cached_property
    def has_fp8(self) -> bool:
        """Whether a weight reads its input in FP8."""
        return any(isinstance(w, ScaledTensor) for w in self.weights)

    @cached_property
    def has_values(self) -> bool:
        """Whether a weight reads its input in high precision."""
        return not all(isinstance(w, ScaledTensor) for w in self.weights)


@dataclass(frozen=True)
class IndexerWeights:
    """The weights of a layer's indexer.

    Attributes:
        q_up: wq_b, for compressed queries.
        k: wk, of the block's input.
        k_norm, k_bias: weight and bias of the norm of keys.
        heads: weights_proj [G, D], float32.
    """

    q_up: Weight
    k: Weight
    k_norm: Tensor
    k_bias: Tensor
    heads: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Attention's weights.

    Attributes:
        x: projections of the block's input: queries or their compression [·], and latent with rotary key [C, R].
        q_norm, q_up: norm and projection of compressed queries; None where they are projected directly.
        kv_up: kv_b_proj, for the naive form.
        w_k: W_UK [H, C, N], w_v: W_UV [H, V, C], in the activations' dtype, for the absorbed form.
        indexer: None where attention is dense, or a layer attends to what an earlier one's indexer has chosen.
    """

    x: Projections
    q_norm: Tensor | None
    q_up: Weight | None
    kv_norm: Tensor
    kv_up: Weight
    w_k: Tensor
    w_v: Tensor
    o: Weight
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MLPWeights:
    """A SwiGLU layer's weights: gate and up, and down."""

    x: Projections
    down: Weight


@dataclass(frozen=True)
class MoEWeights:
    """A mixture's weights: its gate [E, D] and bias [E], the experts' gate and up and down, and the shared experts."""

    gate: Tensor
    bias: Tensor | None
    x: Projections
    down: Weight
    shared: MLPWeights


@dataclass(frozen=True)
class BlockWeights:
    """A block's weights."""

    input_norm: Tensor
    attention: AttentionWeights
    post_norm: Tensor
    mlp: MLPWeights | MoEWeights


@dataclass(frozen=True)
class MTPWeights:
    """The weights of the multi-token prediction layer, but for those of its block."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Weight
    norm: Tensor
    block: BlockWeights


def tensors_of(weights: Any) -> Iterator[Tensor]:
    """Yield all tensors of a weight or of the weights of a part, FP8 data and their scales one after the other."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, tuple):
        for each in weights:
            yield from tensors_of(each)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from tensors_of(getattr(weights, field.name))


def join(weights: Sequence[Weight], sizes: Sequence[Sequence[int]]) -> Projections:
    """Join weights [..., N_i, K] to one matrix of their rows; those in FP8 if each but the last has whole blocks.

    Args:
        sizes: for each weight, sizes whose sum is N_i: what its results are split into.
    """
    parts = tuple(map(tuple, sizes))
    fp8 = [w for w in weights if isinstance(w, ScaledTensor)]
    if not fp8:
        return Projections((torch.cat([w for w in weights if isinstance(w, Tensor)], dim=-2),), (sum(parts, ()),))
    if len(fp8) < len(weights) or any(w.shape[-2] % BLOCK[0] for w in weights[:-1]):
        return Projections(tuple(weights), parts)
    data, scale = (torch.cat([getattr(w, part) for w in fp8], dim=-2) for part in ("data", "scale"))
    return Projections((ScaledTensor(data, scale, BLOCK),), (sum(parts, ()),))


def stack(weights: Sequence[Weight]) -> Weight:
    """Stack the weights of experts: [E, N, K].

    Raises:
        ValueError: some of them are in FP8, and others not.
    """
    fp8 = [w for w in weights if isinstance(w, ScaledTensor)]
    if not fp8:
        return torch.stack([w for w in weights if isinstance(w, Tensor)])
    if len(fp8) < len(weights):
        raise ValueError(f"the experts of a layer must all be in FP8 or none, but {len(fp8)} of {len(weights)} are")
    return ScaledTensor(torch.stack([w.data for w in fp8]), torch.stack([w.scale for w in fp8]), BLOCK)


class Part(NamedTuple):
    """A range of a weight [N, K] along a dimension, 0 or 1. Of an FP8 weight it begins at a multiple of 128."""

    dim: int
    start: int
    stop: int

    def of(self, weight: ScaledTensor | Tensor) -> ScaledTensor | Tensor:
        """Return this part of a weight."""
        if isinstance(weight, ScaledTensor):
            return ScaledTensor(self._narrow(weight.data), self.blocks()._narrow(weight.scale), BLOCK)
        return self._narrow(weight)

    def blocks(self) -> Part:
        """Return the part of a matrix of scales, one for each block of 128×128, that this part has."""
        side = BLOCK[self.dim]
        return Part(self.dim, self.start // side, -(-self.stop // side))

    def _narrow(self, t: Tensor) -> Tensor:
        return t.narrow(self.dim, self.start, self.stop - self.start).contiguous()
