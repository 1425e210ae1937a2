"""DeepSeekMoE: every token is sent to a few of many small experts, and to the shared experts.

    gate       the affinity of every token to every expert, and which K experts it is sent to     gate.py
    dispatch   the tokens' rows, sorted by expert; the counts stay on the device                  dispatcher.py
    experts    grouped GEMMs: an expert without tokens costs nothing                              Experts
    combine    the K results of a token, weighted and summed                                      dispatcher.py

No token is ever dropped, and none is padded.  Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2.
Shapes: B batch, S sequence, T = B·S tokens, D model, E experts, K chosen experts, I intermediate, R = T·K rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from octile.nn.checkpointed_loss import leave_behind, pop_loss
from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.dispatcher import LocalDispatcher, RoutingPlan
from octile.nn.functional import grouped_linear, result_dtype
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.elementwise import swiglu
from octile.nn.fused.feed_forward import Routed, can_fuse_size, experts_feed_forward
from octile.nn.fused.fusion import FusableModule, Fusion, check_not_batch_invariant, has_hooks
from octile.nn.gate import Gate, Routing
from octile.nn.linear import RecipeHolder, history_for
from octile.nn.mlp import MLP
from octile.nn.smooth_swiglu import power_of_2_at_least, scale_columns
from octile.ops.permute import count_tokens
from octile.recipe import Recipe

_SHARE: ContextVar[tuple[int, int]] = ContextVar("octile_share_of_experts", default=(0, 1))


@contextmanager
def share_of_experts(rank: int, n_ranks: int) -> Iterator[None]:
    """Let `Experts` that are made inside have only the experts of one of several ranks, with the same bits.

    All experts are drawn, one stacked weight at a time, and those of other ranks dropped. A model that is made so is
    then given to `octile.parallel.shard_experts`; without it every rank has memory for all experts at first.
    """
    token = _SHARE.set((rank, n_ranks))
    try:
        yield
    finally:
        _SHARE.reset(token)


class Experts(nn.Module, RecipeHolder[Recipe | None]):
    """E SwiGLU layers in two stacked weights: gate_up [E, 2I, D], the gates' rows first, and down [E, D, I].

    Attributes:
        n_experts: experts of all ranks together, E without expert parallelism.
        here: which of them these are.

    Raises:
        ValueError: the ranks of `share_of_experts` do not divide the experts.
    """

    def __init__(self, n_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        rank, n_ranks = _SHARE.get()
        if n_experts % n_ranks:
            raise ValueError(f"the number of experts must be a multiple of the {n_ranks} ranks, not {n_experts}")
        local = n_experts // n_ranks
        self.n_experts, self.here = n_experts, slice(rank * local, (rank + 1) * local)
        self.gate_up = nn.Parameter(torch.empty(local, 2 * intermediate_size, hidden_size))
        self.draw_(self.gate_up, 0.006)
        self.down = nn.Parameter(torch.empty(local, hidden_size, intermediate_size))
        self.draw_(self.down, 0.006)
        self.use_recipe(None)

    @torch.no_grad()
    def draw_(self, weight: Tensor, std: float) -> None:
        """Draw one of the weights from N(0, std²), with the values that it has among all experts of all ranks."""
        if len(weight) == self.n_experts:
            weight.normal_(std=std)
        else:
            weight.copy_(weight.new_empty(self.n_experts, *weight.shape[1:]).normal_(std=std)[self.here])

    @property
    def linear_layers(self) -> int:
        """How many linear layers these weights stand for."""
        return 3 * len(self.down)

    def use_recipe(self, recipe: Recipe | None) -> None:
        """Change the recipe, and clear the amax history that delayed scaling has collected."""
        self.recipe = recipe
        self.gate_up_history, self.down_history = history_for(recipe, self.gate_up), history_for(recipe, self.down)

    def forward(self, x_RD: Tensor, offs_E: Tensor) -> Tensor:
        """Compute rows [R, D] sorted by expert; offs_E int32 [E] is the end of each expert's rows: [R, D]."""
        histories = self.gate_up_history, self.down_history
        return experts_layers(x_RD, offs_E, self.gate_up, self.down, self.recipe, *histories)


