"""The tensors of published architectures other than DeepSeek's, from a Hugging Face `config.json` alone.

Their names and shapes are those of the checkpoints that transformers writes, so that the size of a conversion can be
predicted before a checkpoint is downloaded.  Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal

from octile.models.hf_config import canonical_names
from octile.validation import Range, check_fields, check_given, from_json

Size = Annotated[int, Range(at_least=1, at_most=2**24)]
Count = Annotated[int, Range(at_least=1, at_most=4096)]
TokenId = Annotated[int, Range(at_least=0)]
ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
ALIASES = {"num_local_experts": "num_experts"}  # as Mixtral calls it
EXPERTS_NEEDED = {"mixtral": ("num_local_experts",), "qwen3_moe": ("num_experts", "moe_intermediate_size")}
DEFAULTS: Mapping[str, Mapping[str, int]] = {  # of transformers, where one of these keys is absent; others are needed
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3_moe": {"num_key_value_heads": 4},
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """The keys of a `config.json` that determine names and shapes.

    Attributes:
        num_key_value_heads: None: as many as num_attention_heads.
        head_dim: None: hidden_size // num_attention_heads.

    Raises:
        TypeError: a key has another type.
        ValueError: a key is out of range, or the heads do not fit together or into hidden_size.
    """

    model_type: ModelType
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Range(at_least=1, at_most=1000)]
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Size | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: Count | None = None
    moe_intermediate_size: Size | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        heads, kv_heads, d = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        if kv_heads is not None and heads % kv_heads:
            default = DEFAULTS.get(self.model_type, {}).get("num_key_value_heads")
            note = f" ({self.model_type}'s default is {default})" if kv_heads == default else ""
            raise ValueError(f"num_key_value_heads must divide num_attention_heads, {heads}, not be {kv_heads}{note}")
        if self.model_type == "llama" and d % heads:
            raise ValueError(f"hidden_size must be a multiple of num_attention_heads, {heads}, not {d}")
        if self.head_dim is None and d < heads:
            raise ValueError(f"hidden_size must be at least num_attention_heads, {heads}, without head_dim, not {d}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a Hugging Face `config.json`.

        Raises:
            ValueError: a key is missing, has another type, or is out of range, or keys do not fit together.
        """
        check_given(cls, config, aliases=ALIASES)
        kind, named = config["model_type"], canonical_names(config, ALIASES)
        needed = (*(field.name for field in fields(cls) if field.default is MISSING), *EXPERTS_NEEDED.get(kind, ()))
        if missing := [key for key in needed if named.get(ALIASES.get(key, key)) is None]:
            raise ValueError(f"the configuration lacks {', '.join(missing)}, which {kind} needs")
        names = {field.name for field in fields(cls)}
        given = {
            key: value
            for key, value in named.items()
            if key in names and (value is not None or key == "num_key_value_heads")
        }
        return from_json(cls, {**DEFAULTS.get(kind, {}), **given})

    def is_moe(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.model_type == "qwen3_moe":
            return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        return self.model_type == "mixtral"

    def shapes(self) -> dict[str, Shape]:
        """Name → shape of every tensor of a checkpoint."""
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Shape]]:
        d = self.hidden_size
        yield "model.embed_tokens.weight", (self.vocab_size, d)
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (d,)
            yield from self._attention(f"{prefix}.self_attn")
            yield f"{prefix}.post_attention_layernorm.weight", (d,)
            yield from self._feed_forward(prefix, layer)
        yield "model.norm.weight", (d,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, d)

    def _attention(self, prefix: str) -> Iterator[tuple[str, Shape]]:
        heads, d = self.num_attention_heads, self.hidden_size
        kv_heads = self.num_key_value_heads or heads
        head_dim = self.head_dim or d // heads
        may_be_biased = self.model_type in ("llama", "qwen3", "qwen3_moe")
        biased = "qkv" if self.model_type == "qwen2" else "qkvo" if self.attention_bias and may_be_biased else ""
        for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads), ("o", None)):
            shape = (d, heads * head_dim) if out is None else (out * head_dim, d)
            yield f"{prefix}.{name}_proj.weight", shape
            if name in biased:
                yield f"{prefix}.{name}_proj.bias", shape[:1]
        if self.model_type in ("qwen3", "qwen3_moe"):
            yield f"{prefix}.q_norm.weight", (head_dim,)
            yield f"{prefix}.k_norm.weight", (head_dim,)

    def _feed_forward(self, prefix: str, layer: int) -> Iterator[tuple[str, Shape]]:
        if not self.is_moe(layer):
            yield from self._mlp(f"{prefix}.mlp", PROJECTIONS)
            return
        module, names, intermediate = f"{prefix}.mlp", PROJECTIONS, self.moe_intermediate_size
        if self.model_type == "mixtral":
            module, names, intermediate = f"{prefix}.block_sparse_moe", ("w1", "w3", "w2"), None
        experts = self.num_experts or 0
        yield f"{module}.gate.weight", (experts, self.hidden_size)
        for expert in range(experts):
            yield from self._mlp(f"{module}.experts.{expert}", names, intermediate)

    def _mlp(
        self, prefix: str, names: tuple[str, str, str], intermediate: int | None = None
    ) -> Iterator[tuple[str, Shape]]:
        d, i = self.hidden_size, intermediate or self.intermediate_size
        for name, shape in zip(names, ((i, d), (i, d), (d, i)), strict=True):
            yield f"{prefix}.{name}.weight", shape
            if self.mlp_bias and self.model_type == "llama":
                yield f"{prefix}.{name}.bias", shape[:1]


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
