"""Trainers on several ranks compared with one process, for test_ranks.py."""

import gc
import json
import os
import re
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Collection
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from octile.checkpoint import DistributedCheckpoints, ShardedCheckpoint, load_checkpoint, save_checkpoint
from octile.kernels.triton import tensor_table
from octile.nn.delayed_scaling import amax_histories
from octile.parallel.nodes import NodeDispatcher
from octile.parallel.nvshmem import NvshmemTransport
from octile.parallel.ranks import Ranks, join, leave
from octile.train.config import ParallelConfig
from octile.train.data import batches
from octile.train.data.token_store import TokenStore
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.run.deterministic import FIXED_WORKSPACE, WORKSPACE_VARIABLE, deterministic
from octile.train.run.rank_checks import differing
from octile.train.step.captured import WARM_UP_STEPS
from octile.train.step.launched import COLLECT_EVERY
from octile.train.strategy import expert_parallel
from octile.train.strategy import single as module
from octile.train.trainer import Trainer
from tests.parallel.expert_cases import peers_on_cpu
from tests.train.conftest import MICRO, collect_steps_by, micro
from tests.worlds import run_cases

STEPS = 3  # the second has the first one's weights, and the third its moments, too
SPARSE = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=8, indexer_rope_interleave=True)
SPARSE = replace(SPARSE, indexer_types=("full", "shared"))  # multi-token prediction has its own
FUSED = replace(MICRO, moe_intermediate_size=128)  # whose experts are one function
EXACT = {"rtol": 2e-5, "atol": 0.0}  # FP32 sums in another order
# a tenth of the usual learning rate, at which two runs in FP8 drift apart: by 9% in the norm of step 9, here by 0.5%
ADDRESSES = 8192  # bytes of a trainer with buffers of peers: 512 for each list of them
SLOW = replace(micro().optim, lr=3e-4)
CLOSE, SAME = ("loss", "main_loss", "mtp_loss", "balance_loss", "grad_norm"), ("step", "lr", "tokens", "skipped")
COMPARED = {*CLOSE, *SAME, "indexer_loss"}
SETTINGS = {"recipe": "float32", "steps": 40, "batch_size": 8, "micro_batches": 2, "val_sequences": 3}
MUON = replace(micro().optim, name="muon")

SHORT = {"batch_size": 4, "micro_batches": 1, "sequence_length": 16}  # Triton's interpreter is slow


def trainers(store: TokenStore, ranks: Ranks, ep: int = 1, parallel=None, **changes) -> tuple[Trainer, Trainer]:
    """The same run on this rank alone, and on all ranks."""
    alone = Trainer(micro(**{**SETTINGS, **changes}), store, device_of(ranks))
    return alone, on_ranks(store, ranks, ep, parallel, **changes)


def on_ranks(store: TokenStore, ranks: Ranks, ep: int = 1, parallel=None, **changes) -> Trainer:
    """A run on all ranks."""
    config = micro(**{**SETTINGS, **changes}, parallel=ParallelConfig(ranks.size, ep, **(parallel or {})))
    return Trainer(config, store, device_of(ranks), ranks=ranks)


def device_of(ranks: Ranks) -> torch.device:
    return torch.device("cuda", ranks.rank) if torch.cuda.is_initialized() else torch.device("cpu")


def steps(trainer: Trainer, n: int = STEPS) -> list[dict]:
    return [trainer.step() for _ in range(n)]


def steps_of_one_process(ranks: Ranks, alone: Trainer, n: int = STEPS) -> list[dict]:
    """The measurements of the trainer of rank 0; the other ranks do not compute the same."""

    def measure() -> str:
        return json.dumps([{key: line[key] for key in COMPARED & line.keys()} for line in steps(alone, n)])

    return json.loads(ranks.from_first(measure, str))


def warm_up_steps() -> int:
    """The steps before one is captured, on a GPU."""
    return WARM_UP_STEPS if torch.cuda.is_initialized() else 0


def check_close(found: list[dict], expected: list[dict], **tolerance: float) -> None:
    for key in CLOSE:
        of_both = (torch.tensor([line[key] for line in lines], dtype=torch.float64) for lines in (found, expected))
        torch.testing.assert_close(*of_both, **tolerance, msg=lambda text, key=key: f"{key}: {text}")
    for key in SAME:
        assert [line[key] for line in found] == [line[key] for line in expected], key


