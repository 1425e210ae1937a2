"""DeepSeekMoE: every token is sent to a few of many small experts, and to the shared ones.

    gate       affinity of every token to every expert, and which K it goes to         gate.py
    dispatch   the tokens' rows, sorted by expert; the counts stay on the device       dispatch.py
    experts    one product for all of them: an expert without tokens costs nothing
    combine    the K results of a token, weighted and summed                           dispatch.py

No token is ever dropped, and none is padded.  Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2.
Shapes: B batch, S sequence, T = B·S tokens, D model, E experts, K chosen experts, I intermediate, R = T·K rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.dispatcher import LocalDispatcher, RoutingPlan
from octile.nn.functional import grouped_linear, result_dtype
from octile.nn.fused import feed_forward
from octile.nn.fused.block_input import BlockInput, read
from octile.nn.fused.layers import fusable_norm, unobserved
from octile.nn.gate import Gate, Routing
from octile.nn.linear import history_for
from octile.nn.mlp import MLP
from octile.nn.norm import RMSNorm
from octile.nn.smooth_swiglu import power_of_2, scale_columns
from octile.recipe import Recipe


class Experts(nn.Module):
    """E SwiGLU layers in two stacked weights: gate_up [E, 2I, D], the gates' rows first, and down [E, D, I]."""

    def __init__(self, n_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(n_experts, 2 * intermediate_size, hidden_size).normal_(std=0.006))
        self.down = nn.Parameter(torch.empty(n_experts, hidden_size, intermediate_size).normal_(std=0.006))
        self.use_recipe(None)

    @property
    def linear_layers(self) -> int:
        """How many linear layers these weights stand for."""
        return 3 * len(self.down)

    def use_recipe(self, recipe: Recipe | None) -> None:
        """Changes the formats of the products; what a delayed recipe has seen so far is forgotten."""
        self.recipe = recipe
        self.gate_up_history, self.down_history = history_for(recipe, self.gate_up), history_for(recipe, self.down)

    def forward(self, x_RD: Tensor, offs_E: Tensor) -> Tensor:
        """Rows sorted by expert, offs_E int32 the end of each expert's rows: [R, D] → [R, D]."""
        gate_RI, up_RI = grouped_linear(x_RD, self.gate_up, offs_E, self.recipe, self.gate_up_history).chunk(2, dim=-1)
        h_RI = F.silu(gate_RI) * up_RI
        down_EDI: Tensor = self.down
        if self.recipe is not None and self.recipe.has_smooth_swiglu:
            h_RI, down_EDI = _smooth(h_RI, down_EDI, offs_E)
        return grouped_linear(h_RI, down_EDI, offs_E, self.recipe, self.down_history)

    def fused_recipe(self) -> Recipe | None:
        """The recipe, where these layers and the way to them and back are one function under it."""
        fuses = self.recipe is not None and self.recipe.can_fuse_swiglu and feed_forward.takes(self.down.shape[-1])
        return self.recipe if fuses and type(self) is Experts and unobserved(self) else None


def _smooth(h_RI: Tensor, down_EDI: Tensor, offs_E: Tensor) -> tuple[Tensor, Tensor]:
    """Moves each expert's channel sizes from h into the weight; see `smooth.py`."""
    expert_R = torch.searchsorted(offs_E, torch.arange(len(h_RI), device=h_RI.device, dtype=offs_E.dtype), right=True)
    amax_EI = h_RI.new_zeros(len(down_EDI) + 1, h_RI.shape[-1])  # the last for rows that belong to no expert
    amax_EI.scatter_reduce_(0, expert_R[:, None].expand_as(h_RI), h_RI.detach().abs(), "amax")
    scale_EI = power_of_2(amax_EI)
    smooth_RI = (h_RI / scale_EI[expert_R]).to(h_RI.dtype)
    return smooth_RI, scale_columns(down_EDI, scale_EI[:-1, None])


