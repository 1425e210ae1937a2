"""The choice of a gate: the K experts of each token with the highest scores, within its best groups of experts.

Among equal scores the expert with the lower index comes first, so that every device chooses the same experts. NaN is
above all numbers. This is the specification: the gate's kernels choose by the same order (`octile.ops.gate`).

Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, DeepSeek-V2 (arXiv 2405.04434) §2.2.2.
Shapes: T tokens, E experts, K chosen ones.
"""

import torch
from torch import Tensor

MAX_EXPERTS = 4096  # a token's scores must fit into one Triton program


def top_experts(scores: Tensor, n_chosen: int, n_group: int, topk_group: int, best: int) -> Tensor:
    """Choose the experts with the highest scores.

    Args:
        scores: [T, E] float32, E at most 4096.
        n_chosen: K, at most the experts of `topk_group` groups.
        n_group: groups of equally many consecutive experts.
        topk_group: groups from which a token's experts come: those with the highest sums of their best scores.
        best: 1 or 2, how many scores of a group are summed; at most its experts.

    Returns:
        experts [T, K] int64, the highest score first.

    Raises:
        TypeError: scores has another dtype.
        ValueError: scores is not a matrix, or the numbers do not fit it or each other.
    """
    _check(scores, n_chosen, n_group, topk_group, best)
    if topk_group < n_group:
        scores_TGe = scores.unflatten(1, (n_group, -1))
        group_TG = scores_TGe.sort(dim=-1, descending=True).values[..., :best].sum(-1)
        outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, _highest(group_TG, topk_group), False)
        scores = scores_TGe.masked_fill(outside_TG[..., None], float("-inf")).flatten(1)
    return _highest(scores, n_chosen)


def _highest(scores: Tensor, n: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :n].contiguous()


def _check(scores: Tensor, n_chosen: int, n_group: int, topk_group: int, best: int) -> None:
    if scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32, not {scores.dtype}")
    if scores.dim() != 2:
        raise ValueError(f"scores must be a matrix [T, E] with E from 1 to {MAX_EXPERTS}, not {tuple(scores.shape)}")
    check_choice("scores", scores.shape[1], n_chosen, n_group, topk_group, best)


def check_choice(name: str, experts: int, n_chosen: int, n_group: int, topk_group: int, best: int) -> None:
    """Raise ValueError unless so many experts, those of a tensor of this name, can be chosen from in this way."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{name} must have from 1 to {MAX_EXPERTS} experts, not {experts}")
    if n_group < 1 or experts % n_group:
        raise ValueError(f"n_group must divide the {experts} experts of {name}, not be {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be from 1 to n_group, {n_group}, not {topk_group}")
    group = experts // n_group
    if not 1 <= n_chosen <= topk_group * group:
        raise ValueError(f"n_chosen must be from 1 to {topk_group * group}, not {n_chosen}")
    if best not in (1, 2) or best > group:
        raise ValueError(f"best must be 1 or 2 and at most the {group} experts of a group, not {best}")
