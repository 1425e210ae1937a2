"""Ranks that train a small model with `ShardedState`, for test_state.py."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from octile.nn import Gate, MoE
from octile.optim import AdamW, Muon, clip_grad_norm_, muon_groups, param_groups
from octile.optim.row_shards import MatrixOwners
from octile.parallel import balance_gates, shard_experts
from octile.parallel.state import ShardedState, collect
from tests.worlds import run_cases

D, E, K, I = 8, 8, 3, 4
STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    # 12 rows are cut on 2 and 4 ranks, 6 on 2 only, 3 and the scalar on none
    layers = {"a": nn.Linear(8, 12), "b": nn.Linear(12, 6), "c": nn.Linear(6, 3, bias=False)}
    found = nn.ModuleDict({**layers, "moe": MoE(Gate(D, E, K), D, I, 4)})
    found.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    return found


def gradients(whole: nn.Module, step: int) -> dict[str, Tensor]:
    """Gradients of few bits, whose sums are exact in every order, also in BF16."""
    torch.manual_seed(100 + step)
    return {name: torch.randint(-4, 5, p.shape).float() / 8 for name, p in whole.named_parameters()}


def train_alone(world: int) -> tuple[nn.Module, AdamW, list[Tensor]]:
    """Train one process with the sum of all ranks' gradients."""
    whole = model()
    optimizer, norms = AdamW(param_groups(whole, 0.1), lr=0.01), []
    for step in range(STEPS):
        for name, p in whole.named_parameters():
            p.grad = sum(gradients(whole, step * world + rank)[name] for rank in range(world))
        norms.append(clip_grad_norm_(whole.parameters(), float("inf")))
        optimizer.step()
    return whole, optimizer, norms