def check_close_losses(found: list[dict], expected: list[dict]) -> None:
    """Check nine steps in FP8 with `SLOW`: on a CPU other micro-batches move losses by 0.015%, old weights by 0.16%."""
    check_close(found, expected, rtol=2e-2, atol=1e-3)
    for key in ("loss", "main_loss", "mtp_loss"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=5e-4), key


def check_same_everywhere(trainer: Trainer, lines: list[dict]) -> None:
    """All ranks report the same numbers, and have the same weights, but for experts that are spread."""
    hidden = ("seconds", "tokens_per_s", "flops_per_s", "mfu")
    reported = [{k: v for k, v in line.items() if k not in hidden} for line in lines]
    names = [n for n, p in trainer.model.named_parameters() if trainer.strategy.layout.of(f"model.{n}").is_whole]
    state = trainer.model.state_dict()
    biases = [n for n in state if "bias" in n]
    weights = {name: state[name].double().sum().item() for name in (*names, *biases)}
    assert biases
    of_ranks = trainer.ranks.gather((repr(reported), weights), tuple[str, dict[str, float]])
    for of_rank in of_ranks:
        assert of_rank == of_ranks[0]


def check_equal_run(store: TokenStore, ranks: Ranks, ep: int, **changes) -> None:
    """Losses, norms, loads and held-out losses are those of one process; so is the state that rank 0 collects."""
    optim = replace(micro().optim, ema_decay=0.9)
    alone, own = trainers(store, ranks, ep, optim=optim, **changes)
    check_initial_loss(ranks, alone, own)
    expected, lines = steps_of_one_process(ranks, alone), steps(own)
    check_close(lines, expected, **EXACT)
    check_same_everywhere(own, lines)
    check_same_state(own, alone)


def check_initial_loss(ranks: Ranks, alone: Trainer, own: Trainer) -> None:
    """The held-out loss before the first step is that of one process."""
    expected = ranks.from_first(lambda: alone.evaluator.validate()["val_loss"], float)
    assert own.evaluator.validate()["val_loss"] == pytest.approx(expected, rel=1e-4)


def check_same_state(own: Trainer, alone: Trainer) -> None:
    """Loads, held-out losses and the state that rank 0 collects are those of one process, which rank 0 trained."""

    def of_alone() -> str:
        return as_json(alone.expert_load(), alone.state()[1], alone.evaluator.validate())

    def as_json(load, state, losses) -> str:
        return json.dumps([load, {**state, "seconds": 0}, losses])

    tensors, state = own.state()
    *same, found = json.loads(as_json(own.expert_load(), state, own.evaluator.validate()))
    *of_both, wanted = json.loads(own.ranks.from_first(of_alone, str))
    assert same == of_both
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert found[key] == pytest.approx(wanted[key], rel=1e-5)
    tensors = own.strategy.layout.whole(tensors)
    whole, _ = alone.state()
    if not own.ranks.is_first:
        assert tensors == {}
        return
    assert tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        assert tensors[name].shape == tensor.shape, name
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-2, atol=3e-4, msg=lambda t, n=name: f"{n}: {t}")


def check_indexers(store: TokenStore, ranks: Ranks, stage: str) -> None:
    """Both stages of training indexers have the losses of one process, but for values that round to others in FP8."""
    alone, own = trainers(store, ranks, 2, model=SPARSE, indexer_stage=stage)
    expected, lines = steps_of_one_process(ranks, alone), steps(own)
    check_close(lines, expected, rtol=1e-3, atol=0.0)
    of_both = ([line["indexer_loss"] for line in of_run] for of_run in (lines, expected))
    assert next(of_both) == pytest.approx(next(of_both), rel=1e-2)
    check_same_everywhere(own, lines)
    assert own.strategy.layout.whole(own.state()[0]).keys() == (alone.state()[0].keys() if ranks.is_first else set())


