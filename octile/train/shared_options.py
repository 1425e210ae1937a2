"""What `octile train` and `octile compare` read in the same way: the preset, the model's shape, and YaRN."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from octile import __version__
from octile.models.config import ModelConfig, RopeScaling
from octile.options import Given, Named, Section
from octile.signals import importing
from octile.text import escape_control_characters
from octile.torchrun import own_rank
from octile.train.config import TrainConfig, describe_settings, preset

ModelFile = Annotated[Path | None, Named("--model", "FILE")]
MODEL_SECTIONS = (
    Section("shape of the model", (), ("model",)),
    Section("YaRN, which extends the model's context", (), ("model.rope_scaling",)),
)


def begin_config(given: Given) -> TrainConfig:
    """Return the configuration that a run begins with: that of its preset, or the default one with a given shape.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the preset is unknown, a shape is given, too, or the file is not the configuration of a model.
    """
    given.check_one_of("preset", "model_file")
    name, file = given.get("preset"), given.get("model_file")
    config = preset("tiny" if name is None else name)
    if file is None:
        return config
    model = _read_shape(file)
    return replace(
        config,
        model=model,
        sequence_length=min(config.sequence_length, model.max_position_embeddings),
        indexer_stage="sparse" if model.has_indexer else None,
    )


def _read_shape(file: str) -> ModelConfig:
    """The model of a file, without what the file says about weights that were once stored with it.

    As with `init_from`, the model of a folder with weights has a multi-token prediction layer only if they have one.
    """
    if not file:
        raise ValueError("model_file is empty: name a path")
    try:
        model = replace(ModelConfig.read(file), extra={})
        if not model.num_nextn_predict_layers or not Path(file).is_dir():
            return model
        with importing():
            from octile.checkpoint.hugging_face import has_mtp_weights
            from octile.checkpoint.shards import tensor_names
        names = tensor_names(Path(file))
    except ValueError as error:
        raise ValueError(f"model_file {file!r} is no shape that octile trains: {error}") from None
    if not names or has_mtp_weights(model, names):
        return model
    warnings.warn(
        f"the weights in {file} have no multi-token prediction layer: the model is trained without it "
        "(--model.num-nextn-predict-layers 1 trains one)",
        stacklevel=2,
    )
    return replace(model, num_nextn_predict_layers=0)


def shown_config(given: Given) -> TrainConfig:
    """Return the configuration that a new run begins with, as the help shows it: with the options of YaRN.

    Raises:
        FileNotFoundError, ValueError: as for `begin_config`.
    """
    config = begin_config(given)
    return replace(config, model=with_yarn(config.model))


def with_yarn(model: ModelConfig) -> ModelConfig:
    """Return a model with YaRN, so that there are options for it; if it has none, with the factor 1, which is none."""
    if model.rope_scaling is not None:
        return model
    return replace(
        model, rope_scaling=RopeScaling(factor=1.0, original_max_position_embeddings=model.max_position_embeddings)
    )


def build(given: Given, default: Any) -> Any:
    """Make options that contain a model.

    Args:
        given: what is given.
        default: an instance of the options.

    Raises:
        ValueError: as for `Given.build`, or an option of YaRN has no effect.
    """
    model, vocab_size = default.model, given.get("model.vocab_size")
    if vocab_size and max(model.special_tokens, default=0) >= int(vocab_size):  # training sets them to its tokenizer's
        model = replace(model, bos_token_id=None, eos_token_id=None)
    begun_with = with_yarn(model)
    options = given.build(replace(default, model=begun_with))
    rope = options.model.rope_scaling
    if default.model.rope_scaling is None and rope == begun_with.rope_scaling:
        return replace(options, model=replace(options.model, rope_scaling=None))
    if default.model.rope_scaling is None and rope.factor == 1:
        raise ValueError("model.rope_scaling.factor must be above 1 for YaRN: its other options have no effect with 1")
    options.model.warn_of_yarn()
    return options


def describe_new_run(config: TrainConfig, given: Given, *first: str) -> str:
    """Describe a run in a line: its preset, or where its model is from, the settings in `first`, and what is given."""
    others = {*given.words, "steps"} if "tokens" in given else given.words
    if "init_from" in given:
        return describe_settings(config, ("init_from", "batch_size", "sequence_length", *first), others)
    if "model_file" not in given:
        return describe_settings(config, ("preset", *first), others)
    return f"model {given.get('model_file')}, {describe_settings(config, first, others)}"


def announce(what: str) -> None:
    """Say what a command does before it imports torch, which takes half a minute on a busy machine; rank 0 says it."""
    if not own_rank():
        line = escape_control_characters(f"octile {__version__} {what}").replace("\n", "\\n")  # of a prompt
        print(line, flush=True)
