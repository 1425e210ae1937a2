"""`octile plan experts` on the command line."""

import json
from xml.etree import ElementTree

import pytest
import torch

from octile.plan.experts import balanced, consecutive, read_load, skewed_load
from tests.test_cli import call, refused

SMALL = ("--num-groups", "1", "--num-nodes", "1", "--num-replicas", "6", "--num-gpus", "2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_metrics(path, *loads) -> None:
    records = [{"step": 1, "loss": 5.0}, *({"step": i, "expert_load": load} for i, load in enumerate(loads))]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.mark.slow
def test_without_options_the_experts_of_deepseek_v3_are_placed(capsys, folder):
    code, out, err = call(capsys, "plan", "experts")
    assert (code, err) == (0, "")
    assert "layers: 58, experts: 256, slots: 288, GPUs: 32, nodes: 4" in out
    texts = ElementTree.parse(folder / "plan" / "experts.svg").iter("{http://www.w3.org/2000/svg}text")
    assert "redundant experts: layer 39, busiest GPU 1.21 × the mean" in [text.text for text in texts]


def test_the_newest_record_of_a_run_is_read(folder):
    write_metrics(folder / "metrics.jsonl", {"layers.1": [1, 2]}, {"layers.1": [3, 4], "layers.2": [5, 6]})
    assert read_load(folder).tolist() == read_load(folder / "metrics.jsonl").tolist() == [[3, 4], [5, 6]]


@pytest.mark.slow
def test_the_table_compares_the_placements(capsys, folder):
    write_metrics(folder / "metrics.jsonl", {"layers.1": [8, 4, 2, 2]})
    _, out, _ = call(capsys, "plan", "experts", "--load", ".", *SMALL, "--out", "a.svg")
    rows = {line[:17]: line.split()[-4:] for line in out.splitlines()}
    assert rows["one copy of each "] == ["2", "1.50", "1.50", "33.3%"]
    assert rows["redundant experts"] == ["3", "1.00", "1.00", "0.0%"]


@pytest.mark.slow
def test_gpus_without_an_expert_are_counted(capsys, folder):
    write_metrics(folder / "metrics.jsonl", {"layers.1": [8, 4, 2]})
    options = ("--num-groups", "1", "--num-nodes", "1", "--num-replicas", "5", "--num-gpus", "5", "--out", "a.svg")
    _, out, _ = call(capsys, "plan", "experts", "--load", ".", *options)
    assert "with one copy of each, 2 of 5 GPUs have no expert" in out


@pytest.mark.slow
def test_nothing_is_said_of_gpus_without_an_expert_where_there_are_none(capsys, folder):
    assert "have no expert" not in call(capsys, "plan", "experts")[1]


def test_before_each_gpu_has_consecutive_experts():
    loads = consecutive(torch.tensor([[1, 2, 3, 4, 5]]), 2)
    assert loads.load.tolist() == [[[1, 2, 3], [4, 5, 0]]]


def test_before_gpus_beyond_the_experts_are_empty():
    assert consecutive(torch.tensor([[1, 2]]), 4).load.tolist() == [[[1], [0], [2], [0]]]


def test_the_copies_of_an_expert_share_its_load():
    loads = balanced(torch.tensor([[8, 4, 2, 2]]), 6, 1, 1, 2)
    assert loads.load.sum() == 16
    assert loads.load[loads.is_redundant].tolist() == [4, 2, 4, 2]


def test_experts_without_load_wait_for_nothing():
    loads = balanced(torch.zeros(2, 4), 6, 1, 1, 2)
    assert loads.imbalance().tolist() == [1, 1]
    assert loads.waiting() == 0


def test_a_skew_of_zero_gives_equal_loads():
    assert skewed_load(0.0, 1).unique().tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--load", "none"), "load must be a run folder or its metrics.jsonl, but there is no file none"),
        (("--num-replicas", "200"), "--num-replicas must be at least 256, the experts of load, not 200"),
        (("--num-replicas", "290"), "--num-replicas, 290, must be a multiple of --num-gpus, 32"),
        (("--num-groups", "7"), "--num-groups must divide the experts of load, 256, but is 7"),
        (("--num-nodes", "5"), "--num-gpus, 32, must be a multiple of --num-nodes, 5"),
        (("--num-gpus", "7"), "--num-gpus, 7, must be a multiple of --num-nodes, 4"),
        (("--num-gpus", "0"), "--num-gpus must be at least 1, not 0"),
        (("--num-gpus", "2048"), "--num-gpus must be at most 1,024, not 2048"),
        (("--skew", "-1"), "--skew must be at least 0, not -1"),
        (("--skew", "nan"), "--skew must be finite, not nan"),
        (("--load", "none", "--skew", "1"), "--skew has no effect with --load, since no loads are drawn"),
        (("--out", "experts.pdf"), "--out must end in .svg or .png, not 'experts.pdf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_options_are_refused_before_anything_is_written(capsys, folder, options, message):
    assert message in refused(capsys, "plan", "experts", *options)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"a": [1, 2], "b": [1]}, "expert_load in line 2 of .* must have equally long lists of counts, not an object"),
        ({"a": [1, -2]}, "must have equally long lists of counts"),
        ({"a": [1.5]}, "must have equally long lists of counts"),
        ({"a": []}, "must have equally long lists of counts"),
        ({}, "must have equally long lists of counts"),
        ([1, 2], "must have equally long lists of counts, not \\[1, 2\\]"),
    ],
)
def test_a_damaged_record_is_refused(folder, load, message):
    write_metrics(folder / "metrics.jsonl", load)
    with pytest.raises(ValueError, match=message):
        read_load(folder)


def test_a_run_without_experts_is_refused(folder):
    write_metrics(folder / "metrics.jsonl")
    with pytest.raises(ValueError, match="has no record of the experts' tokens"):
        read_load(folder)


def test_a_line_that_is_cut_off_is_refused(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "expert_load": {"a": [1')
    with pytest.raises(ValueError, match=r"line 1 of .* is damaged: not JSON at byte"):
        read_load(folder)
