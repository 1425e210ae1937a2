"""What test_distributed.py runs on gloo ranks: one set of processes is in turn a world of 4, 2 and 8 ranks.

The ranks are forked, so that torch is imported once.

The state is that of a run with data-parallel ranks and experts spread over pairs of them: whole tensors, experts' rows
that several ranks hold, moments' rows that one rank holds, and a DTensor whose rows do not divide. Every tensor is the
same function of its name in every world.
"""

import json
import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from octile.checkpoint import Chunk, DistributedCheckpoints, ShardedCheckpoint, load_tensors, save_checkpoint
from octile.checkpoint import store as store_module
from octile.checkpoint.distributed import own_group
from octile.parallel.ranks import gather_results
from tests.checkpoint.micro_model import micro_model

WORLDS = (4, 2, 8)  # in their order; all names of cases are in CASES
EXPERT_RANKS = 2  # ranks that share the experts of a layer; the others have the same experts again
STEPS = {4: 10, 2: 20, 8: 30}  # the step that each world saves


def whole() -> dict[str, Tensor]:
    """All tensors of the run, as one process has them."""
    torch.manual_seed(0)
    moment = torch.randn(16, 3, 5)
    moment[3, 1, 2], moment[9, 0, 0] = float("nan"), -0.0
    return {
        "model.norm.weight": torch.randn(7),
        "model.experts.down": torch.randn(8, 3, 5),
        "model.embedding": torch.randn(13, 4).bfloat16(),
        "optimizer.0.step": torch.tensor(12.0),
        "optimizer.0.exp_avg": moment.bfloat16(),
        "optimizer.1.exp_avg": torch.randn(8, 3, 5),
        "fp8": torch.randn(16, 9).to(torch.float8_e4m3fn),
        "generator": torch.get_rng_state()[:64],
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
    }


def state(step: int) -> dict:
    return {"steps_done": step, "loss": 0.1 + 0.2, "text": "é"}


def _rows(tensor: Tensor, index: int, parts: int) -> Chunk:
    n_rows = len(tensor) // parts
    local = tensor[index * n_rows : (index + 1) * n_rows].clone()
    return Chunk.rows(local, index * n_rows, len(tensor))


def held() -> dict[str, Tensor | Chunk]:
    """What this rank of the current world holds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    replica, expert = divmod(rank, EXPERT_RANKS)
    tensors: dict[str, Tensor | Chunk] = dict(whole())
    tensors["model.experts.down"] = _rows(tensors["model.experts.down"], expert, EXPERT_RANKS)
    order = expert * (world // EXPERT_RANKS) + replica
    tensors["optimizer.1.exp_avg"] = _rows(tensors["optimizer.1.exp_avg"], order, world)
    for name in ("optimizer.0.exp_avg", "fp8"):
        tensors[name] = _rows(tensors[name], rank, world)
    mesh = init_device_mesh("cpu", (world,))
    tensors["model.embedding"] = distribute_tensor(tensors["model.embedding"], mesh, [Shard(0)])
    return tensors


def local(tensor: Tensor | Chunk) -> Tensor:
    if isinstance(tensor, Chunk):
        return tensor.local
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bits(tensor: Tensor | Chunk) -> Tensor:
    """The bytes of this rank's part, a view of them if it is contiguous."""
    return local(tensor).detach().reshape(-1).view(torch.uint8)


def emptied(tensors: dict[str, Tensor | Chunk]) -> dict[str, Tensor | Chunk]:
    for tensor in tensors.values():
        bits(tensor).fill_(0)
    return tensors


def check_same(found: dict[str, Tensor | Chunk], needed: dict[str, Tensor | Chunk]) -> None:
    assert found.keys() == needed.keys()
    for name in needed:
        assert bits(found[name]).equal(bits(needed[name])), f"{name} differs"


# --- cases: each runs on all ranks of its world -----------------------------------------------------------------------


def saved(folder: Path) -> None:
    """Tensors that change after `save` returns are saved as they were."""
    checkpoints, tensors = DistributedCheckpoints(folder / "run"), held()
    step = STEPS[dist.get_world_size()]
    checkpoints.save(step, tensors, state(step))
    emptied(tensors)
    checkpoints.close()


def loaded(folder: Path) -> None:
    """The newest checkpoint, of another number of ranks, has the same bits here."""
    checkpoints = DistributedCheckpoints(folder / "run")
    path, before = checkpoints.latest(), STEPS[WORLDS[WORLDS.index(dist.get_world_size()) - 1]]
    assert path is not None
    assert path.endswith(f"step_{before:08d}")
    targets = emptied(held())
    load_tensors(path, targets, check=False)
    check_same(targets, held())
    assert ShardedCheckpoint(path).state == state(before)
    checkpoints.close()


