"""The expert gates of DeepSeek-V3 and V2: which experts a token goes to, and with what weight.

A token has an affinity to every expert.  To limit the traffic between nodes it may only go to experts of a few groups,
so the best groups are chosen first and then the best experts within them.  V3 balances the experts without an auxiliary
loss: a bias for each expert steers the choice and does not affect the weights.

Sources: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, DeepSeek-V2 (arXiv 2405.04434) §2.2.2.
Shapes: T tokens, D model, E experts, K chosen experts, G groups of e experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from octile.nn.double_backward import creates_graph, differentiable_gradients, first_derivative_only
from octile.nn.fused.block_input import BlockInput, Saved
from octile.ops.gate import gate, gate_backward
from octile.ops.sequence_balance import balance_of, sequence_balance, sequence_balance_backward
from octile.routing import ScoringFunc, TopkMethod, check_routing, choice_of


class Routing(NamedTuple):
    """The result of a gate: weights [T, K] float32, experts [T, K] int64, logits of the affinities [T, E] float32."""

    weights_TK: Tensor
    experts_TK: Tensor
    logits_TE: Tensor


class Gate(nn.Module):
    """Chooses K of E experts for each token, at most `topk_group` groups of experts a token; always in FP32.

    The two generations differ in four settings:

        topk_method            noaux_tc (V3)            group_limited_greedy, greedy (V2)
        score of a group       its two best experts     its best expert; greedy has no groups
        scoring_func           sigmoid                  softmax
        norm_topk_prob         True                     False
        balance by             a bias on the choice     the balance loss alone
        balance loss counts    K highest affinities     the experts that a token goes to

    Args:
        n_chosen: K.
        routed_scaling_factor: by which the weights are finally multiplied.

    Raises:
        ValueError: a setting is unknown, or the sizes do not fit together.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        n_experts: int,
        n_chosen: int,
        *,
        n_group: int = 1,
        topk_group: int = 1,
        topk_method: TopkMethod = "noaux_tc",
        scoring_func: ScoringFunc = "sigmoid",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
    ):
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1, not {hidden_size}")
        check_routing(n_experts, n_chosen, n_group, topk_group, topk_method, scoring_func)
        super().__init__()
        self.n_chosen, self.n_group, self.topk_group = n_chosen, n_group, topk_group
        self.topk_method, self.scoring_func = topk_method, scoring_func
        self.norm_topk_prob, self.routed_scaling_factor = norm_topk_prob, routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(n_experts, hidden_size).normal_(std=0.006))
        has_bias = topk_method == "noaux_tc"
        self.register_buffer("e_score_correction_bias", torch.zeros(n_experts) if has_bias else None)

    def forward(self, x: Tensor | BlockInput) -> Routing:
        """Choose experts for x [T, D], or for an input that fused layers read and save as well."""
        inputs = (x.x, x.saved, x.how_saved) if isinstance(x, BlockInput) else (x, (x.detach(),), None)
        invariant = isinstance(x, BlockInput) and x.recipe.batch_invariant
        choice = choice_of(self.topk_method, self.n_chosen, self.n_group, self.topk_group)
        weighting = self.scoring_func, self.norm_topk_prob, self.routed_scaling_factor
        return Routing(*_Gate.apply(self.weight, self.e_score_correction_bias, *inputs, choice, weighting, invariant))

    def sequence_balance(self, routing: Routing, batch: int) -> Tensor:
        """Compute the balance of the experts within each sequence, Σ_i f_i · P_i; 1 if all are used equally.

            f_i = E / (K · S) · Σ_t [s_{i,t} is among the K highest of s_{1,t} … s_{E,t}]
            P_i = 1 / S · Σ_t s'_{i,t}        s'_{i,t} = s_{i,t} / Σ_j s_{j,t}

        The sums are over the S tokens of a sequence; s is the affinity, without the bias that steers the choice, and
        no group limits the K highest. V2 counts the experts that the token goes to instead. Only P has a gradient.

        Args:
            routing: the gate's result for `batch` sequences of equal length, one after the other.

        Returns:
            the mean over the sequences, float32, without the weight α; 0 if there is no token.

        Source: DeepSeek-V3 (arXiv 2412.19437) equations 17 to 20; DeepSeek-V2 (arXiv 2405.04434) equations 23 to 25.
        """
        logits_TE = routing.logits_TE
        if not logits_TE.numel():
            return logits_TE.sum()
        # V3 counts the highest affinities, which rise with the logits
        experts_TK = None if self.topk_method == "noaux_tc" else routing.experts_TK
        return _SequenceBalance.apply(logits_TE, experts_TK, self.n_chosen, batch, self.scoring_func)

    @torch.no_grad()
    def balance(self, load_E: Tensor, speed: float | Tensor) -> None:
        """Raise the bias of experts that got fewer tokens than the mean, lower the others': call it after each step.

        A gate of V2 has no bias and is not changed; it is balanced by its loss alone.

        Args:
            load_E: how many tokens went to each expert in the step.
            speed: γ, how far a bias moves; 0.001 in DeepSeek-V3, 0 at the end of its training. A number, or a tensor []
                on the bias's device.
        """
        if self.e_score_correction_bias is None:
            return
        load_E = load_E.float()
        self.e_score_correction_bias += speed * torch.sign(load_E.mean() - load_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply fn as `nn.Module` does, but keep the bias in FP32: BF16 would lose a step of 0.001."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.e_score_correction_bias = before.to(after.device)
        return self


class _SequenceBalance(torch.autograd.Function):
    """Compute the balance of the experts within each sequence, and save the logits and f for backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, experts_TK: Tensor | None, n_chosen: int, batch: int, scoring_func: ScoringFunc
    ) -> Tensor:
        loss, f_BE = sequence_balance(logits_TE, experts_TK, n_chosen, batch, scoring_func)
        ctx.save_for_backward(logits_TE, f_BE)
        ctx.scoring_func = scoring_func
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, f_BE = ctx.saved_tensors
        if creates_graph():

            def formula(logits_TE: Tensor) -> Tensor:
                return balance_of(logits_TE, f_BE, ctx.scoring_func)

            return *differentiable_gradients(formula, (logits_TE,), (dloss,)), None, None, None, None
        return sequence_balance_backward(dloss, logits_TE, f_BE, ctx.scoring_func), None, None, None, None


class _Gate(torch.autograd.Function):
    """Choose experts and weigh them by the logits of an input, which is saved as it is or as fused layers save it."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        x_TD: Tensor,
        saved: tuple[Tensor, ...],
        how_saved: Saved | None,
        choice: tuple[int, int, int, int],
        weighting: tuple[ScoringFunc, bool, float],
        invariant: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights_TK, experts_TK, logits_TE = gate(x_TD, weight_ED, bias_E, *choice, *weighting, invariant)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts_TK)
        ctx.save_for_backward(weight_ED, logits_TE, experts_TK, *saved)
        ctx.how_saved, ctx.weighting = how_saved, weighting
        return weights_TK, experts_TK, logits_TE

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dweights_TK: Tensor | None, _: None, dlogits_TE: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_ED, logits_TE, experts_TK, *saved = ctx.saved_tensors
        x_TD = saved[0] if ctx.how_saved is None else ctx.how_saved.values(tuple(saved))
        gradients = gate_backward(dweights_TK, dlogits_TE, logits_TE, experts_TK, x_TD, weight_ED, *ctx.weighting)
        dx_TD, dweight_ED = gradients
        return dweight_ED.to(weight_ED.dtype), None, dx_TD, None, None, None, None, None