def check_training(spread: int, reduce: torch.dtype, device: str) -> None:
    """Weights and moments of the ranks have the bits of one process, and exist once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected, alone, norms = train_alone(world)
    own, mesh = model(), None
    if spread > 1:
        mesh = init_device_mesh(device, (world // spread, spread), mesh_dim_names=("replica", "expert"))
        shard_experts(own, mesh.get_group("expert"))
    state = ShardedState(own, mesh, reduce)
    optimizer = AdamW(param_groups(state.parts, 0.1), lr=0.01)
    for step in range(STEPS):
        of_ranks = [gradients(expected, step * world + r) for r in range(world)]
        for name, p in own.named_parameters():
            layout = state.weight_layout(name)
            rows = layout.rows_of(rank) if p.dim() else ...
            # the gradient of a rank's experts is that of the tokens of all ranks of its replica
            found = of_ranks[rank - rank % spread :][:spread] if not layout.is_whole else [of_ranks[rank]]
            p.grad = sum(g[name] for g in found)[rows].clone().to(p.device)
        state.reduce_gradients()
        torch.testing.assert_close(state.gradient_norm().norm.cpu(), norms[step].cpu(), rtol=1e-6, atol=0)
        optimizer.step()
        state.gather_weights()
        optimizer.zero_grad()
        state.drop_gradients()
    params = dict(state.parts.named_parameters())
    elements = torch.tensor([sum(optimizer.state[p]["exp_avg"].numel() for p in params.values())], device=device)
    for name, p in expected.named_parameters():
        mine = dict(own.named_parameters())[name]
        rows = state.weight_layout(name).rows_of(rank) if p.dim() else ...
        assert torch.equal(mine.cpu(), p[rows].cpu()), name
        moment = collect(optimizer.state[params[name]]["exp_avg"], state.part_layout(name))
        if rank == 0:
            assert torch.equal(moment.cpu(), alone.state[p]["exp_avg"].cpu()), name
        else:
            assert moment is None
    dist.all_reduce(elements)
    cut = [p for name, p in expected.named_parameters() if not state.part_layout(name).is_whole]
    whole = [p for name, p in expected.named_parameters() if state.part_layout(name).is_whole]
    copies = {name: world // len(set(state.part_layout(name).starts)) for name, _ in expected.named_parameters()}
    assert elements.item() == sum(copies[name] * p.numel() for name, p in expected.named_parameters())
    assert len(cut) > len(whole) > 0


def check_muon(spread: int, device: str) -> None:
    """Muon on the ranks has the steps of one process, on a CPU its bits; a rank computes whole matrices."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, own, mesh = model(), model(), None
    if spread > 1:
        mesh = init_device_mesh(device, (world // spread, spread), mesh_dim_names=("replica", "expert"))
        shard_experts(own, mesh.get_group("expert"))
    state = ShardedState(own, mesh)
    alone = Muon(muon_groups(whole, 0.1), lr=0.01)
    optimizer = Muon(muon_groups(own, 0.1, state.parts), lr=0.01)
    for step in range(STEPS):
        of_step = gradients(whole, step)
        for p, name in zip(whole.parameters(), of_step, strict=True):
            p.grad = of_step[name].clone()
        for name, part in state.parts.named_parameters():
            part.grad = of_step[name][state.part_layout(name).rows_of(rank) if part.dim() else ...].to(part.device)
        alone.step()
        optimizer.step()
        state.gather_weights()
    for name, p in whole.named_parameters():
        rows = state.weight_layout(name).rows_of(rank) if p.dim() else ...
        mine, expected = own.get_parameter(name), p[rows]
        # a GPU may have another kernel for a batch of fewer matrices
        assert torch.equal(mine, expected) if device == "cpu" else torch.allclose(mine, expected, rtol=0, atol=1e-3), (
            name
        )
    matrices = {p for g in optimizer.param_groups if g["use_muon"] for p in g["params"]}
    divided = [p for p in matrices if p.dim() == 2 and hasattr(p, "row_shard")]
    assert len(matrices) > len(divided) > 0


def check_owners(device: str) -> None:
    """Each matrix has one owner, also if ranks own none or have no rows, and the rows come back where they were."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for columns in ([3], [3, 5, 3, 1, 7]):
        rows = [tuple((r + i) % world for r in range(world)) for i in range(len(columns))]  # of a rank none
        torch.manual_seed(0)
        wholes = [torch.randn(sum(n), k, device=device).bfloat16() for n, k in zip(rows, columns, strict=True)]
        mine = [whole.split(n)[rank] for whole, n in zip(wholes, rows, strict=True)]
        owners = MatrixOwners(rows, columns, dist.group.WORLD)
        collected = owners.collect(mine)
        assert all(torch.equal(found, wholes[i]) for i, found in zip(owners.own, collected, strict=True))
        returned = owners.distribute([2 * whole for whole in collected], mine[0])
        assert all(torch.equal(found, 2 * part) for found, part in zip(returned, mine, strict=True))
        owned = torch.zeros(len(columns), device=device)
        owned[owners.own] = 1
        dist.all_reduce(owned)
        assert owned.tolist() == [1] * len(columns)


def check_versions() -> None:
    """A gather counts as a write of the weights, so that what is cached of them is stale."""
    own = model()
    state = ShardedState(own)
    before = [p._version for p in own.parameters()]
    state.gather_weights()
    cut = [not state.part_layout(name).is_whole for name, _ in own.named_parameters()]
    assert [p._version > v for p, v in zip(own.parameters(), before, strict=True)] == cut


def check_balance(spread: bool) -> None:
    """Biases move by the tokens of all ranks; each rank's own tokens would move them another way."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(world, 1, 16, D)
    whole, own = (nn.ModuleList(MoE(Gate(D, E, K), D, I) for _ in range(2)) for _ in range(2))
    own.load_state_dict(whole.state_dict())
    if spread:
        shard_experts(own)
    for mine, alone in zip(own, whole, strict=True):
        mine(x[rank])
        alone(x.flatten(0, 1))
        alone.gate.balance(alone.last_load_E, 0.01)
    balance_gates(own, 0.01)
    for mine, alone in zip(own, whole, strict=True):
        assert alone.gate.e_score_correction_bias.count_nonzero()
        assert torch.equal(mine.gate.e_score_correction_bias, alone.gate.e_score_correction_bias)


def check_missing_gradients() -> None:
    own = model()
    state = ShardedState(own)
    own["a"].weight.grad = torch.ones_like(own["a"].weight)
    state.reduce_gradients()
    assert [name for name, p in state.parts.named_parameters() if p.grad is not None] == ["a.weight"]


def stages(own: nn.Module) -> list[nn.Module]:
    return [own["a"], own["b"], own["c"], own["moe"], own]


def product(own: nn.Module, of_name: dict[str, Tensor], names: list[str]) -> Tensor:
    """A scalar whose gradients are given; those of the last names are complete first."""
    params, total = dict(own.named_parameters()), torch.zeros(())
    for name in names:
        total = total + (params[name] * of_name[name].to(params[name].device)).sum()
    return total


def check_sums_during_backward(reduce: torch.dtype) -> None:
    """Sums have the bits of those after the backward pass, although gradients come in another order on each rank."""
    rank = dist.get_rank()
    after, during = model(), model()
    of_both = ShardedState(after, None, reduce), ShardedState(during, None, reduce, stages(during))
    drawn = gradients(after, rank)
    for _ in range(2):
        for name, p in after.named_parameters():
            p.grad = drawn[name].clone().to(p.device)
        of_both[0].reduce_gradients()
        names = [*drawn]
        during.zero_grad()
        with of_both[1].reducing():
            product(during, drawn, names[rank:] + names[:rank]).backward()
        assert all(stage.sums is not None for stage in of_both[1]._stages)
        of_both[1].reduce_gradients()
        for (name, ours), (_, theirs) in zip(*(state.parts.named_parameters() for state in of_both), strict=True):
            assert torch.equal(ours.grad, theirs.grad), name


def check_micro_batches() -> None:
    """Only the last backward pass sums; the gradients of the others are in its sums."""
    own = model()
    state = ShardedState(own, stages=stages(own))
    drawn = [gradients(own, 10 * rank) for rank in range(dist.get_world_size())]
    product(own, drawn[dist.get_rank()], [*drawn[0]]).backward()
    assert not any(stage.sums for stage in state._stages)
    with state.reducing():
        product(own, drawn[dist.get_rank()], [*drawn[0]]).backward()
    state.reduce_gradients()
    for name, part in state.parts.named_parameters():
        rows = state.part_layout(name).rows_of(dist.get_rank()) if part.dim() else ...
        expected = 2 * sum(of_rank[name] for of_rank in drawn)[rows]
        assert torch.equal(part.grad.cpu(), expected.cpu()), name


def check_incomplete_stage() -> None:
    """A stage that lacks a gradient, as all ranks do, is summed after the backward pass, as are those before it."""
    own = model()
    state = ShardedState(own, stages=[own["b"], own["a"], own["c"], own["moe"], own])
    names = [name for name, _ in own.named_parameters() if name != "a.weight"]
    with state.reducing():
        product(own, gradients(own, 0), names).backward()
    assert [stage.sums is not None for stage in state._stages] == [False, False, True, True, True]
    state.reduce_gradients()
    assert [name for name, part in state.parts.named_parameters() if part.grad is None] == ["a.weight"]


def check_gather_of_stages() -> None:
    """A stage of the forward pass waits for its own weights, and reads those of all ranks."""
    own = model()
    state = ShardedState(own, stages=stages(own))
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for part in state.parts.parameters():
            part.fill_(rank + 1.0)
    x, waiting = torch.ones(8, device=own["a"].weight.device), [state._stages[0], state._stages[3]]
    state.begin_gather()
    assert [bool(stage.gathers) for stage in waiting] == [True, True]
    of_row = torch.arange(12, device=x.device) // (12 // world) + 1.0
    assert torch.equal(own["a"](x), 9 * of_row)
    assert [bool(stage.gathers) for stage in waiting] == [False, True]
    state.finish_gather()
    assert [bool(stage.gathers) for stage in waiting] == [False, False]
    of_expert = torch.arange(E, device=x.device) // (E // world) + 1.0
    assert torch.equal(own["moe"].experts.down[:, 0, 0], of_expert)


def check_freed() -> None:
    """The hooks of a model's weights do not keep it: autograd's cycles are not collected."""
    own = model()
    state = ShardedState(own, stages=stages(own))
    with state.reducing():
        product(own, gradients(own, 0), list(gradients(own, 0))).backward()
    state.reduce_gradients()
    left = weakref.ref(own), weakref.ref(state)
    del own, state
    gc.collect()
    assert [found() for found in left] == [None, None]


def check_waiting_gradients() -> None:
    """Outside `reducing` no weight has a hook, so that weight gradients of a pipeline can wait."""
    own = model()
    state = ShardedState(own, stages=stages(own))
    with state.reducing():
        product(own, gradients(own, 0), list(gradients(own, 0))).backward()
    state.reduce_gradients()
    assert [name for name, p in own.named_parameters() if p._post_accumulate_grad_hooks] == []


def check_uncounted() -> None:
    """The norm counts a parameter once of which groups of ranks have a copy each, as of the embedding in a pipeline."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = world // 2
    groups = [dist.new_group(range(first, first + size)) for first in (0, size)]
    own = nn.ParameterDict(
        {
            "shared": nn.Parameter(torch.zeros(4, 1)),  # cut on two ranks
            "small": nn.Parameter(torch.zeros(3, 1)),  # whole on each rank
            f"of_group_{rank // size}": nn.Parameter(torch.zeros(4, 1)),
        }
    )
    copies = ("shared", "small")
    state = ShardedState(own, group=groups[rank // size], uncounted=copies if rank >= size else ())
    for name, p in own.items():
        p.grad = torch.full_like(p, 2.0 if name in copies else 3.0 + rank // size)
    state.reduce_gradients()  # sums over the ranks of a group
    squares = (4 + 3) * 2**2 + 4 * 3**2 + 4 * 4**2
    torch.testing.assert_close(state.gradient_norm().norm, torch.tensor(size * squares**0.5))


def check_refusals() -> None:
    own = model()
    with pytest.raises(ValueError, match=r"stages must have all parameters, but none has scalar"):
        ShardedState(own, stages=[own["a"], own["b"]])
    with pytest.raises(ValueError, match=r"reduce must be torch\.float32 or torch\.bfloat16, not torch\.float16"):
        ShardedState(model(), reduce=torch.float16)
    with pytest.raises(ValueError, match=f"must be spread over 1 ranks, not {dist.get_world_size()}"):
        ShardedState(_spread())


def _spread() -> nn.Module:
    found = model()
    shard_experts(found)
    return found


def cases(world: int, device: str = "cpu") -> dict[str, object]:
    found: dict[str, object] = {
        f"training-{name}-{spread}": lambda spread=spread, dtype=dtype: check_training(spread, dtype, device)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for spread in (1, 2, 4)
        if spread <= world
    }
    found |= {
        f"muon-{spread}": lambda spread=spread: check_muon(spread, device) for spread in (1, 2, 4) if spread <= world
    }
    found["owners"] = lambda: check_owners(device)
    found |= {"balance": lambda: check_balance(False), "balance-spread": lambda: check_balance(True)}
    return found | {
        "versions": check_versions,
        "missing": check_missing_gradients,
        "uncounted": check_uncounted,
        "refusals": check_refusals,
        "freed": check_freed,
        "waiting": check_waiting_gradients,
        "during_backward-fp32": lambda: check_sums_during_backward(torch.float32),
        "during_backward-bf16": lambda: check_sums_during_backward(torch.bfloat16),
        "micro_batches": check_micro_batches,
        "incomplete": check_incomplete_stage,
        "gather_of_stages": check_gather_of_stages,
    }


def run(rank: int, world: int, folder: str, device: str = "cpu") -> None:
    """Run all cases as one rank, on a CPU or each rank on its GPU, and write what went wrong in each."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(seconds=60), world, rank)
    run_cases(cases(world, device), folder, rank)
    dist.destroy_process_group()
