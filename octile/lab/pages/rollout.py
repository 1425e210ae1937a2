"""`octile lab rollout`: whether serving and training give a token the same probability, and where they first differ."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from octile.checkpoint.files import check_output_file
from octile.lab_options.rollout import Mode, Options
from octile.report.console import Console, progress_bar
from octile.report.table import Table, screen_table
from octile.text import format_count

if TYPE_CHECKING:
    from octile.lab.rollout import Agreement, Difference, DraftCounts, Text
    from octile.models.config import ModelConfig
    from octile.serve.engine.config import CacheConfig, EngineConfig
    from octile.serve.weights.load import Folder
    from octile.serve.weights.weights import ServedWeights

MAX_SEARCHED = 8  # texts in which the first block that differs is looked for
OPTION_OF_FIELD = {  # of the engine's options that an error may name
    "engine.max_batch": "--max-batch",
    "engine.max_step_tokens": "--max-step-tokens",
    "engine.n_drafts": "--drafts",
    "engine.exact": "--mode exact",
    "engine.batch_invariant": "--mode batch_invariant",
}


def run(options: Options) -> None:
    """Sample texts with the engine, compare them, and show how far they agree and where they first differ.

    Raises:
        FileNotFoundError, ValueError: the model, its tokenizer or the text cannot be read, or an option does not fit
            the model.
        InexactError: the engine is in exact mode, and they differ.
    """
    from octile.checkpoint.hugging_face import load
    from octile.lab.operators import record
    from octile.lab.pages.preflight import read_tokens
    from octile.lab.rollout import InexactError, compare, draw_prompts, find_difference, first_to_search
    from octile.parallel.device import pick_device
    from octile.serve.runner.model_runner import ModelRunner
    from octile.serve.weights.load import Folder

    folder, device = Folder.open(options.model), pick_device("auto")
    if options.record is not None:
        check_output_file("record", options.record)
    room = folder.model.max_position_embeddings - options.new_tokens
    if room < 1:
        raise ValueError(
            "new_tokens must be less than the model's max_position_embeddings, "
            f"{folder.model.max_position_embeddings}, not {options.new_tokens}: a text begins with a prompt"
        )
    with _naming_options():
        mode, engine, cache = _configure(options, folder, device)
    count = -(-options.tokens // options.new_tokens)
    tokens = read_tokens(options.model, options.text, 20_000).tolist()
    prompts = draw_prompts(tokens, count, options.seed, longest=room)
    texts, weights, drafts = _sample(options, folder, device, engine, cache, prompts)
    gc.collect()  # the engine's runner with its cache and CUDA graphs, before there is a model in high precision
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = load(options.model, device=device)
    with progress_bar("training", count, options.json) as advance:
        found = compare(model, texts, advance)
    if options.record is not None:
        record(model, texts).save(options.record)
    n_pages = -(-max(len(text.prompt) + len(text.tokens) for text in texts) // ModelRunner.page_size)
    how = cache.format, 0, engine.batch_invariant
    without_graphs = ModelRunner(weights, n_pages, *how, max_step_tokens=0)
    searched = first_to_search(texts, MAX_SEARCHED)
    with progress_bar("searching", len(searched), options.json) as advance:
        difference = find_difference(model, without_graphs, texts, searched, advance)
    if options.json:
        rows = [asdict(each) for each in found]
        parts = {"difference": difference and asdict(difference), "drafts": drafts and asdict(drafts)}
        print(json.dumps({"mode": mode, "agreement": rows, **parts}, indent=1))
    else:
        console = Console()
        console.print_line(f"engine:   {mode}, {engine.max_batch} texts at once, {format_count(count, 'text')}")
        if drafts is not None:
            console.print_line(f"drafts:   {describe_drafts(drafts)}")
        console.print(screen_table(table(found)))
        console.print_line(describe(found, difference))
        if options.record is not None:
            console.print_line(f"recorded: {options.record}; octile lab recompute {options.model} {options.record}")
    if mode == "exact" and (difference or any(each.equal < each.tokens for each in found)):
        raise InexactError(f"{options.model} is served in exact mode, but not with the bits of training")


@contextmanager
def _naming_options() -> Iterator[None]:
    """Context manager in which a ValueError names options of this command instead of fields of the engine's."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for field, option in OPTION_OF_FIELD.items():
            message = message.replace(field, option)
        raise ValueError(message) from None


