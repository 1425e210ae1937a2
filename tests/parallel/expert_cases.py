"""What each rank of a world of gloo processes runs for test_experts.py: a world starts once for all cases."""

import copy
import datetime
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import octile
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.triton import decode_rows, launch_config
from octile.nn import Gate, MoE, RMSNorm, pre_norm
from octile.nn.dispatcher import InFlight, LocalDispatcher
from octile.nn.functional import result_dtype
from octile.nn.fused import feed_forward
from octile.nn.gate import Routing
from octile.nn.interleave import run_interleaved
from octile.nn.moe import share_of_experts
from octile.nn.observer import ObservedGemm, observe_gemms
from octile.ops.permute import count_tokens
from octile.parallel import ExpertDispatcher, ExpertShare, nvshmem, shard_experts, symmetric_memory
from octile.parallel.decoding import SortedExchange
from octile.parallel.experts import Across
from octile.parallel.links import NVSHMEM_EXCHANGE
from octile.scaled import ScaledTensor
from tests.triton_interpreter import quicken_interpreter
from tests.worlds import run_cases

E, K, D = 8, 3, 160  # D is no multiple of 128: the last scale of a row is that of a smaller tile
SIZES = {"fp32": 64, "bf16": 64, "fp8": 128, "fp8_in_fp32": 128, "fp8_unfused": 192}  # I: a fused layer has whole tiles
T = 13  # tokens of a rank where a gate chooses
WHY_NOT_PEERS = symmetric_memory.why_not_peers  # before ranks on a CPU replace it
WHY_NOT_NVSHMEM = nvshmem.why_not_nvshmem  # before they replace it
MAX_TOKENS = 90
ALLOCATIONS = count()


class Tokens(NamedTuple):
    """The experts of each token of each rank."""

    experts: list[list[list[int]]]

    @property
    def starts(self) -> list[int]:
        counts = [len(of_rank) for of_rank in self.experts]
        return [sum(counts[:rank]) for rank in range(len(counts) + 1)]


class FixedGate(Gate):
    """A gate that sends tokens where a test wants them, with weights that have a gradient."""

    def send(self, experts_TK: Tensor, weights_TK: Tensor) -> None:
        self.experts_TK, self.weights_TK = experts_TK, weights_TK

    def forward(self, x) -> Routing:
        return Routing(self.weights_TK, self.experts_TK, torch.zeros(len(self.experts_TK), E))


class RankwiseGate(Gate):
    """A gate that computes the tokens of each rank alone: its last bits depend on the number of tokens."""

    ranks = 1

    def forward(self, x) -> Routing:
        parts = [super(RankwiseGate, self).forward(part) for part in x.chunk(self.ranks)]
        return Routing(*map(torch.cat, zip(*parts, strict=True)))


class Shared(nn.Module):
    """Shared experts whose bits do not depend on the number of tokens."""

    def fusion(self) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return x.to(result_dtype(x)) * 2


