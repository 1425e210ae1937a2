"""The bytes of a model's weights as serving holds them, by its configuration alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from octile.checkpoint.fp8_layout import fp8_specs, is_stored_in_fp8
from octile.models.config import ModelConfig
from octile.models.counts import kind_of
from octile.models.meta import checkpoint_shapes
from octile.models.names import mtp_copies

BF16_BYTES, FP32_BYTES = 2, 4
ROUTED, EMBEDDING, HEAD = "routed experts", "embedding", "head"


class WeightBytes(NamedTuple):
    """Bytes of weights by kind of module, as `octile.models.counts` names them.

    Attributes:
        main: bytes of the main model.
        mtp: bytes of the multi-token prediction layer, without the embedding and the head that it shares.
    """

    main: Mapping[str, int]
    mtp: Mapping[str, int]


@lru_cache(16)
def weight_bytes(config: ModelConfig, fp8: bool) -> WeightBytes:
    """Count the bytes of a model's weights.

    Args:
        config: configuration of the model, whose activations are BF16.
        fp8: whether the weights of linear layers are in FP8, as in published checkpoints; otherwise in BF16.
    """
    main, mtp = Counter[str](), Counter[str]()
    prediction = f"model.layers.{config.num_hidden_layers}."
    copies = mtp_copies(config)
    for name, shape in checkpoint_shapes(config).items():
        if name not in copies:
            found = mtp if name.startswith(prediction) else main
            found[kind_of(name)] += _bytes_of(name, shape, fp8)
    return WeightBytes(main, mtp)


def _bytes_of(name: str, shape: tuple[int, ...], fp8: bool) -> int:
    """The bytes of a weight by its name in a checkpoint."""
    if name.endswith("bias"):
        return prod(shape) * FP32_BYTES
    if fp8 and is_stored_in_fp8(name, shape) and ".kv_b_proj." not in name:  # W_UK and W_UV are dequantized
        return sum(spec.nbytes for spec in fp8_specs(name, shape).values())
    return prod(shape) * BF16_BYTES
