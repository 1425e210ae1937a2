"""The model on the meta device, which has shapes and dtypes and no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.names import to_hf


def meta_model(config: ModelConfig) -> DeepseekV3:
    """Return the model on the meta device. A process that only needs this loads no compiler."""
    with torch.device("meta"), _NothingDrawn():
        return DeepseekV3(config)


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a published checkpoint, by its name."""
    return {name: tuple(t.shape) for name, t in to_hf(meta_model(config).state_dict(), config).items()}


class _NothingDrawn(TorchFunctionMode):
    """Leave out `normal_`, which has no effect on the meta device and there imports torch's compiler, in a second."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"]
        if func is Tensor.normal_:
            return args[0]
        return func(*args, **kwargs)
