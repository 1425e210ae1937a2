"""What a run leaves behind: its model, a sample, a summary and a report; and what it leaves behind if it fails."""

from __future__ import annotations

import itertools
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octile.atomic_files import write_json, write_text
from octile.checkpoint.hugging_face import save
from octile.command_text import generate_command, quoted_path
from octile.formats import E4M3
from octile.models.counts import count_parameters
from octile.nn.linear import RecipeHolder
from octile.recipe import BLOCK, OperandFormat
from octile.report.machine import describe_machine, machine
from octile.report.run.memorization import find_memorization
from octile.report.run.metrics import Run, read_run
from octile.report.run.page import write_run_report
from octile.serve.engine.request import Sampling
from octile.serve.engine.text import INCOMPLETE
from octile.serve.generate import generate_from
from octile.text import format_count
from octile.tokenizer import Tokenizer
from octile.train.config import TrainConfig
from octile.train.data.corpus import PYTHON
from octile.train.data.packed_tokens import FIRST, LOSS, PackedTokens
from octile.train.data.token_store import TokenStore
from octile.train.memory.device import is_out_of_memory
from octile.train.run.best_model import BestModel
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from octile.train.run.tokens import MODEL_FILES
from octile.train.trainer import Trainer

SAMPLE_TOKENS = 128
PROMPT = "def "  # of the sample of a run on `stdlib` or `packages`, if none is given
MORE_PROMPT = "class "  # of the command for further texts of such a run
PROMPT_TOKENS = 8  # of a held-out text, with which the sample of a run on other texts begins
READ_TOKENS = 4096  # of the held-out texts, among which a beginning of a text is looked for
NO_PROMPT = (
    "no held-out example has a prompt that the sample could answer: it begins a text; --prompt TEXT gives it one"
)


def stored_format(trainer: Trainer) -> Literal["fp8", "bf16"]:
    """The format of the weights in `model/`, if no guard switches a GEMM until then."""
    formats = trainer.strategy.recipe.formats
    stored = formats and OperandFormat(E4M3, BLOCK, formats.w.scale)
    is_fp8 = formats is not None and formats.w == stored and not _has_layers_in_bf16(trainer)
    return "fp8" if is_fp8 else "bf16"


