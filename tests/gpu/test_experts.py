"""Experts on GPUs, one a rank, by NCCL, compared with one process bit for bit: the cases of tests/parallel."""

import pytest
import torch
import torch.multiprocessing as mp

from tests.parallel import expert_cases
from tests.parallel.expert_cases import E, K, Tokens
from tests.worlds import Failures, assert_passed, read_failures

NEEDS_RANKS = "refusals"
NAMES = list(expert_cases.cases(2, [], {"ranks": None, "peers": "peers"}))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Failures]:
    """What went wrong on one GPU, and on two if there are as many, by rank."""
    drawn = [Tokens([[[(r + t + k) % E for k in range(K)] for t in range(3 * n)] for r in range(2)]) for n in range(4)]
    found = {}
    for world in range(1, min(torch.cuda.device_count(), 2) + 1):
        folder = tmp_path_factory.mktemp(f"world{world}")
        of_world = [Tokens(tokens.experts[:world]) for tokens in drawn]
        mp.spawn(expert_cases.run, (world, str(folder), of_world, "cuda"), world)
        found[world] = read_failures(folder, world)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2])
def test_ranks(world: int, name: str, request: pytest.FixtureRequest):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if world == 1 and (name == NEEDS_RANKS or name.endswith("peers")):
        pytest.skip("one rank refuses nothing and has no peers")
    assert_passed(request.getfixturevalue("failures")[world], name)
