"""Recognition of other people's modules by what they compute, on a few numbers, and not by their names."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# signs, zeros, small values and values beyond any limit that a model clamps its activations to, in every combination
_VALUES = (-1000.0, -30.0, -3.0, -0.5, 0.0, 0.25, 1.0, 6.0, 25.0, 1000.0)


def is_swiglu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether activation computes silu(gate) · up from rows that have the values of gate first: [R, 2I] → [R, I]."""
    gate, up = _gate_and_up()
    try:
        result = activation(torch.cat((gate, up), dim=-1))
    except Exception:  # of another library, and about the numbers that are tried here
        return False
    return _equal(result, F.silu(gate) * up)


def _gate_and_up() -> tuple[Tensor, Tensor]:
    """Return gate and up [10, 10], so that their elements are all pairs of the values."""
    values = torch.tensor(_VALUES)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.contiguous(), up.contiguous()


def _equal(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.is_meta:
        return False
    return torch.allclose(found.float(), expected, rtol=1e-5, atol=1e-30)
