"""Bad input and faults of two ranks of `octile train`: one line, and all ranks end."""

import json
import pickle
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch.distributed as dist

from octile.train.data.prepare import prepare
from octile.train.data.token_store import TokenStore
from tests.train.conftest import MICRO
from tests.train.strategy import bad_rank
from tests.train.strategy.test_torchrun import CLOSED, OPTIONS, PIPELINE
from tests.worlds import begin_ranks, start_ranks

NOTHING: Mapping[str, str] = MappingProxyType({})


class Ended(NamedTuple):
    """What became of two ranks: their exit statuses, and octile's lines of each rank's error output."""

    statuses: list[int | None]
    lines: list[list[str]]


def train(
    folder: Path,
    *arguments: str,
    fault: str = "",
    environment: Mapping[str, str] = NOTHING,
    foreign: Mapping[str, bytes] | None = None,
) -> Ended:
    """Run `octile train` on two ranks, whose store outlives them as torchrun's does; their output is in the folder.

    Another process sets the keys of `foreign` in the store first.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    if foreign is not None:
        start_ranks(set_keys, (store.port, foreign), 1)
    ranks = begin_ranks(bad_rank.run, (store.port, str(folder), fault, arguments, dict(environment)), 2)
    for process in ranks:
        process.join(60)
        if fault.startswith("hang"):
            ranks[1].kill()
    errors = [(folder / f"{rank}.err").read_text().splitlines() for rank in range(2)]
    own = [[line for line in of_rank if line.startswith("octile: ")] for of_rank in errors]
    return Ended([process.exitcode for process in ranks], own)


def set_keys(rank: int, port: int, values: Mapping[str, bytes]) -> None:
    """Set keys of the ranks in a store, as any process can that reaches its port."""
    store = dist.TCPStore("localhost", port, is_master=False)
    for key, value in values.items():
        dist.PrefixStore("octile", dist.PrefixStore("start 0", store)).set(key, value)


def check_refused(ended: Ended, message: str) -> None:
    assert ended.statuses == [2, 2]
    (line,), of_other = ended.lines
    assert of_other == []
    assert line.startswith("octile: ")
    assert message in line


@pytest.fixture(scope="module")
def arguments(text) -> list[str]:
    return [*OPTIONS, f"--data={text}", "--steps=1", "--checkpoint-every=1"]


@pytest.fixture(scope="module")
def trained(arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, with a checkpoint of two shards."""
    folder = tmp_path_factory.mktemp("trained")
    ended = train(folder, *arguments, f"--out={folder / 'run'}")
    assert ended.statuses == [0, 0], ended.lines
    return folder / "run"


