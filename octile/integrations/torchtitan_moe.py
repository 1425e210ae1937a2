"""torchtitan's mixture of experts, whose rows are copied to the experts and summed again by octile's kernels.

torchtitan gathers the rows [R, D] of the experts, scatters their results back to the order of the tokens, casts them to
FP32 and sums them by a batched product of 1 × K by K × D. Here one kernel sums each token's rows in FP32, times their
scores, straight from where the experts left them (`octile.ops.permute.unpermute`), and one computes both gradients. The
gradient of the gathered rows is the same sum without scores. Router, sorting, experts and what distributes them stay
torchtitan's; the module stays the same object, with the same parameters, buffers and names.

Source: torchtitan 0.2, `torchtitan.models.moe.moe`. Shapes: B texts, S tokens of each, T = B·S, D model, K experts a
token, E experts, R = T·K rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE

from octile.nn.dispatcher import LocalDispatcher, RoutingPlan
from octile.ops.permute import inverse

_dispatcher = LocalDispatcher()


class FusedMoE(MoE):
    """`MoE` with `score_before_experts` off."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, S, D] of x [B, S, D]."""
        x_TD = x.view(-1, x.shape[-1])
        scores_TK, experts_TK, load_E = self.router(x_TD, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(load_E)
        _, order_R, load_E = self.reorderer(scores_TK, experts_TK)
        offs_E = load_E.cumsum(0).to(torch.int32)
        plan = RoutingPlan(inverse(order_R).view(scores_TK.shape), order_R.to(torch.int32), offs_E)
        y_RD = self.experts(_dispatcher.dispatch(x_TD, plan), load_E)
        shared_TD = None if self.shared_experts is None else self.shared_experts(x_TD)
        return _dispatcher.combine(y_RD, scores_TK, plan, shared_TD).to(x.dtype).view(x.shape)


def fuse_moe(model: nn.Module) -> None:
    """Have the mixtures of a model move their rows by octile's kernels, in place.

    A subclass of another library, and a mixture that multiplies rows by their scores before the experts, stay as they
    are. So must one whose tokens tensor parallelism divides among ranks after they were routed.
    """
    for module in model.modules():
        if type(module) is MoE and not module.score_before_experts:
            module.__class__ = FusedMoE
