"""Which activations a run on a GPU saves for its backward pass although they could be recomputed.

DeepSeek-V3 recomputes the outputs of norms, and queries, keys and values, since its memory does not suffice for them. A
run saves them where they take little of the GPU's memory that is free when it begins, which saves the time. Their bits
are the same, but for those of a norm that a gate reads, too: recomputed for the experts on a GPU, its squares are
summed in another order. A checkpoint therefore says whether the run saves them, and a resumed run does the same.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.3, which recomputes.
"""

from __future__ import annotations

from dataclasses import replace

from octile.plan.pass_memory import recomputable_bytes
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
    needed = held * config.micro_batch_size * config.sequence_length * recomputable_bytes(config.model)
    return not config.deterministic and needed <= MAX_SHARE * available


def saving_activations(recipe: Recipe) -> Recipe:
    """Return the recipe with norms and latent attention's inputs saved."""
    return replace(recipe, norms="kept", latent_attention_inputs="kept")
