"""`octile lab rollout`: whether serving and training give a token the same probability, and where they first differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from octile.options import Positional
from octile.report.console import Console
from octile.report.table import Table, screen_table
from octile.text import format_count
from octile.validation import Range, check_fields

if TYPE_CHECKING:
    from octile.lab.rollout import Agreement, Difference

LOOKED_INTO = 8  # texts, if no log-probability differs
Mode = Literal["exact", "batch_invariant", "default"]


@dataclass(frozen=True)
class Options:
    """Compare the log-probabilities of a served model with those of a training forward pass, token by token.

    Attributes:
        model: a run folder, or the Hugging Face folder of a DeepSeek model.
        mode: how the engine computes: exact, batch_invariant or default. If not given, exact for weights of the recipe
            exact, and default for others.
        tokens: decoded tokens to compare, at least; each text has as many as new_tokens says.
        new_tokens: decoded tokens of a text.
        drafts: draft tokens per request and step.
        max_batch: texts that the engine decodes at once.
        max_step_tokens: tokens of one forward pass of the engine; longer prompts are prefilled in chunks.
        text: the text that prompts are cut from: a text file, a folder, hf:NAME, stdlib or packages.
        seed: determines prompts and samples.
        json: print JSON.

    Raises:
        TypeError, ValueError: an option has another type or is outside its range.
    """

    model: Positional[Path]
    mode: Mode | None = None
    tokens: Annotated[int, Range(at_least=1, at_most=2**31)] = 2000
    new_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 64
    drafts: Annotated[int, Range(at_least=0, at_most=7)] = 0
    max_batch: Annotated[int, Range(at_least=1, at_most=4096)] = 32
    max_step_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 512
    text: str = "stdlib"
    seed: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def run(options: Options) -> None:
    """Sample texts with the engine, compare them, and show how far they agree and where they first differ.

    Raises:
        FileNotFoundError, ValueError: the model, its tokenizer or the text cannot be read, or an option does not fit
            the model.
    """
    from octile.checkpoint.hugging_face import load
    from octile.lab.pages.preflight import read_tokens
    from octile.lab.rollout import compare, draw_prompts, find_difference, prefill, roll_out
    from octile.parallel.device import pick_device
    from octile.serve.engine.config import CacheConfig, EngineConfig
    from octile.serve.runner.model_runner import ModelRunner
    from octile.serve.weights.load import Folder

    folder, device = Folder.open(options.model), pick_device("auto")
    mode = options.mode or ("exact" if folder.is_exact() else "default")
    engine_config = EngineConfig(
        options.max_batch,
        options.max_step_tokens,
        options.drafts,
        batch_invariant=mode == "batch_invariant",
        exact=mode == "exact",
    )
    engine_config, cache = folder.exact_options(engine_config, CacheConfig(), None, device)
    count = -(-options.tokens // options.new_tokens)
    prompts = draw_prompts(read_tokens(options.model, options.text, 20_000).tolist(), count, options.seed)
    engine, runner = folder.load(device, engine_config, cache)
    texts = roll_out(engine, prompts, options.new_tokens, options.seed)
    prefill(runner, texts)
    model = load(options.model, device=device)
    found = compare(model, texts)
    differ = any(each.equal < each.tokens for each in found)
    n_pages = -(-max(len(text.prompt) + len(text.tokens) for text in texts) // ModelRunner.page_size)
    how = cache.format, 0, engine_config.batch_invariant
    without_graphs = ModelRunner(runner.forward.weights, n_pages, *how, max_step_tokens=0)
    difference = find_difference(model, without_graphs, texts if differ else texts[:LOOKED_INTO])
    if options.json:
        rows = [asdict(each) for each in found]
        print(json.dumps({"mode": mode, "agreement": rows, "difference": difference and asdict(difference)}, indent=1))
        return
    console = Console()
    console.print_line(f"engine:   {mode}, {engine.config.max_batch} texts at once, {format_count(count, 'text')}")
    console.print(screen_table(table(found)))
    console.print_line(describe(found, difference))


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


def describe(found: Sequence[Agreement], difference: Difference | None) -> str:
    """Say whether all log-probabilities are equal, or where the first value differs."""
    different = sum(each.tokens - each.equal for each in found)
    summary = f"{different:,} log-probabilit{'y differs' if different == 1 else 'ies differ'}"
    if not different:
        summary = "Serving and training agree in all bits of all log-probabilities"
    if difference is None and different:
        return f"{summary}, though none where a text is read alone: the bits depend on what else is in the batch."
    if difference is None:
        return f"{summary}, and of what all blocks compute of the first texts."
    n_values, n_all = difference.values
    where = f"the output of {difference.where}" if difference.where.startswith("block") else f"the {difference.where}"
    return (
        f"{summary}. The first difference is in text {difference.text}, position {difference.position}: "
        f"{n_values:,} of {n_all:,} values of {where}, by up to {difference.largest:.2g}."
    )
