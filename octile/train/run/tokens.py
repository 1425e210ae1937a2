"""The tokens of a run or a comparison: prepared in its folder, or those that it began with."""

from __future__ import annotations

import filecmp
from pathlib import Path

from octile.checkpoint.files import GENERATION_CONFIG, copy, remove
from octile.checkpoint.hugging_face import checkpoint_folder
from octile.parallel.ranks import Ranks
from octile.tokenizer import CHAT_TEMPLATE, NAMED_TEMPLATES
from octile.train.config import TrainConfig
from octile.train.data.batches import count_windows
from octile.train.data.corpus import check_source, is_path, is_url
from octile.train.data.examples import is_examples
from octile.train.data.prepare import prepare
from octile.train.data.prepare_examples import prepare_examples
from octile.train.data.token_store import MANIFEST, TokenStore
from octile.train.run.console import RunConsole
from octile.train.step.progress import batch_ramp

MODEL_FILES = CHAT_TEMPLATE, NAMED_TEMPLATES, GENERATION_CONFIG  # that a model may have besides its tokenizer
MAX_PASSES = 4  # that are nearly as good as new text (Muennighoff et al., arXiv 2305.16264)


def check_data(config: TrainConfig) -> None:
    """Refuse data and validation data that cannot be used, without reading a text; two files of one size are compared.

    Raises:
        ValueError: one is examples and the other text, both are the same or one holds the other, both are files with
            the same content, or one is the URL of tokens; or as for `check_source`, which raises the other exceptions.
    """
    if (val_data := config.val_data) is None:
        check_source(config.data)
        return
    if is_url(val_data):
        raise ValueError(f"val_data must be text or examples, not the URL of tokens, {val_data!r}")
    if is_url(config.data):
        raise ValueError(f"val_data must not be given for the tokens of a URL: {config.data!r} has a held-out part")
    check_source(config.data)
    check_source(val_data, "val_data")
    kinds = ["examples" if is_examples(source) else "text" for source in (config.data, val_data)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"val_data {val_data!r} must be {kinds[0]}, as data {config.data!r} is, but it is {kinds[1]}"
            f"{' (one JSON object a line, in a .jsonl file)' if 'examples' in kinds else ''}"
        )
    paths = [Path(source).resolve() for source in (config.data, val_data) if is_path(source)]
    if config.data == val_data or (len(paths) == 2 and any(a.is_relative_to(b) for a, b in (paths, paths[::-1]))):
        raise ValueError(
            f"val_data {val_data!r} must hold nothing of data {config.data!r}, which is trained on: "
            "name another file or folder"
        )
    if len(paths) == 2 and all(path.is_file() for path in paths) and filecmp.cmp(paths[0], paths[1], shallow=False):
        raise ValueError(
            f"val_data {val_data!r} must hold nothing of data {config.data!r}, which is trained on, but the two files "
            "have the same content: name another file"
        )


def prepare_tokens(config: TrainConfig, folder: Path, console: RunConsole) -> TokenStore:
    """Tokenize the configuration's data into a folder, or reuse the tokens there.

    The folder gets the `MODEL_FILES` of the model that the run begins with, too.
    """
    store = _prepare(config, folder, console)
    for name in MODEL_FILES:
        remove(folder / name)  # of a run that has failed in this folder
        if config.init_from is not None and (source := checkpoint_folder(config.init_from) / name).exists():
            copy(source, folder / name)
    return store


def _prepare(config: TrainConfig, folder: Path, console: RunConsole) -> TokenStore:
    if is_examples(config.data):
        return _prepare_examples(config, folder, console)
    with console.stages() as progress:
        store = prepare(
            config.data,
            config.model.vocab_size,
            folder,
            config.sequence_length - 1,  # a window is one token longer than that
            val_source=config.val_data,
            held_out_windows=config.val_sequences,
            tokenizer=None if config.init_from is None else checkpoint_folder(config.init_from),
            progress=progress,
            say=console.print,
        )
    console.print_data(store, config.val_data)
    _print_held_out(config, store, console)
    return store


def _prepare_examples(config: TrainConfig, folder: Path, console: RunConsole) -> TokenStore:
    assert config.init_from is not None
    with console.stages() as progress:
        store = prepare_examples(
            config.data,
            folder,
            config.sequence_length,
            checkpoint_folder(config.init_from),
            val_source=config.val_data,
            held_out_sequences=config.val_sequences,
            progress=progress,
            say=console.print,
        )
    console.print_examples(store, config.model.max_position_embeddings, config.val_data)
    _print_held_out(config, store, console)
    return store


def _print_held_out(config: TrainConfig, store: TokenStore, console: RunConsole) -> None:
    """Say if fewer sequences are held out than a validation is to measure, or it measures a part of `val_data`."""
    windows = count_windows(store.val, config.sequence_length - 1)
    if config.val_data is not None and windows > config.val_sequences:
        console.print(
            f"a validation measures {config.val_sequences:,} of the {windows:,} sequences of val_data: "
            f"--val-sequences {windows} measures all"
        )
    if config.val_data is None and windows < config.val_sequences:
        console.print(
            f"val_sequences is {config.val_sequences:,}, but so little text is held out: {windows:,} are measured"
        )


def open_tokens(config: TrainConfig, folder: Path, resume: bool, console: RunConsole, ranks: Ranks) -> TokenStore:
    """The tokens of a run or a comparison, which rank 0 prepares, and the others open.

    What is resumed reads the tokens that it began with, even if their source has changed.
    """
    if not resume or not ranks.from_first((folder / MANIFEST).exists, bool):
        prepared = ranks.from_first_only(lambda: prepare_tokens(config, folder, console))
        if prepared is not None:
            return prepared
    return TokenStore.open(folder)


def print_passes(config: TrainConfig, store: TokenStore, console: RunConsole) -> None:
    """Say how often a run reads its text, if that is so often that it memorizes it."""
    passes = batch_ramp(config).before(config.steps) / count_windows(store.train, config.sequence_length - 1)
    if passes > MAX_PASSES:
        text = len(store.train)
        more = f"more text (--data packages, --data PATH) or fewer tokens (--tokens {MAX_PASSES * text})"
        advice = "more examples or fewer --steps" if is_examples(config.data) else more
        console.print(
            f"the run reads its {text:,} tokens of text {passes:.1f} times and begins to memorize them after about "
            f"{MAX_PASSES}: use {advice}"
        )


def check_prompt(config: TrainConfig, store: TokenStore) -> None:
    """Refuse a given prompt for the sample that leaves no token of the model's context.

    Raises:
        ValueError: it does.
    """
    length, context = len(store.tokenizer.encode_prompt(config.prompt or "")), config.model.max_position_embeddings
    if length >= context:
        raise ValueError(f"prompt has {length} tokens, which fill the model's context of {context}")