def finish(trainer: Trainer, best: BestModel, run: RunFolder, store: TokenStore, console: RunConsole) -> None:
    """Write the model with the lowest held-out loss, its sample and the report, and the average after the last step."""
    as_trained = stored_format(trainer)
    files = [store.folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    files += [file for name in MODEL_FILES if (file := store.folder / name).exists()]
    ranks = trainer.ranks
    ranks.at("the results")
    if trainer.ema:
        with trainer.evaluator.averaged():
            _save_whole(trainer, run.model_ema, as_trained, files)
    best.restore()
    _save_whole(trainer, run.model, as_trained, files)
    _free_all_but_weights(trainer)  # the sample reads the model once more
    ranks.from_first(lambda: _write_results(trainer, best, run, store, console))


def _has_layers_in_bf16(trainer: Trainer) -> bool:
    """Whether forward GEMMs are in high precision by exceptions of the recipe, or by guards: no FP8 folder says so."""
    holders = [module for module in trainer.model.modules() if isinstance(module, RecipeHolder)]
    by_guards = any(holder.recipe and "fprop" in holder.recipe.high_precision for holder in holders)
    return by_guards or any("fprop" in gemms for _, gemms in trainer.strategy.recipe.exceptions)


def _free_all_but_weights(trainer: Trainer) -> None:
    """Free captured steps, gradients and moments, after the last step: no other may follow, and no checkpoint."""
    trainer.release_captured()
    trainer.strategy.zero_gradients(trainer.optimizer)
    trainer.optimizer.state.clear()


def _save_whole(trainer: Trainer, folder: Path, weights: Literal["fp8", "bf16"], files: list[Path]) -> None:
    model = trainer.strategy.whole_model()
    trainer.ranks.from_first(lambda: save(model, folder, weights, files))


def _write_results(trainer: Trainer, best: BestModel, run: RunFolder, store: TokenStore, console: RunConsole) -> None:
    prompt = sample_prompt(trainer.config, store)
    if not prompt and trainer.config.prompt is None and store.manifest.packed is not None:
        console.print(NO_PROMPT)
    records = read_run(run.path)
    ema_val_loss = _last_ema_val_loss(records, trainer.steps_done)
    _write_summary(trainer, best, run, store, prompt, ema_val_loss)
    sample = sample_text(trainer, store, run, prompt)
    write_text(run.sample_file, sample)
    report = write_run_report(run.path)
    if memorization := find_memorization(records):
        console.print(str(memorization))
    more = _more(trainer.config, store, run, prompt)
    console.print_results(run, sample, report, best, trainer.steps_done, more, ema_val_loss)


def _more(config: TrainConfig, store: TokenStore, run: RunFolder, prompt: str) -> str:
    """A command for further texts: a server of chats for examples, else one that continues a text.

    Args:
        config, store, run: those of the run.
        prompt: that of its sample.
    """
    if store.manifest.packed is not None:
        return f"octile serve {quoted_path(run.path)}"
    if not prompt or (config.prompt is None and config.data in PYTHON):
        prompt = MORE_PROMPT
    return generate_command(run.path, prompt)


def _last_ema_val_loss(records: Run, steps: int) -> float | None:
    """The held-out loss of the averaged weights after the last of the steps; None if it was not measured."""
    measured, values = records.series("ema_val_loss")
    is_known = len(measured) and measured[-1] == steps and np.isfinite(values[-1])
    return float(values[-1]) if is_known else None


def _write_summary(
    trainer: Trainer, best: BestModel, run: RunFolder, store: TokenStore, prompt: str, ema_val_loss: float | None
) -> None:
    counts, m = count_parameters(trainer.config.model), store.manifest
    measured_on = machine(trainer.device)
    summary = {
        "preset": trainer.config.preset,
        "recipe": trainer.config.recipe,
        "parameters": counts.total,
        "active_parameters": counts.active,
        **({"bytes_per_token": m.bytes_per_token} if m.packed is None else {"examples": _describe_examples(store)}),
        **({"held_out_share": m.held_out_share} if trainer.config.val_data is None else {}),
        "held_out_text": f"{m.tokens['val']:,} tokens in {format_count(m.documents['val'], m.unit.removesuffix('s'))}",
        "machine": describe_machine(measured_on),
        "measured_on": measured_on,
        "prompt": prompt,
        "command": run.read_config().full_command,  # the trainer of a resumed run has no init_from
        **({} if best.initial_val_loss is None else {"initial_val_loss": best.initial_val_loss}),
        **({"model_step": best.best.step, "model_val_loss": best.best.val_loss} if best.best else {}),
        **({} if ema_val_loss is None else {"ema_val_loss": ema_val_loss}),
    }
    if trainer.steps_done < trainer.config.steps:
        summary["stopped_after_validations"] = trainer.config.patience
    write_json(run.summary_file, summary)


def _describe_examples(store: TokenStore) -> dict[str, int]:
    """What became of the examples of a run: texts of both parts, and tokens to train on."""
    m, p = store.manifest, store.manifest.packed
    assert p is not None
    return {
        "texts": sum(m.documents.values()),
        "truncated": p.truncated,
        "left_out_without_a_loss": sum(m.skipped.values()),
        "tokens": m.tokens["train"],
        "tokens_with_a_loss": p.labels["train"],
        "padding": p.padding["train"],
    }


def sample_prompt(config: TrainConfig, store: TokenStore) -> str:
    """The prompt of the sample: that of the configuration, or one that the data suggest.

    For `stdlib` and `packages` it is PROMPT, for other texts the beginning of a held-out one, and for examples the
    prompt of the first held-out example that has one. An example that has a loss from its first token on has no prompt;
    nor has one for the sample whose text the tokenizer encodes otherwise, or which leaves no half of the context.

    Returns:
        the prompt; "" if no held-out example has one.
    """
    val = store.val
    if config.prompt is not None:
        return config.prompt
    if not isinstance(val, PackedTokens):
        return PROMPT if config.data in PYTHON else _first_words(store.tokenizer, val[:READ_TOKENS].tolist())
    has_loss, longest = val.marks & LOSS != 0, config.model.max_position_embeddings // 2
    begins = (val.marks & FIRST != 0).nonzero()[0]
    for begin, end in itertools.pairwise([*begins.tolist(), len(val)]):
        losses = has_loss[begin:end]  # padding has none
        if losses.any() and (text := _prompt_text(store.tokenizer, val.tokens[begin:end], losses, longest)):
            return text
    return ""


def _first_words(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The first line of some words of a document that is not blank, of the first that has one; "" if none has."""
    for is_special, document in itertools.groupby(tokens, tokenizer.special_tokens.__contains__):
        words = "" if is_special else tokenizer.decode([*itertools.islice(document, PROMPT_TOKENS)])
        if text := words.rstrip(INCOMPLETE).strip():
            return text.splitlines()[0]
    return ""


def _prompt_text(tokenizer: Tokenizer, tokens: npt.NDArray[Any], has_loss: npt.NDArray[np.bool_], longest: int) -> str:
    """The text before the first token with a loss; "" if there is none that is encoded to the same tokens."""
    prompt, prefix = tokens[: int(has_loss.argmax())].tolist(), tokenizer.prefix
    if len(prompt) > longest:
        return ""
    text = tokenizer.decode(prompt[len(prefix) :] if prompt[: len(prefix)] == prefix else prompt)
    return text if tokenizer.encode_prompt(text) == prompt else ""


def sample_text(trainer: Trainer, store: TokenStore, run: RunFolder, prompt: str) -> str:
    """The prompt and a sampled continuation by the model that the run has written, as `octile generate` continues it.

    Greedy decoding of a model after few steps would repeat itself. If the sample fails, the text says why: the model is
    written, and the report does not depend on it.
    """
    available = trainer.config.model.max_position_embeddings - len(store.tokenizer.encode_prompt(prompt))
    sampling = Sampling(min(SAMPLE_TOKENS, available), temperature=0.8, top_p=0.95)
    try:
        return prompt + "".join(generate_from(run.path, prompt, sampling, trainer.device))
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # the frames hold the model
        device = trainer.device.type
        reason = f"out of memory on the {device}" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        return f"There is no sample: {reason}"


@contextmanager
def unmarked_on_failure(run: RunFolder, steps_done: Callable[[], int]) -> Iterator[None]:
    """Leave no run behind if its first step fails, so that the corrected command can use the same folder.

    The prepared data stay. A non-finite loss or lack of memory is a result: the run and its report stay.
    """
    try:
        yield
    except (FloatingPointError, MemoryError):
        raise
    except Exception:
        if steps_done() == 0:
            run.config_file.unlink(missing_ok=True)
            run.metrics_file.unlink(missing_ok=True)
            run.loggers_file.unlink(missing_ok=True)
            for folder in (run.tensorboard, run.wandb):
                shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def report_on_failure(run: RunFolder, console: RunConsole) -> Iterator[None]:
    """Write the report of the steps so far if a non-finite loss or lack of memory ends the run."""
    try:
        yield
    except (FloatingPointError, MemoryError):
        console.print(f"report: {write_run_report(run.path)}")
        raise
