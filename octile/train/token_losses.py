"""The loss of every token of some windows, and a token as a person reads it.

Shapes: N windows, S predicted tokens of each, B windows at a time, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.weight_cache import frozen_weights
from octile.train.tokenizer import Tokenizer
from octile.train.trainer import Trainer

VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}


@torch.no_grad()
def token_losses(trainer: Trainer, windows: Tensor | None = None) -> Tensor:
    """The main head's loss of each token but the first of its window: float32 [N, S] on the CPU, in nats.

    Args:
        trainer: whose model predicts them.
        windows: int64 [N, S + 1]; the held-out ones if not given. Their mean is then what `Trainer.validate` calls
            val_loss, up to the order of the sum.
    """
    trainer.model.eval()
    batch = trainer.config.batch_size // trainer.config.micro_batches
    pieces = []
    with (
        frozen_weights(trainer.model),
        torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.device.type == "cuda"),
    ):
        for piece_BS in (trainer.held_out if windows is None else windows).split(batch):
            piece_BS = piece_BS.to(trainer.device)
            logits_BSV = trainer.model(piece_BS)[:, :-1].float()
            loss = F.cross_entropy(logits_BSV.flatten(0, 1), piece_BS[:, 1:].flatten(), reduction="none")
            pieces.append(loss.view(len(piece_BS), -1).cpu())
    return torch.cat(pieces)


def visible_token(tokenizer: Tokenizer, token: int) -> str:
    """A token's text with its white space made visible, runs of it counted; its bytes where they are no whole text."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        return "bytes " + " ".join(f"{_byte(c):02X}" for c in tokenizer.backend.id_to_token(token) or "")
    blank = text[: len(text) - len(text.lstrip())]
    if len(blank) > 3 and len(set(blank)) == 1:
        text = f"{blank[0]}×{len(blank)} {text[len(blank) :]}".rstrip(" ")
        return VISIBLE.get(text[0], text[0]) + text[1:]
    return "".join(VISIBLE.get(c, c) for c in text)


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def _byte(character: str) -> int:
    """The byte for which a character stands in a byte-level vocabulary: itself, or the n-th that cannot be printed."""
    code = ord(character)
    return code if code < 256 else _OTHERS[code - 256]
