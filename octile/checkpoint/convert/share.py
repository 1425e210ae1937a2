"""How much of a model a set of weights is: of its parameters, and of its work on a token."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octile.checkpoint.fp8_layout import is_scale
from octile.checkpoint.tensor_file import TensorSpec

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")  # as DeepSeek, Qwen and Mixtral call it


@dataclass(frozen=True)
class Share:
    """Some weights of a model against all of them.

    Attributes:
        parameters: of the whole model, without scales.
        part: parameters among them.
        flops: the part's share in the matrix products of one token, 0 … 1: the weights that multiply it, of routed
            experts only as many as are active. Embedding look-ups are no products; attention's products of
            activations with one another are left out. None where config does not tell how many experts are active.
    """

    parameters: int
    part: int
    flops: float | None

    @property
    def of_parameters(self) -> float:
        """The share in the parameters, 0 … 1."""
        return self.part / max(self.parameters, 1)


def share_of(names: Collection[str], specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Share:
    """The share of the named tensors in a model.

    Args:
        names: tensors among specs.
        specs: all tensors of a checkpoint; scales of FP8 weights are not counted.
        config: its config.json.
    """
    weights = {name: spec for name, spec in specs.items() if not is_scale(name, specs)}
    part = sum(weights[name].numel for name in names)
    return Share(sum(spec.numel for spec in weights.values()), part, _flops_share(set(names), weights, config))


def _flops_share(names: set[str], weights: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> float | None:
    config = {**config.get("text_config", {}), **config}  # models of several modalities nest the language model's
    active = _active_experts(config)
    tied = bool(config.get("tie_word_embeddings")) and not any("head" in name for name in weights)
    total = chosen = 0.0
    for name, spec in weights.items():
        module, _, last = name.rpartition(".")
        routed = "experts" in name.split(".")
        is_matrix = len(spec.shape) == 3 if routed and last != "weight" else len(spec.shape) == 2 and last == "weight"
        is_lookup = "embed" in module and not tied
        if is_lookup or not is_matrix:
            continue
        use = active if routed else 1.0
        if use is None:
            return None
        work = spec.numel * use
        total += work
        chosen += work if name in names else 0.0
    return chosen / max(total, 1.0)


def _active_experts(config: Mapping[str, Any]) -> float | None:
    """The share of the routed experts that a token visits, or None if config does not say."""
    experts = next((config[key] for key in EXPERT_COUNTS if config.get(key)), None)
    chosen = config.get("num_experts_per_tok")
    return chosen / experts if experts and chosen else None
