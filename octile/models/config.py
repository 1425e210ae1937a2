"""The shape of a model, under the names that Hugging Face configurations use.

`ModelConfig` imports no torch, so a planner or a command line reads it in a millisecond.  Its presets are the published
models, and three smaller models of the same architecture: `tiny` for a laptop, `small` and `medium` for one GPU.

Sources: the configurations published with DeepSeek-V2, V2-Lite and V3; DeepSeek-V3 (arXiv 2412.19437) §4.2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from octile.atomic_files import write_text
from octile.command_text import how_to_download
from octile.models import hf_config
from octile.options import Refused
from octile.routing import ScoringFunc, TopkMethod, check_routing
from octile.validation import Range, check_fields, from_json, quoted, read_json, warn_caller

# the largest numbers are beyond any published model, and keep a size within 64 bits and a model on the meta device fast
Size = Annotated[int, Range(at_least=1, at_most=2**20)]
HeadDim = Annotated[int, Range(at_least=1, at_most=2**16)]
Count = Annotated[int, Range(at_least=1, at_most=4096)]
Tokens = Annotated[int, Range(at_least=1, at_most=2**31 - 1)]
OF_TOKENIZER = Refused("is no option: it is a token of the tokenizer with which the model is trained")
TokenId = Annotated[int, Range(at_least=0)]
Weight = Annotated[float, Range(at_least=0, at_most=1000)]
IndexerType = Literal["full", "shared"]
MAX_INDEX_HEAD_DIM = 128  # channels that share a scale


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: extends a model trained on `original_max_position_embeddings` tokens to `factor` times as many.

    Rotary pairs with more than `beta_fast` full rotations within the original length keep their frequency, those with
    less than `beta_slow` are slowed down by `factor`, the others are interpolated.  Source: arXiv 2309.00071.

    Attributes:
        factor: how many times longer the context is than the original; 1 changes nothing.
        original_max_position_embeddings: tokens of the context before YaRN.
        beta_fast: full rotations within the original context from which a rotary pair keeps its frequency.
        beta_slow: full rotations within the original context up to which a rotary pair's frequency is divided by the
            factor.
        mscale: m in the number by which cosines and sines are multiplied, 0.1 m ln(factor) + 1; they are divided by the
            same number with mscale_all_dim as m.
        mscale_all_dim: m in the number by whose square attention's softmax scale is multiplied, 0.1 m ln(factor) + 1.
        attention_factor: what cosines and sines are multiplied by; None: it follows from both mscales.
        truncate: round to whole pairs the range of pairs whose frequencies are interpolated.

    Raises:
        TypeError, ValueError: a field is not a number or outside its range.
    """

    factor: Annotated[float, Range(at_least=1, at_most=1_000_000)] = 40.0
    original_max_position_embeddings: Tokens = 4096
    beta_fast: Annotated[float, Range(at_least=1e-6, at_most=1_000_000)] = 32.0
    beta_slow: Annotated[float, Range(at_least=1e-6, at_most=1_000_000)] = 1.0
    mscale: Weight = 1.0
    mscale_all_dim: Weight = 1.0
    attention_factor: Annotated[float, Range(above=0, at_most=1000)] | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "rope_scaling.")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"rope_scaling.beta_fast must be at least beta_slow, {self.beta_slow}, not {self.beta_fast}"
            )

    @property
    def is_of_transformers(self) -> bool:
        """Whether transformers multiplies cosines and sines by the same number.

        Unless both mscales are above 0 it takes 1 and 0 for them; DeepSeek's code takes each as it is.
        """
        mscales = self.mscale, self.mscale_all_dim
        return self.attention_factor is not None or self.factor == 1 or all(mscales) or mscales == (1, 0)


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V2 or V3 model.  The defaults are DeepSeek-V3's.

    Attributes:
        vocab_size: tokens of the vocabulary, the rows of the embedding and of the output head.
        hidden_size: channels of each token between layers.
        intermediate_size: channels within the feed-forward network of a layer without experts.
        moe_intermediate_size: channels within the feed-forward network of one expert.
        num_hidden_layers: layers, without that of multi-token prediction.
        first_k_dense_replace: how many of the first layers have no experts.
        num_nextn_predict_layers: depth of multi-token prediction, 0 or 1.
        num_attention_heads: heads of each layer's attention.
        q_lora_rank: rank of the queries' compression; None (V2-Lite) projects them directly.
        kv_lora_rank: rank of the compression of keys and values: the channels of the latent that is cached for a token.
        qk_nope_head_dim: channels of a head's query and key without rotary position embedding.
        qk_rope_head_dim: channels of a head's query and key with rotary position embedding, an even number; all heads
            share this part of the key.
        v_head_dim: channels of a head's value.
        n_routed_experts: experts of a layer among which its gate chooses.
        n_shared_experts: experts of a layer that compute every token.
        num_experts_per_tok: experts that the gate chooses for a token.
        n_group: groups into which the routed experts are divided.
        topk_group: groups from which a token's experts may come.
        topk_method: "noaux_tc" is V3's gate, whose bias steers the choice; the two "greedy" ones are V2's.
        scoring_func: function of the gate's logits that gives the scores of the experts: sigmoid (V3) or softmax (V2).
        norm_topk_prob: divide the scores of a token's chosen experts by their sum.
        routed_scaling_factor: what the output of the chosen experts is multiplied by.
        aux_loss_alpha: weight of the sequence-wise balance loss.
        mtp_loss_weight: weight of the multi-token prediction's loss (0.3, and 0.1 late in V3's training).
        index_n_heads: heads of the indexer of V3.2's sparse attention (64); None: there is no indexer, and attention is
            dense.
        index_head_dim: channels of a head of the indexer (128), a power of two from qk_rope_head_dim to 128; None:
            there is no indexer.
        index_topk: top-k keys of each query, which the indexer finds (2048); None: there is no indexer.
        indexer_rope_interleave: rotate pairs of adjacent channels in the indexer, as GLM-5 does; otherwise the channels
            of a pair are half of the rotary channels apart.
        indexer_types: for each layer "full", it has an indexer, or "shared", it attends to the top-k keys that the
            last indexer before it has found, as in GLM-5.2; None: all are full. Multi-token prediction has its own.
        max_position_embeddings: length of the context, in tokens.
        rope_theta: base θ of the rotary position embedding: from a position to the next, pair i of R channels is
            rotated by θ^(−2i/R).
        rope_scaling: YaRN, which extends the context; None: it is not extended.
        rms_norm_eps: what RMSNorm adds to the mean of the squares before it takes the root.
        initializer_range: standard deviation of the normal distribution of new weights.
        bos_token_id: number of the token that begins a text; training sets it to its tokenizer's.
        eos_token_id: numbers of the tokens that end a text; training sets it to its tokenizer's.
        extra: further keys of a configuration file, written back unchanged.

    Raises:
        TypeError: a field has another type than its annotation.
        ValueError: a field is outside its range, or the sizes do not fit together.
    """

    vocab_size: Annotated[int, Range(at_least=1, at_most=2**24)] = 129280
    hidden_size: Size = 7168
    intermediate_size: Size = 18432
    moe_intermediate_size: Size = 2048
    num_hidden_layers: Annotated[int, Range(at_least=1, at_most=hf_config.MAX_LAYERS)] = 61
    first_k_dense_replace: Annotated[int, Range(at_least=0)] = 3
    num_nextn_predict_layers: Literal[0, 1] = 1

    num_attention_heads: Count = 128
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: HeadDim = 128
    qk_rope_head_dim: HeadDim = 64
    v_head_dim: HeadDim = 128

    n_routed_experts: Count = 256
    n_shared_experts: Count = 1
    num_experts_per_tok: Count = 8
    n_group: Count = 8
    topk_group: Count = 4
    topk_method: TopkMethod = "noaux_tc"
    scoring_func: ScoringFunc = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: Weight = 2.5
    aux_loss_alpha: Weight = 1e-4
    mtp_loss_weight: Weight = 0.3

    index_n_heads: Count | None = None
    index_head_dim: HeadDim | None = None
    index_topk: Tokens | None = None
    indexer_rope_interleave: bool = False
    indexer_types: tuple[IndexerType, ...] | None = None

    max_position_embeddings: Tokens = 163840
    rope_theta: Annotated[float, Range(above=1, at_most=1e18)] = 10000.0
    rope_scaling: RopeScaling | None = RopeScaling()

    rms_norm_eps: Annotated[float, Range(at_least=1e-30, at_most=1)] = 1e-6
    initializer_range: Annotated[float, Range(at_least=0, at_most=10)] = 0.006
    bos_token_id: Annotated[TokenId | None, OF_TOKENIZER] = 0
    eos_token_id: Annotated[TokenId | tuple[TokenId, ...] | None, OF_TOKENIZER] = 1
    extra: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """The numbers of the tokens that begin and end texts."""
        return (*tokens_of(self.bos_token_id), *tokens_of(self.eos_token_id))

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query and of a key of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Channels that a cache holds per token and layer: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def has_indexer(self) -> bool:
        """Whether attention is sparse, to the top-k keys of an indexer."""
        return self.index_topk is not None

    @property
    def shares_top_k(self) -> bool:
        """Whether there are layers that attend to the top-k keys of an earlier layer's indexer."""
        return "shared" in (self.indexer_types or ())

    def has_own_indexer(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has an indexer. That of multi-token prediction is the last."""
        return self.has_indexer and (self.indexer_types or ())[layer : layer + 1] != ("shared",)

    def top_k_readers(self, layer: int) -> int:
        """Count the layers that attend to the top-k keys of a layer's indexer: it, and the shared ones that follow."""
        if not self.shares_top_k:
            return 1
        return 1 + len([*takewhile(lambda kind: kind == "shared", (self.indexer_types or ())[layer + 1 :])])

    def is_moe(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts. The multi-token prediction layer is the last and has them."""
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Make a configuration from the content of a Hugging Face `config.json`.

        Raises:
            ValueError: a needed key is missing, a key has another type or is outside its range, or a key asks for what
                this model does not compute.
        """
        read = from_json(cls, hf_config.parse(config, [f.name for f in fields(cls)]))
        read.warn_of_yarn()
        return read

    def warn_of_yarn(self) -> None:
        """Warn where YaRN extends the context to another length than the model's, and where transformers differs.

        The first, which transformers does, too, is left out for a model of the original length, whose context is not
        extended.
        """
        rope, longest = self.rope_scaling, self.max_position_embeddings
        if rope is None:
            return
        if not rope.is_of_transformers:
            warn_caller(
                f"rope_scaling: mscale is {rope.mscale:g} and mscale_all_dim {rope.mscale_all_dim:g}, with which "
                f"octile computes as DeepSeek's code does; {hf_config.IGNORED_MSCALE}",
            )
        if longest == rope.original_max_position_embeddings:
            return
        extended = rope.factor * rope.original_max_position_embeddings
        if abs(extended - longest) >= 1:
            warn_caller(
                f"rope_scaling: a factor of {rope.factor:g} extends {rope.original_max_position_embeddings:,} tokens "
                f"to {extended:,.0f}, but max_position_embeddings is {longest:,}: the factor is used as it is",
            )

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a Hugging Face `config.json`, including the keys in `extra`."""
        kind = "V32" if self.has_indexer else "V3" if self.topk_method == "noaux_tc" else "V2"
        named = {"architectures": [f"Deepseek{kind}ForCausalLM"], "model_type": f"deepseek_{kind.lower()}"}
        if self.indexer_rope_interleave:
            named = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": hf_config.GLM}
        config: dict[str, Any] = {
            **named,
            "num_key_value_heads": self.num_attention_heads,
            **hf_config.COMPUTED,
            **asdict(replace(self, extra={})),
        }
        if self.rope_scaling is not None:
            config["rope_scaling"]["type"] = "yarn"
            for name, unset in (("attention_factor", None), ("truncate", True)):  # which engines may not know
                if config["rope_scaling"][name] is unset:
                    del config["rope_scaling"][name]
        del config["extra"]
        if not self.has_indexer:
            for name in hf_config.INDEXER:
                del config[name]
        if not self.indexer_rope_interleave:
            del config["indexer_rope_interleave"]
        if self.indexer_types is None:
            del config["indexer_types"]
        config |= self.extra
        is_sparse, is_glm = config["model_type"] in hf_config.SPARSE, config["model_type"] == hf_config.GLM
        if (is_sparse, is_glm) != (self.has_indexer, self.indexer_rope_interleave):  # the file was another model's
            config |= named
        types = [*(self.indexer_types or self.num_hidden_layers * ("full",))]
        if self.has_indexer and hf_config.spelled_types(config) != types:
            config["index_topk_pattern"] = "".join(kind[0].upper() for kind in types)
        return config

    @classmethod
    def read(cls, path: str | Path) -> ModelConfig:
        """Read a `config.json`, or that of a folder.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a JSON object, or `from_hf` raises it.
        """
        path, name = Path(path), "config.json"
        if not path.exists() and (how := how_to_download(path, name)):
            raise FileNotFoundError(f"{path} does not exist{how}")
        return cls.from_hf(read_json(path / name if path.is_dir() else path))

    def write(self, path: str | Path) -> None:
        """Write a `config.json` that transformers, vLLM and SGLang read."""
        write_text(Path(path), json.dumps(self.to_hf(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def tiny(cls) -> ModelConfig:
        """DeepSeek-V3's attention, dense layer and mixture of experts in a few million parameters, for two CPU cores.

        Multi-token prediction, 45% of a step's FLOPs, is an option.
        """
        return cls(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            num_attention_heads=4,
            q_lora_rank=128,
            kv_lora_rank=96,  # with the rotary key 128 rows: transformers misreads partial blocks on a CPU
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            max_position_embeddings=2048,
            rope_scaling=None,
            initializer_range=0.03,
        )

    @classmethod
    def small(cls) -> ModelConfig:
        """About 100M parameters, for one GPU."""
        return cls(
            vocab_size=8192,
            hidden_size=768,
            intermediate_size=2048,
            moe_intermediate_size=256,
            num_hidden_layers=8,
            first_k_dense_replace=1,
            num_attention_heads=6,
            q_lora_rank=384,
            kv_lora_rank=256,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            max_position_embeddings=4096,
            rope_scaling=None,
            initializer_range=0.02,
        )

    @classmethod
    def medium(cls) -> ModelConfig:
        """About 2B parameters, 0.5B active with the embedding, for one GPU of 80 GB or more.

        Every side of its GEMMs is a multiple of 128, but the 576 of the latent with the rotary key, as in DeepSeek's.
        """
        return cls(
            vocab_size=32768,
            hidden_size=2048,
            intermediate_size=8192,
            moe_intermediate_size=512,
            num_hidden_layers=9,
            first_k_dense_replace=1,
            num_attention_heads=16,
            q_lora_rank=768,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            n_group=1,
            topk_group=1,
            max_position_embeddings=4096,
            rope_scaling=None,
            initializer_range=0.02,
        )

    @classmethod
    def v2_lite_16b(cls) -> ModelConfig:
        """DeepSeek-V2-Lite: 15.7B parameters, 2.7B active, queries not compressed."""
        return cls(
            vocab_size=102400,
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            num_hidden_layers=27,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            num_attention_heads=16,
            q_lora_rank=None,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            scoring_func="softmax",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            aux_loss_alpha=1e-3,
            rope_scaling=RopeScaling(mscale=0.707, mscale_all_dim=0.707),
            bos_token_id=100000,
            eos_token_id=100001,
        )

    @classmethod
    def v2_236b(cls) -> ModelConfig:
        """DeepSeek-V2: 235.7B parameters, 21.4B active."""
        return replace(
            cls.v2_lite_16b(),
            hidden_size=5120,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=60,
            num_attention_heads=128,
            q_lora_rank=1536,
            n_routed_experts=160,
            n_group=8,
            topk_group=3,
            topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
        )

    @classmethod
    def v3_671b(cls) -> ModelConfig:
        """DeepSeek-V3: 671.0B parameters, 37.6B active, without the multi-token prediction layer."""
        return cls()


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": ModelConfig.tiny,
    "small": ModelConfig.small,
    "medium": ModelConfig.medium,
    "v2_lite_16b": ModelConfig.v2_lite_16b,
    "v2_236b": ModelConfig.v2_236b,
    "v3_671b": ModelConfig.v3_671b,
}


def tokens_of(token_id: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the tokens of a `bos_token_id` or `eos_token_id`: one, several, or none."""
    if token_id is None:
        return ()
    return token_id if isinstance(token_id, tuple) else (token_id,)


def _check(c: ModelConfig) -> None:
    check_fields(c)
    for name in ("bos_token_id", "eos_token_id"):
        for token in tokens_of(getattr(c, name)):
            if token >= c.vocab_size:
                raise ValueError(f"{name} must be below vocab_size, {c.vocab_size}, not {quoted(token)}")
    if c.first_k_dense_replace > c.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace {quoted(c.first_k_dense_replace)} exceeds the {c.num_hidden_layers} layers"
        )
    if c.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even, it holds pairs, not {c.qk_rope_head_dim}")
    _check_indexer(c)
    check_routing(
        c.n_routed_experts,
        c.num_experts_per_tok,
        c.n_group,
        c.topk_group,
        c.topk_method,
        c.scoring_func,
        names=("n_routed_experts", "num_experts_per_tok"),
    )


def _check_indexer(c: ModelConfig) -> None:
    given = {name: getattr(c, name) for name in hf_config.INDEXER}
    if not c.has_indexer and all(value is None for value in given.values()):
        if c.indexer_rope_interleave:
            raise ValueError("indexer_rope_interleave must be false: the model has no indexer")
        if c.indexer_types is not None:
            raise ValueError("indexer_types must not be given: the model has no indexer")
        return
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(
            f"an indexer needs {', '.join(hf_config.INDEXER)}, of which {', '.join(missing)} must be given"
        )
    if c.q_lora_rank is None:
        raise ValueError("an indexer reads compressed queries, so q_lora_rank must be a number, not None")
    if c.topk_method != "noaux_tc":
        raise ValueError(f"an indexer is DeepSeek-V3.2's, whose topk_method is 'noaux_tc', not {c.topk_method!r}")
    width = c.index_head_dim or 0
    if width & (width - 1) or not c.qk_rope_head_dim <= width <= MAX_INDEX_HEAD_DIM:
        raise ValueError(
            f"index_head_dim must be a power of two from qk_rope_head_dim, {c.qk_rope_head_dim}, "
            f"to {MAX_INDEX_HEAD_DIM}, not {width}"
        )
    if c.indexer_types is not None:
        _check_indexer_types(c, c.indexer_types)


def _check_indexer_types(c: ModelConfig, types: tuple[IndexerType, ...]) -> None:
    if len(types) != c.num_hidden_layers:
        raise ValueError(
            f"indexer_types (or index_topk_pattern) must name each of the {c.num_hidden_layers} layers of the model "
            f"(num_hidden_layers), not {len(types)}"
        )
    if not c.shares_top_k:
        return
    if types[0] == "shared":
        raise ValueError("indexer_types must begin with 'full': there is no indexer before the first layer")
    if not c.indexer_rope_interleave:
        raise ValueError(
            "indexer_types (or index_topk_pattern, index_topk_freq) must be 'full' for each layer unless "
            f"indexer_rope_interleave is true: only a {hf_config.GLM} has layers that share top-k keys"
        )