def experts_layers(
    x_RD: Tensor,
    offs_E: Tensor,
    gate_up: Tensor,
    down: Tensor,
    recipe: Recipe | None,
    gate_up_history: AmaxHistory | None,
    down_history: AmaxHistory | None,
    activation: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Compute rows [R, D] sorted by expert, one layer after the other: [R, D].

    Args:
        x_RD: the rows.
        offs_E: int32 [E], the end of each expert's rows.
        gate_up, down: the stacked weights [E, N, D] and [E, D, I].
        recipe: recipe of both; None: they are in high precision.
        gate_up_history, down_history: for a recipe with delayed scaling.
        activation: what is computed between the two, [R, N] → [R, I].
    """
    h_RI = activation(grouped_linear(x_RD, gate_up, offs_E, recipe, gate_up_history))
    return down_projections(h_RI, offs_E, down, recipe, down_history)


def down_projections(
    h_RI: Tensor, offs_E: Tensor, down: Tensor, recipe: Recipe | None, down_history: AmaxHistory | None
) -> Tensor:
    """Compute the last layer of experts from SwiGLU's output [R, I], as `experts_layers` does: [R, D]."""
    if recipe is None or not recipe.has_smooth_swiglu:
        return grouped_linear(h_RI, down, offs_E, recipe, down_history)
    h_RI, down_EDI = _smooth(h_RI, down, offs_E)
    return grouped_linear(h_RI, down_EDI, offs_E, recipe.smoothed, down_history)


def expert_of_rows(offs_E: Tensor, rows: int) -> Tensor:
    """Return the expert of each of so many rows sorted by expert, E for those of none: int64 [R]."""
    return torch.searchsorted(offs_E, torch.arange(rows, device=offs_E.device, dtype=offs_E.dtype), right=True)


def _smooth(h_RI: Tensor, down_EDI: Tensor, offs_E: Tensor) -> tuple[Tensor, Tensor]:
    """Move the scale of each expert's channels from h into the weight; see `octile.nn.smooth_swiglu`."""
    expert_R = expert_of_rows(offs_E, len(h_RI))
    amax_EI = h_RI.new_zeros(len(down_EDI) + 1, h_RI.shape[-1])  # the last row is for rows that belong to no expert
    amax_EI.scatter_reduce_(0, expert_R[:, None].expand_as(h_RI), h_RI.detach().abs(), "amax")
    scale_EI = power_of_2_at_least(amax_EI)
    smooth_RI = (h_RI / scale_EI[expert_R]).to(h_RI.dtype)
    return smooth_RI, scale_columns(down_EDI, scale_EI[:-1, None])


class MoE(FusableModule):
    """A mixture of experts: each token uses a few of them, and all tokens use the shared ones: [B, S, D] → [B, S, D].

    For any model (`docs/moe.md`): any number of tokens, experts and chosen experts, any sizes. No token is dropped and
    none is padded, an expert without tokens costs nothing, nothing waits for the host, and the same tokens give the
    same bits, on a GPU in deterministic mode (`torch.use_deterministic_algorithms`).

    It computes in the input's dtype, or autocast's, until `octile.convert` or `use_recipe` of its experts gives it a
    recipe. Under a recipe that says how SwiGLU's inputs are saved, and with intermediate sizes that are multiples of
    128, the input is quantized once, travels to the experts in 8 bits, and the results come back in BF16
    (`octile.nn.fused.feed_forward`).

    In training mode a forward pass leaves two things behind:

        last_load_E     int64 [E], how many tokens each expert got, from all ranks under expert parallelism
                        (`octile.parallel`): what `gate.balance` needs after the step
        balance_loss    α · `gate.sequence_balance`, for the model to add to its loss; None where α is 0

    Args:
        gate: chooses the experts, and has their number.
        hidden_size, intermediate_size: D, and I of one expert.
        shared_intermediate_size: I of the shared experts, which are one SwiGLU layer together; 0: there are none.
        alpha: weight α of the balance loss.

    Raises:
        ValueError: a negative size or alpha, no intermediate_size, or a gate of another hidden_size.

    Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2 and §3.3.3.
    """

    fusable_layers = ("experts",)
    reads_high_precision = True  # the gate does
    last_load_E: Tensor

    def __init__(
        self,
        gate: Gate,
        hidden_size: int,
        intermediate_size: int,
        shared_intermediate_size: int = 0,
        alpha: float = 1e-4,
    ):
        if intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, not {intermediate_size}")
        for name, value in (("shared_intermediate_size", shared_intermediate_size), ("alpha", alpha)):
            if not value >= 0:  # rejects NaN, too
                raise ValueError(f"{name} must be at least 0, not {value}")
        n_experts, gate_size = gate.weight.shape
        if gate_size != hidden_size:
            raise ValueError(f"hidden_size must be the gate's, {gate_size}, not {hidden_size}")
        super().__init__()
        self.gate = gate
        self.experts = Experts(n_experts, hidden_size, intermediate_size)
        self.shared_experts = MLP(hidden_size, shared_intermediate_size) if shared_intermediate_size else None
        self.dispatcher = LocalDispatcher()
        self.alpha = alpha
        self.register_buffer("last_load_E", torch.zeros(n_experts, dtype=torch.int64), persistent=False)
        self.balance_loss: Tensor | None = None

    def forward(self, x_BSD: Tensor | BlockInput) -> Tensor:
        """Compute the mixture of x, or of the second result of `octile.nn.pre_norm`: [B, S, D].

        Raises:
            ValueError: x is not [B, S, D].
        """
        shape, width = x_BSD.shape, self.gate.weight.shape[1]
        if len(shape) != 3 or shape[-1] != width:
            raise ValueError(f"x must be [batch, sequence, {width}], not {tuple(shape)}")
        x = self.fused_input(x_BSD)
        if isinstance(x, BlockInput):
            return self._fused(x).view(shape)

        x_TD = x.flatten(0, 1)
        routing, plan = self._route(x_TD, shape[0])
        y_RD = self.experts(self.dispatcher.dispatch(x_TD, plan), plan.offs_E)
        sent = None
        if self.dispatcher.exchanges:  # while the shared experts run
            with torch.no_grad():
                sent = self.dispatcher.begin_send_back(y_RD.detach(), plan)
        shared_TD = None if self.shared_experts is None else self.shared_experts(x_TD)
        return self.dispatcher.combine(y_RD, routing.weights_TK, plan, shared_TD, sent).view(shape)

    def decide_fusion(self) -> Fusion | None:
        """Return how the experts' GEMMs and SwiGLU are fused, or None if they are called one after the other."""
        recipe = self.experts.recipe if type(self.experts) is Experts else None
        if recipe is None or recipe.formats is None or not recipe.can_fuse_swiglu:
            return None
        return Fusion(recipe, recipe.formats) if can_fuse_size(self.experts.down.shape[-1]) else None

    def _fused(self, x: BlockInput) -> Tensor:
        x, x_gate, x_shared = x.for_readers()
        routing, plan = self._route(x_gate, x.shape[0])
        shared_experts = self.shared_experts

        def shared() -> Tensor:
            assert shared_experts is not None
            shares_input = self._shares_input(shared_experts, x.recipe)
            if not shares_input:
                check_not_batch_invariant(shared_experts.modules())
            return shared_experts(x_shared if shares_input else x_shared.x).view(x.x.shape)

        weights = (self.experts.gate_up, self.experts.down, routing.weights_TK)
        return experts_feed_forward(
            x, *weights, shared if shared_experts else None, Routed(self.dispatcher, plan), result_dtype(x.x)
        )

    def _shares_input(self, shared_experts: MLP, recipe: Recipe) -> bool:
        """Whether the shared experts read the same quantized input as the experts: fused by an equal recipe."""
        fusion = None if has_hooks(shared_experts) else shared_experts.fusion()
        return fusion is not None and (fusion.recipe is recipe or fusion.recipe == recipe)

    def _route(self, x: Tensor | BlockInput, batch: int) -> tuple[Routing, RoutingPlan]:
        """Choose each token's experts and plan the way of the rows; store the load and its loss."""
        if isinstance(x, BlockInput) and (type(self.gate) is not Gate or has_hooks(self.gate)):
            check_not_batch_invariant([self.experts])
            x = x.x
        routing = self.gate(x)
        load_E = count_tokens(routing.experts_TK, len(self.gate.weight))[0]
        plan = self.dispatcher.plan(routing.experts_TK, load_E)
        if self.training:
            self.last_load_E = self.dispatcher.total_load(load_E, plan)
            if self.alpha:
                loss = self.alpha * self.gate.sequence_balance(routing, batch)
                weights_TK = leave_behind(self, "balance_loss", loss, routing.weights_TK)
                routing = routing._replace(weights_TK=weights_TK)
            else:
                self.balance_loss = None
        return routing, plan

    def pop_balance_loss(self) -> Tensor | float:
        """Return the balance loss of the last forward pass in training mode, once; 0 if there was none.

        Raises:
            RuntimeError: compiled code computed it without gradients, as in a reentrant checkpoint.
        """
        return pop_loss(self, "balance_loss", self.gate.weight)