def check_moved_run(store: TokenStore, ranks: Ranks, ep: int) -> None:
    """A checkpoint goes from one process to the ranks and back."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    alone, own = trainers(store, ranks, ep)
    move_to_ranks(ranks, alone, own, folder)
    check_close(steps(own, 2), steps_of_one_process(ranks, alone, 2), **EXACT)
    check_moved_back(store, ranks, alone, own, folder, 2)


def move_to_ranks(ranks: Ranks, alone: Trainer, own: Trainer, folder: Path) -> None:
    """Make two steps in one process, and let the ranks continue from its checkpoint."""
    steps_of_one_process(ranks, alone, 2)
    single = ranks.from_first(lambda: save_checkpoint(folder / "single", 2, *alone.state()), Path)
    checkpoint = ShardedCheckpoint(single)
    own.load(own.strategy.layout.own_rows(checkpoint), checkpoint.state)


def check_moved_back(store: TokenStore, ranks: Ranks, alone: Trainer, own: Trainer, folder: Path, n: int) -> None:
    """A new trainer of one process makes the same next n steps from a checkpoint of the ranks; removes the folder."""
    checkpoints = DistributedCheckpoints(folder / "sharded")
    tensors, state = own.state()
    checkpoints.save(own.steps_done, own.strategy.layout.chunks(tensors), state)
    after = steps(own, n)  # while it is written
    again = Trainer(alone.config, store, device_of(ranks))
    again.load(*load_checkpoint(checkpoints.latest()))
    check_close(after, steps_of_one_process(ranks, again, n), **EXACT)
    checkpoints.close()
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_muon(store: TokenStore, ranks: Ranks, ep: int) -> None:
    """A checkpoint of Muon goes from one process to the ranks and back, and both continue alike.

    Newton–Schulz runs in BF16, and makes more of the difference between sums in another order.
    """
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    alone, own = trainers(store, ranks, ep, optim=MUON)
    move_to_ranks(ranks, alone, own, folder)
    same, of_alone = own.strategy.layout.whole(own.state()[0]), alone.state()[0]
    if ranks.is_first:
        assert any(name.endswith("momentum_buffer") for name in same)
        assert [name for name, tensor in of_alone.items() if not torch.equal(same[name], tensor)] == []
    lines = steps(own)
    check_close(lines, steps_of_one_process(ranks, alone), rtol=2e-4, atol=0.0)
    check_same_everywhere(own, lines)
    check_moved_back(store, ranks, alone, own, folder, 1)


def check_collected(store: TokenStore, ranks: Ranks, ep: int, exchange: str = "all_to_all", **changes) -> None:
    """A trainer that is done leaves nothing behind: not itself, nor its model, weights, moments, exchange and graphs.

    Tensors that stay after the first one are the kernels' workspaces; the second one adds nothing. Tables of addresses,
    of which the last 32 stay, are not counted, nor those of peers, which torch keeps for each buffer.
    """
    optim = replace(micro().optim, ema_decay=0.9)
    before: set[int] = set()

    def train() -> list[tuple[str, weakref.ref]]:
        own = on_ranks(store, ranks, ep, {"exchange": exchange}, optim=optim, **changes)
        steps(own, warm_up_steps() + 2)
        own.evaluator.validate()
        parts = [own, own.model, own.optimizer, own.strategy.shards, own.ema, *own.strategy.moes.values()]
        parts += [moe.dispatcher for moe in own.strategy.moes.values()]
        parts += [weight.untyped_storage() for weight in own.model.parameters()]
        parts += [t.untyped_storage() for moments in own.optimizer.state.values() for t in moments.values() if t.dim()]
        own.close()
        if own.captured is not None:
            own.captured.release()
        return [(type(part).__name__, weakref.ref(part)) for part in parts]

    def left(references: list[tuple[str, weakref.ref]]) -> list[str]:
        tensor_table._cached.cache_clear()
        gc.collect()
        names = [name for name, part in references if part() is not None]
        tensors = [t for t in live_tensors() if id(t) not in before and t.numel() > 64] if before else []
        return [*names, *(f"{t.dtype} {tuple(t.shape)}" for t in tensors)]

    allocated = []
    for _ in range(2):
        references, end = train(), time.monotonic() + 20
        while left(references) and time.monotonic() < end:  # gloo's threads let go of what they sent a little later
            time.sleep(0.05)
        assert left(references) == []
        before = {id(tensor) for tensor in live_tensors()}
        allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)
    assert allocated[1] - allocated[0] <= (ADDRESSES if exchange == "symmetric_memory" else 0)


def live_tensors() -> list[torch.Tensor]:
    """All tensors that Python can see."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def check_own_rows(store: TokenStore, ranks: Ranks) -> None:
    """A rank reads its own sequences of the batch of a step only."""
    own = on_ranks(store, ranks)
    read: list[int] = []
    windows = batches.read_windows

    def counted(tokens, window_B, *settings):
        read.append(len(window_B))
        return windows(tokens, window_B, *settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "read_windows", counted)
        steps(own, 1)
    assert read == [own.config.batch_size // ranks.size]


def check_added_in_place(store: TokenStore, ranks: Ranks) -> None:
    """GEMMs add to the gradients of earlier micro-batches, but in the last one, whose gradients hooks take."""
    own = on_ranks(store, ranks, micro_batches=4, recipe="deepseek_v3")
    added: list[bool] = []
    weight = own.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    own.model.register_forward_hook(lambda *_: added.append(hasattr(weight, "main_grad")))
    own.step()
    assert added == [False, True, True, False]


def check_checkpoint_timeout(store: TokenStore, ranks: Ranks) -> None:
    """A rank waits for the parts of a checkpoint no longer than for anything else."""
    hurried = Ranks(ranks.rank, ranks.size, ranks.store, timedelta(seconds=1))
    checkpoints = RunCheckpoints(ranks.from_first(tempfile.mkdtemp, str), hurried)

    def wait_alone() -> None:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            checkpoints.latest()

    ranks.from_first(wait_alone)


def check_refused_exchange(store: TokenStore, ranks: Ranks) -> None:
    """Kernels that the ranks cannot run are not replaced by what was not asked for."""
    with pytest.raises(
        ValueError, match=r"parallel\.exchange symmetric_memory cannot be used, since the ranks are not on"
    ):
        on_ranks(store, ranks, 2, {"exchange": "symmetric_memory"})


def check_too_many_rows(store: TokenStore, ranks: Ranks) -> None:
    """Steps whose rows are more than the capacity are discarded and run again with more; the bits are the same."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    settings = {**SHORT, "batch_size": 2, "val_sequences": 2}
    with pytest.MonkeyPatch.context() as patch, peers_on_cpu(folder), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(module, "why_eager", lambda *_: None)  # so that a later step is launched before it is known
        patch.setattr(expert_parallel, "CAPACITY_FACTOR", 0.6)
        lines = []
        for exchange in ("symmetric_memory", "all_to_all"):
            trainer = on_ranks(store, ranks, 2, {"exchange": exchange}, **settings)
            found = []
            while trainer.steps_done < 2 or trainer._launched:
                found += trainer.advance() if trainer.steps_done < 2 else trainer.collect()
            lines.append([{name: line[name] for name in ("step", "loss", "grad_norm", "tokens")} for line in found])
            lines[-1].append(trainer.evaluator.validate())
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0][:-1]] == [1, 2]
    message = next(str(warning.message) for warning in warned if "more rows than capacity" in str(warning.message))
    assert message.startswith("step 1: the experts of a rank have more rows than capacity, which is doubled to 38 rows")
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_capacity(store: TokenStore, ranks: Ranks) -> None:
    """The capacity is twice the rows of balanced experts, unless a step cannot be repeated with the same bits."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    with peers_on_cpu(folder):
        for recipe, share in (("float32", 0.5), ("delayed", 1.0), ("fp16_loss_scaling", 1.0)):
            own = on_ranks(store, ranks, 4, {"exchange": "symmetric_memory"}, recipe=recipe)
            for moe in own.strategy.moes.values():
                assert moe.dispatcher.max_rows == share * moe.dispatcher.enough_rows, recipe
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_hosts(store: TokenStore, ranks: Ranks) -> None:
    """Experts over two hosts of two ranks: rows cross once, then go on inside the host; on request no host waits."""
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        alone, own = trainers(store, ranks, 4)
        assert {len(moe.dispatcher.groups) for moe in own.strategy.moes.values()} == {2}
        check_close(steps(own, 2), steps_of_one_process(ranks, alone, 2), **EXACT)
        with peers_on_cpu(folder):
            alone, own = trainers(store, ranks, 4, {"exchange": "symmetric_memory"}, **SHORT)
            check_close(steps(own, 1), steps_of_one_process(ranks, alone, 1), **EXACT)
    dispatchers = [moe.dispatcher for moe in own.strategy.moes.values()]
    assert {(type(own), type(own.transport)) for own in dispatchers} == {(NodeDispatcher, NvshmemTransport)}
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


def check_unequal_hosts(store: TokenStore, ranks: Ranks) -> None:
    """Hosts with 2, 1 and 1 ranks: all ranks make the same groups, without a hop inside the hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2" if ranks.rank < 2 else "1")
        alone, own = trainers(store, ranks, 4)
    assert {len(moe.dispatcher.groups) for moe in own.strategy.moes.values()} == {1}
    check_close(steps(own, 1), steps_of_one_process(ranks, alone, 1), **EXACT)


def check_ramp(store: TokenStore, ranks: Ranks) -> None:
    """Batches of odd sizes are shared as evenly as they can be."""
    alone, own = trainers(store, ranks, steps=8, initial_batch_size=4, batch_ramp=0.5)
    expected, lines = steps_of_one_process(ranks, alone, 3), steps(own, 3)
    check_close(lines, expected, **EXACT)
    assert [line["batch_size"] for line in lines] == [4, 5, 6]


def check_bfloat16_sums(store: TokenStore, ranks: Ranks) -> None:
    alone, own = trainers(store, ranks, parallel={"reduce": "bfloat16"})
    lines = steps(own)
    check_close(lines[:1], steps_of_one_process(ranks, alone, 1), rtol=2e-3, atol=0)
    check_same_everywhere(own, lines)


def check_fp8(store: TokenStore, ranks: Ranks, recipe: str, ep: int) -> None:
    """Tiles have the tokens of a rank, so another rounding; the ranks agree with one another."""
    alone, own = trainers(store, ranks, ep, recipe=recipe)
    lines = steps(own)
    check_close(lines, steps_of_one_process(ranks, alone), rtol=2e-2, atol=0)
    check_same_everywhere(own, lines)
    histories = [history.amax_OH.tolist() for history in amax_histories(own.model).values()]
    assert all(of_rank == histories for of_rank in ranks.gather(histories, list[list[list[float]]]))


def check_exact(store: TokenStore, ranks: Ranks) -> None:
    """Under `exact` one process with all experts computes the same log-probabilities, bit for bit, also after steps."""
    alone, own = trainers(store, ranks, 2, recipe="exact")
    tokens_BS = torch.randint(320, (3, 50), generator=torch.Generator().manual_seed(ranks.rank))

    def check() -> None:
        assert torch.equal(own.model.log_probs(tokens_BS), alone.model.log_probs(tokens_BS))

    check()
    check_close(steps(own), steps_of_one_process(ranks, alone), rtol=2e-2, atol=0)
    folder = Path(ranks.from_first(tempfile.mkdtemp, str))
    checkpoints = DistributedCheckpoints(folder)
    tensors, state = own.state()
    checkpoints.save(own.steps_done, own.strategy.layout.chunks(tensors), state)
    alone.load(*load_checkpoint(checkpoints.latest()))
    check()
    checkpoints.close()
    dist.barrier()
    ranks.from_first(lambda: shutil.rmtree(folder))


@contextmanager
def broken(trainer: Trainer, at: set[int], value: float = float("nan")):
    """Let the gradients of some steps be NaN on the last rank."""
    if trainer.ranks.rank == trainer.ranks.size - 1:
        weight = trainer.model.model.layers[0].self_attn.o_proj.weight
        weight.register_hook(lambda g: torch.full_like(g, value) if trainer.steps_done + 1 in at else None)
    yield


def check_skips(store: TokenStore, ranks: Ranks) -> None:
    """A NaN on one rank skips the step on all, and names the parameter on all."""
    own = on_ranks(store, ranks, skip_limit=1)
    with broken(own, {2, 4, 5}):
        lines = steps(own, 3)
        before = {name: t.clone() for name, t in own.model.state_dict().items()}
        lines += steps(own, 1)
        with pytest.raises(FloatingPointError, match="a gradient is not finite at step 5") as stopped:
            own.step()
    assert ["skipped_for" in line for line in lines] == [False, True, False, True]
    assert "layers.0.self_attn.o_proj.weight" in lines[1]["skipped_for"]
    assert all(torch.equal(before[name], t) for name, t in own.model.state_dict().items())
    assert len(set(ranks.gather(str(stopped.value), str))) == 1
    check_same_everywhere(own, lines)


def check_broken_loss(store: TokenStore, ranks: Ranks) -> None:
    """A loss of one rank that is NaN ends the run on all, with the module where that rank found it."""
    own = on_ranks(store, ranks)
    steps(own, 1)
    if ranks.rank == ranks.size - 1:
        own.model.model.norm.register_forward_hook(lambda module, inputs, y: y * float("nan"))
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 2; .* is in model\.norm$"):
        own.step()


def check_broken_expert(store: TokenStore, ranks: Ranks) -> None:
    """A weight that is NaN on the one rank that has it ends the run on all, which name it."""
    own = on_ranks(store, ranks, 2)
    steps(own, 1)
    name, weight = next((n, p) for n, p in own.model.named_parameters() if n.endswith("experts.down"))
    if ranks.rank == ranks.size - 1:
        weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=f"is in parameter {re.escape(name)}$"):
        own.step()


def check_loss_scale(store: TokenStore, ranks: Ranks) -> None:
    """An overflow on one rank halves the loss scale of all."""
    own = on_ranks(store, ranks, recipe="fp16_loss_scaling")
    before = own.loss_scale.value
    with broken(own, {2}, float("inf")):
        lines = steps(own, 3)
    assert "overflowed" in lines[1]["skipped_for"]
    assert ranks.gather(own.loss_scale.value, float) == [before / 2] * ranks.size
    check_same_everywhere(own, lines)


def check_late(store: TokenStore, ranks: Ranks, recipe: str = "float32", collect_every: int = COLLECT_EVERY) -> None:
    """Ranks that read results late, as on GPUs, stop after the same step, although only one wants to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "why_eager", lambda *_: None)
        collect_steps_by(patch, collect_every)
        own = on_ranks(store, ranks, recipe=recipe)
        done = []
        while not own.strategy.must_stop(own.ranks.rank == 1 and own.steps_done >= 2):
            done += [line["step"] for line in own.advance()]
        done += [line["step"] for line in own.collect()]
    assert done == list(range(1, own.steps_done + 1))
    assert ranks.gather(own.steps_done, int) == [2 * collect_every] * ranks.size


