"""`octile train` under torchrun, on two and four processes of which one is killed: restarted, and resumed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octile.cli import main
from tests.train.conftest import MICRO, write_no_report
from tests.train.strategy.faulty_rank import start_and_restart
from tests.worlds import begin_ranks

CLOSED = r"\([^()]*(Connection (closed|reset) by peer|Broken pipe)[^()]*\)"  # how gloo notices that a rank has ended
FAULTY = Path(__file__).with_name("faulty_rank.py")
OPTIONS = [
    f"--model.{name.replace('_', '-')}={value}"
    for name, value in vars(MICRO).items()
    if type(value) is int and not name.endswith("token_id")  # which are those of the tokenizer
]
OPTIONS += ["--recipe=float32", "--batch-size=4", "--sequence-length=32", "--val-sequences=4", "--device=cpu"]
OPTIONS += ["--optim.lr=3e-3", "--optim.warmup=0", "--optim.decay=0", "--validate-every=4", "--checkpoint-every=2"]
OPTIONS += ["--steps=4", "--parallel.dp=2"]

PIPELINE = ["--parallel.dp=1", "--parallel.pp=2", "--micro-batches=2"]


def torchrun(
    *command: str, restarts: int = 0, ranks: int = 2, seconds: float = 180
) -> subprocess.CompletedProcess[str]:
    """Start a command on a few processes, and wait for it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    options = [f"--max-restarts={restarts}", *command]
    return subprocess.run([*launcher, *options], env=environment, capture_output=True, text=True, timeout=seconds)


def own_lines(errors: str) -> list[str]:
    """What octile printed when it failed, without torchrun's report."""
    return [line for line in errors.splitlines() if line.startswith("octile: ")]


def output(folder: Path, stream: str) -> str:
    """What the ranks wrote to stdout or stderr, before and after the restart."""
    return "".join(file.read_text() for file in sorted(folder.glob(f"*/attempt_*/*/{stream}.log")))


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def arguments(text) -> list[str]:
    return [*OPTIONS, f"--data={text}"]


@pytest.fixture(scope="module")
def straight(arguments, tmp_path_factory) -> dict[int, float]:
    """The losses of one process."""
    out = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        main(["train", *arguments, "--steps=8", "--parallel.dp=1", f"--out={out}"])
    return losses(out)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_resumes(arguments, straight, tmp_path):
    """The agent is torchrun's, but forks the ranks, which takes seconds less than to start them with its command."""
    run, logs = tmp_path / "run", tmp_path / "logs"
    (agent,) = begin_ranks(start_and_restart, (str(logs), 6, [*arguments, "--steps=8", f"--out={run}"]), 1)
    agent.join(180)
    assert agent.exitcode == 0, output(logs, "stderr")
    assert re.search(r"resumed at step [24] ", output(logs, "stdout"))  # that of step 4 may still be written then
    (line,) = own_lines(output(logs, "stderr"))
    where = "at step 6: sum of the gradients; last seen: rank 1 at step 6: passes of micro-batch 0"
    assert re.search(rf"{where} {CLOSED}$", line)
    assert losses(run) == pytest.approx(straight, rel=1e-5)
    assert (run / "report.html").exists()
    assert (run / "sample.txt").exists()


@pytest.mark.exhaustive  # of one process: test_pipelined, test_moved_runs; the restart is the one above
def test_a_killed_rank_of_a_pipeline_with_spread_experts_is_restarted_and_resumes(arguments, straight, tmp_path):
    run = tmp_path / "run"
    arguments = [*arguments, *PIPELINE, "--parallel.dp=2", "--parallel.ep=2", "--steps=8", f"--out={run}"]
    ended = torchrun(str(FAULTY), "6", *arguments, restarts=1, ranks=4)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"resumed at step [24] ", ended.stdout)
    (line,) = own_lines(ended.stderr)
    assert "rank 1 at step 6: backward pass of stage 0 for micro-batch 0" in line
    assert losses(run) == pytest.approx(straight, rel=1e-5)
    assert (run / "report.html").exists()
