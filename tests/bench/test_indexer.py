"""Tests of the indexer's benchmark: what it measures on a CPU, and its verdicts."""

import pytest

from octile.bench import goals, indexer
from octile.bench.indexer import Size
from octile.bench.rows import Row, compare


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "SIZES", {"cpu": Size(4, 256, 2, 128)})
        patch.setattr(indexer, "CHOICES", {"cpu": ((4, 256),)})
        patch.setattr(indexer, "ROUNDS", 1)
        return list(indexer.rows())


def test_every_shape_of_the_goals_is_measured(rows: list[Row]):
    speeds = {row.case for row in rows if row.unit == "GFLOP/s"}
    assert set(goals.INDEXER_FIGURES) < speeds
    assert len([case for case in speeds if "in pages" in case]) == 4
    assert all(row.value > 0 for row in rows)


def test_the_choice_of_keys_is_compared_with_torchs(rows: list[Row]):
    last = rows[-1]
    assert last.against is not None
    assert (last.what, last.against.peer) == ("choice of keys", "torch.topk")
    assert last.case == "4 queries, 64 of 256 keys"  # a choice of all keys would be none


def test_no_two_rows_have_one_name(rows: list[Row]):
    assert len({(row.case, row.what) for row in rows}) == len(rows)


def test_a_cpu_is_not_judged(rows: list[Row]):
    assert goals.indexer_verdicts(rows) == ""


def test_each_peer_is_judged():
    case = goals.indexer_case(64, 128)
    measured = [
        compare(case, "logits", 1000, "TFLOP/s", "DeepGEMM", 1100),
        compare(case, "logits", 1000, "TFLOP/s", goals.RECORDED, 900),
    ]
    assert goals.indexer_verdicts(measured).splitlines() == [
        "logits, 64 heads of 128 vs. DeepGEMM: 0.909: floor ≥ 0.95 MISSED, aim ≥ 1.05 MISSED",
        "logits, 64 heads of 128 vs. DeepGEMM, recorded: 1.111: floor ≥ 0.95 met, aim ≥ 1.05 met",
    ]
