"""Experts on 2 and 4 gloo ranks compared with one process, bit for bit; see expert_cases.py."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.kernels.cuda.gemm import num_sms
from octile.nn import Gate, MoE
from octile.parallel import shard_experts
from octile.parallel.symmetric_memory import PeerMemory
from tests.parallel import expert_cases
from tests.parallel.expert_cases import E, K, Tokens
from tests.worlds import Failures, assert_passed, start_once, start_ranks

MESHES = {
    2: ["nvshmem_peers", "ranks", "peers"],
    4: ["nvshmem_peers", "ranks", "peers", "nodes", "node_peers"],
}
SEVERAL_EXCHANGES = {"recomputed", "interleaved", "two_passes", "second_derivative", "observed", "overlap"}
FEW = {"gate", "more_than_a_tile", "no_tokens"}  # a recipe's cases that are not exhaustive for all peers
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


def is_further(world: int, name: str) -> bool:
    """Whether other cases show the same.

    For four peers these are two peers, and peers of nodes; for NVSHMEM and peers of nodes two peers, but for FEW, and
    many exchanges, whose numbers of tokens are drawn, too; for other recipes of peers FP8. For four ranks without peers
    two ranks show each recipe's rows, and what calls an exchange several times or differentiates it in another way, and
    FP32 shows where rows of any distribution go.
    """
    what, _, of = name.rpartition("-")
    kind, _, mode = what.partition("-")
    if world == 4 and of in ("peers", "nvshmem_peers"):
        return True
    if of in ("nvshmem_peers", "node_peers"):
        return kind in SEVERAL_EXCHANGES or (mode != "" and kind not in FEW)
    if world == 4:
        is_another_recipe = mode not in ("", "fp32") and kind not in ("gate", "overlap", "recomputed")
        return is_another_recipe or (of == "ranks" and kind in SEVERAL_EXCHANGES)
    return of == "peers" and mode in ("fp32", "fp8_unfused") and kind not in ("gate", "overlap", "recomputed")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Failures]:
    """What went wrong in the further cases of a world or in the others, by rank."""

    def start_cases(further: bool, world: int, folder: str) -> None:
        names = [name for name in NAMES[world] if is_further(world, name) == further]
        start_ranks(expert_cases.run, (world, folder, draw(world), "cpu", names), world)

    worlds = [
        start_once(tmp_path_factory, f"experts-{further}", partial(start_cases, further)) for further in (False, True)
    ]
    return lambda world, further: worlds[further](world)


CASES = [(world, name, is_further(world, name)) for world, names in NAMES.items() for name in names]


@pytest.mark.parametrize(
    ("world", "name", "further"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case[2] else pytest.mark.slow) for case in CASES],
    ids=[f"{world}-{name}" for world, name, _ in CASES],
)
def test_ranks(failures, world: int, name: str, further: bool):
    assert_passed(failures(world, further), name)


def test_without_a_process_group_the_error_says_so():
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialized"):
        shard_experts(MoE(Gate(16, 4, 2), 16, 8))


@pytest.mark.parametrize(("there", "used"), [(132, (128, 32)), (114, (114, 32)), (78, (78, 32)), (20, (20, 20))])
def test_an_exchange_uses_no_more_sms_than_there_are(
    monkeypatch: pytest.MonkeyPatch, there: int, used: tuple[int, int]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(num_sms, "multiprocessors", lambda device: there)
    memory = PeerMemory(None)
    assert (memory.num_sms, memory.num_sms_overlapped) == used
