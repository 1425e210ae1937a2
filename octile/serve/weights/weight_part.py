"""A range of rows or columns of a weight, in FP8 with its scales or in high precision."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octile.formats import BLOCK
from octile.scaled import ScaledTensor


class Part(NamedTuple):
    """A range of a weight [N, K] along a dimension, 0 or 1. Of an FP8 weight it begins at a multiple of 128."""

    dim: int
    start: int
    stop: int

    def of(self, weight: ScaledTensor | Tensor) -> ScaledTensor | Tensor:
        """Return this part of a weight."""
        if isinstance(weight, ScaledTensor):
            return ScaledTensor(self._of(weight.data), self.of_blocks()._of(weight.scale), BLOCK)
        return self._of(weight)

    def of_blocks(self) -> Part:
        """Return the part of a matrix of scales, one for each block of 128×128, that this part has."""
        side = BLOCK[self.dim]
        return Part(self.dim, self.start // side, -(-self.stop // side))

    def _of(self, t: Tensor) -> Tensor:
        return t.narrow(self.dim, self.start, self.stop - self.start).contiguous()
