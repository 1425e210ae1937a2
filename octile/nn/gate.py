"""The expert gates of DeepSeek-V3 and V2: which experts a token goes to, and with what weight.

A token has an affinity to every expert.  To spare the network between nodes it may only go to experts of a few groups,
so the best groups are found first and then the best experts within them.  V3 balances the experts without a loss that
pulls at the model: a bias for each expert steers the choice and never touches the weights.

Sources: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, DeepSeek-V2 (arXiv 2405.04434) §2.2.2.
Shapes: T tokens, D model, E experts, K chosen experts, G groups of e experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from octile.nn.fused.block_input import BlockInput, Source
from octile.ops.gate import gate_logits, gate_logits_backward
from octile.routing import ScoringFunc, TopkMethod, check_routing


class Routing(NamedTuple):
    """What a gate decides: weights [T, K] float32, experts [T, K] int64, affinity [T, E] float32."""

    weights_TK: Tensor
    experts_TK: Tensor
    affinity_TE: Tensor


class Gate(nn.Module):
    """Chooses K of E experts for each token, at most `topk_group` groups of experts a token; always in FP32.

    The two generations differ in four settings:

        topk_method            noaux_tc (V3)            group_limited_greedy, greedy (V2)
        a group is as good as  its two best experts     its best expert; greedy knows no groups
        scoring_func           sigmoid                  softmax
        norm_topk_prob         True                     False
        balance by             a bias on the choice     the balance loss alone

    Args:
        n_chosen: K.
        routed_scaling_factor: what the weights are multiplied by in the end.

    Raises:
        ValueError: a setting is unknown, or the numbers do not fit together.
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
        steered = topk_method == "noaux_tc"
        self.register_buffer("e_score_correction_bias", torch.zeros(n_experts) if steered else None)

    def forward(self, x: Tensor | BlockInput) -> Routing:
        """x [T, D], or what other layers read as well and which is kept as they keep it."""
        read = (x.x, x.kept, x.source) if isinstance(x, BlockInput) else (x, (x.detach(),), None)
        logit_TE = _Logits.apply(self.weight, *read)
        affinity_TE = logit_TE.sigmoid() if self.scoring_func == "sigmoid" else logit_TE.softmax(-1)
        score_TE = affinity_TE.detach()
        if self.e_score_correction_bias is not None:
            score_TE = score_TE + self.e_score_correction_bias
        experts_TK = self._within_best_groups(score_TE).topk(self.n_chosen, dim=-1).indices

        weights_TK = affinity_TE.gather(1, experts_TK)
        if self.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights_TK * self.routed_scaling_factor, experts_TK, affinity_TE)

    def _within_best_groups(self, score_TE: Tensor) -> Tensor:
        """Every score outside the token's best groups becomes −inf: a bias may make scores negative, 0 would win."""
        if self.topk_method == "greedy" or self.topk_group == self.n_group:
            return score_TE
        score_TGe = score_TE.unflatten(-1, (self.n_group, -1))
        best = 2 if self.topk_method == "noaux_tc" else 1
        group_TG = score_TGe.topk(best, dim=-1).values.sum(-1)
        best_TG = group_TG.topk(self.topk_group, dim=-1).indices
        outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, best_TG, False)
        return score_TGe.masked_fill(outside_TG[..., None], float("-inf")).flatten(1)

    @torch.no_grad()
    def balance(self, load_E: Tensor, speed: float) -> None:
        """After a step: experts that got fewer tokens than the mean become easier to choose.

        A gate of V2 has no bias, is balanced by its loss alone, and stays as it is.

        Args:
            load_E: how many tokens went to each expert in the step.
            speed: γ, how far a bias moves; 0.001 in DeepSeek-V3, 0 at the end of its training.
        """
        if self.e_score_correction_bias is None:
            return
        load_E = load_E.float()
        self.e_score_correction_bias += speed * torch.sign(load_E.mean() - load_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves with the model, but the bias stays FP32: a step of 0.001 is lost in BF16."""
        exact = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if exact is not None and moved is not None and moved.dtype != exact.dtype:
            self.e_score_correction_bias = exact.to(moved.device)
        return self


class _Logits(torch.autograd.Function):
    """x · wᵀ in FP32, of an input that is not kept in FP32; without a source it is kept as it is."""

    @staticmethod
    def forward(ctx: Any, weight_ED: Tensor, x_TD: Tensor, kept: tuple[Tensor, ...], source: Source | None) -> Tensor:
        ctx.save_for_backward(weight_ED, *kept)
        ctx.source = source
        return gate_logits(x_TD, weight_ED)

    @staticmethod
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Tensor | None, ...]:
        weight_ED, *kept = ctx.saved_tensors
        x_TD = kept[0] if ctx.source is None else ctx.source.values_again(tuple(kept))
        dx_TD, dweight_ED = gate_logits_backward(dy_TE, x_TD, weight_ED)
        return dweight_ED.to(weight_ED.dtype), dx_TD, None, None
