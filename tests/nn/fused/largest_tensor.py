"""How large the tensors are that a computation makes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Record the most elements of a tensor that an operator inside returns.

    Attributes:
        numel: the most elements so far.
    """

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(returned) if isinstance(t, Tensor)]
        self.numel = max(self.numel, *(t.numel() for t in tensors), 0)
        return returned