class MoE(nn.Module):
    """A mixture of experts of which each token uses a few, and shared ones that all use: x [B, S, D] → [B, S, D].

    For any model (`docs/moe.md`): any number of tokens, experts and chosen ones, any sizes. No token is dropped and
    none is padded, an expert without tokens costs nothing, nothing waits for the host, and the same tokens give the
    same bits, on a GPU in deterministic mode (`torch.use_deterministic_algorithms`).

    It computes in the input's dtype, or autocast's, until `octile.convert` or `use_recipe` of its experts gives it a
    recipe. Under one that says how SwiGLU's inputs are kept, and with intermediate sizes that are multiples of 128,
    the input is quantised once, travels to the experts in 8 bits, and comes back in BF16 (`feed_forward.py`).

    In training mode a forward pass leaves two things behind:

        last_load_E     int64 [E], how many tokens each expert got: what `gate.balance` needs after the step
        balance_loss    α · Σ f_i · P_i, the mean over the sequences, for the model to add to its loss (or None)

    Args:
        gate: chooses the experts; their number is its.
        hidden_size, intermediate_size: D, and I of an expert.
        shared_intermediate_size: of the shared experts, which are one SwiGLU layer together; 0: there are none.
        alpha: weight α of the balance loss.

    Raises:
        ValueError: a negative size or alpha, no intermediate_size, or a gate of another hidden_size.

    Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2 and §3.3.3.
    """

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
            if not value >= 0:  # NaN is refused too
                raise ValueError(f"{name} must be at least 0, not {value}")
        n_experts, of_gate = gate.weight.shape
        if of_gate != hidden_size:
            raise ValueError(f"hidden_size must be the gate's, {of_gate}, not {hidden_size}")
        super().__init__()
        self.gate = gate
        self.experts = Experts(n_experts, hidden_size, intermediate_size)
        self.shared_experts = MLP(hidden_size, shared_intermediate_size) if shared_intermediate_size else None
        self.dispatcher = LocalDispatcher()
        self.alpha = alpha
        self.register_buffer("last_load_E", torch.zeros(n_experts, dtype=torch.int64), persistent=False)
        self.balance_loss: Tensor | None = None

    def forward(self, x_BSD: Tensor, norm: RMSNorm | None = None, residual: bool = False) -> Tensor:
        """The mixture's result for x, or for norm(x), of which only x is then kept for the backward pass.

        Args:
            residual: adds x to the result.

        Raises:
            ValueError: x is not [B, S, D].
        """
        width = self.gate.weight.shape[1]
        if x_BSD.dim() != 3 or x_BSD.shape[-1] != width:
            raise ValueError(f"x must be [batch, sequence, {width}], not {tuple(x_BSD.shape)}")
        recipe = self.experts.fused_recipe()
        if recipe is not None and recipe.formats is not None and fusable_norm(norm):
            return self._fused(x_BSD, norm, residual, recipe)
        x_TD = (x_BSD if norm is None else norm(x_BSD)).flatten(0, 1)
        routing, plan = self._route(x_TD, len(x_BSD))
        y_RD = self.experts(self.dispatcher.dispatch(x_TD, plan), plan.offs_E)
        y_TD = self.dispatcher.combine(y_RD, routing.weights_TK, plan)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        y_BSD = y_TD.view_as(x_BSD)
        return x_BSD + y_BSD if residual else y_BSD

    def _fused(self, x_BSD: Tensor, norm: RMSNorm | None, residual: bool, recipe: Recipe) -> Tensor:
        assert recipe.formats is not None
        x = read(x_BSD.flatten(0, 1), recipe.formats.x, norm, values=True)  # the gate reads the values
        routing, plan = self._route(x, len(x_BSD))
        shared = None
        if self.shared_experts is not None:
            alike = self.shared_experts.fused_recipe() == recipe and unobserved(self.shared_experts)
            shared = self.shared_experts.fused(x, recipe) if alike else self.shared_experts(x.x)
        routed = feed_forward.Routed(self.dispatcher, plan)
        weights = (self.experts.gate_up, self.experts.down)
        y_TD = feed_forward.experts(x, *weights, routing.weights_TK, shared, routed, recipe, result_dtype(x.x))
        return (x.residual + y_TD if residual else y_TD).view_as(x_BSD)

    def _route(self, x: Tensor | BlockInput, batch: int) -> tuple[Routing, RoutingPlan]:
        """Which token goes where; notes the load and its loss."""
        own_gate = type(self.gate) is Gate and unobserved(self.gate)
        routing = self.gate(x if own_gate or not isinstance(x, BlockInput) else x.x)
        load_BE = self._load(routing.experts_TK, batch)
        if self.training:
            self.last_load_E = load_BE.sum(0)
            self.balance_loss = self.alpha * sequence_balance(routing.affinity_TE, load_BE)
        return routing, self.dispatcher.plan(routing.experts_TK, load_BE.sum(0))

    def pop_balance_loss(self) -> Tensor | float:
        """The balance loss of the last forward pass in training mode, once; 0 if there was none."""
        loss, self.balance_loss = self.balance_loss, None
        return 0.0 if loss is None else loss

    def _load(self, experts_TK: Tensor, batch: int) -> Tensor:
        """How many tokens of each sequence go to each expert: int64 [B, E]."""
        tokens, n_experts = len(experts_TK), len(self.gate.weight)
        sequence_T = torch.arange(tokens, device=experts_TK.device) // max(tokens // max(batch, 1), 1)
        index_X = (experts_TK + sequence_T[:, None] * n_experts).flatten()  # one dimension: added up in a fixed order
        zeros_X = experts_TK.new_zeros(batch * n_experts)
        return zeros_X.scatter_add_(0, index_X, torch.ones_like(index_X)).view(batch, n_experts)


def sequence_balance(affinity_TE: Tensor, load_BE: Tensor) -> Tensor:
    """Σ_i f_i · P_i of each sequence, averaged over the batch; 1 if every expert is used alike.

        f_i = E / (K · S) · how many tokens chose expert i        P_i = mean over tokens of s_i / Σ_j s_j

    Only P carries a gradient. Source: DeepSeek-V3 (arXiv 2412.19437) equations 17 to 20.
    """
    b, e = load_BE.shape
    if not affinity_TE.numel():
        return affinity_TE.sum()  # no token, no imbalance
    share_TE = affinity_TE / affinity_TE.sum(-1, keepdim=True)
    p_BE = share_TE.view(b, -1, e).mean(1)
    f_BE = load_BE * e / load_BE.sum(1, keepdim=True)
    return (f_BE * p_BE).sum(1).mean()
