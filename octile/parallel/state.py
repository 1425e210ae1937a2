"""ZeRO-1: every rank has all weights, but the optimizer's state of a part of each, and updates that part.

    reduce    every rank receives the sum of all ranks' gradients for its part      reduce-scatter
    update    any optimizer steps the parts; its state exists for them only
    gather    every rank receives the updated parts of the others                   all-gather

A part is a view of consecutive rows of a parameter's dimension 0, so nothing is copied: the sum of the gradients is
written into the part's rows of the gradient, and the weights are gathered in place. A parameter whose first dimension
the ranks do not divide, such as a small norm, is updated as a whole by each rank, with the same bits. A part says how
the rows of its parameter are divided (`row_shard`), for an optimizer that needs whole matrices.

Experts that `octile.parallel.shard_experts` has cut are shared only by the ranks that have the same experts, the
replicas. Their gradients are complete in each replica's tokens, and are summed over the replicas only.

Sums are in FP32, or in BF16, which is half the traffic and rounds each rank's gradient and each partial sum.

Both exchanges overlap with computation, in buckets: the parameters of one stage of the forward pass, such as a block.

    reduce    a stage's sum begins in the backward pass, when its last gradient is complete; the last stage is the first
    gather    in the order of the stages; a stage of the next forward pass waits for its own weights only

Buckets are launched in this order on all ranks, whenever their gradients come, so that bits do not depend on timing.

Source: ZeRO (arXiv 1910.02054) §5.1, P_os. Shapes: W ranks, R replicas of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from octile.nn.moe import MoE
from octile.optim.gradient import GradientNorm, norms_of
from octile.optim.row_shards import RowShard
from octile.parallel.experts import ExpertDispatcher

# torch 2.13 gave them these names, and warns of the former ones
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

COALESCING = ("nccl",)  # backends that launch many collectives as one; gloo has no such call


class Layout(NamedTuple):
    """Which rows of dimension 0 of a whole tensor each rank has.

    Attributes:
        starts: the first row of each rank.
        rows: how many rows each rank has.
        total: rows of the whole tensor; `rows` if every rank has all of it.
    """

    starts: tuple[int, ...]
    rows: int
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole tensor."""
        return self.rows == self.total

    def rows_of(self, rank: int) -> slice:
        """The rows of a rank."""
        return slice(self.starts[rank], self.starts[rank] + self.rows)


class _Shard(NamedTuple):
    """A parameter and this rank's part of it.

    Attributes:
        weight: the model's parameter.
        part: a view of some of its rows; the parameter itself if each rank updates all of it.
        ranks: the ranks that have the same weight; None: only this one.
        weight_layout, part_layout: where both lie in the whole weight of all ranks.
        is_counted: whether this rank counts the part in the gradient's norm.
    """

    weight: nn.Parameter
    part: nn.Parameter
    ranks: dist.ProcessGroup | None
    weight_layout: Layout
    part_layout: Layout
    is_counted: bool

    @property
    def is_cut(self) -> bool:
        return self.part is not self.weight


class _Sums(NamedTuple):
    """A group's gradients on the way to their sums over the ranks.

    Attributes:
        shards: whose gradients they are.
        own: this rank's rows of them.
        works: what has to be waited for.
    """

    shards: list[_Shard]
    own: list[Tensor]
    works: list[Any]


class _Stage:
    """A bucket: the parameters that a stage of the forward pass reads first, by the ranks that have the same.

    Attributes:
        groups: the parameters that are cut, of each group of ranks.
        whole: those that each rank updates as a whole.
        incomplete: how many gradients the backward pass has not completed.
        sums: those that were launched.
        gathers: what has to be waited for before the weights are read.
    """

    def __init__(self, shards: Sequence[_Shard]):
        self.groups: dict[dist.ProcessGroup, list[_Shard]] = {}
        self.whole: dict[dist.ProcessGroup, list[_Shard]] = {}
        for shard in shards:
            if shard.ranks is not None:
                (self.groups if shard.is_cut else self.whole).setdefault(shard.ranks, []).append(shard)
        self.incomplete = 0
        self.sums: list[_Sums] | None = None
        self.gathers: list[Any] = []

    @property
    def cut(self) -> list[_Shard]:
        return [shard for shards in self.groups.values() for shard in shards]

    def wait(self, *_: Any) -> None:
        """Let the current stream, on a CPU the host, wait for the weights."""
        works, self.gathers = self.gathers, []
        for work in works:
            work.wait()


