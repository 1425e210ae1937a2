"""The share that some weights have in a model's parameters and in the FLOPs of a token."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octile.checkpoint.fp8_layout import is_scale
from octile.checkpoint.tensor_file import TensorSpec

WORD_EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte", "embed_in", "shared", "tok_embeddings")
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")  # as DeepSeek, Qwen and Mixtral call it


@dataclass(frozen=True)
class Share:
    """How much of a model some of its weights are.

    Attributes:
        parameters: number of parameters of the whole model, without scales.
        part: number of parameters of the chosen weights.
        flops: their share in the GEMM FLOPs of one token, 0 … 1. Of routed experts only the active ones count.
            Embedding look-ups and attention's GEMMs between activations do not count. None where the configuration
            does not say how many experts are active.
    """

    parameters: int
    part: int
    flops: float | None

    @property
    def parameter_share(self) -> float:
        """The share in the parameters, 0 … 1."""
        return self.part / max(self.parameters, 1)


def share_of(names: Collection[str], specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Share:
    """Compute the share of the named tensors in a model.

    Args:
        names: tensors among specs.
        specs: all tensors of a checkpoint; scales of FP8 weights are not counted.
        config: its config.json, which `check_config` has checked.
    """
    weights = {name: spec for name, spec in specs.items() if not is_scale(name, specs)}
    part = sum(weights[name].numel for name in names)
    return Share(sum(spec.numel for spec in weights.values()), part, _flops_share(set(names), weights, config))


def _flops_share(names: set[str], weights: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> float | None:
    nested = config.get("text_config") or {}  # of multimodal models
    config = {**nested, **config}
    active = _active_experts(config)
    # the output head multiplies the word embedding where no weight is a head's, and the model generates text
    architectures = config.get("architectures") or ()
    generates = not architectures or any("LM" in name for name in architectures)
    tied = bool(config.get("tie_word_embeddings")) and generates and not any("head" in name for name in weights)
    total = chosen = 0.0
    for name, spec in weights.items():
        module, _, last = name.rpartition(".")
        routed = "experts" in name.split(".")
        is_matrix = len(spec.shape) == 3 if routed and last != "weight" else len(spec.shape) == 2 and last == "weight"
        is_lookup = "embed" in module and not (tied and module.endswith(WORD_EMBEDDINGS))
        if is_lookup or not is_matrix:
            continue
        fraction = active if routed else 1.0
        if fraction is None:
            return None
        flops = spec.numel * fraction
        total += flops
        chosen += flops if name in names else 0.0
    return chosen / max(total, 1.0)


def _active_experts(config: Mapping[str, Any]) -> float | None:
    """Return the fraction of the routed experts that a token uses, or None if the configuration does not say."""
    experts = next((config[key] for key in EXPERT_COUNTS if config.get(key)), None)
    chosen = config.get("num_experts_per_tok")
    return min(chosen, experts) / experts if experts and chosen else None
