"""The sigmoid and SiLU of references: an element's bits depend on the element alone, as serving and training need it.

torch's own functions compute the elements that fill no vector, or that end a thread's share, by another exponential on
a CPU. So the same number at another position, or in a tensor of another size, has other last bits. `torch.exp` has not.
"""

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(−x))."""
    return (1 + (-x).exp()).reciprocal()


def silu(x: Tensor) -> Tensor:
    """Return x · sigmoid(x), as x / (1 + exp(−x))."""
    return x / (1 + (-x).exp())
