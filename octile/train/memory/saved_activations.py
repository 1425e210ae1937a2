"""Which activations a run on a GPU saves for its backward pass although they could be recomputed.

DeepSeek-V3 recomputes the outputs of norms, and queries, keys and values, since its memory does not suffice for them. A
run saves them where they take little of the GPU's memory that is free when it begins, which saves the time. Their bits
are the same, but for those of a norm that a gate reads, too: recomputed for the experts on a GPU, its squares are
summed in another order. A checkpoint therefore says whether the run saves them, and a resumed run does the same.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.3, which recomputes.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from octile.formats import TILE
from octile.models.config import ModelConfig
from octile.recipe import Recipe
from octile.train.config import TrainConfig

MAX_SHARE = 0.1  # of the available memory


def can_save(config: TrainConfig, available: int, held: float = 1.0) -> bool:
    """Whether a run on a GPU saves such activations: they take at most MAX_SHARE of the memory that it can have.

    A deterministic run saves none, since the memory may be another the next time.

    Args:
        config: the configuration of the run.
        available: the memory at its start, in bytes (`octile.train.memory.device.available_memory`).
        held: the activations that a rank holds at a time, in units of the whole model's for a micro-batch.
    """
    needed = held * config.micro_batch_size * config.sequence_length * bytes_per_token(config.model)
    return not config.deterministic and needed <= MAX_SHARE * available


def saving_activations(recipe: Recipe) -> Recipe:
    """Return the recipe with norms and latent attention's inputs saved."""
    return replace(recipe, norms="kept", latent_attention_inputs="kept")


def bytes_per_token(c: ModelConfig) -> int:
    """The bytes that are saved of each token.

    Norms in 1×128 tiles, those that a gate reads in BF16, too; queries, keys and values in BF16.
    """
    norms = 2 * _tiles(c.hidden_size) + _tiles(c.kv_lora_rank) + _tiles(c.q_lora_rank or 0)
    a_head = 3 * c.qk_nope_head_dim + 2 * c.qk_rope_head_dim + c.v_head_dim
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    gates = sum(c.is_moe(layer) for layer in range(layers))
    return layers * (norms + 2 * c.num_attention_heads * a_head) + gates * 2 * c.hidden_size


def _tiles(n: int) -> int:
    """The bytes of n values in 8 bits with an FP32 scale each 128."""
    return n + 4 * ceil(n / TILE[1])
