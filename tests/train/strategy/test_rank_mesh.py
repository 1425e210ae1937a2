"""The groups of ranks of pipelines, data parallelism and experts."""

import pytest

from octile.parallel.ranks import FOREVER, Ranks
from octile.train.config import ParallelConfig
from octile.train.strategy import rank_mesh
from octile.train.strategy.rank_mesh import RankMesh


@pytest.fixture
def groups_of(monkeypatch: pytest.MonkeyPatch):
    """Return the groups of a rank as their ranks, and a mesh as its rows."""

    def own(groups, ranks: Ranks) -> list[int]:
        assert sorted(rank for group in groups for rank in group) == list(range(ranks.size))
        return next([*group] for group in groups if ranks.rank in group)

    def mesh(dimensions, device_type: str, rows: list[list[int]], mesh_dim_names: tuple[str, ...]) -> list[list[int]]:
        rank = (set(dimensions[0]) & set(dimensions[1])).pop()
        assert dimensions[1] in rows
        assert dimensions[0] == [row[dimensions[1].index(rank)] for row in rows]
        return rows

    monkeypatch.setattr(rank_mesh, "_own_group", own)
    monkeypatch.setattr(rank_mesh.DeviceMesh, "from_group", mesh)

    def of(rank: int, config: ParallelConfig, ranks_of_a_host: int | None = None) -> RankMesh:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_a_host or config.ranks))
        return RankMesh.of(config, Ranks(rank, config.ranks, None, FOREVER), "cpu")

    return of


def test_a_pipeline_has_the_same_stages_on_consecutive_ranks(groups_of):
    found = groups_of(5, ParallelConfig(dp=4, ep=2, pp=2))
    assert found.data == [4, 5, 6, 7]
    assert found.pipeline == [1, 5]
    assert found.experts == [[4, 5], [6, 7]]
    assert found.hops == [4, 5]


def test_without_a_pipeline_all_ranks_share_the_batch(groups_of):
    assert groups_of(1, ParallelConfig(dp=2)) == RankMesh(None, None, None, None)
    assert groups_of(3, ParallelConfig(dp=4, ep=2)) == RankMesh(None, None, [[0, 1], [2, 3]], [2, 3])


@pytest.mark.parametrize(("rank", "rows"), [(6, [[4, 5], [6, 7]]), (8, [[8, 9], [10, 11]])])
def test_experts_on_several_hosts_have_a_hop_across_them(groups_of, rank: int, rows: list[list[int]]):
    found = groups_of(rank, ParallelConfig(dp=8, ep=4, pp=2), ranks_of_a_host=2)
    assert found.hops == rows


@pytest.mark.parametrize(("exchange", "hops"), [("symmetric_memory", [[0], [1]]), ("all_to_all", [0, 1])])
def test_hosts_of_one_rank_are_a_mesh_for_symmetric_memory_only(groups_of, exchange: str, hops: list):
    assert groups_of(1, ParallelConfig(dp=2, ep=2, exchange=exchange), ranks_of_a_host=1).hops == hops
