"""octile: DeepSeek-V3-style mixture-of-experts models in fine-grained FP8.

This module holds the public names. Each is imported when it is first used, so that `import octile` is fast and does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from octile import nn, optim
    from octile.checkpoint.hugging_face import load, save
    from octile.formats import BF16, E4M3, E5M2, E5M6, FP16, FP32, INT8, UE8M0, FloatFormat
    from octile.nn.conversion import convert
    from octile.recipe import Recipe
    from octile.scaled import (
        ScaledTensor,
        align_groups,
        dequantize,
        grouped_matmul_nt,
        grouped_wgrad,
        masked_grouped_matmul_nt,
        matmul_nt,
        quantize,
    )

_MODULES = {  # the public names of each module
    "octile.formats": ("BF16", "E4M3", "E5M2", "E5M6", "FP16", "FP32", "INT8", "UE8M0", "FloatFormat"),
    "octile.recipe": ("Recipe",),
    "octile.scaled": (
        "ScaledTensor",
        "align_groups",
        "dequantize",
        "grouped_matmul_nt",
        "grouped_wgrad",
        "masked_grouped_matmul_nt",
        "matmul_nt",
        "quantize",
    ),
    "octile.nn.conversion": ("convert",),
    "octile.checkpoint.hugging_face": ("load", "save"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_PACKAGES = (
    *("formats", "recipe", "ops", "scaled", "nn", "models", "optim", "checkpoint"),
    *("parallel", "report", "train", "serve", "lab", "plan", "bench", "compat", "integrations"),
)

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name in _PACKAGES:
        return import_module(f"octile.{name}")
    raise AttributeError(f"module 'octile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
