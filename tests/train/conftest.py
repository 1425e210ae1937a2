"""Shared by the tests of training: a model of a few thousand parameters and a text of 200 kB; a run takes a second."""

import argparse
import hashlib
import inspect
import io
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octile.kernels import cpu as kernels
from octile.models.config import ModelConfig
from octile.recipe import Recipe
from octile.train import trainer
from octile.train.compare import compare
from octile.train.config import OptimConfig, TrainConfig
from octile.train.data.prepare import prepare
from octile.train.data.token_store import TokenStore
from octile.train.evaluation.evaluator import Evaluator
from octile.train.memory import check
from octile.train.memory import cpu as memory
from octile.train.memory.cpu import CpuNeed
from octile.train.run import results
from octile.train.run.console import RunConsole
from octile.train.step import launched
from octile.train.trainer import Trainer
from tests.report.conftest import draw_no_figures

MICRO = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    max_position_embeddings=128,
    rope_scaling=None,
    initializer_range=0.02,
)


# each format of theirs, and each kind of scales, loss scale and optimizer state, is that of another recipe
FURTHER_RECIPES = {
    "float32", "per_tensor", "delayed", "hybrid_e5m2", "fp16_loss_scaling", "smooth_swiglu", "mxfp8", "wgrad_x_blocks",
}  # fmt: skip


STATELESS_RECIPES = {"bf16", "int8_tiles"}  # with no state but weights and moments, as deepseek_v3


def every_recipe(
    is_tested: Callable[[Recipe], bool] = lambda recipe: True, further: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Test with each recipe for which `is_tested` is true, of those that `MICRO` takes.

    `FURTHER_RECIPES` and the further ones are exhaustive.
    """
    recipes = [recipe for recipe in map(Recipe.named, Recipe.names()) if not recipe.batch_invariant]
    names = [recipe.name for recipe in recipes if is_tested(recipe)]
    marks = [[pytest.mark.exhaustive] if name in {*FURTHER_RECIPES, *further} else [] for name in names]
    return pytest.mark.parametrize("recipe", [pytest.param(n, marks=m) for n, m in zip(names, marks, strict=True)])


def write_no_report(patch: pytest.MonkeyPatch) -> None:
    """Have runs and comparisons write no pictures and no sample, and count no scales of tiles.

    Pictures and a sample take longer than their steps, and the scales of each validation as long as two steps.
    """
    patch.setattr(Evaluator, "tile_scales", lambda self: {})
    patch.setattr(results, "write_run_report", lambda folder: folder / "report.html")
    patch.setattr(results, "sample_text", lambda *_: "")
    patch.setattr(compare, "write_compare_report", lambda folder, result: folder / "report.html")


def write_short_report(patch: pytest.MonkeyPatch) -> None:
    """Have runs write a report whose figures are empty, and a sample of 4 tokens."""
    draw_no_figures(patch)
    patch.setattr(results, "SAMPLE_TOKENS", 4)


ESTIMATES: dict[str, CpuNeed] = {}  # by all that they depend on


def estimate_once(config: TrainConfig, ranks: Sequence[int] = (0,)) -> CpuNeed:
    """Estimate the memory of runs with the same settings once in all processes: it takes as long as three steps."""
    optim = config.optim.name, config.optim.ema_decay
    sizes = config.batch_size, config.micro_batches, config.sequence_length, *optim
    machine = kernels.can_multiply(), memory.MAX_TOKENS  # which tests change
    key = repr((config.load_recipe(), config.model, config.parallel, config.indexer_stage, *sizes, ranks, *machine))
    if key not in ESTIMATES:
        file = Path(os.environ["ESTIMATES_OF_TESTS"], hashlib.sha256(key.encode()).hexdigest())
        if not file.exists():
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(memory.estimate_need(config, ranks)))
            unfinished.rename(file)
        ESTIMATES[key] = pickle.loads(file.read_bytes())
    return ESTIMATES[key]


def collect_steps_by(patch: pytest.MonkeyPatch, n: int) -> None:
    """Have the host collect n late steps at a time."""
    for module in (launched, trainer):
        patch.setattr(module, "COLLECT_EVERY", n)


def estimate_memory_once(patch: pytest.MonkeyPatch) -> None:
    """Have runs of the same settings estimate their memory once."""
    patch.setattr(check, "estimate_need", estimate_once)


@pytest.fixture(autouse=True)
def estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test's runs of the same settings estimate their memory once; forked processes call the function."""
    estimate_memory_once(monkeypatch)


@pytest.fixture(autouse=True)
def no_report() -> Iterator[pytest.MonkeyPatch]:
    """Have a test's runs write no report and no sample, and count no scales of tiles; `undo` has them do so."""
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        yield patch


@pytest.fixture
def short_report(no_report: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test's runs write a report whose figures are empty, and a sample of 4 tokens."""
    no_report.undo()
    write_short_report(monkeypatch)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of text: the source of argparse and parts of it."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "argparse.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    for part in range(8):
        (folder / f"part{part}.txt").write_text(inspect.getsource(argparse)[part * 4000 :][:4000], encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def store(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return prepare(text, MICRO.vocab_size, tmp_path_factory.mktemp("store"), 31, held_out_windows=4)


def silent_console(width: int = 400) -> RunConsole:
    """Make a console whose output is read by `console.console.file.getvalue()`."""
    return RunConsole(Console(file=io.StringIO(), width=width))


def micro(**changes) -> TrainConfig:
    """Make the configuration of a run of the micro model, with `changes`; under `exact` its experts are wider."""
    model = replace(MICRO, moe_intermediate_size=128) if changes.get("recipe") == "exact" else MICRO
    settings = {
        "recipe": "deepseek_v3",
        "steps": 6,
        "checkpoint_every": 2,
        "validate_every": 3,
        "batch_size": 4,
        "sequence_length": 32,
        "val_sequences": 4,
        "device": "cpu",
        "model": model,
        "optim": OptimConfig(lr=3e-3),
    }
    return TrainConfig(**{**settings, **changes})


def micro_bf16(**changes) -> TrainConfig:
    """Make the configuration of `micro` without quantization, in half the time a step, for what no recipe changes.

    Its recipe has, as deepseek_v3, no state but weights and moments.
    """
    return micro(**{"recipe": "bf16", **changes})


@pytest.fixture
def new_trainer(store: TokenStore):
    return lambda **changes: Trainer(micro(**changes), store, torch.device("cpu"))
