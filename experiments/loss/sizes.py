"""The models of the experiment: three sizes of DeepSeek-V3's architecture with 35M, 81M and 143M active parameters.

At least 85% of a token's operations are GEMMs that a recipe may run in FP8. The head, attention and the gate are not:

| part | precision | what keeps its share small |
|---|---|---|
| head | BF16 | a vocabulary of 8,192 |
| attention | BF16 | heads of 96 and 64 channels, sequences of 1,024 tokens |
| gate | FP32 | 32 experts |

Multi-token prediction is off unless a job asks for it.
"""

from __future__ import annotations

from dataclasses import replace

from octile.models.config import ModelConfig
from octile.train.config import OptimConfig, TrainConfig

VOCABULARY = 8192
SEQUENCE = 1024
BATCH = 64  # sequences a step: 65,536 tokens
TOKENS_A_STEP = BATCH * SEQUENCE

_SHAPE = ModelConfig(
    vocab_size=VOCABULARY,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    n_routed_experts=32,
    num_experts_per_tok=4,
    n_group=8,
    topk_group=4,
    max_position_embeddings=SEQUENCE,
    rope_scaling=None,
    initializer_range=0.02,
)
MODELS = {
    "30m": replace(
        _SHAPE,
        hidden_size=384,
        intermediate_size=3840,
        moe_intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        q_lora_rank=192,
        kv_lora_rank=96,
    ),
    "80m": replace(
        _SHAPE,
        hidden_size=768,
        intermediate_size=3200,
        moe_intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=6,
        q_lora_rank=384,
        kv_lora_rank=224,
    ),
    "150m": replace(
        _SHAPE,
        hidden_size=1024,
        intermediate_size=3840,
        moe_intermediate_size=768,
        num_hidden_layers=9,
        num_attention_heads=8,
        q_lora_rank=512,
        kv_lora_rank=352,
    ),
}
RATES = {"30m": 2e-3, "80m": 1.5e-3, "150m": 1e-3}  # peak learning rates

TOY = replace(
    _SHAPE,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=None,
    kv_lora_rank=96,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    max_position_embeddings=64,
)


def run_config(size: str, tokens: float, **changes: object) -> TrainConfig:
    """Return the configuration of a run: warm-up over 5% of the steps, then a cosine to a tenth of the peak rate.

    Args:
        size: a key of MODELS, or "toy" for a CPU, with batches of 8 × 64 tokens.
        tokens: the tokens to train on, rounded to whole steps.
        changes: fields of `TrainConfig` to replace.

    Raises:
        ValueError: there is no such size.
    """
    if size != "toy" and size not in MODELS:
        raise ValueError(f"size must be one of {', '.join(MODELS)} or toy, not {size!r}")
    toy = size == "toy"
    batch, length = (8, 64) if toy else (BATCH, SEQUENCE)
    optim = OptimConfig(lr=2e-3 if toy else RATES[size], warmup=0.05, decay=0.95, final_lr=0.1, balance_speed=0.005)
    config = TrainConfig(
        preset=f"loss-{size}",
        steps=max(1, round(tokens / (batch * length))),
        checkpoint_every=0,
        validate_every=50,
        batch_size=batch,
        sequence_length=length,
        model=TOY if toy else MODELS[size],
        optim=optim,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def operations(c: ModelConfig) -> dict[str, float]:
    """Count the multiply-adds of a token's forward pass in "8 bits", "head", "attention" and "gate".

    Attention counts the keys that a query attends to, on average half of SEQUENCE. The backward pass costs twice
    as many, so the shares are also those of a training step.
    """
    from octile.models.flops import multiply_adds

    found = multiply_adds(c, min(SEQUENCE, c.max_position_embeddings) / 2)
    return {"8 bits": found.pop("layers"), **found}


def share_in_8_bits(c: ModelConfig) -> float:
    """Return the share of a token's operations in GEMMs that a recipe may run in FP8 or INT8."""
    found = operations(c)
    return found["8 bits"] / sum(found.values())
