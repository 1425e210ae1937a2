"""Trainers on the ranks of a pipeline compared with one process, for test_pipelined.py."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from octile.checkpoint import DistributedCheckpoints, ShardedCheckpoint, load_checkpoint, save_checkpoint
from octile.checkpoint.hugging_face import save
from octile.nn.delayed_scaling import amax_histories
from octile.nn.linear import BatchInvariantHead
from octile.parallel.ranks import Ranks, join, leave
from octile.recipe import Recipe
from octile.train.config import OptimConfig, ParallelConfig, TrainConfig
from octile.train.data.token_store import TokenStore
from octile.train.memory.saved_activations import saving_activations
from octile.train.run.best_model import BestModel
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.run.deterministic import deterministic
from octile.train.step.captured import WARM_UP_STEPS
from octile.train.strategy import pipelined, single
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, micro
from tests.train.strategy.rank_cases import (
    EXACT,
    SLOW,
    check_close,
    check_close_losses,
    check_initial_loss,
    check_same_run,
    check_same_state,
    device_of,
    steps,
    steps_of_one_process,
)
from tests.worlds import run_cases

MODEL = replace(MICRO, num_hidden_layers=4, num_nextn_predict_layers=1)  # a dense layer, then mixtures
SETTINGS = {"recipe": "float32", "steps": 40, "batch_size": 8, "micro_batches": 4, "val_sequences": 3, "model": MODEL}
AVERAGED = replace(micro().optim, ema_decay=0.9)
SCHEDULES = ("gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev", "chimera")


def trainers(store: TokenStore, ranks: Ranks, schedule: str = "1f1b", dp: int = 1, ep: int = 1, **changes):
    """The same run on this rank alone, and on all ranks."""
    return of_one_process(store, ranks, **changes), of_ranks(store, ranks, schedule, dp, ep, **changes)


def of_one_process(store: TokenStore, ranks: Ranks, **changes) -> Trainer:
    """A run on this rank alone."""
    return Trainer(settings(**changes), store, device_of(ranks))


def of_ranks(store: TokenStore, ranks: Ranks, schedule: str = "1f1b", dp: int = 1, ep: int = 1, **changes) -> Trainer:
    """A run on all ranks."""
    config = replace(settings(**changes), parallel=ParallelConfig(dp, ep, ranks.size // dp, schedule))
    return Trainer(config, store, device_of(ranks), ranks=ranks)


def settings(**changes) -> TrainConfig:
    return micro(**{**SETTINGS, **changes})


@cache
def run_of_one_process(ranks: Ranks, folder: Path) -> tuple[Trainer, list[dict]]:
    """What every schedule must equal: rank 0's trainer on a CPU after a few steps, and their measurements."""
    alone = Trainer(settings(optim=AVERAGED), TokenStore.open(folder), torch.device("cpu"))
    return alone, steps_of_one_process(ranks, alone)


def check_equal_run(store: TokenStore, ranks: Ranks, schedule: str, dp: int = 1, ep: int = 1) -> None:
    """Losses, norms, loads, held-out losses and the state are those of one process."""
    alone, expected = run_of_one_process(ranks, store.folder)
    own = of_ranks(store, ranks, schedule, dp, ep, optim=AVERAGED)
    lines = steps(own)
    if dp == 1:
        assert lines[0]["loss"] == expected[0]["loss"]
        assert lines[0]["mtp_loss"] == expected[0]["mtp_loss"]
    check_close(lines, expected, **EXACT)
    check_same_state(own, alone)


