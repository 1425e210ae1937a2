"""Experts on GPUs, one a rank, by NCCL, compared with one process bit for bit: the cases of tests/parallel."""

from collections.abc import Callable

import pytest
import torch

from tests.parallel import expert_cases
from tests.parallel.expert_cases import E, K, Tokens
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NEEDS_RANKS = "refusals"
NAMES = list(expert_cases.cases(2, [], dict.fromkeys(("ranks", "peers", "node_peers"))))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong on so many GPUs, by rank."""

    def start(world: int, folder: str) -> None:
        drawn = [
            Tokens([[[(r + t + k) % E for k in range(K)] for t in range(3 * n)] for r in range(world)])
            for n in range(4)
        ]
        start_ranks(expert_cases.run, (world, folder, drawn, "cuda"), world)

    return start_once(tmp_path_factory, "experts-on-gpus", start)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2])
def test_ranks(failures, world: int, name: str):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if world == 1 and (name == NEEDS_RANKS or name.endswith("peers")):
        pytest.skip("one rank refuses nothing and has no peers")
    assert_passed(failures(world), name)
