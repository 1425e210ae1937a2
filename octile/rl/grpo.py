"""Group relative policy optimization (GRPO): advantages of groups, the clipped loss, and the penalty on the divergence.

A group is G completions of one prompt. Its mean reward takes the place of a critic.

    advantage     A_i = (r_i − mean(r)) / (std(r) + ε), the same for all tokens of completion i
    ratio         ρ_t = exp(log π(t) − log π_old(t))
    surrogate     min(ρ_t · A, clip(ρ_t, 1 − c, 1 + c) · A)
    penalty       β · (exp(d_t) − 1 − d_t), d_t = log π_ref(t) − log π(t)
    loss          −(w_t · surrogate − penalty): the mean over a completion's tokens, then over the completions

w_t is 1 where the engine's log-probabilities are the trainer's. Otherwise it can be the truncated importance weight
min(π_old(t) / π_engine(t), C), which corrects that an engine with other bits has sampled the tokens.

Sources: DeepSeekMath (arXiv 2402.03300) §4.1 and DeepSeek-R1 (arXiv 2501.12948) §2.2.1 for advantages, clipping and
penalty; J. Schulman, "Approximating KL Divergence" (2020), for its estimator k3; F. Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (2025), for truncated importance sampling.

Shapes: P prompts, G completions of each, B = P·G completions, T tokens of the longest one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-4  # added to a standard deviation; rewards are of the order of 1


def group_advantages(rewards_PG: Tensor, eps: float = EPSILON) -> Tensor:
    """Compute the advantages of groups: rewards minus their group's mean, over its standard deviation plus eps.

    The standard deviation is that of the group as a whole population. A group of equal rewards has zero advantages.

    Args:
        rewards_PG: floating point, finite.
        eps: above 0.

    Returns:
        [P, G], of the dtype of the rewards.

    Raises:
        TypeError: rewards are not floating point.
        ValueError: they are not [P, G] with at least two completions of a prompt, one is NaN or Inf, or eps is not
            above 0.
    """
    if not rewards_PG.is_floating_point():
        raise TypeError(f"rewards must be floating point, not {rewards_PG.dtype}")
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ValueError(f"rewards must be [prompts, 2 completions or more], not {list(rewards_PG.shape)}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, not {eps}")
    if not bool(rewards_PG.isfinite().all()):
        raise ValueError("rewards must be finite, but one is NaN or Inf")
    centered_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    is_equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(1, keepdim=True)  # whose mean is rounded
    centered_PG = centered_PG.masked_fill(is_equal_P1, 0.0)
    return centered_PG / (centered_PG.square().mean(1, keepdim=True).sqrt() + eps)


def kl_k3(new_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """Estimate the divergence of the policy from the reference at each token: exp(d) − 1 − d, d = reference − new.

    Its mean over tokens that the policy has sampled is unbiased, and it is never negative.

    Args:
        new_BT: log-probabilities of the policy.
        reference_BT: those of the reference, of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(new_BT, reference=reference_BT)
    d_BT = reference_BT - new_BT
    return d_BT.expm1() - d_BT


def importance_weights(old_BT: Tensor, engine_BT: Tensor, limit: float) -> Tensor:
    """Compute truncated importance weights min(exp(old − engine), limit), without gradients.

    Args:
        old_BT: log-probabilities of the trainer with the weights that have sampled the tokens.
        engine_BT: those of the engine, of the same shape.
        limit: C, above 0.

    Raises:
        ValueError: the shapes differ, or limit is not above 0.
    """
    _check_shapes(old_BT, engine=engine_BT)
    if not limit > 0:
        raise ValueError(f"limit must be above 0, not {limit}")
    return (old_BT - engine_BT).detach().exp().clamp(max=limit)


class TokenLosses(NamedTuple):
    """The loss of each token, and what it consists of.

    Attributes:
        loss: [B, T], what is averaged and differentiated.
        is_clipped: bool [B, T], whether the surrogate is that of the clipped ratio, whose gradient is zero.
        kl: [B, T], the estimated divergence from the reference; None without one.
    """

    loss: Tensor
    is_clipped: Tensor
    kl: Tensor | None


def token_losses(
    new_BT: Tensor,
    old_BT: Tensor,
    advantages_B: Tensor,
    clip: float,
    *,
    reference_BT: Tensor | None = None,
    kl_coefficient: float = 0.0,
    weights_BT: Tensor | None = None,
) -> TokenLosses:
    """Compute the loss of each token; differentiable in the new log-probabilities.

    Args:
        new_BT: log-probabilities of the policy that is trained.
        old_BT: those of the policy that has sampled; no gradient flows into them.
        advantages_B: the advantage of each completion.
        clip: by how much the ratio may differ from 1, above 0 and below 1.
        reference_BT: log-probabilities of the reference; needed if there is a penalty.
        kl_coefficient: β, at least 0.
        weights_BT: truncated importance weights of the surrogate; None: 1.

    Raises:
        ValueError: shapes differ, clip or kl_coefficient is out of its range, or the reference is missing.
    """
    _check_shapes(new_BT, old=old_BT, reference=reference_BT, weights=weights_BT)
    if advantages_B.shape != new_BT.shape[:1]:
        raise ValueError(f"advantages must be [{new_BT.shape[0]}], not {list(advantages_B.shape)}")
    if not 0 < clip < 1:
        raise ValueError(f"clip must be above 0 and below 1, not {clip}")
    if not kl_coefficient >= 0:
        raise ValueError(f"kl_coefficient must be at least 0, not {kl_coefficient}")
    if kl_coefficient and reference_BT is None:
        raise ValueError("reference is missing, which kl_coefficient above 0 needs")
    ratio_BT = (new_BT - old_BT.detach()).exp()
    advantages_B1 = advantages_B[:, None]
    free_BT, clipped_BT = ratio_BT * advantages_B1, ratio_BT.clamp(1 - clip, 1 + clip) * advantages_B1
    is_clipped_BT = (clipped_BT < free_BT).detach()
    surrogate_BT = torch.where(is_clipped_BT, clipped_BT, free_BT)  # minimum halves the gradient of equal ones
    if weights_BT is not None:
        surrogate_BT = surrogate_BT * weights_BT
    loss_BT, kl_BT = -surrogate_BT, None
    if reference_BT is not None:
        kl_BT = kl_k3(new_BT, reference_BT.detach())
        if kl_coefficient:
            loss_BT = loss_BT + kl_coefficient * kl_BT
    return TokenLosses(loss_BT, is_clipped_BT, kl_BT)


def completion_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Average values over the tokens of each completion, then over the completions: a scalar.

    Args:
        values_BT: a value of each token; those outside the mask may be anything, NaN included.
        mask_BT: bool, the tokens that count.

    Raises:
        TypeError: mask is not bool.
        ValueError: the shapes differ, or a completion has no token.
    """
    _check_shapes(values_BT, mask=mask_BT)
    if mask_BT.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask_BT.dtype}")
    lengths_B = mask_BT.sum(1)
    if not bool((lengths_B > 0).all()):
        raise ValueError("mask must have a token of each completion")
    return (torch.where(mask_BT, values_BT, 0.0).sum(1) / lengths_B).mean()


def _check_shapes(expected_BT: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if a tensor has another shape than the first."""
    for name, other in others.items():
        if other is not None and other.shape != expected_BT.shape:
            raise ValueError(f"{name} must be {list(expected_BT.shape)}, not {list(other.shape)}")
