"""The tensors of published architectures other than DeepSeek's, from a Hugging Face `config.json` alone, and its check.

Their names and shapes are those of the checkpoints that transformers writes, so that the size of a conversion can be
predicted before a checkpoint is downloaded.  Source: the modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from octile.models.config import ModelConfig, RopeScaling
from octile.models.hf_config import ALIASES as DEEPSEEK_ALIASES
from octile.models.hf_config import MODEL_TYPES as DEEPSEEK
from octile.validation import Range, check_fields, check_given, from_json

Size = Annotated[int, Range(at_least=1, at_most=2**24)]
Count = Annotated[int, Range(at_least=1, at_most=4096)]
TokenId = Annotated[int, Range(at_least=0)]
ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
ALIASES = {"num_local_experts": "num_experts"}  # as Mixtral calls it
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """The keys of a `config.json` that determine names and shapes. Source of the defaults: transformers.

    Raises:
        TypeError: a key has another type.
        ValueError: a key is out of range, or one that the architecture needs is missing.
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
        if self.model_type in ("mixtral", "qwen3_moe") and self.num_experts is None:
            raise ValueError(f"the configuration lacks num_experts, which {self.model_type} needs")
        if self.model_type == "qwen3_moe" and self.moe_intermediate_size is None:
            raise ValueError("the configuration lacks moe_intermediate_size, which qwen3_moe needs")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a Hugging Face `config.json`. Of the keys that change no shape, those of `OtherKeys` are checked.

        Raises:
            ValueError: a key is missing, has another type, or is out of range.
        """
        named = {ALIASES.get(key, key): value for key, value in config.items() if value is not None}
        from_json(OtherKeys, _known(OtherKeys, named))
        return from_json(cls, _known(cls, named))

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
        biased = {"q", "k", "v"} if self.model_type == "qwen2" else {"q", "k", "v", "o"} if self.attention_bias else ()
        for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads), ("o", None)):
            shape = (d, heads * head_dim) if out is None else (out * head_dim, d)
            yield f"{prefix}.{name}_proj.weight", shape
            if name in biased:
                yield f"{prefix}.{name}_proj.bias", shape[:1]
        if self.model_type in ("qwen3", "qwen3_moe"):
            yield f"{prefix}.q_norm.weight", (head_dim,)
            yield f"{prefix}.k_norm.weight", (head_dim,)

    def _feed_forward(self, prefix: str, layer: int) -> Iterator[tuple[str, Shape]]:
        experts, d = self.num_experts or 0, self.hidden_size
        if self.model_type == "mixtral":
            yield f"{prefix}.block_sparse_moe.gate.weight", (experts, d)
            for expert in range(experts):
                yield from self._mlp(f"{prefix}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"))
        elif self.model_type == "qwen3_moe" and self._is_sparse(layer):
            yield f"{prefix}.mlp.gate.weight", (experts, d)
            for expert in range(experts):
                yield from self._mlp(f"{prefix}.mlp.experts.{expert}", PROJECTIONS, self.moe_intermediate_size)
        else:
            yield from self._mlp(f"{prefix}.mlp", PROJECTIONS)

    def _is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def _mlp(
        self, prefix: str, names: tuple[str, str, str], intermediate: int | None = None
    ) -> Iterator[tuple[str, Shape]]:
        d, i = self.hidden_size, intermediate or self.intermediate_size
        for name, shape in zip(names, ((i, d), (i, d), (d, i)), strict=True):
            yield f"{prefix}.{name}.weight", shape
            if self.mlp_bias and self.model_type == "llama":
                yield f"{prefix}.{name}.bias", shape[:1]


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class OtherKeys:
    """The keys of these architectures' configurations that change no shape; a file with a wrong one is damaged.

    Raises:
        TypeError: a key has another type.
        ValueError: a key is out of range.
    """

    architectures: tuple[str, ...] | None = None
    attention_dropout: Annotated[float, Range(at_least=0, at_most=1)] | None = None
    bos_token_id: TokenId | None = None
    dtype: str | None = None
    eos_token_id: TokenId | tuple[TokenId, ...] | None = None
    hidden_act: str | None = None
    initializer_range: Annotated[float, Range(at_least=0)] | None = None
    layer_types: tuple[str, ...] | None = None
    max_position_embeddings: Annotated[int, Range(at_least=1)] | None = None
    max_window_layers: Annotated[int, Range(at_least=0)] | None = None
    norm_topk_prob: bool | None = None
    num_experts_per_tok: Annotated[int, Range(at_least=1)] | None = None
    output_router_logits: bool | None = None
    pad_token_id: Annotated[int, Range(at_least=-1)] | None = None
    pretraining_tp: Annotated[int, Range(at_least=1)] | None = None
    quantization_config: dict[str, Any] | None = None
    rms_norm_eps: Annotated[float, Range(above=0)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Annotated[float, Range(above=0)] | None = None
    router_aux_loss_coef: Annotated[float, Range(at_least=0)] | None = None
    router_jitter_noise: Annotated[float, Range(at_least=0)] | None = None
    sliding_window: Annotated[int, Range(at_least=1)] | None = None
    torch_dtype: str | None = None
    use_cache: bool | None = None
    use_sliding_window: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def check_config(config: Mapping[str, Any]) -> None:
    """Check the keys of a `config.json` that comes with weights, which give the shapes: keys may be missing.

    The keys of DeepSeek models and of the other architectures are checked. Of any other model they are unknown.

    Raises:
        ValueError: a key has another type, or is out of range.
    """
    kind = config.get("model_type")
    if kind not in (*DEEPSEEK, *get_args(ModelType)):
        return
    aliases = DEEPSEEK_ALIASES if kind in DEEPSEEK else ALIASES
    named = {aliases.get(key, key): value for key, value in config.items()}
    check_given(OtherKeys, named)
    ropes = {key: named.pop(key, None) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, rope in ropes.items():
        check_given(RopeScaling, rope, f"{key}.")
    check_given(ModelConfig if kind in DEEPSEEK else Architecture, named)


def _known(cls: type[Architecture] | type[OtherKeys], config: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(cls)}
    return {key: value for key, value in config.items() if key in names}