def check_moved_run(
    store: TokenStore, ranks: Ranks, schedule: str, dp: int = 1, ep: int = 1, optim: OptimConfig = AVERAGED
) -> None:
    """A checkpoint with a best model goes from one process to the pipeline and back, which continue alike."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    alone, own = trainers(store, ranks, schedule, dp, ep, optim=optim, recipe="delayed", val_sequences=2)
    steps_of_one_process(ranks, alone, 2)
    tensors, state = alone.state()
    best = BestModel(alone.model)
    best.update(1, 1.0)
    best_tensors, best_state = best.state(2)
    single = ranks.from_first(
        lambda: save_checkpoint(folder / "single", 2, tensors | best_tensors, state | best_state), Path
    )
    checkpoint = ShardedCheckpoint(single)
    own.load(own.strategy.layout.own_rows(checkpoint), checkpoint.state)
    BestModel(own.model).load(own.strategy.layout.own_rows(checkpoint, best=True), checkpoint.state, 2)
    same, of_alone = own.strategy.layout.whole(own.state()[0]), alone.state()[0]
    if ranks.is_first:
        assert same.keys() == of_alone.keys()
        assert [name for name, tensor in of_alone.items() if not torch.equal(same[name], tensor)] == []
    check_close(steps(own, 1), steps_of_one_process(ranks, alone, 1), rtol=2e-2, atol=0.0)
    checkpoints = DistributedCheckpoints(folder / "sharded")
    tensors, state = own.state()
    checkpoints.save(3, own.strategy.layout.chunks(tensors), state)
    after = steps(own, 1)  # while it is written
    again = of_one_process(store, ranks, optim=optim, recipe="delayed")
    again.load(*load_checkpoint(checkpoints.latest()))
    check_close(after, steps_of_one_process(ranks, again, 1), rtol=2e-2, atol=0.0)
    checkpoints.close()
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_resumed_run(store: TokenStore, ranks: Ranks, schedule: str) -> None:
    """A run that is resumed has the bits of one that goes on, on each rank."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    model = replace(MODEL, num_hidden_layers=2 * ranks.size)  # one of each stage of a folded pipeline
    changes = {"recipe": "deepseek_v3", "optim": AVERAGED, "model": model, "micro_batches": 8}
    own, again = (of_ranks(store, ranks, schedule, **changes) for _ in range(2))
    steps(own, 1)
    checkpoints = DistributedCheckpoints(folder)
    tensors, state = own.state()
    checkpoints.save(1, own.strategy.layout.chunks(tensors), state)
    straight = steps(own, 2)
    checkpoint = ShardedCheckpoint(checkpoints.latest())
    again.load(again.strategy.layout.own_rows(checkpoint), checkpoint.state)
    check_same_run(again, steps(again, 2), own, straight)
    checkpoints.close()
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_differing_copies(store: TokenStore, ranks: Ranks) -> None:
    """A checkpoint is not written if the copies of a parameter differ, of which it would have one."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    own = of_ranks(store, ranks, "dualpipe")
    checkpoints, best = RunCheckpoints(str(folder), ranks), BestModel(own.model)
    steps(own, 1)
    checkpoints.save(own, best, own.config)
    steps(own, 1)
    if not ranks.is_first:
        with torch.no_grad():
            own.model.model.norm.weight[3] += 1e-6
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight of stage 1, on ranks 0 and 1 of the pipeline$"):
        checkpoints.save(own, best, own.config)
    checkpoints.close()
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_fp8(store: TokenStore, ranks: Ranks, recipe: str, schedule: str) -> None:
    """Without data parallelism the tiles are those of one process, and so are the first losses, bit for bit."""
    alone, own = trainers(store, ranks, schedule, recipe=recipe)
    check_initial_loss(ranks, alone, own)
    lines, expected = steps(own, 2), steps_of_one_process(ranks, alone, 2)
    assert lines[0]["loss"] == expected[0]["loss"]
    check_close(lines, expected, rtol=2e-2, atol=0.0)
    of_alone = ranks.from_first(lambda: alone.evaluator.validate()["val_loss"], float)
    assert own.evaluator.validate()["val_loss"] == pytest.approx(of_alone, rel=1e-3)
    own.strategy.check_copies()
    names = set(amax_histories(own.model))
    histories = {name: h.amax_OH.tolist() for name, h in amax_histories(own.model).items()}
    for of_rank in ranks.gather(histories, dict[str, list[list[float]]]):
        assert all(of_rank[name] == amax_histories(own.model)[name].amax_OH.tolist() for name in names & of_rank.keys())


def check_measurements(store: TokenStore, ranks: Ranks) -> None:
    """Losses of tokens are those of one process bit for bit; scales are counted on all stages."""
    alone, own = trainers(store, ranks, "dualpipe", recipe="deepseek_v3")
    windows = alone.batches.batch(0)
    for of_windows in (None, windows[:5]):
        assert torch.equal(own.evaluator.token_losses(of_windows), alone.evaluator.token_losses(of_windows))
    assert own.evaluator.validate() == alone.evaluator.validate()
    found, expected = own.evaluator.tile_scales(), alone.evaluator.tile_scales()
    assert {operand: set(h) for operand, h in found.items()} == {operand: set(h) for operand, h in expected.items()}
    assert sum(found["x"]["count"]) > 3 * sum(expected["x"]["count"])  # of four windows
    assert all(p.grad is None for p in own.model.parameters())


def check_whole_model(store: TokenStore, ranks: Ranks, schedule: str) -> None:
    """Rank 0 collects the layers of all ranks."""
    alone, own = trainers(store, ranks, schedule, recipe="delayed")
    alone.model.load_state_dict(alone.strategy.whole_model().state_dict())
    model = own.strategy.whole_model()
    if not ranks.is_first:
        assert model is own.model
        return
    expected = alone.model.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].cpu()) for name, tensor in model.state_dict().items())
    assert amax_histories(model).keys() == amax_histories(alone.model).keys()
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}  # a GPU may have no room


def check_memory_of_whole_model(store: TokenStore, ranks: Ranks) -> None:
    """Rank 0 collects the whole model without a second copy of it, and without its random initial weights."""
    own = of_ranks(store, ranks)
    allocated = []
    seen = own.strategy.layout.whole

    def whole(tensors):
        found = seen(tensors)
        allocated.extend(t.data_ptr() for t in found.values())
        return found

    own.strategy.layout.whole = whole
    model = own.strategy.whole_model()
    if ranks.is_first:
        assert {p.data_ptr() for p in model.parameters()} <= {*allocated}


def check_initial_weights(store: TokenStore, ranks: Ranks) -> None:
    """A run begins with the weights of a folder, of which each rank has those of its stages."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    begun = of_one_process(store, ranks)
    steps_of_one_process(ranks, begun, 1)
    ranks.from_first(lambda: save(begun.model, folder, "bf16"))
    alone, own = trainers(store, ranks, init_from=folder)
    assert steps(own, 1)[0]["loss"] == steps_of_one_process(ranks, alone, 1)[0]["loss"]
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_stored_scales(store: TokenStore, ranks: Ranks) -> None:
    """The whole model has the scales of all layers in the folder that it began with, to store what has not changed."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    begun = of_one_process(store, ranks)
    ranks.from_first(lambda: save(begun.model, folder, "fp8"))
    alone, own = trainers(store, ranks, init_from=folder)
    expected, found = alone.model.stored_scales, own.strategy.whole_model().stored_scales
    if ranks.is_first:
        assert found.keys() == expected.keys() != set()
        assert all(torch.equal(scale, expected[name]) for name, scale in found.items())
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_exceptions(store: TokenStore, ranks: Ranks) -> None:
    """A recipe's exception for a layer that only one rank has is none for the others."""
    recipe = Recipe.deepseek_v3()
    recipe = replace(recipe, exceptions=(("model.layers.0.*", frozenset({"fprop"})),))
    config = micro(**SETTINGS)
    parallel = ParallelConfig(1, 1, ranks.size)
    alone = Trainer(config, store, torch.device("cpu"), recipe)
    own = Trainer(replace(config, parallel=parallel), store, torch.device("cpu"), recipe, ranks)
    assert steps(own, 1)[0]["loss"] == steps_of_one_process(ranks, alone, 1)[0]["loss"]
    assert str(own.model.conversion_summary) == str(alone.model.conversion_summary)