class Parts(nn.Module):
    """This rank's parts of a model's parameters by the parameters' names, for an optimizer or a moving average."""

    def __init__(self, parts: Mapping[str, nn.Parameter]):
        super().__init__()
        self._parts = dict(parts)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return names and parts, in the order of the model's parameters."""
        yield from self._parts.items()


class ShardedState:
    """The parts of a model's parameters that this rank updates, and the collectives around the update.

        state = ShardedState(model)
        optimizer = octile.optim.AdamW(param_groups(state.parts, weight_decay), lr=1e-3)
        ...
        with state.reducing():        # around the last micro-batch
            loss.backward()           # scaled for the batch of all ranks
        state.reduce_gradients()
        optimizer.step()
        state.gather_weights()
        optimizer.zero_grad(); model.zero_grad()

    All ranks must make it with the same model, after `shard_experts`, and make the same calls in the same order.

    Args:
        model: contiguous parameters with the same values on all ranks; of experts, on all replicas.
        experts: the mesh [replicas, ranks of a replica], over whose second dimension `shard_experts` sharded the
            experts; None: they are not sharded.
        reduce: the dtype in which gradients are summed, float32 or bfloat16.
        stages: modules that the forward pass calls one after another, with all parameters together. Their exchanges
            overlap with one another's computation. None: the model is one stage.
        group: the ranks that have this model, those of the mesh if there is one; None: all. Other ranks may have other
            layers, as in a pipeline.
        uncounted: names of parameters that ranks outside the group have, too, and count in the gradient's norm.
        order: the names of the parameters of all ranks' layers; None: of the model, as all ranks have it.

    Attributes:
        parts: an optimizer's parameters.
        group: the ranks that have this model.
        rank, size: this rank's number among them, and theirs.

    Raises:
        ValueError: a mixture's experts are sharded over other ranks than the mesh says, `reduce` is another dtype, or a
            parameter is in no stage.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: DeviceMesh | None = None,
        reduce: torch.dtype = torch.float32,
        stages: Sequence[nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
        uncounted: Collection[str] = (),
        order: Sequence[str] | None = None,
    ):
        if reduce not in (torch.float32, torch.bfloat16):
            raise ValueError(f"reduce must be torch.float32 or torch.bfloat16, not {reduce}")
        self.reduce = reduce
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        expert_parallel = _expert_parallel_weights(model, 1 if experts is None else experts.size(1))
        self._replicas = self.group if experts is None else experts.get_group(0)
        self._shards: dict[str, _Shard] = {}
        for name, weight in model.named_parameters():
            mesh = experts if weight in expert_parallel else None
            self._shards[name] = self._cut(weight, mesh)
        is_counted = [shard.is_counted and name not in uncounted for name, shard in self._shards.items()]
        number = {name: index for index, name in enumerate(self._shards if order is None else order)}
        device = next(model.parameters()).device
        self._counted_C = torch.tensor(is_counted).nonzero().squeeze(1).to(device)
        self._index_N = torch.tensor([number[name] for name in self._shards], device=device)
        self.parts = Parts({name: shard.part for name, shard in self._shards.items()})
        self._stages = self._make_stages([model] if stages is None else stages)
        self._next: int | None = None  # the stage whose gradients are to be summed next, in the backward pass

    def _make_stages(self, modules: Sequence[nn.Module]) -> list[_Stage]:
        shard_of = {shard.weight: (name, shard) for name, shard in self._shards.items()}
        stages = []
        for module in modules:
            found = [shard_of.pop(weight)[1] for weight in module.parameters() if weight in shard_of]
            stage = _Stage(found)
            module.register_forward_pre_hook(stage.wait)
            stages.append(stage)
        for name, _ in shard_of.values():
            raise ValueError(f"stages must have all parameters, but none has {name}")
        return stages

    def _cut(self, weight: nn.Parameter, experts: DeviceMesh | None) -> _Shard:
        ranks = self.group if experts is None else experts.get_group(0)
        n_replicas = self.size if experts is None else experts.size(0)
        n_cuts = self.size // n_replicas  # of the whole weight between ranks, before this
        rows = len(weight) if weight.dim() else 1
        # rank = replica · n_cuts + cut
        starts = tuple(rank % n_cuts * rows for rank in range(self.size))
        weight_layout = part_layout = Layout(starts, rows, n_cuts * rows)
        part, replica = weight, self.rank // n_cuts
        if n_replicas > 1 and weight.dim() and rows and rows % n_replicas == 0:
            n = rows // n_replicas
            starts = tuple(start + rank // n_cuts * n for rank, start in enumerate(starts))
            part_layout = Layout(starts, n, n_cuts * rows)
            part = nn.Parameter(weight.detach()[replica * n :][:n], weight.requires_grad)
            assert ranks is not None
            part.row_shard = RowShard((n,) * n_replicas, ranks)  # type: ignore[attr-defined]
        is_counted = part is not weight or replica == 0
        return _Shard(weight, part, ranks if n_replicas > 1 else None, weight_layout, part_layout, is_counted)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Begin to sum the gradients of each stage when the backward pass inside, the last of a step, completes them.

        `reduce_gradients` must follow.
        """
        hooks = []  # only inside: a weight with a hook does not let its gradient wait (`octile.nn.deferred_wgrad`)
        for stage in self._stages:
            trained = [shard.weight for shard in stage.cut if shard.weight.requires_grad]
            stage.incomplete = len(trained)
            stage.sums = None  # of a step that failed
            hooks += [weight.register_post_accumulate_grad_hook(partial(self._complete, stage)) for weight in trained]
        self._next = len(self._stages) - 1
        try:
            yield
        finally:
            self._next = None
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _complete(self, stage: _Stage, weight: Tensor) -> None:
        """Count a gradient of a stage, and launch the sums whose turn has come."""
        assert self._next is not None
        stage.incomplete -= 1
        while self._next >= 0 and not self._stages[self._next].incomplete:
            self._launch_sums(self._stages[self._next])
            self._next -= 1

    def _launch_sums(self, stage: _Stage) -> None:
        stage.sums = []
        for ranks, shards in stage.groups.items():
            found = [shard for shard in shards if shard.weight.grad is not None]
            sums = [_gradient(shard.weight).to(self.reduce) for shard in found]  # the gradient itself if it is of that
            own = [total[self._own(shard)] for total, shard in zip(sums, found, strict=True)]
            stage.sums.append(_Sums(found, own, _launch(reduce_scatter, own, sums, ranks)))

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the `.grad` of all parameters over the ranks; each part gets its rows of the sum as its `.grad`.

        The other rows of a parameter's gradient are undefined afterwards. The parameters of all ranks must have, or
        lack, the same gradients. What `reducing` has begun is awaited. The host does not wait for a GPU.
        """
        for stage in reversed(self._stages):
            if stage.sums is None:
                self._launch_sums(stage)
        whole: dict[dist.ProcessGroup, list[_Shard]] = {}
        for stage in self._stages:
            for ranks, shards in stage.whole.items():
                whole.setdefault(ranks, []).extend(shard for shard in shards if shard.weight.grad is not None)
        for ranks, shards in whole.items():
            self._reduce_whole(shards, ranks)
        for stage in reversed(self._stages):
            launched, stage.sums = stage.sums or [], None
            for sums in launched:
                self._finish_sums(sums)

    def _reduce_whole(self, shards: list[_Shard], ranks: dist.ProcessGroup) -> None:
        if not shards:
            return
        gradients = [_gradient(shard.weight) for shard in shards]
        flat = torch.cat([gradient.flatten().to(self.reduce) for gradient in gradients])
        dist.all_reduce(flat, group=ranks)
        sums = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([gradient.view(-1) for gradient in gradients], list(sums))

    def _finish_sums(self, sums: _Sums) -> None:
        for work in sums.works:
            work.wait()
        for shard, mine in zip(sums.shards, sums.own, strict=True):
            shard.part.grad = _gradient(shard.weight)[self._own(shard)]
            if shard.part.grad.dtype != self.reduce:
                shard.part.grad.copy_(mine)

    @torch.no_grad()
    def gradient_norm(self) -> GradientNorm:
        """Compute the norm of the sums that `reduce_gradients` left, of all ranks together, the same on each.

        Every element counts once. Parameters are numbered as in `order`. The norm is Inf if the sum of the squares
        exceeds FP32's range. The host does not wait for the device.
        """
        norms_N = norms_of(list(self.parts.parameters()))
        total = norms_N.square()[self._counted_C].sum()
        last = torch.where(norms_N.isnan(), self._index_N, -1).amax()
        dist.all_reduce(total)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        return GradientNorm(total.sqrt(), last)

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Begin to overwrite every parameter with the parts of all ranks.

        The forward pass of each stage waits for its own parameters. Who reads them otherwise calls `gather_weights`.
        """
        for stage in self._stages:
            stage.wait()
            for ranks, shards in stage.groups.items():
                weights = [shard.weight.detach() for shard in shards]
                parts = [shard.part.detach() for shard in shards]
                stage.gathers += _launch(all_gather, weights, parts, ranks)
            increment_version([shard.weight for shard in stage.cut])  # a collective does not

    def finish_gather(self) -> None:
        """Wait for what `begin_gather` has begun. The host does not wait for a GPU."""
        for stage in self._stages:
            stage.wait()

    def gather_weights(self) -> None:
        """Overwrite every parameter with the parts of all ranks. The host does not wait for a GPU."""
        self.begin_gather()
        self.finish_gather()

    @torch.no_grad()
    def sum_over_replicas(self, counts: Tensor) -> Tensor:
        """Sum over the replicas, in place, what each rank has counted for all ranks of its replica; return it."""
        dist.all_reduce(counts, group=self._replicas)
        return counts

    def drop_gradients(self) -> None:
        """Delete the parts' gradients, which are views of the parameters' gradients and keep their memory."""
        for shard in self._shards.values():
            if shard.is_cut:
                shard.part.grad = None

    def weight_layout(self, name: str) -> Layout:
        """The rows that each rank's parameter of that name has of the whole weight."""
        return self._shards[name].weight_layout

    def part_layout(self, name: str) -> Layout:
        """The rows that each rank's part of the parameter has of the whole weight."""
        return self._shards[name].part_layout

    def _own(self, shard: _Shard) -> slice:
        """The part's rows of this rank's parameter."""
        start = shard.part_layout.starts[self.rank] - shard.weight_layout.starts[self.rank]
        return slice(start, start + shard.part_layout.rows)


