"""Experts on 2 and 4 gloo ranks compared with one process, bit for bit; see expert_cases.py."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.nn import Gate, MoE
from octile.parallel import shard_experts
from tests.parallel import expert_cases
from tests.parallel.expert_cases import E, K, Tokens
from tests.worlds import Failures, assert_passed, start_once, start_ranks

MESHES = {2: ["ranks", "peers"], 4: ["ranks", "peers", "nodes"]}
NAMES = {world: list(expert_cases.cases(world, [], dict.fromkeys(meshes))) for world, meshes in MESHES.items()}


def draw(world: int) -> list[Tokens]:
    """Distributions of tokens: any number on each rank, any experts from a part of them."""
    found: list[Tokens] = []

    @settings(max_examples=8)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        used = data.draw(st.lists(st.integers(0, E - 1), min_size=K, max_size=E, unique=True))
        token = st.permutations(used).map(lambda order: order[:K])
        found.append(Tokens([data.draw(st.lists(token, max_size=6)) for _ in range(world)]))

    collect()
    return found


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong in a world, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(expert_cases.run, (world, folder, draw(world)), world)

    return start_once(tmp_path_factory, "experts", start)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_ranks(failures, world: int, name: str):
    assert_passed(failures(world), name)


def test_without_a_process_group_the_error_says_so():
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialized"):
        shard_experts(MoE(Gate(16, 4, 2), 16, 8))
