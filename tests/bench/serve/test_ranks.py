"""What `octile bench serve` measures on two ranks, on a CPU and a miniature model."""

import socket

import pytest
import torch

from octile.bench.serve import rows
from tests.bench.serve.rank_case import measure
from tests.worlds import start_ranks


@pytest.mark.slow
def test_rows_of_a_miniature_model(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_ranks(measure, (str(tmp_path), port), 2)
    found = {(case, what): (value, peer) for case, what, value, peer in torch.load(tmp_path / "0.pt")}
    assert list(found) == [
        ("miniature, decode, batch 2", "decode"),
        ("miniature, decode, batch 1 on each of 2 ranks", "step"),
        ("miniature, decode, batch 1 on each of 2 ranks", "decode"),
        ("miniature, decode, batch 2 on each of 2 ranks", "step"),
        ("miniature, decode, batch 2 on each of 2 ranks", "decode"),
        ("miniature, decode, batch 1 on each of 2 ranks, routed shared experts", "step"),
        ("miniature, decode, batch 1 on each of 2 ranks, routed shared experts", "decode"),
        ("miniature, decode, batch 2 on 2 ranks together", "step"),
        ("miniature, decode, batch 2 on 2 ranks together", "decode"),
    ]
    assert all(value > 0 for value, _ in found.values())
    assert found["miniature, decode, batch 2 on each of 2 ranks", "decode"][1] == "one, batch 2"
    assert torch.load(tmp_path / "1.pt") == []


@pytest.mark.parametrize("gpus", [0, 1])
def test_ranks_without_a_gpu_each_are_refused_before_a_model_is_made(monkeypatch, gpus):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"torchrun has started 2 processes on a machine with {gpus}$"):
        next(rows(None))
