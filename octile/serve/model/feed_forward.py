"""The second half of a block in serving: the norm, a SwiGLU layer or a mixture of experts, and the residual.

The rows of a mixture are sorted by expert, and their results are weighted in SwiGLU if the down-projections are in FP8,
as in training (`octile.nn.fused.feed_forward`). They go to their experts in one of three ways:

    on one GPU    sorted by one kernel where there are few; the shared experts are computed at the same time
    dispatcher    rows of any step to ranks among which the experts are spread
    exchange      the few rows of decode steps to such ranks, for which no host waits

Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2 and §3.4.
Shapes: T rows, D model, E experts, K chosen ones, I intermediate; R rows sorted by expert.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.jit.launch import only_activations_are_new
from octile.models.config import ModelConfig
from octile.nn.dispatcher import InFlight, LocalDispatcher
from octile.nn.fused.feed_forward import can_fuse_size
from octile.ops.gate import gate
from octile.ops.norm import rms_norm
from octile.ops.permute import count_tokens, permute, unpermute, unpermute_add_, weighted_routing_plan
from octile.ops.swiglu import swiglu
from octile.parallel.decoding import SortedExchange
from octile.parallel.symmetric_memory import PeerDispatcher
from octile.routing import choice_of
from octile.scaled import ScaledTensor
from octile.serve.model.gemms import Gemms, Rows
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.tensor_parallel import TensorParallel
from octile.serve.weights.block_weights import BlockWeights, MLPWeights, MoEWeights

PARTS = 8  # of a window of `ExpertLoad`
FEW_ROWS = 256  # whose shared experts have a stream of their own: GEMMs of more rows fill a GPU


@dataclass(frozen=True)
class FeedForward:
    """The SwiGLU layers and mixtures of a model.

    Attributes:
        config: configuration of the model.
        gemms: by its weights.
        dispatcher: sends rows to experts that are spread over ranks; None: all are here.
        tp: the ranks that share the rows of a step.
        expert_load: counts the tokens of each expert; None: nothing does.
        expert_parallel: weights with the experts of all ranks, if these share them.
        exchange: sends the rows of decode steps, and the host does not wait; None: the dispatcher does.
        routes_shared: whether rows choose the shared experts like routed ones (`ExpertParallelWeights.add_shared`).
    """

    config: ModelConfig
    gemms: Gemms
    dispatcher: LocalDispatcher | None
    tp: TensorParallel
    expert_load: ExpertLoad | None
    expert_parallel: ExpertParallelWeights | None
    exchange: SortedExchange | None = None
    routes_shared: bool = False

    @property
    def is_expert_parallel(self) -> bool:
        """Whether ranks share the experts, and so exchange rows."""
        return self.dispatcher is not None

    def for_rows(self, rows: int) -> FeedForward:
        """Return these for steps of at most so many rows on any rank, or on any group of ranks."""
        dispatcher, exchange, n_own = self.dispatcher, self.exchange, self.tp.n_own(rows)
        if isinstance(dispatcher, PeerDispatcher):
            dispatcher = dispatcher.with_max_tokens(n_own)
        if exchange is not None:
            exchange = exchange.with_max_tokens(n_own)
        return replace(self, dispatcher=dispatcher, exchange=exchange)

    def add(self, x_TD: Tensor, layer: int, w: BlockWeights, slots: Tensor) -> Tensor:
        """Add to rows what a block's SwiGLU layer or mixture computes of them, and return them: [T, D].

        Args:
            x_TD: a rank's own rows.
            layer, w: which block it is, and its weights.
            slots: where the rows of all ranks of a group are cached; negative: nowhere, they are padding.
        """
        eps = self.config.rms_norm_eps
        if isinstance(w.mlp, MLPWeights):
            if self.gemms.batch_invariant and not can_fuse_size(w.mlp.down.shape[-1]):
                return x_TD.add_(self._mlp_in_steps(rms_norm(x_TD, w.post_norm, eps)[0], w.mlp))
            x = self.gemms.norm(x_TD, w.post_norm, eps, w.mlp.x.has_fp8, w.mlp.x.has_values)
            return self.gemms.add_nt_(x_TD, self._mlp_hidden(x, w.mlp), w.mlp.down)
        x = self.gemms.norm(x_TD, w.post_norm, eps, w.mlp.x.has_fp8 or w.mlp.shared.x.has_fp8, True)
        if self.exchange is not None:
            return self._add_exchanged(x_TD, x, layer, w.mlp, self.tp.own(slots), self.exchange)
        if self.expert_parallel is None:
            return self._add_mixture(x_TD, x, layer, w.mlp, slots)
        return x_TD.add_(self._expert_parallel_mixture(x, layer, w.mlp, self.tp.own(slots)))

    def _mlp(self, x: Rows, w: MLPWeights) -> Tensor:
        return self.gemms.nt(self._mlp_hidden(x, w), w.down)

    def _mlp_hidden(self, x: Rows, w: MLPWeights) -> Rows:
        """Compute what a SwiGLU layer's down-projection reads."""
        gate_TI, up_TI = self.gemms.projections(x, w.x)
        return self.gemms.swiglu(gate_TI, up_TI, w.down)

    def _mlp_in_steps(self, x_TD: Tensor, w: MLPWeights) -> Tensor:
        """Compute a SwiGLU layer of a width that training cannot fuse: each step rounds to the activations' dtype."""
        in_fp8 = next((weight for weight in w.x.weights if isinstance(weight, ScaledTensor)), None)
        x = Rows(x_TD, None if in_fp8 is None else self.gemms.rows_for(x_TD, in_fp8).q)
        gate_TI, up_TI = self.gemms.projections(x, w.x)
        return self.gemms.nt(self.gemms.rows_for(swiglu(gate_TI, up_TI), w.down), w.down)

    def _add_mixture(self, x_TD: Tensor, x: Rows, layer: int, w: MoEWeights, slots: Tensor) -> Tensor:
        if len(slots) <= FEW_ROWS:
            shared_TD, wait_for_shared = begin_shared_experts(lambda: self._mlp(x, w.shared), slots.device)
        else:
            shared_TD, wait_for_shared = self._mlp(x, w.shared), None
        weights_TK, experts_TK = self._choose(x, layer, w, slots)
        row_ids_TK, order_R, offs_E, weight_R = weighted_routing_plan(experts_TK, weights_TK, len(w.gate))
        if x.q is not None and w.x.has_fp8:
            data, scale = permute(x.q.data, x.q.scale, row_ids_TK, order_R)
            rows = Rows(None, ScaledTensor(data, scale, TILE))
        else:
            assert x.values is not None
            rows = Rows(x.values.index_select(0, order_R // experts_TK.shape[1]), None)
        is_weighted = isinstance(w.down, ScaledTensor)
        with only_activations_are_new() if offs_E.is_cuda else nullcontext():
            y_RD = self._experts(rows, w, offs_E, weight_R if is_weighted else None, all_rows=True)
            if wait_for_shared is not None:
                wait_for_shared()
            unpermute_add_(x_TD, y_RD, row_ids_TK, shared_TD, None if is_weighted else weights_TK)
        return x_TD

    def _expert_parallel_mixture(self, x: Rows, layer: int, w: MoEWeights, slots: Tensor) -> Tensor:
        parallel, dispatcher = self.expert_parallel, self.dispatcher
        assert parallel is not None
        assert dispatcher is not None
        weights_TK, experts_TK = self._choose(x, layer, w, slots)
        load_E = count_tokens(experts_TK, parallel.n_experts)[0]
        experts_TK = parallel.slots(layer, experts_TK)
        if isinstance(dispatcher, PeerDispatcher):
            experts_TK = experts_TK.masked_fill((slots < 0)[:, None], -1)  # padding goes nowhere
        plan = dispatcher.plan(experts_TK, load_E)
        shared_TD = None if self.routes_shared else self._mlp(x, w.shared)
        if x.q is not None and w.x.has_fp8:
            rows = Rows(None, dispatcher.dispatch_quantized(dispatcher.send_quantized(x.q, plan), plan))
        else:
            assert x.values is not None
            rows = Rows(dispatcher.send(x.values, plan).index_select(0, plan.token_R), None)
        if not isinstance(w.down, ScaledTensor):
            y_RD = self._experts(rows, w, plan.offs_E)
            return unpermute(dispatcher.send_back(y_RD, plan), plan.row_ids_TK, shared_TD, weights_TK)
        weight_R = dispatcher.dispatch_weights(dispatcher.begin_send(weights_TK, plan), plan)
        return dispatcher.combine_unweighted(self._experts(rows, w, plan.offs_E, weight_R), plan, shared_TD)

    def _add_exchanged(
        self, x_TD: Tensor, x: Rows, layer: int, w: MoEWeights, slots: Tensor, exchange: SortedExchange
    ) -> Tensor:
        """Add a mixture of decode rows to x_TD, and return it; rows of padding go nowhere."""
        assert self.expert_parallel is not None
        shared = None
        if not self.routes_shared:
            shared = InFlight(*begin_shared_experts(lambda: self._mlp(x, w.shared), x_TD.device))
        weights_TK, experts_TK = self._choose(x, layer, w, slots)
        sent_TD = x.q if w.x.has_fp8 else x.values
        assert sent_TD is not None
        sent = exchange.send(sent_TD, experts_TK, weights_TK, self.expert_parallel.slots_of_experts(layer), slots)
        here = exchange.receive(sent, len(experts_TK))
        rows = Rows(None, here.rows) if isinstance(here.rows, ScaledTensor) else Rows(here.rows, None)
        is_weighted = isinstance(w.down, ScaledTensor)
        y_RD = self._experts(rows, w, here.offs, here.weights if is_weighted else None)
        return exchange.combine(y_RD, here, shared, None if is_weighted else weights_TK, x_TD)

    def _experts(
        self, rows: Rows, w: MoEWeights, offs_E: Tensor, weight_R: Tensor | None = None, all_rows: bool = False
    ) -> Tensor:
        """Compute the routed experts of rows sorted by expert, times their weights if down-projections are in FP8.

        If all rows have an expert, SwiGLU does not wait for where they end before it loads them.
        """
        gate_RI, up_RI = self.gemms.projections(rows, w.x, offs_E)
        hidden = self.gemms.swiglu(gate_RI, up_RI, w.down, weight_R, None if all_rows else offs_E)
        return self.gemms.nt(hidden, w.down, offs_E)

    def _choose(self, x: Rows, layer: int, w: MoEWeights, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row, and count them; return their weights and numbers, both [T, K].

        Shared experts that are routed are added, and not counted.
        """
        assert x.values is not None
        weights_TK, experts_TK = self._gate(x.values, w)
        if self.expert_load is not None:
            self.expert_load.count(layer, experts_TK, slots)
        if self.routes_shared:
            assert self.expert_parallel is not None
            return self.expert_parallel.add_shared(weights_TK, experts_TK)
        return weights_TK, experts_TK

    def _gate(self, x_TD: Tensor, w: MoEWeights) -> tuple[Tensor, Tensor]:
        return gate(x_TD, w.gate, w.bias, *self.routing, self.gemms.batch_invariant)[:2]

    @cached_property
    def routing(self) -> tuple[Any, ...]:
        """How a gate chooses experts and weights them: the arguments of `octile.ops.gate` after weight and bias."""
        c = self.config
        choice = choice_of(c.topk_method, c.num_experts_per_tok, c.n_group, c.topk_group)
        return *choice, c.scoring_func, c.norm_topk_prob, c.routed_scaling_factor


def begin_shared_experts(
    compute: Callable[[], Tensor], device: torch.device
) -> tuple[Tensor, Callable[[], object] | None]:
    """Begin to compute the shared experts of few rows on a stream of their own, while their experts are chosen.

    Few rows leave most of a GPU idle while they are sorted, or exchanged with other ranks. The stream begins after what
    the current one was asked to do before. It is one of a GPU, made when it is first needed.

    What they read must stay until the result is waited for. Memory of their stream is used again by later work of that
    stream alone, which waits for what has read it.

    Args:
        compute: launches the kernels, whose GEMMs leave half of the SMs to the current stream's.
        device: device of the rows. On a CPU the result is computed at once.

    Returns:
        the result, and a function that lets the current stream wait for it, to be called before it is read; None: there
        is nothing to wait for.
    """
    if device.type != "cuda":
        return compute(), None
    current, stream = torch.cuda.current_stream(device), _stream(device)
    stream.wait_stream(current)
    restore = num_sms.leave_free(num_sms.multiprocessors(device) // 2, math.inf)
    try:
        with torch.cuda.stream(stream):
            result = compute()
    finally:
        restore()
    return result, lambda: current.wait_stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class ExpertLoad:
    """The tokens of each expert, counted over a window of steps that moves; by these its copies are placed anew.

    The forward passes add to counts on their device, in CUDA graphs, too. Eight times in a window the totals are copied
    to the host, which does not wait for them: on a GPU a copy is read when the next one is made.

    Args:
        layers: the numbers of the layers that have experts.
        n_experts: E of each.
        window: how many steps; a multiple of 8.
        device: device of the model.

    Attributes:
        in_window: the tokens of each expert of each layer, by the layer's number, in the last `window` steps; up to a
            quarter of the window is newer than these.
    """

    def __init__(self, layers: Sequence[int], n_experts: int, window: int, device: torch.device):
        self._layers, self._every, self._steps = list(layers), window // PARTS, 0
        self._total = torch.zeros(len(self._layers), n_experts, dtype=torch.int64, device=device)
        self._counts = dict(zip(self._layers, self._total, strict=True))
        self._totals = deque([torch.zeros_like(self._total, device="cpu")], maxlen=PARTS + 1)
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None
        self.in_window: Mapping[int, tuple[int, ...]] = {}
        self._read(self._totals[0])

    def count(self, layer: int, experts_TK: Tensor, slots_T: Tensor) -> None:
        """Count the chosen experts, int64, of a layer's rows, but for those that are written to no slot: padding."""
        is_row = (slots_T >= 0).to(torch.int64)[:, None].expand(experts_TK.shape)
        self._counts[layer].scatter_add_(0, experts_TK.flatten(), is_row.flatten())

    def end_step(self) -> None:
        """Move the window by a step."""
        self._steps += 1
        if self._steps % self._every:
            return
        if self._total.device.type == "cpu":
            self._read(self._total.clone())
            return
        if self._copied is not None:
            total, event = self._copied
            event.synchronize()  # of an eighth of a window ago
            self._read(total)
        total = torch.empty_like(self._total, device="cpu", pin_memory=True)
        total.copy_(self._total, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._total.device))  # of the model's GPU
        self._copied = total, event

    def _read(self, total: Tensor) -> None:
        self._totals.append(total)
        rows = (total - self._totals[0]).tolist()
        self.in_window = {layer: tuple(row) for layer, row in zip(self._layers, rows, strict=True)}
