"""Floating-point operations of training: what a model needs, whatever an implementation computes.

As in PaLM's appendix B, a token of a training step costs

    6·N + 12·L·H·Q·T

    N         weights that the token is multiplied by. A multiplication and an addition in the forward pass, and twice
              as many in the backward pass, make 6. The token's experts count, the other experts do not. Neither do
              the embedding, of which a row is read, and the norms.
    L, H, T   layers, heads, and the length of a sequence. Every query is counted with all T keys, although a causal
              mask hides half of them. Of packed texts T is the mean length, without padding, which is less than a
              query's text has on average, as long texts have more queries.
    Q         the size of a head. In latent attention queries and keys have another size than values: Q is the mean.

With indexers a query attends to index_topk keys at most; their weights, and their logits for all T keys, count like the
rest, although no gradient of their inputs is needed. A layer that shares the keys of another one's indexer has neither.
Attention counts with the channels of the heads' keys and values, also where it reads latents, which have more.

The layer of multi-token prediction counts like the others, and the head once more for it, since both are trained.
What is recomputed in the backward pass does not count.

MFU, the model FLOPs utilization, is the operations per second over the peak of the GPU's dense BF16 GEMMs. A run in FP8
is measured by the same peak, so that it can be compared with one in BF16.

Source: PaLM (arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters

BF16_PEAKS = {  # part of a GPU's name: dense BF16 FLOP/s in its data sheet; the first match counts
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989.4e12,
    "H100": 989.4e12,  # SXM
    "H200": 989.4e12,
    "A100": 312e12,
}


def multiply_adds(config: ModelConfig, keys: float) -> dict[str, float]:
    """Count the multiply-adds of a token's forward pass, without those of multi-token prediction.

    Args:
        config: the model.
        keys: how many keys a query attends to.

    Returns:
        Those of "layers" (all linear layers of blocks), "head", "attention" (q · kᵀ and p · v), "gate" and "indexer".
    """
    used = _weight_flops(count_parameters(config).main_active)
    index_flops = used["indexer"] + sum(_index_logits(config, i, keys) for i in range(config.num_hidden_layers))
    return {**used, "attention": _attention(config, keys), "indexer": index_flops}


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """The FLOPs that a token of a training step needs; see the head of this file.

    Args:
        config: the model.
        sequence_length: T, the tokens of a sequence, or of a packed text on average.
    """
    main = multiply_adds(config, sequence_length)
    total = sum(main.values())
    if config.num_nextn_predict_layers:
        total += sum(_weight_flops(count_parameters(config).mtp_active).values())
        layer = config.num_hidden_layers
        total += main["head"] + main["attention"] / layer + _index_logits(config, layer, sequence_length)
    return 6 * total


def bf16_peak(gpu: str) -> float | None:
    """The dense BF16 FLOP/s of a GPU by its name, as `torch.cuda.get_device_name` returns it; None if it is unknown."""
    return next((peak for part, peak in BF16_PEAKS.items() if part in gpu), None)


def _weight_flops(used: dict[str, int]) -> dict[str, float]:
    """The multiply-adds of weights, by kind of module as in `ParameterCount`."""
    layers = sum(n for kind, n in used.items() if kind.endswith(("projections", "projection", "experts", "MLP")))
    return {"layers": layers, **{kind: used.get(kind, 0) for kind in ("head", "gate", "indexer")}}


def _attention(config: ModelConfig, keys: float) -> float:
    channels = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return config.num_hidden_layers * channels * min(keys, config.index_topk or keys)


def _index_logits(config: ModelConfig, layer: int, keys: float) -> float:
    """Those of a layer's logits: products of queries and keys, and of their scores with the heads' weights."""
    if not config.has_own_indexer(layer):
        return 0
    return (config.index_n_heads or 0) * ((config.index_head_dim or 0) + 1) * keys
