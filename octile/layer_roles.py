"""The table of layers that stay in high precision, by their names: for `octile.convert` and for `octile convert`.

DeepSeek-V3 computes its embedding, output head, gates, norms and MTP projection in high precision; the same roles have
other names in other models.  Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.1; the weights published with DeepSeek-V3.2,
Llama, Qwen, Mixtral, GLM, OLMoE, Phi, Gemma, GPT-NeoX, BERT and T5; LoRA's names in peft.  vLLM has no blockwise FP8
for the gates of GatedDeltaNet, Mamba's `dt_proj`, BERT's pooler and Llama-4's encoder of images; Mistral publishes its
encoders in high precision.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

KEPT = "left out by keep"
NUMBER = re.compile(r"\d+")  # of a layer or an expert, in a name; no role depends on it
HEAD = "output head"
ENCODER = "encoder of images or audio"
# A module of transformers that is a linear layer with the weight [K, N].
CONV1D = "Conv1D (a weight that is stored transposed)"
FALCON_LINEAR = "FalconLinear (a subclass of nn.Linear)"  # of which transformers makes no FP8 layer
# Type of a model → its linear layers, where neither octile nor transformers makes FP8 layers of them.
MODELS_WITH_OTHER_LAYERS = {
    **dict.fromkeys(("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"), CONV1D),
    "falcon": FALCON_LINEAR,
}


@dataclass(frozen=True)
class Role:
    """A role of layers that stay in high precision; names are separated by dots into parts.

    Attributes:
        name: name of the role.
        parts: a layer has this role if a part of its name is one of these.
        ends: or if its name, or the end of it from a dot on, is one of these.
        contains: or if the last part of its name contains a match of this regular expression.
        is_known: whether engines leave layers with this role in high precision automatically.
        is_lookup: whether layers with this role are tables of rows, so that a linear layer with such a name is none.
    """

    name: str
    parts: frozenset[str] = frozenset()
    ends: tuple[str, ...] = ()
    contains: str = "(?!)"
    is_known: bool = False
    is_lookup: bool = False

    def includes(self, layer: str) -> bool:
        """Whether a layer with this name has the role."""
        parts = layer.split(".")
        ends = any(f".{layer}".endswith(f".{end}") for end in self.ends)
        return ends or not self.parts.isdisjoint(parts) or bool(re.search(self.contains, parts[-1]))


HEADS = frozenset({"lm_head", "head", "classifier", "score", "qa_outputs", "qa_classifier", "cls", "embed_out"})
TOP_HEADS = ("output", "proj_out")  # names of heads at the top of a model, and of other layers elsewhere
ENCODERS = frozenset({
    "audio_tower", "connector", "mm_projector", "multi_modal_projector", "vision_adapter", "vision_encoder",
    "vision_model", "vision_tower", "visual",
})  # fmt: skip
ROLES = (
    Role(HEAD, parts=HEADS, is_known=True),
    Role("adapter", parts=frozenset({"lora_A", "lora_B"})),
    Role("embedding", contains="(^|_)emb|embed", is_known=True),
    Role("embedding", ends=("wte", "wpe", "shared", "relative_attention_bias"), is_known=True, is_lookup=True),
    Role("norm", contains="norm", is_known=True),
    Role("gate", parts=frozenset({"gate", "router", "shared_expert_gate", "moe_gate"})),
    Role("MTP projection", parts=frozenset({"eh_proj"}), is_known=True),
    Role("indexer weights", parts=frozenset({"weights_proj"})),
    Role("gate of GatedDeltaNet", parts=frozenset({"in_proj_ba", "in_proj_a", "in_proj_b"})),
    Role("Mamba's projection of step sizes", parts=frozenset({"dt_proj"})),
    Role("pooler", parts=frozenset({"pooler"})),
    Role(ENCODER, parts=ENCODERS),
    Role("T5's MLP output, FP32 in transformers", ends=("DenseReluDense.wo",)),
)
RULE = (
    "the weights of linear layers become FP8; embeddings, output heads, gates, norms, adapters, encoders of images and "
    "audio, poolers, dt_proj, eh_proj and weights_proj stay, as does every other tensor"
)


def role_of(layer: str, is_linear: bool = False) -> Role | None:
    """Return the role for which a layer with this name stays in high precision; None: it does not.

    A layer called `output` or `proj_out` at the top of a model is its output head.

    Args:
        layer: its name.
        is_linear: whether it is known to be a linear layer, and not only that it has a matrix.
    """
    if layer in TOP_HEADS:
        return ROLES[0]
    return _role_of_pattern(NUMBER.sub("0", layer), is_linear)


@lru_cache(maxsize=4096)
def _role_of_pattern(layer: str, is_linear: bool) -> Role | None:
    """Return the role of the layers whose names differ in numbers only: a model has few such patterns."""
    return next((role for role in ROLES if role.includes(layer) and not (is_linear and role.is_lookup)), None)


def is_kept(layer: str, keep: Iterable[str]) -> bool:
    """Whether a pattern matches the name of a layer or of a module that contains it.

    Args:
        layer: the name of the layer, such as `model.layers.0.mlp.down_proj`.
        keep: patterns with `*`, `?` and `[…]`; `*` matches dots, too.
    """
    parts = layer.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, pattern) for pattern in keep for name in names)


def why_high_precision(layer: str, keep: Sequence[str] = (), is_linear: bool = False) -> str | None:
    """Return why a layer with this name stays in high precision; None: it is converted to FP8.

    Args:
        layer, is_linear: as for `role_of`.
        keep: patterns of further layers that stay, as for `is_kept`.
    """
    if role := role_of(layer, is_linear):
        return role.name
    return KEPT if keep and is_kept(layer, keep) else None


def check_keep(keep: Sequence[str], layers: Iterable[str]) -> None:
    """Check that every pattern leaves out a layer that would otherwise be converted.

    Args:
        keep: the patterns.
        layers: the names of the layers that are converted if there are no patterns.

    Raises:
        TypeError: keep is not a sequence of strings.
        ValueError: a pattern matches none of the layers.
    """
    if isinstance(keep, str) or not all(isinstance(pattern, str) for pattern in keep):
        raise TypeError(f"keep must be a list of patterns, not {keep!r}")
    layers = list(layers) if keep else []
    for pattern in keep:
        if not any(is_kept(layer, [pattern]) for layer in layers):
            example = f", such as {layers[0]}" if layers else ""
            raise ValueError(f"keep has {pattern!r}, which matches no layer that would be converted{example}")
