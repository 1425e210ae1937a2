"""The buffer `main_grad` of a weight, in FP32, to which layers add its gradient instead of returning it to autograd."""

from collections.abc import Sequence

from torch import Tensor, float32

MainGrads = Sequence[Tensor | None]


def main_grads_of(weights: Sequence[Tensor]) -> MainGrads:
    """Return the buffer `main_grad` of each weight, or None where it has none.

    Raises:
        TypeError, ValueError: as `check_main_grad`.
    """
    for weight in weights:
        check_main_grad(weight)
    return [getattr(weight, "main_grad", None) for weight in weights]


def check_main_grad(weight: Tensor) -> None:
    """Raise TypeError or ValueError if a weight has a buffer `main_grad` that is no float32 of its shape and device."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.dtype != float32:
        raise TypeError(f"weight.main_grad must be float32, not {main_grad.dtype}")
    if main_grad is not None and main_grad.shape != weight.shape:
        raise ValueError(f"weight.main_grad must be {list(weight.shape)} as weight, not {list(main_grad.shape)}")
    if main_grad is not None and main_grad.device != weight.device:
        raise ValueError(f"weight is on {weight.device} but weight.main_grad on {main_grad.device}")
