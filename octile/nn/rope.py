"""Rotary position embeddings, and YaRN, which extends them to longer texts.

Each pair of adjacent channels (x₀, x₁), (x₂, x₃), … is rotated by an angle that grows with the position, so that the
dot product of a query and a key depends on their distance:

    angle of pair i = position · θ^(−2i/R)

In a model trained on L tokens, the slow pairs have never been rotated beyond the angle of position L.  YaRN slows these
down by `factor`, leaves the fast ones, which distinguish near positions, and makes the softmax a little sharper, since
a longer text has more keys to choose from.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), DeepSeek-V3 (arXiv 2412.19437) §4.3.
Shapes: S positions, H heads, R rotary channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.nn.tables import table

CosSin = tuple[Tensor, Tensor]  # each [S, R/2] float32


@dataclass(frozen=True)
class Rope:
    """The angles of `dim` rotary channels. A factor of 1 is the rotation without YaRN.

    The fields are those of `octile.models.config.RopeScaling`.

    It holds no tensors: its results are computed in FP32 on the device of the positions.
    """

    dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def cos_sin(self, position_S: Tensor) -> CosSin:
        """Return cosines and sines [S, dim/2] of each pair's angle at integer positions [S]."""
        angle_SR = position_S.float()[:, None] * self.frequencies(position_S.device)
        size = self.attention_factor
        if size is None:
            size = self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return angle_SR.cos() * size, angle_SR.sin() * size

    def table(self, length: int, device: torch.device) -> CosSin:
        """Return `cos_sin` of the first `length` positions; inside `tables_once`, those of an earlier call."""
        return table((self, length, device), lambda: self.cos_sin(torch.arange(length, device=device)))

    @property
    def softmax_factor(self) -> float:
        """The factor by which the softmax scale of attention is multiplied."""
        return self._sharpness(self.mscale_all_dim) ** 2

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return the angle of each pair between adjacent positions, in radians: [dim/2]."""
        pair = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        unscaled = 1.0 / self.theta ** (pair / self.dim)
        first, last = self._pair(self.beta_fast), self._pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        slowed = ((pair / 2 - first) / max(last - first, 0.001)).clamp(0, 1)
        return unscaled * (1 - slowed) + unscaled / self.factor * slowed

    def _pair(self, rotations: float) -> float:
        """Return the number of the pair that makes so many full rotations within the original length."""
        positions_per_radian = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return self.dim * math.log(positions_per_radian) / (2 * math.log(self.theta))

    def _sharpness(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0
