"""What autograd saves for backward."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], object], own: Iterable[Tensor]) -> int:
    """The bytes that a forward pass saves, each memory once, without that of the `own` tensors, such as parameters."""
    held = list(own)  # and so are the saved ones, so that no memory is reused
    kept = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        result = forward()
    del result
    return sum(kept[address].nbytes() for address in kept.keys() - {t.untyped_storage().data_ptr() for t in held})