def check_kept_activations(store: TokenStore, ranks: Ranks) -> None:
    """A resumed run keeps the activations that its checkpoint says, in all stages, with the same bits."""
    recipe = replace(Recipe.deepseek_v3(), exceptions=(("model.layers.0.*", frozenset({"fprop"})),))
    config = replace(micro(**SETTINGS), parallel=ParallelConfig(1, 1, ranks.size, "dualpipe"))
    found, expected = (Trainer(config, store, torch.device("cpu"), recipe, ranks) for _ in range(2))
    expected.step()
    tensors, state = expected.state()
    found.load(tensors, {**state, "keeps_activations": True})
    assert found.strategy.recipe == saving_activations(recipe)
    for stage in found.strategy.pipelined.stages.values():
        recipes = [m.recipe for m in stage.modules() if getattr(m, "recipe", None) is not None]
        assert {recipe.norms for recipe in recipes} == {"kept"}
    assert [found.step()["loss"] for _ in range(2)] == [expected.step()["loss"] for _ in range(2)]


def check_ramp(store: TokenStore, ranks: Ranks) -> None:
    """Micro-batches may have other sizes in each step."""
    alone, own = trainers(store, ranks, "zb1p", steps=8, initial_batch_size=4, batch_ramp=0.5)
    expected, lines = steps_of_one_process(ranks, alone, 3), steps(own, 3)
    assert lines[0]["loss"] == expected[0]["loss"]
    check_close(lines, expected, **EXACT)
    assert [line["batch_size"] for line in lines] == [4, 5, 6]


