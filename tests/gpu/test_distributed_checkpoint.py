"""Checkpoints of ranks with GPUs: copies in pinned memory, a process group of NCCL, and FSDP2's parameters."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from octile.checkpoint import DistributedCheckpoints, ShardedCheckpoint, load_tensors
from octile.checkpoint import store as store_module
from octile.checkpoint.sharded import ShardWriter
from tests.worlds import start_ranks


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is written before the event is set."""
    event, write = threading.Event(), store_module.atomic_write

    def wait(path: Path):
        assert event.wait(60)
        return write(path)

    monkeypatch.setattr(store_module, "atomic_write", wait)
    return event


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What the thread that writes is given."""
    found: dict[str, torch.Tensor] = {}
    write = ShardWriter.write

    def record(self, chunks, rank, n_ranks):
        found.update({name: chunk.local for name, chunk in chunks.items()})
        return write(self, chunks, rank, n_ranks)

    monkeypatch.setattr(ShardWriter, "write", record)
    return found


def test_tensors_may_change_as_soon_as_save_returns(tmp_path, held_back):
    tensors = {"w": torch.randn(1000, 300, device="cuda"), "m": torch.randn(77, device="cuda").bfloat16()}
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    checkpoints = DistributedCheckpoints(tmp_path)
    checkpoints.save(1, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()
    torch.cuda.synchronize()
    held_back.set()
    checkpoints.close()
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load_tensors(tmp_path / "step_00000001", found)
    assert all(found[name].cpu().equal(tensor) for name, tensor in before.items())


def test_copies_lie_in_pinned_memory(tmp_path, staged):
    checkpoints = DistributedCheckpoints(tmp_path)
    checkpoints.save(1, {"w": torch.randn(1000, 300, device="cuda")}, {})
    checkpoints.wait()
    assert staged["w"].device.type == "cpu"
    assert staged["w"].is_pinned()
    checkpoints.close()


def _be_rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", store, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(33, 65, device="cuda"))
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save({name: tensor.cpu() for name, tensor in whole.items()}, Path(folder) / "whole.pt")
    checkpoints = DistributedCheckpoints(Path(folder) / "run")
    checkpoints.save(1, model.state_dict(), {"rank": rank})
    path = checkpoints.latest()
    assert path is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_tensors(path, model.state_dict(), check=False)
    for name, tensor in model.state_dict().items():
        assert tensor.full_tensor().equal(whole[name]), name
    checkpoints.close()
    dist.destroy_process_group()


def test_two_ranks_of_nccl_save_and_load_fsdp2(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    start_ranks(_be_rank, (str(tmp_path),), 2)
    checkpoint = ShardedCheckpoint(tmp_path / "run" / "step_00000001")
    whole = torch.load(tmp_path / "whole.pt")
    assert all(checkpoint.read(name).equal(tensor) for name, tensor in whole.items())
    assert checkpoint.state == {"rank": 0}
