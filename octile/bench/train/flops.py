"""Model FLOPs of a training step, and the peak of the GPU that they are compared with.

A token takes 6 FLOPs a parameter that it is multiplied with, and 6·H·(Q + V)·S for the attention of each layer, as in
PaLM's appendix B (arXiv 2204.02311), where Q and V are 6·H·Q·S each: H heads, Q channels of a query and a key, V of a
value, S tokens of the sequence. Recomputation and the causal mask change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters

BF16_PEAK = 989e12  # FLOP/s, dense: NVIDIA's data sheets of H100 SXM and H200


def peak(gpu: str) -> float | None:
    """Return the FLOP/s of BF16 GEMMs in the data sheet of a GPU of this name; None if it is not listed here."""
    is_listed = ("H100" in gpu or "H200" in gpu) and not any(kind in gpu for kind in ("PCIe", "NVL"))
    return BF16_PEAK if is_listed else None


def flops_per_token(config: ModelConfig, sequence: int) -> int:
    """Return the model FLOPs of a token's forward and backward pass in sequences of this many tokens."""
    counts = count_parameters(config)
    parameters = _used(counts.main_active)
    layers = config.num_hidden_layers
    if config.num_nextn_predict_layers:
        experts = counts.mtp["routed experts"]
        parameters += _used(counts.mtp) - experts + experts * config.num_experts_per_tok // config.n_routed_experts
        parameters += counts.main["head"]  # which both predictions use
        layers += 1
    channels = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return 6 * (parameters + layers * channels * sequence)


def _used(counts: Mapping[str, int]) -> int:
    """Sum the parameters that a token is multiplied with. It reads one row of the embedding."""
    return sum(n for kind, n in counts.items() if kind != "embedding")