def check_skips(store: TokenStore, ranks: Ranks) -> None:
    """A NaN in a stage's gradient skips the step on all ranks, and names the parameter on all."""
    own = of_ranks(store, ranks, "dualpipev", skip_limit=1)
    name, weight = [*own.model.named_parameters()][0 if ranks.is_first else 5]
    first = ranks.from_first(lambda: name, str)
    if ranks.is_first:
        weight.register_hook(lambda g: torch.full_like(g, torch.nan) if own.steps_done + 1 in {2, 4, 5} else None)
    lines = steps(own, 3)
    before = {name: t.clone() for name, t in own.model.state_dict().items()}
    lines += steps(own, 1)
    with pytest.raises(FloatingPointError, match="a gradient is not finite at step 5") as stopped:
        own.step()
    assert ["skipped_for" in line for line in lines] == [False, True, False, True]
    assert first in lines[1]["skipped_for"]
    assert all(torch.equal(before[name], t) for name, t in own.model.state_dict().items())
    assert len(set(ranks.gather(str(stopped.value), str))) == 1


def check_broken_loss(store: TokenStore, ranks: Ranks) -> None:
    """A loss that is NaN ends the run on all ranks, with the first module where it is not finite."""
    own = of_ranks(store, ranks, "dualpipe")
    steps(own, 1)
    layer = own.model.model.layers[1]  # of the first stage; the other copy is on the other rank
    layer.register_forward_hook(lambda module, inputs, y: y * float("nan"))
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 2; .* is in model\.layers\.1$"):
        own.step()


def check_loss_scale(store: TokenStore, ranks: Ranks) -> None:
    """An overflow in one stage halves the loss scale of all."""
    alone, own = trainers(store, ranks, recipe="fp16_loss_scaling")
    before = own.loss_scale.value
    assert own.step()["loss"] == steps_of_one_process(ranks, alone, 1)[0]["loss"]
    if not ranks.is_first:
        next(own.model.parameters()).register_hook(lambda g: torch.full_like(g, torch.inf))
    assert "overflowed" in own.step()["skipped_for"]
    assert ranks.gather(own.loss_scale.value, float) == [before / 2] * ranks.size


