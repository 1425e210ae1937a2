"""Rotary positions, and YaRN, which stretches them to longer texts.

Each pair of neighbouring channels (x₀, x₁), (x₂, x₃), … is turned by an angle that grows with the position, so that
the product of a query and a key depends on how far apart they are:

    pair i turns by  position · θ^(−2i/R)

A model trained on L tokens has never seen its slow pairs turn further than L positions take them.  YaRN slows these
down by `factor`, leaves the fast ones, which tell neighbours apart, and makes the softmax a little sharper, since a
longer text has more keys to choose from.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), DeepSeek-V3 (arXiv 2412.19437) §4.3.
Shapes: S positions, H heads, R rotary channels of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.ops.rope import rotated

CosSin = tuple[Tensor, Tensor]  # each [S, R/2] float32


@dataclass(frozen=True)
class Rope:
    """The angles of `dim` rotary channels. A factor of 1 is the plain rotation, without YaRN.

    It holds numbers only: what it returns is computed in FP32 on the device of the positions.
    """

    dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def cos_sin(self, position_S: Tensor) -> CosSin:
        """Cosines and sines [S, dim/2] of every pair's angle at integer positions [S]."""
        angle_SR = position_S.float()[:, None] * self.frequencies(position_S.device)
        size = self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return angle_SR.cos() * size, angle_SR.sin() * size

    @property
    def softmax_factor(self) -> float:
        """What the attention's softmax scale is multiplied by."""
        return self._sharpness(self.mscale_all_dim) ** 2

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """How far each pair turns from one position to the next, in radians: [dim/2]."""
        pair = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        plain = 1.0 / self.theta ** (pair / self.dim)
        first, last = math.floor(self._pair(self.beta_fast)), math.ceil(self._pair(self.beta_slow))
        first, last = max(first, 0), min(last, self.dim - 1)
        slowed = ((pair / 2 - first) / max(last - first, 0.001)).clamp(0, 1)
        return plain * (1 - slowed) + plain / self.factor * slowed

    def _pair(self, turns: float) -> float:
        """Which pair turns that many times within the original length."""
        length_of_a_turn = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return self.dim * math.log(length_of_a_turn) / (2 * math.log(self.theta))

    def _sharpness(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def rotate(x_SHR: Tensor, cos_sin: CosSin) -> Tensor:
    """Turns the pairs of x [..., S, H, R] in FP32; returns x's shape and dtype."""
    return rotated(x_SHR, *cos_sin).to(x_SHR.dtype)
