"""Fine-tuning: runs that begin with the weights of a checkpoint, `octile train --init-from PATH`.

The checkpoint determines the model's shape and the tokenizer, the preset the batch. The learning rates are those with
which DeepSeek-V3 was fine-tuned (arXiv 2412.19437 §5.1): a cosine from 5e-6 to 1e-6. The experts' biases are constant,
as at the end of its pre-training (§4.2).

FP32 master weights are dequantized from FP8 weights. The first step quantizes them again. Since the largest magnitude
of a block is 448 times its scale, it finds the same scale, and with it the same FP8 values.

Where the checkpoint announces power-of-two scales (`scale_fmt: "ue8m0"`), weights are quantized with power-of-two
scales, so that the values are the same, too.

`count_unchanged_weights` counts the weights for which this is true. It is not true for power-of-two scales that are not
announced, nor if the block boundaries of a stacked weight differ (`moe_intermediate_size` not a multiple of 128).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from octile.checkpoint.hugging_face import has_fp8_weights, read_model_config
from octile.command_text import quoted_path
from octile.models.deepseek_v3 import DeepseekV3
from octile.recipe import Recipe
from octile.scaled import quantize
from octile.train.config import OptimConfig, TrainConfig
from octile.train.data.corpus import files_below, is_path, why_not_opened, why_not_text
from octile.train.data.examples import SUFFIX, begins_with_example, is_examples

SHAPE = (  # fields of the model that determine its weights and their shapes
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("first_k_dense_replace", "num_nextn_predict_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "topk_method"),
)
INDEXER_SHAPE = ("index_n_heads", "index_head_dim", "indexer_types")  # those of its indexers
OPTIM = OptimConfig(lr=5e-6, warmup=0.0, decay=1.0, final_lr=0.2, balance_speed=0.0)


def fine_tuning(config: TrainConfig, folder: Path, warmup: float = OPTIM.warmup) -> TrainConfig:
    """A preset's configuration, changed to fine-tune the weights in a folder.

    Sequences are at most as long as the model's context.

    Args:
        config: the configuration.
        folder: the folder.
        warmup: share of the steps in which the learning rate rises; it falls in all others.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is not one of this model, or damaged; or warmup is not from 0 to 1.
    """
    model = read_model_config(folder)
    return replace(
        config,
        init_from=folder,
        model=model,
        optim=replace(OPTIM, warmup=warmup, decay=1 - warmup),
        indexer_stage="sparse" if model.has_indexer else None,
        sequence_length=min(config.sequence_length, model.max_position_embeddings),
    )


def check_shape(config: TrainConfig, folder: Path) -> None:
    """Refuse a model whose shape differs from that of its initial weights. It may have indexers that they lack.

    Raises:
        FileNotFoundError, ValueError: as for `fine_tuning`; or names what differs.
    """
    there = read_model_config(folder)
    names = (*SHAPE, *INDEXER_SHAPE) if there.has_indexer else SHAPE
    pairs = {name: (getattr(config.model, name), getattr(there, name)) for name in names}
    different = [f"{name} is {ours!r}, there {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if different:
        raise ValueError(f"the model has another shape than its weights in {folder}: {', '.join(different)}")


def check_examples(config: TrainConfig) -> None:
    """Refuse to train on examples what cannot be.

    Raises:
        ValueError: a file of examples has another suffix, or is a JSON array; or a folder holds examples and other
            text. There are no weights to begin with, and with them no tokenizer and chat template. Layers do not know
            the borders of texts that share a sequence, as in sparse attention and in a pipeline.
    """
    _check_files("data", config.data)
    if config.val_data is not None:
        _check_files("val_data", config.val_data)
    if not is_examples(config.data):
        return
    if config.init_from is None:
        raise ValueError(
            f"data {config.data!r} holds examples to fine-tune on: add --init-from FOLDER, which has weights, "
            "tokenizer and chat template"
        )
    if config.parallel.pp > 1:
        raise ValueError(f"parallel.pp must be 1 for examples (data {config.data!r}), not {config.parallel.pp}")
    if config.model.has_indexer:
        raise ValueError(
            f"data {config.data!r} holds examples, on which a model with an indexer is not trained: its sparse "
            "attention does not know the borders of texts that share a sequence"
        )


def _check_files(name: str, data: str) -> None:
    """Refuse examples that would be read as plain text, and a folder that holds examples and other text."""
    path = Path(data)
    if not is_path(data) or why_not_opened(path) is not None:
        return
    files = files_below(path)[0] if path.is_dir() else [path]
    for file in files:
        if (file != path and file.suffix not in (SUFFIX, ".json")) or why_not_opened(file) is not None:
            continue
        named = f"{name} {data!r}" if file == path else f"{name} {data!r}: {file.relative_to(path)}"
        begins = begins_with_example(file)
        if begins == "array":
            lines = file.with_suffix(".lines.jsonl" if file.suffix == SUFFIX else SUFFIX)
            raise ValueError(
                f"{named} is a JSON array of examples, but must have one object a line: convert it with "
                f"jq -c '.[]' {quoted_path(file)} > {quoted_path(lines)}"
            )
        if begins == "line" and file.suffix != SUFFIX:
            raise ValueError(
                f"{named} would be read as plain text, but its first line is an example: "
                f"rename it to {file.with_suffix(SUFFIX).name}"
            )
    if path.is_dir() and is_examples(data):
        for file in files:
            if file.suffix != SUFFIX and why_not_text(file, file.name) is None:
                raise ValueError(
                    f"{name} {data!r} must hold either examples or other text, but it holds examples in {SUFFIX} files "
                    f"and {str(file.relative_to(path))!r}: name one of its files, or move them to a folder of their own"
                )


@torch.no_grad()
def count_unchanged_weights(model: DeepseekV3, without: Iterable[nn.Module] = ()) -> tuple[int, int]:
    """The number of weights that quantization by their recipe does not change, and the number of quantized weights.

    Args:
        model: the model.
        without: modules of it whose weights are not counted.
    """
    left_out = {part for module in without for part in module.modules()}
    unchanged = quantized = 0
    for module in model.modules():
        if module in left_out:
            continue
        recipe = getattr(module, "recipe", None)
        if not isinstance(recipe, Recipe) or recipe.formats is None or recipe.formats.w.amax != "current":
            continue
        w = recipe.formats.w
        for weight in (p for p in module.parameters(recurse=False) if p.dim() > 1):
            quantized += 1
            unchanged += bool(quantize(weight, w.block, w.fmt, w.scale).dequantize(weight.dtype).equal(weight))
    return unchanged, quantized


def describe_initial_weights(model: DeepseekV3, folder: Path) -> str:
    """The origin of a run's weights, and whether its first step computes with the values of an FP8 checkpoint.

    Indexers that the checkpoint lacks are new: they are named, and not counted.
    """
    are_new = bool(model.indexers()) and not read_model_config(folder).has_indexer
    new = "; the indexers are new" if are_new else ""
    if not has_fp8_weights(folder):
        return f"weights: {folder}, not quantized{new}"
    unchanged, quantized = count_unchanged_weights(model, model.indexers() if are_new else ())
    if not quantized:
        return f"weights: {folder}, FP8, dequantized{new}"
    same = f"{unchanged} of {quantized} quantized weights have the folder's FP8 values in the first step"
    return f"weights: {folder}, FP8; {same}{new}"
