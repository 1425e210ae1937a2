"""How often a decoder would keep what multi-token prediction drafts.

With the next token known, the draft says the one after it; the main head, one place further, says it too. A greedy
decoder keeps the draft where both name the same token. One that draws from the model keeps it with probability
Σ min(p, q), p being the main head's distribution and q the draft's, and draws as from p alone.

Sources: DeepSeek-V3 (arXiv 2412.19437) §5.4.3; Leviathan et al., "Fast inference from transformers via speculative
decoding" (arXiv 2211.17192) §3.  Shapes: B windows at a time, S tokens of each, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octile.nn.weight_cache import frozen_weights
from octile.train.trainer import Trainer


@dataclass(frozen=True)
class DraftAcceptance:
    """Shares from 0 to 1: greedy decoding, and drawing from the model at temperature 1."""

    greedy: float
    drawn: float


@torch.no_grad()
def draft_acceptance(trainer: Trainer, windows: Tensor | None = None) -> DraftAcceptance:
    """On text that is given, every place counts alike.

    Args:
        trainer: whose model drafts.
        windows: int64 [N, S]; the held-out ones if not given.

    Raises:
        ValueError: the model has no multi-token prediction.
    """
    trainer.model.eval()
    windows = trainer.held_out if windows is None else windows
    batch = trainer.config.batch_size // trainer.config.micro_batches
    greedy = drawn = torch.zeros((), dtype=torch.float64, device=trainer.device)
    with (
        frozen_weights(trainer.model),
        torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.device.type == "cuda"),
    ):
        for tokens_BS in windows.split(batch):
            main_BSV, draft_BSV = trainer.model.with_drafts(tokens_BS.to(trainer.device))
            main_BSV = main_BSV[:, 1:]
            greedy = greedy + (main_BSV.argmax(-1) == draft_BSV.argmax(-1)).sum()
            p_BSV, q_BSV = (logits.float().softmax(-1) for logits in (main_BSV, draft_BSV))
            drawn = drawn + torch.minimum(p_BSV, q_BSV).sum()
    places = windows.shape[0] * (windows.shape[1] - 1)
    return DraftAcceptance(greedy.item() / places, drawn.item() / places)