def _configure(options: Options, folder: Folder, device: torch.device) -> tuple[Mode, EngineConfig, CacheConfig]:
    """Return the mode, and the options of the engine and of its cache but for its size."""
    from octile.serve.engine.config import CacheConfig, EngineConfig
    from octile.serve.engine.drafts import check_can_draft
    from octile.serve.weights.load import usual_cache_format

    check_can_draft(options.drafts, folder.model.num_nextn_predict_layers > 0, "engine.n_drafts")
    mode: Mode = options.mode or ("exact" if folder.is_exact() else "default")
    engine = EngineConfig(
        options.max_batch,
        options.max_step_tokens,
        options.drafts,
        batch_invariant=mode == "batch_invariant",
        exact=mode == "exact",
    )
    engine, cache = folder.exact_options(engine, CacheConfig(), None, device)
    return mode, engine, replace(cache, format=cache.format or usual_cache_format(device))


def _sample(
    options: Options,
    folder: Folder,
    device: torch.device,
    engine_config: EngineConfig,
    cache: CacheConfig,
    prompts: Sequence[Sequence[int]],
) -> tuple[list[Text], ServedWeights, DraftCounts | None]:
    """Continue prompts with an engine whose cache has the pages that they need, and no more.

    Returns:
        the texts, the engine's weights, and what became of its drafts, if it makes any.
    """
    from octile.lab.rollout import DraftCounts, count_pages, prefill, roll_out

    n_pages = count_pages(prompts, options.new_tokens, options.max_batch)
    layers = folder.model if options.drafts else replace(folder.model, num_nextn_predict_layers=0)
    cache = replace(cache, gib=n_pages * _bytes_per_page(layers, cache) / 2**30)
    engine, runner = folder.load(device, engine_config, cache)
    with progress_bar("sampling", len(prompts) * options.new_tokens, options.json) as advance:
        texts = roll_out(engine, prompts, options.new_tokens, options.seed, advance)
    drafts = DraftCounts.of(engine.stats()) if options.drafts else None
    with progress_bar("prefilling", len(prompts), options.json) as advance:
        prefill(runner, texts, advance)
    runner.close()
    return texts, runner.forward.weights, drafts


def _bytes_per_page(config: ModelConfig, cache: CacheConfig) -> int:
    """Return the bytes of a page of the cache in all layers of a configuration, for the longest texts."""
    from octile.models.meta import meta_model
    from octile.serve.runner.model_runner import ModelRunner

    assert cache.format is not None
    return ModelRunner.bytes_per_page(meta_model(config), cache.format, config.max_position_embeddings)


def table(found: Sequence[Agreement]) -> Table:
    """Return the agreement of prompts and of decoded tokens as a table."""
    columns = ("tokens", "compared", "equal bits", "mean |Δ|, nats", "largest |Δ|", "KL, nats a token")
    rows = [
        (
            each.kind,
            f"{each.tokens:,}",
            f"{each.equal:,}",
            f"{each.mean:.2g}",
            f"{each.largest:.2g}",
            "–" if each.kl is None else f"{each.kl:.2g}",
        )
        for each in found
    ]
    return Table(columns, rows)


def describe_drafts(drafts: DraftCounts) -> str:
    """Say which share of the draft tokens was accepted, and how many tokens a step has added to a text."""
    per_step = f"{drafts.tokens_per_step:.2f} tokens per step of a text"
    if drafts.acceptance_rate is None:
        return f"none was verified, {per_step}"
    return f"{drafts.acceptance_rate:.1%} of {drafts.verified:,} accepted, {per_step}"


def describe(found: Sequence[Agreement], difference: Difference | None) -> str:
    """Say whether all log-probabilities are equal, or where the first value differs."""
    different = sum(each.tokens - each.equal for each in found)
    summary = f"{different:,} log-probabilit{'y differs' if different == 1 else 'ies differ'}"
    if not different:
        summary = "Serving and training agree in all bits of all log-probabilities"
    if difference is None and different:
        searched = f"none in the texts that were read alone, at most {MAX_SEARCHED}"
        return (
            f"{summary}, though {searched}: the bits depend on what else is in the batch, or the log-softmax differs."
        )
    if difference is None:
        return f"{summary}, and of what all blocks compute of the first texts."
    if not different:
        summary += ", but not of what blocks compute"
    n_values, n_all = difference.values
    where = f"the output of {difference.where}" if difference.where.startswith("block") else f"the {difference.where}"
    return (
        f"{summary}. The first difference is in text {difference.text}, position {difference.position}: "
        f"{n_values:,} of {n_all:,} values of {where}, by up to {difference.largest:.2g}."
    )
