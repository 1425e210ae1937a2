"""The heads of attention that a rank has, and their part of the weights: tensor parallelism (Megatron-LM).

    q_proj, q_b_proj, kv_b_proj     the rows of the rank's heads
    o_proj                          the columns of the rank's heads: its results are summed over the ranks
    all other weights               whole: the latents and the indexer's keys are computed by all ranks of a group

FP8 weights have a scale for each block of 128×128, so that each rank must have whole blocks of them.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053) §3.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octile.formats import BLOCK
from octile.models.config import ModelConfig
from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import Part
from octile.text import format_count

_DIMENSIONS = {"q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}  # of the heads, by the layer's name


class HeadShare(NamedTuple):
    """The share of one rank: those of a group have as many consecutive heads each.

    Attributes:
        rank: its number in the group.
        size: ranks of the group; 1: all heads are here.
    """

    rank: int = 0
    size: int = 1

    def n_heads(self, c: ModelConfig) -> int:
        """Return how many heads of a model the rank has."""
        return c.num_attention_heads // self.size

    def part_of(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """Return which part of a weight [N, K] the rank has, by its name in a checkpoint; None: all of it."""
        dim = _dimension(name)
        if self.size == 1 or dim is None:
            return None
        extent = shape[dim] // self.size
        return Part(dim, self.rank * extent, (self.rank + 1) * extent)

    def take(self, name: str, weight: ScaledTensor | Tensor) -> ScaledTensor | Tensor:
        """Return the rank's part of a weight, by its name in a checkpoint."""
        part = self.part_of(name, weight.shape)
        return weight if part is None else part.of(weight)


def is_of_heads(name: str) -> bool:
    """Whether a weight has a part for each head of attention, by its layer's name or its own in a checkpoint."""
    return _dimension(name) is not None


def check_heads(c: ModelConfig, size: int, is_fp8: bool) -> None:
    """Check that so many ranks can divide the heads of a model among them.

    Args:
        c: configuration of the model.
        size: ranks.
        is_fp8: whether the weights of attention are in FP8.

    Raises:
        ValueError: they do not divide the heads, or blocks of FP8 weights would be divided.
    """
    if c.num_attention_heads % size:
        raise ValueError(f"parallel.tp must divide the model's {c.num_attention_heads} heads, but is {size}")
    n, side = c.num_attention_heads // size, BLOCK[0]
    widths = {
        "queries": c.qk_head_dim,
        "keys and values": c.qk_nope_head_dim + c.v_head_dim,
        "results": c.v_head_dim,
    }
    for what, width in widths.items():
        if size > 1 and is_fp8 and n * width % side:
            raise ValueError(
                f"parallel.tp must leave each rank whole blocks of FP8 weights, but is {size}: "
                f"{format_count(n, 'head')} × {width} channels of {what} = {n * width}, which is no multiple of {side}"
            )


def _dimension(name: str) -> int | None:
    """Return along which dimension of a weight its heads are; None: it has no parts of heads."""
    return _DIMENSIONS.get(name.removesuffix(".weight").rpartition(".")[2])
