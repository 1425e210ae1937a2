"""The completions of a step as tensors, and how far the engine's log-probabilities are the trainer's.

Shapes: B completions, S tokens of the longest text, T = S − 1 tokens that are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octile.rl.grpo import kl_k3
from octile.rl.sample import Completion


class Batch(NamedTuple):
    """Completions, padded at the end to the same length.

    Attributes:
        tokens: int64 [B, S], prompts and completions.
        mask: bool [B, T], whether a token after the first one was sampled.
        engine: float32 [B, T], the engine's log-probabilities of the sampled tokens; 0 elsewhere.
        advantages: float32 [B].
    """

    tokens: Tensor
    mask: Tensor
    engine: Tensor
    advantages: Tensor

    def split(self, parts: int) -> list[Batch]:
        """Divide the completions into parts, as even as they can be, in their order."""
        tensors = zip(*(torch.tensor_split(tensor, parts) for tensor in self), strict=True)
        return [Batch(*part) for part in tensors if len(part[0])]


def make_batch(completions: Sequence[Completion], advantages_B: Tensor, device: torch.device) -> Batch:
    """Make the tensors of completions; padding is the token 0, which no token before it depends on."""
    texts = [completion.prompt_tokens + completion.tokens for completion in completions]
    shape = len(texts), max(map(len, texts))
    tokens_BS = torch.zeros(shape, dtype=torch.int64)
    engine_BT, mask_BT = torch.zeros(shape[0], shape[1] - 1), torch.zeros(shape[0], shape[1] - 1, dtype=torch.bool)
    for row, (text, completion) in enumerate(zip(texts, completions, strict=True)):
        first, last = len(completion.prompt_tokens) - 1, len(text) - 1
        tokens_BS[row, : len(text)] = torch.tensor(text)
        mask_BT[row, first:last] = True
        engine_BT[row, first:last] = torch.tensor(completion.log_probs)
    return Batch(*(tensor.to(device) for tensor in (tokens_BS, mask_BT, engine_BT, advantages_B)))


class LogProbDifference(NamedTuple):
    """How far log-probabilities of engine and trainer agree.

    Attributes:
        tokens, equal: the sampled tokens, and those with equal bits in both.
        mean, largest: mean and largest magnitude of the differences, in nats.
    """

    tokens: int
    equal: int
    mean: float
    largest: float


def compare_log_probs(engine_N: Tensor, trainer_N: Tensor) -> LogProbDifference:
    """Compare log-probabilities of the same tokens, float32 [N]. −0.0 has other bits than 0.0, a NaN equals itself."""
    equal_N = engine_N.view(torch.int32) == trainer_N.view(torch.int32)
    d_N = (engine_N.double() - trainer_N.double()).abs()
    mean, largest = (float(d_N.mean()), float(d_N.max())) if len(d_N) else (0.0, 0.0)
    return LogProbDifference(len(d_N), int(equal_N.sum()), mean, largest)


def estimate_kl(engine_N: Tensor, trainer_N: Tensor) -> float:
    """Estimate the Kullback-Leibler divergence of the trainer from the engine, which has sampled N tokens, N above 0.

    It is the mean of `kl_k3` in nats.
    """
    return float(kl_k3(engine_N.double(), trainer_N.double()).mean())