def check_late_weights(store: TokenStore, ranks: Ranks, ep: int, **changes) -> None:
    """Weights that are gathered during the next forward pass give the bits of those gathered after each step."""
    optim = replace(micro().optim, ema_decay=0.9)
    at_once, late = (on_ranks(store, ranks, ep, optim=optim, **changes) for _ in range(2))
    at_once.captured = late.captured = None
    with deterministic(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "why_eager", lambda *_: "the test compares with it")
        expected = steps(at_once)
        patch.setattr(module, "why_eager", lambda *_: None)
        for _ in range(STEPS):
            late.launch()
        assert not late.strategy.is_gathered
        lines = list(late.collect())
    check_same_run(late, lines, at_once, expected)


def check_same_run(own: Trainer, lines: list[dict], other: Trainer, expected: list[dict]) -> None:
    """Two trainers have the same losses and the same state, bit for bit."""
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected]
    (tensors, _), (wanted, _) = own.state(), other.state()
    assert [name for name, tensor in wanted.items() if not torch.equal(tensors[name], tensor)] == []


def check_captured_late(store: TokenStore, ranks: Ranks, ep: int = 1, exchange: str = "all_to_all") -> None:
    """Captured steps of which several are in flight have the bits of those that are collected one by one."""
    with deterministic(True):
        one_by_one, late = (on_ranks(store, ranks, ep, {"exchange": exchange}, recipe="deepseek_v3") for _ in range(2))
        expected, lines = steps(one_by_one, warm_up_steps() + 6), steps(late, warm_up_steps() + 2)
        for _ in range(4):
            late.launch()
        lines += late.collect()
    if late.captured is not None:  # on a GPU
        assert late.captured.is_captured
        assert one_by_one.captured.is_captured
    check_same_run(late, lines, one_by_one, expected)


