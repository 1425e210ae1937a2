"""`octile train` on a pipeline of two and of four GPUs, over NCCL: tests/train/strategy/pipeline_cases.py."""

import re
from collections.abc import Callable

import pytest
import torch

from tests.train.strategy import pipeline_cases
from tests.train.strategy.test_ranks import free_port
from tests.train.strategy.test_torchrun import FAULTY, OPTIONS, PIPELINE, losses, torchrun
from tests.worlds import Failures, assert_passed, start_once, start_ranks

pytestmark = pytest.mark.timeout(400, method="thread")  # the first test runs all cases


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong in a world of so many GPUs, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(pipeline_cases.run, (world, folder, str(store.folder), free_port(), "cuda"), world)

    return start_once(tmp_path_factory, "pipelined-on-gpus", start)


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (2, 4) for name in pipeline_cases.gpu_cases(world)]
)
def test_trainers(failures, world: int, name: str):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert_passed(failures(world), name)


def test_a_rank_that_is_killed_among_captured_steps_is_restarted_and_resumes(text, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = [*OPTIONS, *PIPELINE, f"--data={text}", "--device=cuda", "--recipe=bf16", "--steps=10"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for run, step in ((straight, 100), (killed, 8)):  # the first is never killed
        # torchrun gives the other rank, whose GPU waits for the killed one, 30 s to end
        ended = torchrun(str(FAULTY), str(step), *arguments, f"--out={run}", restarts=1, seconds=240)
        assert ended.returncode == 0, ended.stderr
    assert re.search(r"resumed at step [46] ", ended.stdout)
    assert losses(killed) == pytest.approx(losses(straight), rel=1e-2)