@contextmanager
def launched_late() -> Iterator[None]:
    """Steps may be launched before earlier ones are collected; on GPUs, they are captured in CUDA graphs."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_initialized():
            patch.setattr(single, "why_eager", lambda *_: None)
        yield


@contextmanager
def launched_eagerly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "why_eager", lambda *_: "the test compares with it")
        yield


def check_late(store: TokenStore, ranks: Ranks, schedule: str, dp: int = 1) -> None:
    """Steps that are launched before earlier ones are collected have the bits of those collected one by one."""
    at_once, late = (of_ranks(store, ranks, schedule, dp, optim=AVERAGED) for _ in range(2))
    expected = steps(at_once)
    with launched_late():
        for _ in expected:
            late.launch()
        lines = list(late.collect())
    check_same_run(late, lines, at_once, expected)


def check_head_alone(store: TokenStore, ranks: Ranks) -> None:
    """The last stage may have only the head, and so no layer that a recipe converts; the head has the recipe's form."""
    model = replace(MODEL, num_nextn_predict_layers=0, moe_intermediate_size=128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "pipeline_layers", lambda *_: [range(4), range(4, 4)])
        alone, own = trainers(store, ranks, model=model, recipe="delayed")
        exact = of_ranks(store, ranks, model=model, recipe="exact")
    lines, expected = steps(own, 2), steps_of_one_process(ranks, alone, 2)
    assert lines[0]["loss"] == expected[0]["loss"]
    assert lines[1]["loss"] == pytest.approx(expected[1]["loss"], rel=2e-2)
    assert own.model.conversion_summary.converted
    assert isinstance(exact.model.lm_head, BatchInvariantHead) != ranks.is_first


def check_differing_divisions(store: TokenStore, ranks: Ranks) -> None:
    """Ranks that divide the layers in different ways, of which one would be left out, are refused."""
    with pytest.MonkeyPatch.context() as patch:
        layers = [range(2 + ranks.rank), range(2 + ranks.rank, 4)]
        patch.setattr(pipelined, "pipeline_layers", lambda *_: layers)
        with pytest.raises(ValueError, match="stages must be the same on all ranks: rank 0 has 2, 2, but rank 1 has 3"):
            of_ranks(store, ranks)


def cases(world: int) -> dict[str, object]:
    """The cases of a world."""
    if world == 4:
        return {
            "equal_run-1f1b-2x2": lambda s, r: check_equal_run(s, r, "1f1b", 2, 2),
            "equal_run-dualpipe-2x2": lambda s, r: check_equal_run(s, r, "dualpipe", 2, 2),
            "equal_run-zb1p-4": lambda s, r: check_equal_run(s, r, "zb1p"),
            "moved-chimera-2x2": lambda s, r: check_moved_run(s, r, "chimera", 2, 2),
            "late-1f1b-2x2": lambda s, r: check_late(s, r, "1f1b", 2),
            **{f"resumed-{name}-4": partial(check_resumed_run, schedule=name) for name in SCHEDULES},
        }
    return {
        **{f"equal_run-{name}": partial(check_equal_run, schedule=name) for name in SCHEDULES},
        **{f"resumed-{name}": partial(check_resumed_run, schedule=name) for name in SCHEDULES},
        "differing_copies": check_differing_copies,
        "moved-1f1b": lambda s, r: check_moved_run(s, r, "1f1b"),
        "muon-1f1b": lambda s, r: check_moved_run(s, r, "1f1b", optim=replace(AVERAGED, name="muon")),
        "deepseek_v3-zb1p": lambda s, r: check_fp8(s, r, "deepseek_v3", "zb1p"),
        "delayed-dualpipe": lambda s, r: check_fp8(s, r, "delayed", "dualpipe"),
        "measurements": check_measurements,
        "whole_model-1f1b": lambda s, r: check_whole_model(s, r, "1f1b"),
        "whole_model-dualpipev": lambda s, r: check_whole_model(s, r, "dualpipev"),
        "memory_of_whole_model": check_memory_of_whole_model,
        "initial_weights": check_initial_weights,
        "stored_scales": check_stored_scales,
        "exceptions": check_exceptions,
        "kept_activations": check_kept_activations,
        "ramp": check_ramp,
        "skips": check_skips,
        "broken_loss": check_broken_loss,
        "loss_scale": check_loss_scale,
        "late-dualpipe": lambda s, r: check_late(s, r, "dualpipe"),
        "head_alone": check_head_alone,
        "differing_divisions": check_differing_divisions,
    }


def check_on_gpus(store: TokenStore, ranks: Ranks, schedule: str, recipe: str = "deepseek_v3") -> None:
    """Steps that launch kernel by kernel have the losses of captured ones, up to the order of sums."""
    alone, own = trainers(store, ranks, schedule, recipe=recipe, optim=SLOW)
    with launched_eagerly():
        compare_eager(ranks, alone, own)