REFUSED = {
    "experts": (["--parallel.ep=3"], "parallel.ep must divide --parallel.dp, 2, but it is 3"),
    "batch": (["--batch-size=3"], "--batch-size 3 must be divisible by --micro-batches 1 × --parallel.dp 2"),
    "world": (["--parallel.dp=4"], "--parallel.dp is 4, but torchrun has started 2 (WORLD_SIZE)"),
    "exchange": (
        ["--parallel.ep=2", "--parallel.exchange=symmetric_memory"],
        "--parallel.exchange symmetric_memory cannot be used, since the ranks are not on GPUs with NCCL",
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize(("wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_ranks_that_cannot_train_end_with_a_line_of_rank_0(arguments, tmp_path: Path, wrong: list[str], message: str):
    check_refused(train(tmp_path, *arguments, f"--out={tmp_path / 'run'}", *wrong), message)


DIFFERENT = {
    "other code": "octile's code and torch's version must be the same on all ranks: rank 0 has octile ",
    "other seed": "seed must be the same on all ranks: rank 0 has 0, but rank 1 has 1",
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), DIFFERENT.items(), ids=DIFFERENT)
def test_ranks_that_differ_are_refused_by_rank_0(arguments, tmp_path: Path, fault: str, message: str):
    check_refused(train(tmp_path, *arguments, f"--out={tmp_path / 'run'}", fault=fault), message)
    assert not (tmp_path / "run").exists()


def test_ranks_whose_files_of_a_recipe_differ_are_refused_by_rank_0(arguments, tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('recipe = "deepseek_v3"\n')
    ended = train(tmp_path, *arguments, f"--recipe={recipe}", f"--out={tmp_path / 'run'}", fault="other recipe")
    check_refused(ended, "recipe must name the same file on all ranks, but that of rank 1 has other contents than")


def test_ranks_that_read_other_data_are_refused_by_rank_0(arguments, tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of another text, {n * n}\n" for n in range(4000)))
    other = prepare(tmp_path / "text.txt", MICRO.vocab_size, tmp_path / "other", 31, held_out_windows=4)
    environment = {"OTHER_DATA": str(other.folder)}
    ended = train(tmp_path, *arguments, f"--out={tmp_path / 'run'}", fault="other data", environment=environment)
    digest = TokenStore.open(tmp_path / "run" / "data").digest
    data = f"the training data in {tmp_path / 'run' / 'data'}"
    check_refused(ended, f"{data} must be the same on all ranks: rank 0 has {digest}, but rank 1 has {other.digest}")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_ranks_of_which_one_does_not_resume_are_refused_by_rank_0(trained: Path, arguments, tmp_path: Path):
    run = shutil.copytree(trained, tmp_path / "run")
    ended = train(tmp_path, *arguments, "--resume", f"--out={run}", fault="no resume")
    check_refused(ended, "--resume must be the same on all ranks: rank 0 has True, but rank 1 has False")


def test_checkpoints_that_ranks_do_not_share_are_refused_by_rank_0(arguments, tmp_path: Path):
    place = "memory://octile/run"  # each process has its own
    ended = train(tmp_path, *arguments, f"--checkpoints={place}", f"--out={tmp_path / 'run'}")
    check_refused(ended, f"checkpoints {place!r} must be the same for all ranks, but rank 0 does not see there what")
    assert not (tmp_path / "run").exists()


class Attack:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.one_case
@pytest.mark.parametrize("key", ["exchange/0", "exchange/1", "position/0", "failure"])
def test_a_pickle_that_another_process_has_left_in_the_store_runs_no_code(arguments, tmp_path: Path, key: str):
    """Where rank 0 writes, the run ends with a line that says what lies there."""
    ran = tmp_path / "ran"
    attack = pickle.dumps((Attack(ran), None))
    ended = train(tmp_path, *arguments, f"--out={tmp_path / 'run'}", foreign={key: attack})
    assert not ran.exists()
    if key.startswith("exchange"):
        assert ended.statuses == [1, 1]
        ((line,), ()) = ended.lines
        assert line.startswith(f"octile: key {key} of torchrun's store must be set by rank 0, but ")
        assert f"must be set by rank 0, but {repr(attack[:8])[:-1]}" in line
    else:
        assert ended.statuses == [0, 0]


@pytest.mark.parametrize("environment", [NOTHING, {bad_rank.AHEAD: "1"}], ids=["collected", "launched ahead"])
def test_an_exception_of_one_rank_ends_all(arguments, tmp_path: Path, environment: Mapping[str, str]):
    arguments = [*arguments, "--steps=4", "--checkpoint-every=0", "--parallel.timeout=20", f"--out={tmp_path / 'run'}"]
    ended = train(tmp_path, *arguments, fault="error", environment=environment)
    assert ended.statuses == [1, 1]
    ((), (line,)) = ended.lines
    assert line.startswith("octile: rank 1: ValueError: a fault that only this rank has")


@pytest.mark.slow
def test_rank_1_reports_that_rank_0_was_killed(arguments, tmp_path: Path):
    ended = train(tmp_path, *arguments, "--steps=4", f"--out={tmp_path / 'run'}", fault="killed")
    assert ended.statuses == [-signal.SIGKILL, 1]
    ((), (line,)) = ended.lines
    assert line.startswith("octile: rank 1 lost the connection to another rank, which has ended, at step 3: ")
    assert re.search(rf"; last seen: rank 0 at step 3: passes of micro-batch 0 {CLOSED}; to continue: torchrun ", line)


@pytest.mark.slow
def test_a_rank_that_is_lost_before_the_first_checkpoint_leaves_nothing(arguments, tmp_path: Path):
    arguments = [*arguments, "--steps=4", "--checkpoint-every=0", f"--out={tmp_path / 'run'}"]
    ended = train(tmp_path, *arguments, fault="killed")
    assert ended.statuses == [-signal.SIGKILL, 1]
    ((), (line,)) = ended.lines
    assert re.search(rf": passes of micro-batch 0 {CLOSED}; nothing is saved before the first checkpoint$", line)


HANGS = {  # options, where rank 0 waits, where rank 1 hangs
    "data parallel": ([], "sum of the gradients", "passes of micro-batch 0"),
    "pipeline": (
        PIPELINE,
        "backward pass of stage 0 for micro-batch 0",
        "backward pass of stage 1 for micro-batch 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "waits", "hangs"),
    [
        pytest.param(*HANGS["data parallel"], id="data parallel", marks=pytest.mark.exhaustive),
        pytest.param(*HANGS["pipeline"], id="pipeline"),
    ],
)
def test_a_hang_names_the_rank_and_the_operation(arguments, tmp_path: Path, options: list[str], waits: str, hangs: str):
    arguments = [*arguments, *options, "--steps=4", "--parallel.timeout=5", f"--out={tmp_path / 'run'}"]
    ended = train(tmp_path, *arguments, fault="hang")
    assert ended.statuses == [1, -signal.SIGKILL]
    ((line,), ()) = ended.lines
    where = f"at step 3: {waits}; last seen: rank 1 at step 3: {hangs}"
    to_continue = f"torchrun --nproc-per-node 2 -m octile train --resume --out {tmp_path / 'run'}"
    gloo = "(Timed out waiting 5000ms for recv operation to complete)"
    assert line == f"octile: rank 0 waited 5 s for the other ranks, {where} {gloo}; to continue: {to_continue}"


def test_a_checkpoint_of_another_model_is_refused(trained: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    config = json.loads((run / "config.json").read_text())
    config["model"]["intermediate_size"] = 128
    (run / "config.json").write_text(json.dumps(config))
    ended = train(tmp_path, "--resume", f"--out={run}", "--steps=2")
    check_refused(ended, "model.intermediate_size is 128 instead of 96 in step_00000001")


def test_a_missing_shard_is_named(trained: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shards = sorted(run.glob("checkpoints/*/tensors-*-of-00002.safetensors"))
    assert len(shards) == 2
    shards[1].unlink()
    ended = train(tmp_path, "--resume", f"--out={run}", "--steps=2")
    check_refused(ended, "are damaged; step_00000001: ")
    assert shards[1].name in ended.lines[0][0]
