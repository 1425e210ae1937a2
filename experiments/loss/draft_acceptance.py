"""The acceptance rate of the drafts of multi-token prediction in speculative decoding.

Given the next token, the MTP head drafts the token after it, which the main head predicts one position later. Greedy
decoding accepts the draft if both heads choose the same token. Sampling accepts it with probability Σ min(p, q), where
p is the main head's distribution and q the draft's; the accepted tokens then have the distribution p.

Sources: DeepSeek-V3 (arXiv 2412.19437) §5.4.3; Leviathan et al., "Fast inference from transformers via speculative
decoding" (arXiv 2211.17192) §3.  Shapes: B windows at a time, S tokens of each, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octile.nn.weight_cache import frozen_weights
from octile.train.data.packed_tokens import is_packed
from octile.train.trainer import Trainer


@dataclass(frozen=True)
class DraftAcceptance:
    """Acceptance rates from 0 to 1: of greedy decoding, and of sampling at temperature 1."""

    greedy: float
    drawn: float


@torch.no_grad()
def draft_acceptance(trainer: Trainer, windows: Tensor | None = None) -> DraftAcceptance:
    """Measure the acceptance rates on given text, with equal weight for every position.

    Args:
        trainer: the run whose model drafts.
        windows: int64 [N, S]; the held-out windows if not given.

    Raises:
        ValueError: the model has no multi-token prediction, or sequences are packed.
    """
    trainer.model.eval()
    windows = trainer.evaluator.held_out if windows is None else windows
    if is_packed(windows):
        raise ValueError(f"windows must be [N, S] of plain text, not packed sequences {list(windows.shape)}")
    batch = trainer.config.micro_batch_size
    greedy = drawn = torch.zeros((), dtype=torch.float64, device=trainer.device)
    with frozen_weights(trainer.model), trainer.passes.precision():
        for tokens_BS in windows.split(batch):
            main_BSV, draft_BSV = trainer.model.with_drafts(tokens_BS.to(trainer.device))
            main_BSV = main_BSV[:, 1:]
            greedy = greedy + (main_BSV.argmax(-1) == draft_BSV.argmax(-1)).sum()
            p_BSV, q_BSV = (logits.float().softmax(-1) for logits in (main_BSV, draft_BSV))
            drawn = drawn + torch.minimum(p_BSV, q_BSV).sum()
    positions = windows.shape[0] * (windows.shape[1] - 1)
    return DraftAcceptance(greedy.item() / positions, drawn.item() / positions)
