"""Dense definition of attention over top-k positions, in float64, for autograd."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Case(NamedTuple):
    """Arguments of the operators: q [S, H, W], latents [T, W], positions [S, K], C and the scale of the scores."""

    q: Tensor
    latents: Tensor
    positions: Tensor
    latent_dim: int
    scale: float

    @property
    def is_in_top_k(self) -> Tensor:
        """Whether each row is among the top-k of each query: bool [S, T]."""
        t = len(self.latents)
        positions = self.positions.long()
        return torch.stack([(positions == i).any(-1) for i in range(t)], dim=-1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case of any small shape; a list has absent entries anywhere, or nothing else."""
    s, h, c, t, k = (draw(st.integers(low, 6)) for low in (0, 1, 1, 1, 0))
    width, generator = c + draw(st.integers(0, 3)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    q, latents = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((s, h, width), (t, width)))
    lists: Sequence[Sequence[int]] = [
        draw(st.permutations([*range(t), *k * [-1]]).map(lambda row: row[:k])) for _ in range(s)
    ]
    positions = torch.tensor(lists, dtype=torch.int32).view(s, k)
    return Case(q, latents, positions, c, draw(st.sampled_from([0.0, 0.3, 2.0])))


def weights_of(case: Case, q: Tensor, latents: Tensor) -> Tensor:
    """The softmax's weights [S, H, T] of float64 q and latents, zeros for rows outside the top-k."""
    is_in_top_k = case.is_in_top_k[:, None]
    scores = (case.scale * q @ latents.mT).masked_fill(~is_in_top_k, -torch.inf)
    return scores.masked_fill(~is_in_top_k.any(-1, keepdim=True), 0.0).softmax(-1) * is_in_top_k


def attention(case: Case, q: Tensor, latents: Tensor) -> Tensor:
    """The attention [S, H, C] of float64 q and latents."""
    return weights_of(case, q, latents) @ latents[:, : case.latent_dim]