def compare_eager(ranks: Ranks, alone: Trainer, own: Trainer) -> None:
    lines, expected = steps(own, WARM_UP_STEPS + 3), steps_of_one_process(ranks, alone, WARM_UP_STEPS + 3)
    assert lines[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-4)
    check_close_losses(lines, expected)
    assert own.strategy.why_eager()
    of_alone = ranks.from_first(lambda: alone.evaluator.validate()["val_loss"], float)
    assert own.evaluator.validate()["val_loss"] == pytest.approx(of_alone, rel=1e-2)
    own.strategy.check_copies()


def check_captured(
    store: TokenStore, ranks: Ranks, schedule: str, recipe: str = "deepseek_v3", dp: int = 1, ep: int = 1
) -> None:
    """Captured steps have the losses of eager ones, and the same bits whether several are in flight or one.

    Held-out losses, measured between two steps with the same communicators, are those of eager steps, too.
    """
    eager, captured, late = (of_ranks(store, ranks, schedule, dp, ep, recipe=recipe, optim=SLOW) for _ in range(3))
    try:
        compare_captured(eager, captured, late)
    finally:
        for trainer in (captured, late):
            trainer.release_captured()  # a communicator that a graph has is not destroyed


def compare_captured(eager: Trainer, captured: Trainer, late: Trainer) -> None:
    with deterministic(True), launched_eagerly():
        expected = steps(eager, WARM_UP_STEPS + 6)
        eager_validated = eager.evaluator.validate()["val_loss"]
    with deterministic(True), launched_late():
        lines, of_late = steps(captured, WARM_UP_STEPS + 6), steps(late, WARM_UP_STEPS + 2)
        validated = captured.evaluator.validate()["val_loss"]
        for _ in range(4):
            late.launch()
        of_late += late.collect()
        lines += steps(captured, 1)
        of_late += steps(late, 1)
        assert captured.captured.is_captured
        assert late.captured.is_captured
        check_same_run(late, of_late, captured, lines)
        captured.strategy.check_copies()
    assert lines[0]["loss"] == expected[0]["loss"]
    check_close_losses(lines[:-1], expected)
    assert validated == pytest.approx(eager_validated, rel=1e-2)


def gpu_cases(world: int) -> dict[str, object]:
    """The cases of two or four GPUs."""
    if world == 4:
        return {
            "captured-1f1b-4": partial(check_captured, schedule="1f1b"),
            "captured-1f1b-dp2": partial(check_captured, schedule="1f1b", dp=2),
            "captured-1f1b-2x2": partial(check_captured, schedule="1f1b", dp=2, ep=2),
            "captured-dualpipe-2x2": partial(check_captured, schedule="dualpipe", dp=2, ep=2),
            "captured-bf16-zb1p-2x2": partial(check_captured, schedule="zb1p", recipe="bf16", dp=2, ep=2),
        }
    return {
        **{f"deepseek_v3-{name}": partial(check_on_gpus, schedule=name) for name in ("1f1b", "dualpipev")},
        **{f"captured-{name}": partial(check_captured, schedule=name) for name in SCHEDULES},
        "captured-bf16-1f1b": lambda s, r: check_captured(s, r, "1f1b", "bf16"),
        "bf16-dualpipe": lambda s, r: check_on_gpus(s, r, "dualpipe", "bf16"),
        "moved-dualpipe": lambda s, r: check_moved_run(s, r, "dualpipe"),
        "whole_model-dualpipev": lambda s, r: check_whole_model(s, r, "dualpipev"),
        "skips": check_skips,
    }


def run(
    rank: int,
    world: int,
    folder: str,
    store: str,
    port: int,
    device: str = "cpu",
    names: Collection[str] | None = None,
) -> None:
    """Run all cases, or those of some names, as one rank on a CPU or a GPU, and write what went wrong in each."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.cuda.init()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks, tokens = join(torch.device(device, rank if device == "cuda" else None), 60), TokenStore.open(Path(store))
    own = gpu_cases(world) if device == "cuda" else cases(world)
    run_cases({name: partial(own[name], tokens, ranks) for name in names or own}, folder, rank)
    dist.barrier()
    leave()