@torch.no_grad()
def collect(local: Tensor, layout: Layout, group: dist.ProcessGroup | None = None) -> Tensor | None:
    """Return the whole tensor, of which each rank of a group has the rows `local`, on its first rank; None on others.

    Without a group these are all ranks.
    """
    is_first = dist.get_rank(group) == 0
    if layout.is_whole:
        return local if is_first else None
    sent = local.detach().contiguous().view(torch.uint8)  # gloo has no FP8
    received = [torch.empty_like(sent) for _ in layout.starts] if is_first else None
    dist.gather(sent, received, group=group, group_dst=0)
    if received is None:
        return None
    whole = local.new_empty(layout.total, *local.shape[1:])
    for rank, rows in enumerate(received):
        whole[layout.rows_of(rank)] = rows.view(local.dtype)
    return whole


def _expert_parallel_weights(model: nn.Module, n_ranks: int) -> set[Tensor]:
    """The weights of experts that `shard_experts` has cut; raises ValueError unless it was between `n_ranks` ranks."""
    weights: set[Tensor] = set()
    for name, moe in model.named_modules():
        if isinstance(moe, MoE):
            found = moe.dispatcher.n_ranks if isinstance(moe.dispatcher, ExpertDispatcher) else 1
            if found != n_ranks:
                raise ValueError(f"the experts of {name or 'model'} must be spread over {n_ranks} ranks, not {found}")
            if found > 1:
                weights.update(moe.experts.parameters())
    return weights


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _launch(
    collective: Callable[..., Any], outputs: Sequence[Tensor], inputs: Sequence[Tensor], ranks: dist.ProcessGroup
) -> list[Any]:
    """Launch a collective for each pair of tensors, as one where the backend can. Return what has to be waited for."""
    if not inputs:
        return []
    pairs = list(zip(outputs, inputs, strict=True))
    if dist.get_backend(ranks) not in COALESCING:
        return [collective(output, own, group=ranks, async_op=True) for output, own in pairs]
    # without a device: with one, torch launches them inside another group, whose work alone is returned; that of the
    # launch itself, for which nobody waits, holds its tensors until the next collective
    with dist._coalescing_manager(ranks, async_ops=True) as together:
        for output, own in pairs:
            collective(output, own, group=ranks)
    return [together]
