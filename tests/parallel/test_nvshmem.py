"""When NVSHMEM is chosen across nodes, and the layout of its memory; exchanges are tested in test_experts.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as torch_memory

from octile.parallel import nvshmem
from octile.parallel.nvshmem import BLOCKS, NvshmemMemory, why_not_nvshmem

NODES, RANKS = ["across"], ["inside"]  # stand-ins for groups of two ranks
IN_USE = "this process has symmetric memory of torch's other backend already"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """job(...): two nodes of two ranks on GPUs, of which the other three have the reasons that are given."""
    others: list[list[str | None]] = []

    def gather(own: list, kind: object, group: object) -> list:
        return [own] * 2 if len(own) == 2 else [own, others.pop(0)]

    def start(*of_others: str | None, is_in_use: bool = False, ranks: tuple[int, ...] = (0, 2)) -> None:
        def set_backend(name: str) -> None:
            if is_in_use:
                raise RuntimeError("Backend can not be changed after use.")

        others[:] = [[reason] for reason in of_others]
        monkeypatch.setattr(torch_memory, "set_backend", set_backend)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(ranks))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvshmem, "has_nvshmem", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(nvshmem, "all_gather_messages", gather)
    return start


def test_it_is_chosen_where_all_ranks_can(job):
    job(None, None)
    assert why_not_nvshmem([NODES, RANKS]) is None


def test_a_rank_that_cannot_keeps_all_from_it(job):
    job("this torch has no NVSHMEM")
    assert why_not_nvshmem([NODES, RANKS]) == "this torch has no NVSHMEM"


def test_memory_of_another_backend_keeps_all_from_it(job):
    job(None, IN_USE, is_in_use=True)
    assert why_not_nvshmem([NODES, RANKS]).startswith(IN_USE)


def test_memory_of_another_backend_on_some_ranks_is_refused(job):
    job(None, IN_USE)
    with pytest.raises(RuntimeError, match=f"on some ranks, not on all, {IN_USE}"):
        why_not_nvshmem([NODES, RANKS])


def test_ranks_that_are_not_evenly_numbered_are_refused(job):
    job(None, ranks=(0, 1, 4))
    assert why_not_nvshmem([NODES, RANKS]) == "the ranks of a group must be evenly numbered, not [0, 1, 4]"


@pytest.mark.parametrize(
    ("blocks", "row_bytes", "in_memory"),
    [("64", 12, 32), ("64", 7168, 7168), ("256", 7168, 8192), ("64", 224, 224), ("6", 224, 240), ("6", 7168, 7200)],
)
def test_blocks_divide_rows_and_long_ones_in_vectors(monkeypatch: pytest.MonkeyPatch, blocks, row_bytes, in_memory):
    monkeypatch.setenv(BLOCKS, blocks)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    memory, rows = NvshmemMemory(NODES), torch.empty(3, row_bytes, dtype=torch.uint8)
    assert memory.n_bytes([rows], 128, 0) == 128 * in_memory
    assert memory.is_dense(rows) == (row_bytes == in_memory)


@pytest.mark.parametrize(("hosts", "blocks"), [(["a", "a"], 128), (["a", "b"], 16), ([*"abcdefghijklmnopqrst"], 20)])
def test_blocks_are_chosen_by_the_hosts_unless_they_are_set(monkeypatch: pytest.MonkeyPatch, hosts, blocks):
    monkeypatch.setenv(BLOCKS, "")  # so that it is as before afterwards
    monkeypatch.delenv(BLOCKS)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(hosts))
    monkeypatch.setattr(nvshmem, "all_gather_messages", lambda own, kind, group: hosts)
    memory = NvshmemMemory(NODES)
    assert nvshmem._blocks(memory.group) == blocks
    assert memory.blocks == blocks // len(hosts)
