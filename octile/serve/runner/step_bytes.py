"""The bytes that a decode step must move between a GPU's memory and its processors.

A decode step computes one row of each request, so it multiplies each weight by few rows and waits for memory. Its bytes
over the memory bandwidth are the least time that it can take: its roofline.

    weights          each once, as `ServedWeights` holds them: FP8 values with their scales, other weights in
                     BF16, W_UK and W_UV among them
    routed experts   those that a row has chosen
    embedding        a row of each request
    cache            a row in each layer of every position that a request attends to: those before are read, that of its
                     own token is written

Activations do not count: rows are few, and fit into the L2 cache.

Source of the model: Williams, Waterman and Patterson, "Roofline" (doi 10.1145/1498765.1498785).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from octile.checkpoint.fp8_layout import fp8_specs, is_stored_in_fp8
from octile.models.config import ModelConfig
from octile.models.counts import kind_of
from octile.models.meta import meta_model
from octile.models.names import to_hf
from octile.serve.runner.latent_pages import CacheFormat, bytes_per_row

BF16_BYTES, FP32_BYTES = 2, 4
ROUTED, EMBEDDING, CACHE = "routed experts", "embedding", "cache"


def decode_bytes(
    config: ModelConfig, lengths: Sequence[int], experts_read: int, fp8: bool = True, cache_format: CacheFormat = "bf16"
) -> dict[str, int]:
    """Count the bytes of a decode step without drafts, by kind.

    Args:
        config: of the model, whose activations are BF16.
        lengths: for each request the positions that its row attends to, its own among them.
        experts_read: routed experts that some row has chosen, summed over the layers.
        fp8: whether the weights of linear layers are in FP8, as in published checkpoints; otherwise in BF16.
        cache_format: of the cache.

    Returns:
        Bytes of each kind of weights, by the names of `octile.models.counts`, and of "cache".

    Raises:
        ValueError: the model has indexers, which read keys of their own, cache_format is unknown, lengths is empty or
            one is below 1, or there are not so many experts.
    """
    c = config
    if c.has_indexer:
        raise ValueError("config must have no indexer (index_topk): the bytes of sparse attention are not counted")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must have a positive number for each request, not {list(lengths)}")
    mixtures = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
    if not 0 <= experts_read <= mixtures * c.n_routed_experts:
        raise ValueError(
            f"experts_read must be from 0 to {mixtures * c.n_routed_experts}, the routed experts of {mixtures} layers, "
            f"not {experts_read}"
        )
    found = Counter[str]()
    tensors = to_hf(meta_model(c).state_dict(), c)
    prediction = f"model.layers.{c.num_hidden_layers}."
    for name, tensor in tensors.items():
        if not name.startswith(prediction):
            found[kind_of(name)] += _weight_bytes(name, tuple(tensor.shape), fp8)
    if found[ROUTED]:  # experts of one size
        found[ROUTED] = found[ROUTED] // (mixtures * c.n_routed_experts) * experts_read
    found[EMBEDDING] = len(lengths) * c.hidden_size * BF16_BYTES
    found[CACHE] = sum(lengths) * c.num_hidden_layers * bytes_per_row(c.kv_lora_rank, c.qk_rope_head_dim, cache_format)
    return dict(found)


def _weight_bytes(name: str, shape: tuple[int, ...], fp8: bool) -> int:
    """The bytes of a weight as serving holds it, by its name in a checkpoint."""
    if name.endswith("bias"):
        return prod(shape) * FP32_BYTES
    if fp8 and is_stored_in_fp8(name, shape) and ".kv_b_proj." not in name:  # W_UK and W_UV are dequantized
        return sum(spec.nbytes for spec in fp8_specs(name, shape).values())
    return prod(shape) * BF16_BYTES
