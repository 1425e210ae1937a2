"""Runs that begin with the weights of a checkpoint instead of drawn ones: `octile train --init-from PATH`.

The checkpoint brings the model's shape and the tokenizer; the preset brings the batch; the rates are those with which
DeepSeek-V3 was fine-tuned (arXiv 2412.19437 §5.1): a cosine from 5e-6 down to 1e-6. The experts' biases rest, as they
do at the end of its pre-training (§4.2).

FP32 masters are made of FP8 weights by multiplying with their scales. The first step quantises them again, and as the
largest number of a block was 448 it finds the scale that was there, and with it the same 8-bit numbers. `kept_weights`
counts where that came true: not with power-of-two scales under a recipe whose weights have FP32 ones, and not where the
block boundaries of a stacked weight fall elsewhere (`moe_intermediate_size` no multiple of 128).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from octile.checkpoint.hugging_face import has_fp8_weights, read_model_config
from octile.models.deepseek_v3 import DeepseekV3
from octile.recipe import Recipe
from octile.scaled import quantize
from octile.train.config import OptimConfig, TrainConfig

SHAPE = (  # fields of the model that decide which weights there are, and of which shape
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("first_k_dense_replace", "num_nextn_predict_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "topk_method"),
)
OPTIM = OptimConfig(lr=5e-6, warmup=0.0, decay=1.0, final_lr=0.2, balance_speed=0.0)


def fine_tuning(config: TrainConfig, folder: Path) -> TrainConfig:
    """A preset's configuration as it is for the weights in a folder.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is not one of this model, or damaged.
    """
    return replace(config, init_from=folder, model=read_model_config(folder), optim=OPTIM)


def check_shape(config: TrainConfig, folder: Path) -> None:
    """Refuses a model of another shape than the weights that it is to begin with.

    Raises:
        FileNotFoundError, ValueError: as for `fine_tuning`; or names what differs.
    """
    there = read_model_config(folder)
    pairs = {name: (getattr(config.model, name), getattr(there, name)) for name in SHAPE}
    different = [f"{name} is {ours!r}, there {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if different:
        raise ValueError(f"the model has another shape than its weights in {folder}: {', '.join(different)}")


@torch.no_grad()
def count_unchanged_weights(model: DeepseekV3) -> tuple[int, int]:
    """How many weights come back from their recipe's cast with the values that they have, and how many are cast."""
    kept = cast = 0
    for module in model.modules():
        recipe = getattr(module, "recipe", None)
        if not isinstance(recipe, Recipe) or recipe.formats is None or recipe.formats.w.amax != "current":
            continue
        w = recipe.formats.w
        for weight in (p for p in module.parameters(recurse=False) if p.dim() > 1):
            cast += 1
            kept += bool(quantize(weight, w.block, w.fmt, w.scale).dequantize(weight.dtype).equal(weight))
    return kept, cast


def describe_initial_weights(model: DeepseekV3, folder: Path) -> str:
    """Where a run's weights come from, and whether its first step computes with the numbers of an FP8 checkpoint."""
    if not has_fp8_weights(folder):
        return f"weights: {folder}, not quantised there"
    kept, cast = count_unchanged_weights(model)
    if not cast:
        return f"weights: {folder}, FP8 there, dequantised here"
    return f"weights: {folder}, FP8 there; {kept} of {cast} quantised weights are to the bit the same in the first step"