def each_rank_writes_a_share(folder: Path) -> None:
    """What several ranks hold is written once, and the files of the ranks are about equally large."""
    files = sorted((folder / "run" / f"step_{STEPS[4]:08d}").glob("tensors-*"))
    assert [file.name for file in files] == [f"tensors-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    total = sum(tensor.nbytes for tensor in whole().values())
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert sum(file.stat().st_size for file in files) == total + headers


def a_model(folder: Path) -> None:
    """A model whose experts are spread over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors: dict[str, Tensor | Chunk] = {}
    for name, tensor in micro_model().state_dict().items():
        tensors[f"model.{name}"] = _rows(tensor, rank, world) if ".experts." in name else tensor
    checkpoints = DistributedCheckpoints(folder / "model")
    checkpoints.save(1, tensors, {})
    checkpoints.close()


def from_one_process(folder: Path) -> None:
    """A checkpoint of one process is loaded by many ranks."""
    if dist.get_rank() == 0:
        save_checkpoint(folder / "single", 1, whole(), state(1))
    dist.barrier()
    targets = emptied(held())
    load_tensors(folder / "single" / "step_00000001", targets)
    check_same(targets, held())


def _failure(call: Callable[[], object]) -> str:
    """The same error on all ranks, as text; and no error is an error."""
    try:
        call()
        text = "no error"
    except (ValueError, TypeError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


def _damaged(folder: Path, name: str, damage: Callable[[Path], None]) -> Path:
    """A copy of the newest checkpoint with a damaged file, and the one before it."""
    copy = folder / name
    if dist.get_rank() == 0:
        shutil.copytree(folder / "run", copy)
        damage(sorted((copy / f"step_{STEPS[2]:08d}").glob("tensors-*"))[-1])
    dist.barrier()
    return copy


def _check_damage(folder: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    copy = _damaged(folder, name, damage)
    newest = copy / f"step_{STEPS[2]:08d}"
    targets = emptied(held())
    text = _failure(lambda: load_tensors(newest, targets))
    assert "tensors-00001-of-00002.safetensors" in text, text
    assert message in text, text
    check_same(targets, emptied(held()))  # nothing of it was used
    checkpoints = DistributedCheckpoints(copy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = checkpoints.latest()
    assert path == str(copy / f"step_{STEPS[4]:08d}")
    warned = [str(w.message) for w in caught if "cannot be used" in str(w.message)]
    assert len(warned) == (dist.get_rank() == 0)
    assert all("tensors-00001-of-00002.safetensors" in text for text in warned)
    checkpoints.close()


def a_flipped_bit(folder: Path) -> None:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    _check_damage(folder, "flipped", flip, "is damaged: its SHA-256")


def a_truncated_shard(folder: Path) -> None:
    _check_damage(folder, "truncated", lambda file: os.truncate(file, 100), "is damaged: 100 bytes found")


def a_missing_shard(folder: Path) -> None:
    _check_damage(folder, "missing", lambda file: file.unlink(), "is missing")


def another_model(folder: Path) -> None:
    """A tensor of another shape on one rank is refused on all, and nothing is read."""
    path = folder / "run" / f"step_{STEPS[4]:08d}"
    targets = emptied(held())
    if dist.get_rank() == 1:
        targets["model.norm.weight"] = torch.zeros(8)
    text = _failure(lambda: load_tensors(path, targets))
    assert "model.norm.weight is F32 [7] in the checkpoint" in text, text
    assert "but F32 [8] here" in text, text
    assert not any(bits(tensor).any() for tensor in targets.values())


def an_unknown_tensor(folder: Path) -> None:
    path = folder / "run" / f"step_{STEPS[4]:08d}"
    text = _failure(lambda: load_tensors(path, {"model.bias": torch.zeros(1)}))
    assert text.endswith("lacks the tensor model.bias"), text


def ranks_that_disagree(folder: Path) -> None:
    checkpoints = DistributedCheckpoints(folder / "refused")
    tensors = {"w": torch.zeros(4 + dist.get_rank())}
    text = _failure(lambda: checkpoints.save(1, tensors, {}))
    assert text == "ValueError: w is F32 [4] on rank 0, but F32 [5] on rank 1"
    assert not (folder / "refused").exists()
    checkpoints.close()


def a_chunk_that_nobody_holds(folder: Path) -> None:
    checkpoints = DistributedCheckpoints(folder / "refused")
    tensors = {"w": Chunk.rows(torch.zeros(2, 3), 2 * dist.get_rank(), 6)}
    text = _failure(lambda: checkpoints.save(1, tensors, {}))
    assert "the chunks of w on all ranks have 12 elements together, but the tensor [6, 3] has 18" in text
    checkpoints.close()


def a_state_that_json_cannot_hold(folder: Path) -> None:
    checkpoints = DistributedCheckpoints(folder / "refused")
    text = _failure(lambda: checkpoints.save(1, held(), {"x": torch.ones(1)} if dist.get_rank() == 0 else {}))
    assert "not JSON serializable" in text
    checkpoints.close()


def a_full_disk_on_one_rank(folder: Path) -> None:
    """The error is raised on all ranks, the checkpoint before stays, and nothing is left of the failed one."""
    if dist.get_rank() == 0:
        shutil.copytree(folder / "run", folder / "full")
    dist.barrier()
    checkpoints, tensors = DistributedCheckpoints(folder / "full"), held()
    before = checkpoints.latest()
    if dist.get_rank() == 1:
        write = store_module.atomic_write

        def full(path: Path):
            raise OSError(28, "No space left on device", str(path))

        store_module.atomic_write = full
    try:
        checkpoints.save(40, tensors, state(40))
        text = _failure(checkpoints.wait)
    finally:
        if dist.get_rank() == 1:
            store_module.atomic_write = write
    assert "No space left on device" in text, text
    assert "tensors-00001-of-00002.safetensors" in text, text
    dist.barrier()
    assert not (folder / "full" / "step_00000040").exists()
    assert checkpoints.latest() == before
    checkpoints.save(40, tensors, state(40))
    assert str(checkpoints.latest()).endswith("step_00000040")
    checkpoints.close()


def an_error_that_cannot_be_sent(folder: Path) -> None:
    """It is described on all ranks, instead of leaving them waiting; libraries of object stores have such errors."""

    class Local(OSError):
        pass

    def work() -> None:
        if dist.get_rank() == 1:
            raise Local("the store is gone")

    try:
        gather_results(own_group(), work)
        text = ""
    except RuntimeError as error:
        text = str(error)
    assert text == "Local: the store is gone"


CASES: dict[int, list[Callable[[Path], None]]] = {
    4: [saved, each_rank_writes_a_share, a_model],
    2: [
        loaded,
        saved,
        from_one_process,
        a_flipped_bit,
        a_truncated_shard,
        a_missing_shard,
        another_model,
        an_unknown_tensor,
        ranks_that_disagree,
        a_chunk_that_nobody_holds,
        a_state_that_json_cannot_hold,
        a_full_disk_on_one_rank,
        an_error_that_cannot_be_sent,
    ],
    8: [loaded, from_one_process, saved],
}


def run(rank: int, folder: str) -> None:
    """Be rank `rank` of each world in turn, and write {case: error or ""} of each to WORLD-RANK.json."""
    torch.set_num_threads(1)
    for world in WORLDS:
        if rank >= world:
            continue
        store = dist.FileStore(str(Path(folder) / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
        results = {}
        for case in CASES[world]:
            try:
                case(Path(folder))
                results[case.__name__] = ""
            except BaseException:
                results[case.__name__] = traceback.format_exc()
                break  # the ranks may not be at the same place any more
        (Path(folder) / f"{world}-{rank}.json").write_text(json.dumps(results))
        with suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()


def run_killed(rank: int, folder: str) -> None:
    """Be one of two ranks, of which rank 1 dies while it writes its file; rank 0 writes what it sees to killed.json."""
    store = dist.FileStore(str(Path(folder) / "store-killed"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    checkpoints = DistributedCheckpoints(Path(folder) / "killed", keep=1)
    checkpoints.save(1, held(), state(1))
    checkpoints.wait()
    if rank == 1:
        store_module.atomic_write = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(2, held(), state(2))
    try:
        checkpoints.wait()
        seen = "no error"
    except RuntimeError as error:
        seen = str(error)
    (Path(folder) / "killed.json").write_text(json.dumps(seen))


def run_worlds(_: int, folder: str) -> None:
    """Fork the ranks of all worlds, of which rank 1 ends in `run_killed`."""
    torch.set_num_threads(1)
    children = []
    for rank in range(max(WORLDS)):
        if (child := os.fork()) == 0:
            run(rank, folder)
            if rank < 2:
                run_killed(rank, folder)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses[1] == signal.SIGKILL, statuses
    assert not any(statuses[:1] + statuses[2:]), statuses
