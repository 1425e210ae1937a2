"""Serving with expert parallelism: each rank has its own requests and the experts of its slots.

    parallel = ExpertParallelWeights(weights, rebalance_experts(load, …)[0])
    runner = ModelRunner(parallel, n_pages, expert_window=4096)
    engine = ExpertParallelEngine(Engine(runner, tokenizer), runner)
    while (outputs := engine.step()) is not None: …

All ranks call `step` in turn, also those without requests: the rows of a step are sent to the ranks that have their
experts, and the results come back. Between GPUs that can write to each other's memory kernels do so, for which no host
waits (`octile.parallel.decoding` where all requests decode, else `octile.parallel.symmetric_memory`). An expert may
have copies on several ranks, to which the tokens of a rank go round-robin; with `num_active`, dynamic redundancy
chooses for all ranks in each layer of each step (`octile.serve.ranks.dynamic_redundancy`). Which copy computes a row
does not change its bits, so in batch-invariant mode a request's logits are those of one process.

Every ten minutes the experts are placed anew by the tokens that they had, and move to their new slots, one layer after
each step. A rank receives an expert that it has not from a rank of its node, if one has it.

Shapes: T rows of this rank, K chosen experts, E experts, P slots of all ranks, L layers with experts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octile.checkpoint.hugging_face import read_model_config
from octile.models.config import ModelConfig
from octile.parallel import symmetric_memory
from octile.parallel.decoding import SortedExchange, max_rank_tokens
from octile.parallel.experts import ExpertDispatcher, check_agreement, check_divisible, groups_of
from octile.parallel.state import all_gather
from octile.parallel.symmetric_memory import PeerDispatcher
from octile.scaled import ScaledTensor
from octile.serve.engine.drafts import check_can_draft
from octile.serve.ranks.dynamic_redundancy import assign_copies, choose_copies
from octile.serve.ranks.placement import move_experts
from octile.serve.ranks.tensor_parallel import ALONE, TensorParallel
from octile.serve.weights.block_weights import BlockWeights, MoEWeights, Projections, Weight
from octile.serve.weights.routed_shared_experts import with_shared
from octile.serve.weights.weights import ServedWeights
from octile.validation import Range, check


class ExpertParallelWeights:
    """The weights of a model whose routed experts are spread over ranks.

    All ranks must make it, with the same model and placement, and then run the same steps. `read` reads a model that is
    too large for one rank.

    Args:
        weights: weights of the whole model; the experts of other ranks are not held.
        physical_to_logical: int64 [L, P], the expert in each slot, as `rebalance_experts` returns it; the W ranks have
            P/W consecutive slots each.
        ranks: those that share the experts; None: all.
        num_active: how many slots of a rank compute tokens in a step: dynamic redundancy; the host then waits for the
            tokens of the experts, and chooses. None: any slot may, and an expert's copies take turns.
        num_nodes: nodes of the ranks, which have consecutive numbers in a node.
        drafts: whether the multi-token prediction layer is served, too; it is then the last row of the placement.
        routes_shared: whether each row of decode steps that are launched ahead chooses the shared experts, too, like
            routed ones with a weight of 1. They have copies in slots: their numbers in the placement are those after
            the last routed expert's.
        tp: the group of this rank, whose ranks share their requests; each group divides the heads of attention. Its
            share are the heads of the weights.

    Attributes:
        weights: those of this rank: the routed experts are those of its slots.
        layers: the numbers of the layers with experts; that of multi-token prediction follows the last layer's.
        tp: as given.
        dispatcher: sends rows to slots.
        n_experts: E, and the shared experts that are routed.
        n_shared: how many these are.
        physical_to_logical: the placement now.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: the placement is not an int64 tensor, a number not an int, or ranks a mesh.
        ValueError: the placement has another number of layers, or not all experts of a layer; W does not divide P, or
            num_nodes W; all experts together need more active slots; the model cannot draft. Or the weights have
            other heads than tp, or the ranks disagree about the placement, the numbers or the model's experts.
    """

    def __init__(
        self,
        weights: ServedWeights,
        physical_to_logical: Tensor,
        ranks: dist.ProcessGroup | None = None,
        num_active: int | None = None,
        num_nodes: int = 1,
        drafts: bool = False,
        routes_shared: bool = False,
        tp: TensorParallel = ALONE,
    ):
        if weights.heads != tp.share:
            raise ValueError(f"weights must have the heads of tp, {tp.share}, not {weights.heads}")
        self.tp = tp
        numbers = num_active, num_nodes, drafts, routes_shared
        own = self._prepare(weights.config, physical_to_logical, ranks, *numbers)

        def with_own(layer: int, block: BlockWeights) -> BlockWeights:
            if not isinstance(block.mlp, MoEWeights):
                return block
            taken = torch.tensor(own[layer], device=weights.device)
            mlp = with_shared(block.mlp, self.n_shared) if self.n_shared else block.mlp
            x = Projections(tuple(_take(weight, taken) for weight in mlp.x.weights), mlp.x.sizes)
            return replace(block, mlp=replace(mlp, x=x, down=_take(mlp.down, taken)))

        blocks, mtp = tuple(with_own(layer, block) for layer, block in enumerate(weights.blocks)), None
        if drafts:
            assert weights.mtp is not None  # the model can draft
            mtp = replace(weights.mtp, block=with_own(len(blocks), weights.mtp.block))
        self.weights = replace(weights, blocks=blocks, mtp=mtp)
        self._set_slots()

    @classmethod
    def read(
        cls,
        path: str | Path,
        physical_to_logical: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        ranks: dist.ProcessGroup | None = None,
        num_active: int | None = None,
        num_nodes: int = 1,
        drafts: bool = False,
        routes_shared: bool = False,
        tp: TensorParallel = ALONE,
    ) -> ExpertParallelWeights:
        """Read a folder as `ServedWeights.read` does, of the routed experts those of this rank's slots alone.

        The other arguments and errors are those of the class.
        """
        parallel = cls.__new__(cls)
        parallel.tp = tp
        numbers = num_active, num_nodes, drafts, routes_shared
        own = parallel._prepare(read_model_config(path), physical_to_logical, ranks, *numbers)
        parallel.weights = ServedWeights.read(path, dtype, device, own, tp.share, drafts)
        parallel._set_slots()
        return parallel

    def _prepare(
        self,
        c: ModelConfig,
        physical_to_logical: Tensor,
        ranks: dist.ProcessGroup | None,
        num_active: int | None,
        num_nodes: int,
        drafts: bool,
        routes_shared: bool,
    ) -> dict[int, list[int]]:
        """Check the placement, and return the experts of this rank's slots, by layer."""
        self.num_active, self.num_nodes = num_active, num_nodes
        self.layers = [layer for layer in range(c.num_hidden_layers + drafts) if c.is_moe(layer)]
        self.n_shared = c.n_shared_experts if routes_shared else 0
        self.n_experts = c.n_routed_experts + self.n_shared
        groups = groups_of(ranks)
        if isinstance(ranks, DeviceMesh):  # has several groups; the dispatcher alone takes it
            raise TypeError("ranks must be a process group, not DeviceMesh")
        experts = f"{c.n_routed_experts} in {c.n_group} groups in layers {self.layers}"
        numbers = (
            ("num_active", num_active),
            ("num_nodes", num_nodes),
            ("drafts", drafts),
            ("routes_shared", routes_shared),
            ("tp", self.tp.size),
        )
        for what, own in (("the model's experts", experts), *((what, str(number)) for what, number in numbers)):
            check_agreement(what, own, groups)
        check_can_draft(int(drafts), c.num_nextn_predict_layers > 0)
        if routes_shared and num_active is not None:
            raise ValueError(f"num_active must be None, not {num_active}, if shared experts are routed")
        check("num_nodes", num_nodes, Annotated[int, Range(at_least=1)])
        n_ranks = math.prod(dist.get_world_size(group) for group in groups)
        if n_ranks % num_nodes:
            raise ValueError(f"num_nodes must divide the {n_ranks} ranks, but is {num_nodes}")
        self._check(physical_to_logical, groups)
        n_slots = physical_to_logical.shape[1]
        self.dispatcher = ExpertDispatcher(n_slots, c.num_experts_per_tok, c.hidden_size, ranks)
        self.physical_to_logical = physical_to_logical.cpu().clone()
        self._moves: Iterator[None] = iter(())
        own_LS = self.physical_to_logical[:, self.dispatcher.local_experts]
        return dict(zip(self.layers, own_LS.tolist(), strict=True))

    def _set_slots(self) -> None:
        placed = zip(self.layers, self.physical_to_logical.to(self.weights.device), strict=True)
        self._slots = {layer: _slots_of(expert_P, self.n_experts) for layer, expert_P in placed}
        shared = torch.arange(self.n_experts - self.n_shared, self.n_experts, device=self.weights.device)
        self._shared = torch.ones(1, self.n_shared, device=self.weights.device), shared[None]

    def mixture(self, layer: int) -> MoEWeights:
        """The weights of a layer's mixture."""
        blocks, mtp = self.weights.blocks, self.weights.mtp
        if layer < len(blocks):
            mlp = blocks[layer].mlp
        else:
            assert mtp is not None  # its layer has a placement
            mlp = mtp.block.mlp
        assert isinstance(mlp, MoEWeights)
        return mlp

    def why_not_peers(self) -> str | None:
        """Return why kernels cannot exchange rows, so that hosts wait; None: they can. All ranks call it."""
        if self.num_active is not None:
            return "the host chooses the active experts of each layer"
        return symmetric_memory.why_not_peers(self.dispatcher.groups)

    def peer_dispatcher(self, max_tokens: int) -> PeerDispatcher:
        """Make a dispatcher of at most so many rows of a rank, by kernels. All ranks call it with the same number."""
        memory = symmetric_memory.PeerMemory(self.dispatcher.groups[-1])
        return PeerDispatcher(*self._sizes, memory, max_tokens)

    def decoding_exchange(self, max_tokens: int) -> SortedExchange | None:
        """Make an exchange of few rows, at most so many of a rank, by kernels.

        All ranks must call it with the same number. If they are too many, a warning says so, and the result is None.
        """
        n_ranks, n_chosen = self.dispatcher.n_ranks, self.dispatcher.n_chosen + self.n_shared
        most = max_rank_tokens(n_ranks, n_chosen)
        if max_tokens > most:
            rows = f"a rank has up to {max_tokens} rows, but {n_ranks} ranks may have {most} each"
            what = f"decode steps are not launched ahead: {rows}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
            return None
        down, memory = self.mixture(self.layers[0]).down, symmetric_memory.PeerMemory(self.dispatcher.groups[-1])
        dtype = torch.float8_e4m3fn if isinstance(down, ScaledTensor) else self.weights.dtype
        n_slots, _, hidden_size = self._sizes
        return SortedExchange(n_slots, n_chosen, hidden_size, dtype, memory, max_tokens, self.weights.device)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.dispatcher.n_experts, self.dispatcher.n_chosen, self.weights.config.hidden_size

    def slots_of_experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """The slots of each expert of a layer, int64 [E, C], and how many it has [E]; they change as experts move."""
        return self._slots[layer]

    def slots(self, layer: int, experts_TK: Tensor) -> Tensor:
        """Return the slots that compute the rows' experts, int64 [T, K]."""
        if self.num_active is not None:
            return self._active_slots(self.physical_to_logical[self.layers.index(layer)], experts_TK)
        slots_EC, count_E = self._slots[layer]
        turn_T1 = torch.arange(len(experts_TK), device=experts_TK.device)[:, None] + self.dispatcher.rank
        return slots_EC[experts_TK, turn_T1 % count_E[experts_TK]]

    def _active_slots(self, expert_P: Tensor, experts_TK: Tensor) -> Tensor:
        group, n_ranks = self.dispatcher.groups[0], self.dispatcher.n_ranks
        own_E = experts_TK.flatten().bincount(minlength=self.n_experts)
        tokens_WE = own_E.new_empty(n_ranks, self.n_experts)
        all_gather(tokens_WE, own_E[None], group=group)
        served_P = choose_copies(tokens_WE.sum(0), expert_P, n_ranks, self.num_active)
        first_E = tokens_WE[: self.dispatcher.rank].sum(0)
        return assign_copies(experts_TK, first_E, served_P.to(own_E.device), expert_P.to(own_E.device))

    def add_shared(self, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Put the shared experts that are routed before the experts of each row, whose sum begins with them.

        Args:
            weights_TK, experts_TK: float32 and int64, of the experts that the gate has chosen.

        Returns:
            both with as many columns more, the weights of which are 1.
        """
        weights, experts = (t.expand(len(experts_TK), -1) for t in self._shared)
        return torch.cat((weights, weights_TK), dim=1), torch.cat((experts, experts_TK), dim=1)

    def move(self, physical_to_logical: Tensor) -> None:
        """Begin to move the experts to another placement of as many slots: one layer with each call of `move_layer`.

        All ranks must call it, between the same steps. A placement that is not yet reached is replaced.

        Raises:
            TypeError, ValueError: as for the class, or the placement has another number of slots.
        """
        self._check(physical_to_logical, self.dispatcher.groups)
        if physical_to_logical.shape != self.physical_to_logical.shape:
            before, found = self.physical_to_logical.shape[1], physical_to_logical.shape[1]
            raise ValueError(f"physical_to_logical must have {before} slots as before, not {found}")
        self._moves = self._move(physical_to_logical.cpu().clone())

    def move_layer(self) -> bool:
        """Move the experts of the next layer whose placement changes; return whether there was one."""
        return next(self._moves, self) is None

    def _move(self, wanted_LP: Tensor) -> Iterator[None]:
        for row, layer in enumerate(self.layers):
            if not torch.equal(wanted_LP[row], self.physical_to_logical[row]):
                mlp = self.mixture(layer)
                now, wanted = self.physical_to_logical[row].tolist(), wanted_LP[row].tolist()
                move_experts([*mlp.x.weights, mlp.down], now, wanted, self.dispatcher.groups[0], self.num_nodes)
                self.physical_to_logical[row] = wanted_LP[row]
                moved = _slots_of(wanted_LP[row].to(self.weights.device), self.n_experts)
                for slots, new in zip(self._slots[layer], moved, strict=True):
                    slots.copy_(new)  # CUDA graphs have their addresses
                yield

    def _check(self, physical_to_logical: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        is_tensor = isinstance(physical_to_logical, Tensor)
        described = str(physical_to_logical.tolist()) if is_tensor else type(physical_to_logical).__name__
        check_agreement("physical_to_logical", described, groups)  # so that all ranks raise the same
        if not isinstance(physical_to_logical, Tensor) or physical_to_logical.dtype != torch.int64:
            found = physical_to_logical.dtype if is_tensor else type(physical_to_logical).__name__
            raise TypeError(f"physical_to_logical must be an int64 tensor, not {found}")
        n_layers, n_experts = len(self.layers), self.n_experts
        if physical_to_logical.dim() != 2 or len(physical_to_logical) != n_layers:
            raise ValueError(
                f"physical_to_logical must be [{n_layers}, slots], a row for each layer with experts, not "
                f"{list(physical_to_logical.shape)}"
            )
        for layer, expert_P in zip(self.layers, physical_to_logical.tolist(), strict=True):
            if set(expert_P) != set(range(n_experts)):
                raise ValueError(
                    f"physical_to_logical must have the experts from 0 to {n_experts - 1} and no others in each layer, "
                    f"but has {sorted(set(expert_P))} in layer {layer}"
                )
        check_divisible(physical_to_logical.shape[1], groups)
        if self.num_active is not None:
            n_ranks = math.prod(dist.get_world_size(group) for group in groups)
            for expert_P in physical_to_logical:  # if all experts can be active together, those of any step can
                choose_copies(torch.ones(n_experts, dtype=torch.int64), expert_P, n_ranks, self.num_active)


def _take(weight: Weight, experts: Tensor) -> Weight:
    """Return the weights of some experts, of stacked ones."""
    if not isinstance(weight, ScaledTensor):
        return weight[experts]
    data = weight.data.view(torch.uint8)[experts].view(weight.data.dtype)
    return ScaledTensor(data, weight.scale[experts], weight.block)


def _slots_of(expert_P: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Return the slots of each expert [E, C], and how many it has [E]; C is what a placement can give it at most."""
    count_E = expert_P.bincount(minlength=n_experts)
    order_P = expert_P.argsort(stable=True)
    first_E = count_E.cumsum(0) - count_E
    copy_C = torch.arange(len(expert_P) - n_experts + 1, device=expert_P.device)
    at_EC = (first_E[:, None] + copy_C).clamp(max=len(expert_P) - 1)  # those beyond an expert's copies are not read
    return order_P[at_EC], count_E