def check_becoming_eager(store: TokenStore, ranks: Ranks, ep: int, **changes) -> None:
    """A step that cannot be launched early, after others that are not collected, computes with the updated weights."""
    at_once, late = (on_ranks(store, ranks, ep, **changes) for _ in range(2))
    at_once.captured = late.captured = None
    with deterministic(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "why_eager", lambda *_: "the test compares with it")
        expected = steps(at_once, 4)
        for reason in (None, None, "a hook", None):
            patch.setattr(module, "why_eager", lambda *_, reason=reason: reason)
            late.launch()
        lines = list(late.collect())
    check_same_run(late, lines, at_once, expected)


def check_agreement(ranks: Ranks) -> None:
    ranks.agree("the code", "same")
    with pytest.raises(ValueError, match="the code must be the same on all ranks: rank 0 has 0, but rank 1 has 1"):
        ranks.agree("the code", str(ranks.rank))
    assert differing(ranks.gather({"seed": "1", "lr": str(ranks.rank)}, dict[str, str])) == {
        "lr": [str(rank) for rank in range(ranks.size)]
    }


def check_captured(
    store: TokenStore, ranks: Ranks, recipe: str, ep: int = 1, exchange: str = "all_to_all", **changes
) -> None:
    """Steps that are captured with their collectives have the losses of one GPU."""
    alone, own = trainers(store, ranks, ep, {"exchange": exchange}, recipe=recipe, **{"optim": SLOW, **changes})
    lines = steps(own, WARM_UP_STEPS + 2)
    for _ in range(4):  # each gathers the weights of the one before
        own.launch()
    lines += own.collect()
    check_close_losses(lines, steps_of_one_process(ranks, alone, len(lines)))
    check_same_everywhere(own, lines)
    assert own.captured.is_captured == (ep == 1 or exchange == "symmetric_memory")
    of_alone = ranks.from_first(lambda: alone.evaluator.validate()["val_loss"], float)
    assert own.evaluator.validate()["val_loss"] == pytest.approx(of_alone, rel=1e-2)