class Block(nn.Module):
    """A norm and a mixture, as in a model: fused, the norm is recomputed in backward."""

    def __init__(self, gate: Gate, intermediate_size: int):
        super().__init__()
        self.norm = RMSNorm(D)
        self.moe = MoE(gate, D, intermediate_size, alpha=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x, normed = pre_norm(x, self.norm, self.moe)
        return x + self.moe(normed)


def autocast(mode: str):
    device = torch.get_default_device().type
    return torch.autocast(device, torch.bfloat16) if mode in ("bf16", "fp8", "fp8_unfused") else nullcontext()


def blocks(mode: str, gate: Gate, ranks, max_tokens: int = T) -> tuple[Block, Block]:
    """A block with all experts, and the same with those of this rank, for as many tokens of a rank."""
    torch.manual_seed(0)
    whole = Block(gate, SIZES[mode])
    nn.init.normal_(gate.weight)
    for p in whole.moe.experts.parameters():
        nn.init.normal_(p, std=0.1)
    if mode.startswith("fp8"):
        octile.convert(whole, recipe=octile.Recipe.deepseek_v3())
        assert (whole.moe.fusion() is None) == (mode == "fp8_unfused")
    whole.moe.shared_experts = Shared()
    sharded = copy.deepcopy(whole)
    gate.ranks = dist.get_world_size()
    shard(sharded, ranks, max_tokens)
    return whole, sharded


class Peers(NamedTuple):
    """Ranks that exchange rows by kernels on symmetric memory: all of them, or those of each node of a mesh."""

    nodes: DeviceMesh | None = None
    across: Across = "all_to_all_single"


def shard(model: nn.Module, ranks, max_tokens: int = MAX_TOKENS) -> ExpertShare:
    """Spread experts over the ranks of a mesh or a group, or over Peers that send up to so many tokens each."""
    if not isinstance(ranks, Peers):
        return shard_experts(model, ranks)
    share = shard_experts(model, ranks.nodes, max_tokens=max_tokens, num_sms=2, across=ranks.across)
    across = NVSHMEM_EXCHANGE if ranks.across == "nvshmem" else ranks.across
    in_node = "" if ranks.nodes is None else f" inside a node, {across} across"
    assert share.exchange == f"kernels on symmetric memory{in_node}", share
    return share


def dispatcher(n_chosen: int, ranks) -> ExpertDispatcher:
    """The dispatcher that `shard` gives to a mixture."""
    moe = MoE(Gate(D, E, n_chosen), D, 8)
    shard(moe, ranks)
    return moe.dispatcher


def gradients(block: Block, mode: str, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The block's output for tokens x [T, D], and the gradients."""
    x = x.clone().requires_grad_()
    with autocast(mode):
        y = block(x[None])[0]
    y.backward(dy.to(y.dtype))
    experts = block.moe.experts
    return {"y": y.detach(), "dx": x.grad, "dgate_up": experts.gate_up.grad, "ddown": experts.down.grad}


def of_rank(whole: dict[str, Tensor], sharded: Block, tokens: slice) -> dict[str, Tensor]:
    """What a rank must have of the results of one process."""
    experts = sharded.moe.dispatcher.local_experts
    return {name: t[experts if name in ("dgate_up", "ddown") else tokens] for name, t in whole.items()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    different = [
        f"{name}: {(t != found[name]).sum()} of {t.numel()}"
        for name, t in expected.items()
        if t.shape != found[name].shape or not torch.equal(t, found[name])
    ]
    assert not different, different


def tokens_of(starts: list[int]) -> slice:
    return slice(starts[dist.get_rank()], starts[dist.get_rank() + 1])


def check_fixed(mode: str, ranks, tokens: Tokens) -> None:
    """Compare the ranks with one process for tokens whose experts are given."""
    whole, sharded = blocks(mode, FixedGate(D, E, K), ranks, max(T, *map(len, tokens.experts)))
    starts, mine = tokens.starts, tokens_of(tokens.starts)
    experts_TK = torch.tensor([t for of_rank in tokens.experts for t in of_rank], dtype=torch.int64).view(-1, K)
    x, dy, weights = torch.randn(starts[-1], D), torch.randn(starts[-1], D), torch.rand(starts[-1], K)
    results = []
    for block, part in ((whole, slice(None)), (sharded, mine)):
        weights_TK = weights[part].clone().requires_grad_()
        block.moe.gate.send(experts_TK[part], weights_TK)
        results.append(gradients(block, mode, x[part], dy[part]) | {"dweights": weights_TK.grad})
    check_equal(results[1], of_rank(results[0], sharded, mine))
    assert torch.equal(sharded.moe.last_load_E, whole.moe.last_load_E)


def check_gate(mode: str, ranks, recompute: bool = False) -> None:
    """Compare the ranks with one process in a mixture with a gate of groups."""
    whole, sharded = blocks(mode, RankwiseGate(D, E, K, n_group=4, topk_group=2), ranks)
    mine = slice(dist.get_rank() * T, (dist.get_rank() + 1) * T)
    x, dy = torch.randn(dist.get_world_size() * T, D), torch.randn(dist.get_world_size() * T, D)
    expected = gradients(whole, mode, x, dy)
    if recompute:
        block, sharded.forward = sharded.forward, lambda x: checkpoint(block, x, use_reentrant=False)
    check_equal(gradients(sharded, mode, x[mine], dy[mine]), of_rank(expected, sharded, mine))
    assert torch.equal(sharded.moe.last_load_E, whole.moe.last_load_E)


def check_two_passes(ranks) -> None:
    """Two forward passes before their backward passes, which need plans of their own."""
    whole, sharded = blocks("fp8", RankwiseGate(D, E, K), ranks)
    mine, found = slice(dist.get_rank() * T, (dist.get_rank() + 1) * T), []
    batches = [torch.randn(dist.get_world_size() * T, D) for _ in range(2)]
    for block, part in ((whole, slice(None)), (sharded, mine)):
        xs = [x[part].clone().requires_grad_() for x in batches]
        loss = sum(block(x[None]).square().sum() for x in xs)
        loss.backward()
        found.append([x.grad for x in xs])
    for expected, dx in zip(*found, strict=True):
        assert torch.equal(dx, expected[mine])


def check_second_derivative(ranks) -> None:
    """A penalty on the gradient has the gradient that it has in one process."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    experts_TK = torch.stack([torch.randperm(E)[:K] for _ in range(world * 4)])
    x, weights = torch.randn(world * 4, D), torch.rand(world * 4, K)
    mine, found = slice(dist.get_rank() * 4, (dist.get_rank() + 1) * 4), []
    for d, part in ((LocalDispatcher(), slice(None)), (dispatcher(K, ranks), mine)):
        xs, ws = x[part].clone().requires_grad_(), weights[part].clone().requires_grad_()
        plan = d.plan(experts_TK[part], experts_TK[part].flatten().bincount(minlength=E))
        y = d.combine(d.dispatch(xs, plan).sin(), ws, plan)
        gradient = torch.autograd.grad(y.square().sum(), (xs, ws), create_graph=True)
        sum(g.square().sum() for g in gradient).backward()
        found.append((xs.grad, ws.grad))
    for expected, second in zip(*found, strict=True):
        torch.testing.assert_close(second, expected[mine], rtol=1e-4, atol=1e-4)


def check_many_exchanges(ranks) -> None:
    """Many exchanges after one another between ranks of which some are late: none overwrites what is still read."""
    torch.manual_seed(dist.get_rank())
    own, gpu = dispatcher(K, ranks), torch.get_default_device().type == "cuda"
    for i in range(100 if gpu else 5):
        t = int(torch.randint(MAX_TOKENS + 1, (), device="cpu"))
        experts_TK = torch.rand(t, E).topk(K).indices
        x, add = torch.randint(-99, 99, (t, D)).float(), torch.zeros(t, D)
        if gpu and i % 3 == dist.get_rank():
            torch.cuda._sleep(10**6)
        plan = own.plan(experts_TK, count_tokens(experts_TK, E)[0])
        y_RD = own.dispatch(x, plan)
        if gpu and i % 5 == dist.get_rank():
            torch.cuda._sleep(10**6)
        sums = own.combine_unweighted(y_RD, plan, add)
        assert torch.equal(sums, K * x), i


def check_captured(ranks) -> None:
    """Forward and backward captured in a CUDA graph and replayed for other tokens have the bits of one process."""
    whole, sharded = blocks("fp8", FixedGate(D, E, K), ranks)
    world, rank = dist.get_world_size(), dist.get_rank()
    mine, params = slice(rank * T, (rank + 1) * T), list(sharded.moe.experts.parameters())
    experts_TK, weights = torch.zeros(T, K, dtype=torch.int64), torch.rand(T, K).requires_grad_()
    x, dy = torch.randn(T, D).requires_grad_(), torch.randn(T, D)
    sharded.moe.gate.send(experts_TK, weights)

    def step() -> tuple[Tensor, ...]:
        with autocast("fp8"):
            y = sharded(x[None])[0]
        return y.detach(), *torch.autograd.grad(y, (x, *params, weights), dy.to(y.dtype))

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    names = ("y", "dx", "dgate_up", "ddown", "dweights")
    for used in (E, E, K, E // 2, E):
        all_experts = torch.rand(world * T, used).topk(K).indices
        all_x, all_dy = torch.randn(world * T, D), torch.randn(world * T, D)
        all_weights = torch.rand(world * T, K).requires_grad_()
        with torch.no_grad():
            for static, values in ((experts_TK, all_experts), (x, all_x), (dy, all_dy), (weights, all_weights)):
                static.copy_(values[mine])
        graph.replay()
        whole.moe.gate.send(all_experts, all_weights)
        expected = of_rank(gradients(whole, "fp8", all_x, all_dy) | {"dweights": all_weights.grad}, sharded, mine)
        for p in whole.moe.experts.parameters():
            p.grad = None
        check_equal(dict(zip(names, found, strict=True)), expected)


def check_observed(ranks) -> None:
    """Observers on all ranks see the values of the rows that the quantized operands have, and wgrad's groups."""
    whole, sharded = blocks("fp8", RankwiseGate(D, E, K), ranks)
    seen: dict[str, list[ObservedGemm]] = {"fprop": [], "dgrad": [], "wgrad": []}

    def observe(weight: Tensor, fprop) -> Callable | None:
        if weight.dim() != 3:
            return None
        seen["fprop"].append(fprop)
        return lambda gemm: seen[gemm.name].append(gemm)

    mine, results = slice(dist.get_rank() * T, (dist.get_rank() + 1) * T), []
    x, dy = torch.randn(dist.get_world_size() * T, D), torch.randn(dist.get_world_size() * T, D)
    for block, part in ((whole, slice(None)), (sharded, mine)):
        with observe_gemms(observe):
            results.append(gradients(block, "fp8", x[part], dy[part]))
    check_equal(results[1], of_rank(results[0], sharded, mine))
    for gemm in (seen["fprop"][2], seen["dgrad"][2]):  # gate_up and down of the rank: their rows came from other ranks
        q = octile.quantize(gemm.before, (1, 128), scale="power_of_2")
        assert torch.equal(q.data.view(torch.uint8), gemm.a.data.view(torch.uint8))
    assert [len(gemms) for gemms in seen.values()] == [4, 4, 4]


def check_overlap(ranks, mode: str) -> None:
    """Shared experts run between the beginning and the end of an exchange, also backward if fused; so does wgrad."""
    _, sharded = blocks(mode, RankwiseGate(D, E, K), ranks)
    own, moe, seen = sharded.moe.dispatcher, sharded.moe, []

    def recorded(name: str) -> None:
        begin = getattr(own, f"begin_{name}")

        def begin_and_record(*args, overlaps: bool = True, lasts: bool = False) -> InFlight:
            flight = begin(*args, overlaps, *([lasts] if name == "send_back" else []))
            if not overlaps or lasts:
                return flight
            seen.append(f"begin {name}")
            return InFlight(flight.result, lambda: (flight.wait(), seen.append(f"end {name}")))

        setattr(own, f"begin_{name}", begin_and_record)

    class Recorded(Shared):
        def forward(self, x: Tensor) -> Tensor:
            seen.append("shared experts")
            y = super().forward(x)
            y.register_hook(lambda dy: seen.append("shared experts"))
            return y

    recorded("send_quantized")
    recorded("send_back")
    moe.shared_experts = Recorded()
    wgrad = feed_forward.FusedLayers.wgrad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward.FusedLayers, "wgrad", lambda *args: (seen.append("wgrad"), wgrad(*args))[1])
        gradients(sharded, mode, torch.randn(T, D), torch.randn(T, D))
    results, dy = ["begin send_back", "end send_back"], ["begin send_quantized", "end send_quantized"]
    expected = [results[0], "shared experts", results[1]]
    if mode == "fp8":
        expected += [dy[0], "shared experts", dy[1], results[0], "wgrad", "wgrad", results[1]]
    else:
        expected += ["shared experts"]
    assert seen == expected, seen


def check_interleaved(ranks) -> None:
    """A forward and a backward pass of one block that are interleaved have the bits of passes in sequence."""
    _, sharded = blocks("fp8", RankwiseGate(D, E, K), ranks)
    xs, dy, found = torch.randn(2, T, D), torch.randn(T, D), []
    for run in (lambda backward, forward: (forward(), backward()), run_interleaved):
        first, second = (x.clone().requires_grad_() for x in xs)
        results = []

        def forward(x: Tensor = second, results: list[Tensor] = results) -> None:
            with autocast("fp8"):
                results.append(sharded(x[None])[0])

        forward(first)
        run(lambda y=results[0]: y.backward(dy.to(y.dtype)), forward)
        experts = sharded.moe.experts
        found.append(
            {"y": results[1].detach(), "dx": first.grad, "gate_up": experts.gate_up.grad, "w": experts.down.grad}
        )
        sharded.zero_grad()
    check_equal(found[1], found[0])


def check_in_flight() -> None:
    """Results in the buffer are not overwritten before they are read."""
    own, t = dispatcher(K, Peers()), 4
    experts_TK = torch.rand(t, E).topk(K).indices
    plan = own.plan(experts_TK, torch.zeros(E))
    x = torch.randint(-99, 99, (t, D)).float()
    rows = own.dispatch(x, plan)
    sending = own.begin_send_back(rows, plan)
    assert (num_sms.left_free == 0) == (torch.get_default_device().type == "cpu")
    refuses(RuntimeError, "before the results of the one before it are read", lambda: own.send(x, plan))
    assert torch.equal(sending.wait()[plan.row_ids_TK[:, 0].long()], x)
    assert num_sms.left_free == 0
    sending = own.begin_send_back(rows, plan)
    del sending  # a failure comes between
    assert num_sms.left_free == 0
    lasting = own.begin_send_back(rows, plan, lasts=True)
    own.send(2 * x, plan)
    assert torch.equal(lasting.wait()[plan.row_ids_TK[:, 0].long()], x)


def check_sent_once() -> None:
    """The rows that each rank sends, by rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    local = E // world
    of_world = ExpertDispatcher(E, 2, D)
    for last in range(world):  # all tokens to two experts of one rank
        experts_TK = torch.tensor([[last * local, last * local + local - 1]] * 5)
        (hop,) = of_world.plan(experts_TK, torch.zeros(E)).handle.hops
        to_last, from_all = [0] * world, [0] * world
        to_last[last] = 5
        if rank == last:
            from_all = [5] * world
        assert (hop.rows_out, hop.rows_in) == (to_last, from_all), hop


def check_sent_once_to_a_node(ranks: DeviceMesh) -> None:
    """A token of all four experts of the other node, on both of its ranks, crosses once."""
    of_mesh, node = ExpertDispatcher(E, 4, D, ranks), dist.get_rank() // 2
    other = 4 * (1 - node)
    plan = of_mesh.plan(torch.tensor([[other, other + 1, other + 2, other + 3]]), torch.zeros(E))
    across, within = plan.handle.hops
    assert across.rows_out == [1 - node == 0, 1 - node == 1], across
    assert within.rows_out == [1, 1], within
    by_kernels = dispatcher(4, Peers(ranks)).plan(
        torch.tensor([[other, other + 1, other + 2, other + 3]]), torch.zeros(E)
    )
    assert by_kernels.handle.hop.hop.rows_out == across.rows_out


def check_why_not_peers_of_nodes(ranks: DeviceMesh) -> None:
    """Ranks of one node that cannot write to each other's memory keep all nodes from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            symmetric_memory, "_why_not_peers_of_a_node", lambda _: "a reason" if dist.get_rank() > 1 else None
        )
        assert WHY_NOT_PEERS([ranks.get_group("node"), ranks.get_group("rank")]) == "a reason"


def refuses(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=message):
        call()


def check_refusals() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    gate = Gate(D, E, K)
    refuses(ValueError, f"a multiple of the {world} ranks, not 9", lambda: shard_experts(MoE(Gate(D, 9, K), D, 8)))
    refuses(ValueError, f"a multiple of the {world} ranks, not 9", lambda: ExpertDispatcher(9, K, D))
    refuses(ValueError, "no octile.nn.MoE", lambda: shard_experts(nn.Linear(2, 2)))
    size = 8 if rank < world - 1 else 16
    refuses(ValueError, f"but rank {world - 1} has", lambda: shard_experts(MoE(gate, D, size)))
    refuses(ValueError, f"but rank {world - 1} has", lambda: ExpertDispatcher(E, K, D if rank < world - 1 else 2 * D))
    model = MoE(gate, D, 8) if rank else nn.Linear(2, 2)
    refuses(ValueError, "rank 0 has none, but rank 1 has", lambda: shard_experts(model))
    moe = MoE(gate, D, 8)
    moe.experts = nn.Linear(2, 2)
    refuses(TypeError, "must be octile.nn.Experts, not Linear", lambda: shard_experts(moe))
    moe = MoE(gate, D, 8)
    shard_experts(moe)
    refuses(ValueError, "model is sharded already", lambda: shard_experts(moe))
    refuses(ValueError, "max_tokens must be at least 1, not 0", lambda: shard_experts(MoE(gate, D, 8), max_tokens=0))
    refuses(ValueError, "max_rows must be at least 1, not 0", lambda: shard_experts(MoE(gate, D, 8), max_rows=0))
    refuses(ValueError, "num_sms must be at least 2, not 1", lambda: shard_experts(MoE(gate, D, 8), num_sms=1))
    refuses(ValueError, "rank 0 has 1, None and None, but", lambda: shard_experts(MoE(gate, D, 8), max_tokens=1 + rank))


def check_decoding() -> None:
    """Rows come sorted by expert with the weights of their experts, quantized or not, and results to their tokens."""
    world, rank, tokens = dist.get_world_size(), dist.get_rank(), [5, 0, 7, 1][: dist.get_world_size()]
    local = E // world
    torch.manual_seed(0)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        memory = symmetric_memory.PeerMemory(dist.distributed_c10d._get_default_group(), 2)
        own = SortedExchange(E, K, D, dtype, memory, 7)
        for _ in range(50 if torch.get_default_device().type == "cuda" else 2):
            experts = [torch.rand(t, E).topk(K).indices for t in tokens]
            for of_rank in experts:
                of_rank[3:4] = -1  # a token without experts, as padding has none
            x = [torch.randn(t, D) for t in tokens]
            rows = [octile.quantize(of_rank, (1, 128)) if dtype.itemsize == 1 else of_rank.to(dtype) for of_rank in x]
            x = [of.dequantize() if isinstance(of, ScaledTensor) else of.float() for of in rows]
            weights, add = [torch.rand(t, K) for t in tokens], [torch.rand(t, D) for t in tokens][rank]
            found = own.receive(own.send(rows[rank], experts[rank], weights[rank]), tokens[rank])
            here = range(rank * local, (rank + 1) * local)
            expected = [[v for vs, of in zip(x, experts, strict=True) for v in vs[(of == e).any(1)]] for e in here]
            shares = [w for e in here for ws, of in zip(weights, experts, strict=True) for w in ws[of == e]]
            counts = torch.tensor([len(of_expert) for of_expert in expected])
            assert found.offs.tolist() == counts.cumsum(0).tolist()
            values = found.rows.dequantize() if isinstance(found.rows, ScaledTensor) else found.rows.float()
            n = len(shares)
            all_rows = [row for of_expert in expected for row in of_expert]
            assert torch.equal(values[:n], torch.stack(all_rows) if n else values[:0])
            assert found.weights[:n].tolist() == torch.tensor(shares).tolist()
            factor = (rank * local + torch.arange(local) + 1).repeat_interleave(counts)
            y = values.clone()
            y[:n] *= factor[:, None] * found.weights[:n, None]
            total = add.clone()
            for k in range(K):
                one = x[rank] * ((experts[rank][:, k, None] + 1) * weights[rank][:, k, None])
                total += one.masked_fill(experts[rank][:, k, None] < 0, 0)
            is_token = (experts[rank] >= 0).all(1)
            combined = own.combine(y, found, add)
            torch.testing.assert_close(combined[is_token], total[is_token])
            to = [torch.randn(t, D) for t in tokens][rank]
            again = own.receive(own.send(rows[rank], experts[rank], weights[rank]), tokens[rank])
            late = torch.full_like(add, torch.nan)
            in_flight = InFlight(late, partial(late.copy_, add))
            into = own.combine(y, again, in_flight, to_TD=to.clone())
            assert torch.equal(into[is_token], (to + combined)[is_token])
    few, n = own.with_max_tokens(2), 2 - rank % 2
    x, chosen, w = torch.randn(n, D), torch.rand(n, E).topk(K).indices, torch.rand(n, K)
    slots = torch.stack((torch.arange(E).flip(0), (torch.arange(E) + 1) % E), 1), torch.arange(E) % 2 + 1
    fewer = few.receive(few.send(x, chosen, w, slots, torch.tensor([4, -1])[:n]), n)
    assert len(fewer.entries) == world * 2 * K
    here = rank * local + torch.searchsorted(
        fewer.offs, torch.arange(len(fewer.entries), dtype=torch.int32), right=True
    )
    results = fewer.rows * (here[:, None] + 1)
    slot_1K = slots[0][chosen[:1], rank % slots[1][chosen[:1]]]
    torch.testing.assert_close(few.combine(results, fewer)[:1], (x[:1, None] * (slot_1K[..., None] + 1)).sum(1))
    assert fewer.offs[-1] <= world * K  # tokens that have no position went nowhere
    refuses(ValueError, "max_tokens must be from 1 to 7, not 8", lambda: own.with_max_tokens(8))
    most = 8192 // (world * K)
    message = f"max_tokens must be from 1 to {most} of {world} ranks, not {most + 1}"
    refuses(ValueError, message, lambda: SortedExchange(E, K, D, torch.float32, memory, most + 1))
    of_8 = torch.zeros(8, D), torch.zeros(8, K, dtype=torch.int64), torch.zeros(8, K)
    refuses(ValueError, "at most max_tokens = 7 tokens, not 8", lambda: own.send(*of_8))
    refuses(ValueError, "x, its dtype, experts and weights must be", lambda: own.send(of_8[0].half(), *of_8[1:]))
    refuses(ValueError, "x, its dtype, experts and weights must be", lambda: own.send(*of_8[:2], of_8[2][:, 1:]))
    refuses(ValueError, r"y_RD must be \(.*\), not", lambda: own.combine(y[1:], found))
    refuses(ValueError, r"add must be \(.*\), not", lambda: own.combine(y, found, torch.ones(tokens[rank] + 1, D)))
    refuses(TypeError, "add must be torch.float32, not torch.float16", lambda: own.combine(y, found, add.half()))
    if tokens[rank] > 1:  # an empty tensor and a single row are contiguous
        to = torch.zeros(D, tokens[rank] + 1).mT[1:]
        refuses(ValueError, "to_TD must be contiguous", lambda: own.combine(y, found, add, to_TD=to))


def check_max_rows() -> None:
    """Tensors of as many rows as are needed compute the same; with one less there is an error."""
    world, rank = dist.get_world_size(), dist.get_rank()
    moe, experts_TK = MoE(Gate(D, E, K), D, 8), (torch.arange(4 * K) % E).view(4, K)
    counts = experts_TK.flatten().bincount(minlength=E).view(world, -1).sum(1) * world
    shard_experts(moe, max_tokens=5, max_rows=int(counts.max()))
    x, load_E = torch.randn(4, D), torch.zeros(E)
    plan = moe.dispatcher.plan(experts_TK, load_E)
    rows = moe.dispatcher.dispatch(x, plan)
    assert len(rows) == counts.max()
    assert plan.offs_E[-1] == counts[rank]
    assert torch.equal(
        moe.dispatcher.combine_unweighted(rows, plan),
        LocalDispatcher().combine_unweighted(x.repeat_interleave(K, 0), plan),
    )
    moe.dispatcher.max_rows = int(counts[rank]) - 1
    if torch.get_default_device().type == "cpu":  # on a GPU the process could not go on
        refuses(RuntimeError, f"more than {counts[rank] - 1} rows", lambda: moe.dispatcher.plan(experts_TK, load_E))


def check_replay_after_growth() -> None:
    """A captured exchange has the same results after a larger one, whose buffer is another."""
    memory = symmetric_memory.PeerMemory(dist.distributed_c10d._get_default_group(), 2)
    own = SortedExchange(E, K, D, torch.float8_e4m3fn, memory, 7)
    torch.manual_seed(dist.get_rank())
    x, experts_TK, weights_TK = (
        octile.quantize(torch.randn(5, D), (1, 128)),
        torch.rand(5, E).topk(K)[1],
        torch.rand(5, K),
    )

    def run() -> Tensor:
        at_experts = own.receive(own.send(x, experts_TK, weights_TK), 5)
        return own.combine(at_experts.rows.dequantize(), at_experts, weights_TK=weights_TK)

    for _ in range(2):
        expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    memory.reserve(2 * len(memory.buffer), x.data.device)
    memory.buffer.fill_(255)
    memory.synchronize()  # a rank that is ahead would store to a buffer that is yet to be filled
    assert torch.equal(run(), expected)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


def check_captured_buffer() -> None:
    """A smaller buffer stays if a graph may have its address, and only then; a graph cannot be captured in between."""
    memory, is_capturing = symmetric_memory.PeerMemory(dist.group.WORLD), False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        device = torch.device("cpu")
        memory.reserve(1000, device)
        free, flags = weakref.ref(memory.buffer), weakref.ref(memory.peers.flags)
        memory.reserve(2000, device)
        assert (free(), flags()) == (None, None)
        is_capturing = True
        memory.reserve(2000, device)
        held, flags = weakref.ref(memory.buffer), weakref.ref(memory.peers.flags)
        refuses(RuntimeError, "run it once before it is captured", lambda: memory.reserve(3000, device))
        is_capturing = False
        memory.reserve(3000, device)
        assert held() is not None
        assert flags() is not None


def check_too_many_tokens() -> None:
    own = dispatcher(K, Peers())
    experts_TK = torch.zeros(MAX_TOKENS + 1, K, dtype=torch.int64)
    refuses(ValueError, "at most max_tokens = 90 tokens, not 91", lambda: own.plan(experts_TK, torch.zeros(E)))


def check_why_not_peers() -> None:
    """Where ranks cannot write to each other's memory, rows are exchanged otherwise, and the reason is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "why_not_peers", WHY_NOT_PEERS)
        share = shard_experts(MoE(Gate(D, E, K), D, 8), max_tokens=5)
    assert share.exchange == "all_to_all_single, since the ranks are not on GPUs with NCCL"
    assert WHY_NOT_PEERS([None, None, None]) == "the mesh of ranks has more than two dimensions"


def check_why_not_nvshmem(ranks: Peers) -> None:
    """Where NVSHMEM cannot be used, the reason is given, and an explicit request is refused."""
    across, in_node = (ranks.nodes.get_group(dimension) for dimension in range(2))
    assert WHY_NOT_NVSHMEM([across]) == "the ranks are not a mesh of nodes"
    assert WHY_NOT_NVSHMEM([dist.new_subgroups(1)[0], across]) == "there is one node"
    assert WHY_NOT_NVSHMEM([across, in_node]) == "the ranks are not on GPUs"
    moe = partial(MoE, Gate(D, E, K), D, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvshmem, "why_not_nvshmem", WHY_NOT_NVSHMEM)
        exchange = shard_experts(moe(), ranks.nodes, max_tokens=5).exchange
        nowhere = "kernels on symmetric memory inside a node, all_to_all_single across, since the ranks are not on GPUs"
        assert exchange == nowhere
        asked = partial(shard_experts, ranks=ranks.nodes, max_tokens=5, across="nvshmem")
        refuses(ValueError, "nvshmem cannot be used, since the ranks are not on GPUs", lambda: asked(moe()))
        patch.setattr(symmetric_memory, "why_not_peers", WHY_NOT_PEERS)
        refuses(ValueError, "nvshmem cannot be used, since .* GPUs with NCCL", lambda: asked(moe()))
    refuses(ValueError, "nvshmem needs max_tokens", lambda: shard_experts(moe(), ranks.nodes, across="nvshmem"))
    refuses(ValueError, "across must be one of auto, nvshmem, .*, not 'x'", lambda: shard_experts(moe(), across="x"))


def check_no_wait(ranks: Peers) -> None:
    """The numbers of rows are on the devices: the plan does not have the host wait."""
    own = dispatcher(K, ranks)
    assert not own.waits_for_device
    assert {type(value) for value in own.plan(torch.rand(4, E).topk(K)[1], torch.zeros(E)).handle.hop} == {Tensor, int}


def check_share() -> None:
    """The weights that are left, with their main_grad, and what is said of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.ModuleList(MoE(Gate(D, E, K), D, 8) for _ in range(2))
    down = model[1].experts.down
    down.main_grad, down.requires_grad = torch.randn_like(down), False
    whole, mine = copy.deepcopy(model), slice(rank * (E // world), (rank + 1) * (E // world))
    whole[1].experts.down.main_grad = down.main_grad
    share = shard_experts(model)
    experts = f"{2 * E // world} of {2 * E} in all of them"
    assert str(share) == f"mixtures: 2; experts on this rank: {experts}; exchange: all_to_all_single"
    for before, after in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(after, before[mine] if before.dim() == 3 else before)
    assert torch.equal(model[1].experts.down.main_grad, down.main_grad[mine])
    assert not model[1].experts.down.requires_grad


def check_own_share() -> None:
    """A mixture that was made with a rank's experts is taken as it is; with those of another rank it is refused."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = MoE(Gate(D, E, K), D, 8)
    torch.manual_seed(0)
    with share_of_experts(rank, world):
        own = MoE(Gate(D, E, K), D, 8)
    with share_of_experts((rank + 1) % world, world):
        other = MoE(Gate(D, E, K), D, 8)
    weights = list(own.experts.parameters())
    shard_experts(own)
    shard_experts(whole)
    for weight, kept, expected in zip(own.experts.parameters(), weights, whole.experts.parameters(), strict=True):
        assert weight is kept
        assert torch.equal(weight, expected)
    if world > 1:
        refuses(ValueError, "is sharded already", lambda: shard_experts(other))


def ugly(world: int) -> dict[str, Tokens]:
    """Distributions of tokens that leave ranks, or experts, without any."""
    local = E // world
    every = [[0, 3, 7], [7, 6, 5], [1, 2, 3]]
    first_rank = [[0, local - 1, E - 1]] * 9  # K = 3, and on 4 ranks a rank has 2 experts
    return {
        "no_tokens": Tokens([[] for _ in range(world)]),
        "one_rank_has_tokens": Tokens([[] for _ in range(world - 1)] + [every * 3]),
        "one_rank_has_none": Tokens([[]] + [every * 2 for _ in range(world - 1)]),
        "all_to_the_last_rank": Tokens([[[E - 1, E - 2, E - 1 - r % 2]] * (r + 1) for r in range(world)]),
        "few_experts": Tokens([first_rank[: 2 * r + 1] for r in range(world)]),
        "more_than_a_tile": Tokens([[[0, 1, 2 + i % 6] for i in range(90)] for _ in range(world)]),
    }


Case = Callable[[], None]


def cases(world: int, drawn: list[Tokens], meshes: dict[str, object]) -> dict[str, Case]:
    """The cases of a world by name."""
    found: dict[str, Case] = {}
    for of, ranks in meshes.items():
        # on a CPU an interpreter runs the kernels of peers: it runs all cases once
        is_interpreted = of.endswith("peers")
        is_slow = world == 4 or (of == "nvshmem_peers" and not torch.cuda.is_available())
        modes = ("fp8",) if is_slow else ("fp32", "fp8", "fp8_unfused")
        for mode in modes if is_interpreted else SIZES:
            found[f"gate-{mode}-{of}"] = lambda mode=mode, ranks=ranks: check_gate(mode, ranks)
            for name, tokens in ugly(world).items() if mode != "fp8_in_fp32" else ():
                found[f"{name}-{mode}-{of}"] = lambda m=mode, r=ranks, t=tokens: check_fixed(m, r, t)

            # where rows go does not depend on their dtype
            is_one = (world, mode) == (2, "fp8") and not is_slow if is_interpreted else mode == "fp32"
            few = drawn if is_one else drawn[:3]

            def draws(mode=mode, ranks=ranks, drawn=few) -> None:
                for tokens in drawn:
                    check_fixed(mode, ranks, tokens)

            found[f"drawn-{mode}-{of}"] = draws
        found[f"many_exchanges-{of}"] = lambda ranks=ranks: check_many_exchanges(ranks)
        if is_interpreted and world == 4:
            continue
        found[f"recomputed-fp8-{of}"] = lambda ranks=ranks: check_gate("fp8", ranks, recompute=True)
        found[f"recomputed-fp32-{of}"] = lambda ranks=ranks: check_gate("fp32", ranks, recompute=True)
        found[f"observed-{of}"] = lambda ranks=ranks: check_observed(ranks)
        for mode in ("fp8", "fp8_unfused"):
            found[f"overlap-{mode}-{of}"] = lambda mode=mode, ranks=ranks: check_overlap(ranks, mode)
        found[f"interleaved-{of}"] = lambda ranks=ranks: check_interleaved(ranks)
        found[f"two_passes-{of}"] = lambda ranks=ranks: check_two_passes(ranks)
        found[f"second_derivative-{of}"] = lambda ranks=ranks: check_second_derivative(ranks)
    for of in ("peers", "nvshmem_peers"):
        if of in meshes and torch.cuda.is_available():
            found[f"captured-{of}"] = partial(check_captured, meshes[of])
    if "nvshmem_peers" in meshes:
        found["no_wait-nvshmem_peers"] = lambda: check_no_wait(meshes["nvshmem_peers"])
        if not torch.cuda.is_available():
            found["why_not_nvshmem"] = lambda: check_why_not_nvshmem(meshes["nvshmem_peers"])
    if "peers" in meshes:
        if torch.cuda.is_available():
            found["replay_after_growth-peers"] = check_replay_after_growth
        else:
            found["why_not-peers"] = check_why_not_peers
            found["captured_buffer-peers"] = check_captured_buffer
        found["in_flight-peers"] = check_in_flight
        found["max_rows-peers"] = check_max_rows
        found["decoding-peers"] = check_decoding
        found["too_many_tokens-peers"] = check_too_many_tokens
    found["sent_once"] = check_sent_once
    if "nodes" in meshes:
        found["sent_once_to_a_node"] = lambda: check_sent_once_to_a_node(meshes["nodes"])
        found["why_not_peers_of_nodes"] = lambda: check_why_not_peers_of_nodes(meshes["nodes"])
    found["refusals"] = check_refusals
    found["share"] = check_share
    found["own_share"] = check_own_share
    return found


def allocate_files(
    memory: symmetric_memory.PeerMemory, folder: Path, n_bytes: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Allocate symmetric memory on a CPU: files that all ranks map."""
    number = next(ALLOCATIONS)  # ranks allocate in the same order
    names = [f"{memory.group.group_name}-{number}-{rank}" for rank in range(dist.get_world_size(memory.group))]
    memory.handle = [torch.from_file(str(folder / n), shared=True, size=n_bytes, dtype=torch.uint8) for n in names]
    return memory.handle[dist.get_rank(memory.group)], [t.data_ptr() for t in memory.handle]


def barrier_without_spinning(memory: symmetric_memory.PeerMemory) -> None:
    """Wait in a process group between the halves of a barrier: ranks that spin would use the cores of others."""
    from octile.kernels.triton.peer_rows import launch_barrier

    launch_barrier(memory.peers, wait=False)
    dist.barrier(memory.group)
    launch_barrier(memory.peers, signal=False)


def without_spinning(launch: Callable[..., None]) -> Callable[..., None]:
    """Wait in the process group before a kernel that waits for all ranks."""

    def after_barrier(*args: object) -> None:
        dist.barrier()
        launch(*args)

    return after_barrier


def allocate_garbage(memory: nvshmem.NvshmemMemory, n_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Allocate memory of which nothing must be read before it is written: NaN in most formats."""
    return torch.full((n_bytes,), 255, dtype=torch.uint8), []


def all_to_all_by_gloo(outgoing: Tensor, incoming: Tensor, splits: Tensor, found: Tensor, group) -> None:
    """Do what torch.ops.symm_mem.all_to_all_vdev does."""
    counts, came = splits.tolist(), torch.empty_like(splits)
    dist.all_to_all_single(came, splits, group=group)
    rows = outgoing.new_empty(int(came.sum()), outgoing.shape[1])
    dist.all_to_all_single(rows, outgoing[: sum(counts)].clone(), came.tolist(), counts, group=group)
    incoming[: len(rows)] = rows
    found.copy_(torch.stack([came, came.cumsum(0) - came]))


@contextmanager
def peers_on_cpu(folder: Path) -> Iterator[None]:
    """Let ranks on a CPU use symmetric memory, in files of a folder, and Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        quicken_interpreter(patch)
        for name in ("PEER_SMS", "PEER_SMS_OVERLAPPED"):  # an interpreter runs the programs one after the other
            patch.setattr(launch_config, name, 2)
        patch.setattr(symmetric_memory.PeerMemory, "allocate", partialmethod(allocate_files, folder))
        patch.setattr(symmetric_memory.PeerMemory, "barrier", barrier_without_spinning)
        for name in ("launch_sort", "launch_sum"):
            patch.setattr(decode_rows, name, without_spinning(getattr(decode_rows, name)))
        patch.setattr(symmetric_memory, "why_not_peers", lambda groups: None)
        patch.setattr(nvshmem.NvshmemMemory, "allocate", allocate_garbage)
        patch.setattr(nvshmem, "all_to_all_vdev", all_to_all_by_gloo)
        patch.setattr(nvshmem, "why_not_nvshmem", lambda groups: None)
        yield


def run(
    rank: int,
    world: int,
    folder: str,
    drawn: list[Tokens],
    device: str = "cpu",
    names: Collection[str] | None = None,
) -> None:
    """Run cases as one rank, on a CPU or each rank on its GPU, and write what went wrong in each.

    Args:
        rank, world, folder, drawn, device: this rank, how many there are, and with what.
        names: of the cases, of which those by NVSHMEM come first; None: all that need none, or a stand-in for it.
    """
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        torch.use_deterministic_algorithms(True)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group(backend, f"file://{folder}/store", timeout, world, rank)
    meshes: dict[str, object] = {}
    if world > 1 and (names is not None or device == "cpu"):
        nodes = init_device_mesh(device, (2, world // 2), mesh_dim_names=("node", "rank"))
        meshes["nvshmem_peers"] = Peers(nodes, "nvshmem")
    meshes["ranks"] = None
    if world > 1:
        meshes["peers"] = Peers()
    if world == 4:
        meshes["nodes"] = init_device_mesh(device, (2, 2), mesh_dim_names=("node", "rank"))
        meshes["node_peers"] = Peers(meshes["nodes"])
    elif world == 2 and device == "cuda":
        meshes["node_peers"] = Peers(init_device_mesh(device, (1, 2), mesh_dim_names=("node", "rank")))
    with peers_on_cpu(Path(folder)) if device == "cpu" else nullcontext():
        found = cases(world, drawn, meshes)
        run_cases({name: found[name] for name in names or found}, folder, rank)
    dist.destroy_process_group()
