"""octile: DeepSeek-V3-style mixture-of-experts models in fine-grained FP8.

This module holds the public names. Each is imported when it is first used, so that `import octile` is fast and does not
import torch.
"""

from typing import TYPE_CHECKING

from octile.lazy import attach

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

__getattr__, __dir__, _public = attach(
    __name__,
    {
        "formats": ("BF16", "E4M3", "E5M2", "E5M6", "FP16", "FP32", "INT8", "UE8M0", "FloatFormat"),
        "recipe": ("Recipe",),
        "scaled": (
            "ScaledTensor",
            "align_groups",
            "dequantize",
            "grouped_matmul_nt",
            "grouped_wgrad",
            "masked_grouped_matmul_nt",
            "matmul_nt",
            "quantize",
        ),
        "nn.conversion": ("convert",),
        "checkpoint.hugging_face": ("load", "save"),
    },
    modules=(
        *("formats", "recipe", "ops", "scaled", "nn", "models", "optim", "checkpoint"),
        *("parallel", "report", "train", "serve", "lab", "plan", "bench", "compat", "integrations"),
    ),
)
__all__ = ["__version__", *_public]