def check_captured_too_many_rows(store: TokenStore, ranks: Ranks) -> None:
    """A captured step whose rows are more than the capacity is found when it is collected, and runs again with more."""
    settings = {"recipe": "deepseek_v3", "optim": SLOW}
    alone, own = trainers(store, ranks, 2, {"exchange": "symmetric_memory"}, **settings)
    lines = steps(own, WARM_UP_STEPS)
    for moe in own.strategy.moes.values():
        moe.dispatcher.max_rows //= 4
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while own.steps_done < WARM_UP_STEPS + 20 or own._launched:
            lines += own.advance() if own.steps_done < WARM_UP_STEPS + 20 else own.collect()
    assert any("more rows than capacity" in str(warning.message) for warning in warned)
    assert [line["step"] for line in lines] == list(range(1, WARM_UP_STEPS + 21))
    check_close(lines, steps_of_one_process(ranks, alone, len(lines)), rtol=2e-2, atol=1e-3)
    assert own.captured.is_captured


def check_eager_skips(store: TokenStore, ranks: Ranks) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "why_eager", lambda *_: "hooks count the steps")
        check_skips(store, ranks)


def gpu_cases() -> dict[str, object]:
    """The cases of two GPUs."""
    return {
        "captured-bf16": lambda s, r: check_captured(s, r, "bf16"),
        "captured-deepseek_v3": lambda s, r: check_captured(s, r, "deepseek_v3"),
        "captured-muon": lambda s, r: check_captured(s, r, "deepseek_v3", optim=replace(SLOW, name="muon")),
        "captured-delayed": lambda s, r: check_captured(s, r, "delayed"),
        "spread-all_to_all": lambda s, r: check_captured(s, r, "deepseek_v3", 2),
        "spread-symmetric_memory": lambda s, r: check_captured(s, r, "deepseek_v3", 2, "symmetric_memory"),
        "spread-fused": lambda s, r: check_captured(s, r, "deepseek_v3", 2, "symmetric_memory", model=FUSED),
        "spread-too_many_rows": check_captured_too_many_rows,
        "skips": check_eager_skips,
        "late": lambda s, r: check_late(s, r, "deepseek_v3"),
        "late_weights-1": lambda s, r: check_late_weights(s, r, 1, recipe="deepseek_v3"),
        "late_weights-2": lambda s, r: check_late_weights(s, r, 2, recipe="deepseek_v3"),
        "becoming_eager-1": lambda s, r: check_becoming_eager(s, r, 1, recipe="deepseek_v3"),
        "captured_late-1": check_captured_late,
        "captured_late-2": lambda s, r: check_captured_late(s, r, 2, "symmetric_memory"),
        "agreement": lambda s, r: check_agreement(r),
        "collected-1": lambda s, r: check_collected(s, r, 1, recipe="deepseek_v3"),
        "collected-2": lambda s, r: check_collected(s, r, 2, "symmetric_memory", recipe="deepseek_v3"),
    }


def check_hosts_of_one_gpu(store: TokenStore, ranks: Ranks) -> None:
    """Two GPUs as two hosts: rows go across by NVSHMEM, and steps are captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        check_captured(store, ranks, "deepseek_v3", 2, "symmetric_memory")
    assert symmetric_memory.get_backend(torch.device("cuda")) == "NVSHMEM"


def nvshmem_cases() -> dict[str, object]:
    """The cases of two GPUs whose processes have symmetric memory by NVSHMEM."""
    return {"hosts_of_one_gpu": check_hosts_of_one_gpu}


def cases(world: int) -> dict[str, object]:
    """The cases of a world of CPU processes."""
    if world == 4:
        return {
            "equal_run-4-2": lambda s, r: check_equal_run(s, r, 2),
            "moved-4-2": lambda s, r: check_moved_run(s, r, 2),
            "place": check_capacity,
            "hosts": check_hosts,
            "unequal_hosts": check_unequal_hosts,
        }
    return {
        "equal_run-2-1": lambda s, r: check_equal_run(s, r, 1),
        "equal_run-2-2": lambda s, r: check_equal_run(s, r, 2),
        "moved-2-2": lambda s, r: check_moved_run(s, r, 2),
        "indexers-warm_up": lambda s, r: check_indexers(s, r, "warm_up"),
        "indexers-sparse": lambda s, r: check_indexers(s, r, "sparse"),
        "muon-1": lambda s, r: check_muon(s, r, 1),
        "muon-2": lambda s, r: check_muon(s, r, 2),
        "ramp": check_ramp,
        "collected-float32": lambda s, r: check_collected(s, r, 1),
        "collected-deepseek_v3": lambda s, r: check_collected(s, r, 2, recipe="deepseek_v3"),
        "own_rows": check_own_rows,
        "added_in_place": check_added_in_place,
        "too_many_rows": check_too_many_rows,
        "checkpoint_timeout": check_checkpoint_timeout,
        "refused_exchange": check_refused_exchange,
        "bfloat16_sums": check_bfloat16_sums,
        "deepseek_v3-1": lambda s, r: check_fp8(s, r, "deepseek_v3", 1),
        "deepseek_v3-2": lambda s, r: check_fp8(s, r, "deepseek_v3", 2),
        "delayed-2": lambda s, r: check_fp8(s, r, "delayed", 2),
        "exact": check_exact,
        "skips": check_skips,
        "broken_loss": check_broken_loss,
        "broken_expert": check_broken_expert,
        "loss_scale": check_loss_scale,
        "late": lambda s, r: check_late(s, r, collect_every=3),
        "late_weights-1": lambda s, r: check_late_weights(s, r, 1),
        "late_weights-2": lambda s, r: check_late_weights(s, r, 2),
        "late_weights-deepseek_v3": lambda s, r: check_late_weights(s, r, 2, recipe="deepseek_v3"),
        "captured_late": check_captured_late,
        "becoming_eager-1": lambda s, r: check_becoming_eager(s, r, 1),
        "becoming_eager-2": lambda s, r: check_becoming_eager(s, r, 2),
        "agreement": lambda s, r: check_agreement(r),
    }


def run(
    rank: int,
    world: int,
    folder: str,
    store: str,
    port: int,
    device: str = "cpu",
    by_nvshmem: bool = False,
    names: Collection[str] | None = None,
) -> None:
    """Run cases as one rank, on a CPU or each rank on its GPU, and write what went wrong in each.

    Without names all cases are run.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.cuda.init()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ[WORKSPACE_VARIABLE] = FIXED_WORKSPACE  # for cases with `deterministic`: cuBLAS reads it once
    ranks, tokens = join(torch.device(device, rank if device == "cuda" else None), 60), TokenStore.open(Path(store))
    own = nvshmem_cases() if by_nvshmem else gpu_cases() if device == "cuda" else cases(world)
    own = {name: partial(case, tokens, ranks) for name, case in own.items() if names is None or name in names}
    run_cases(own, folder, rank)
    dist.barrier()
    leave()
