"""The loss of every token of windows of text, and the display of single tokens.

Shapes: N windows, S predicted tokens of each, B windows at a time, V vocabulary.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.fused.cross_entropy import cross_entropies
from octile.nn.weight_cache import frozen_weights
from octile.ops.cross_entropy import IGNORED
from octile.tokenizer import Tokenizer
from octile.train.trainer import Trainer

VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})
LONG_RUN = re.compile(r"([␣↵␍⇥\s])\1{3,}")  # of visible white space


@torch.no_grad()
def token_losses(trainer: Trainer, windows: Tensor | None = None) -> Tensor:
    """The main head's loss of each token but the first of its window: float32 [N, S] on the CPU, in nats.

    Args:
        trainer: the run whose model predicts the tokens.
        windows: int64 [N, S + 1]; the held-out windows if not given. The mean is then the val_loss of
            `Trainer.validate`, up to the order of summation.
    """
    trainer.model.eval()
    return trainer.with_place(lambda: _token_losses(trainer, windows))


def _token_losses(trainer: Trainer, windows: Tensor | None) -> Tensor:
    windows = trainer.held_out if windows is None else windows
    batches = windows.split(trainer.config.micro_batch_size)
    with frozen_weights(trainer.model), trainer.precision():
        if trainer.pipelined:
            of_batches = trainer.pipelined.token_losses([tokens_BS.to(trainer.device) for tokens_BS in batches])
            return torch.cat(of_batches).cpu()
        # a new small tensor for each batch would split the memory that the next batch's logits need in one piece
        losses_NS = torch.empty(len(windows), windows.shape[1] - 1)
        for tokens_BS, losses_BS in zip(batches, losses_NS.split(trainer.config.micro_batch_size), strict=True):
            tokens_BS = tokens_BS.to(trainer.device)
            labels_BS = F.pad(tokens_BS[:, 1:], (0, 1), value=IGNORED)
            losses_BS.copy_(cross_entropies(trainer.model(tokens_BS), labels_BS)[:, :-1])
    return losses_NS


def visible_token(tokenizer: Tokenizer, token: int) -> str:
    """A token's text with visible white space, long runs of it counted; its bytes if they are not valid UTF-8."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        return "bytes " + " ".join(f"{_byte(c):02X}" for c in tokenizer.backend.id_to_token(token) or "")
    return LONG_RUN.sub(lambda run: f"{run[1]}×{len(run[0])} ", text.translate(VISIBLE)).rstrip(" ")


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]


def _byte(character: str) -> int:
    """The byte that a character represents in a byte-level vocabulary: itself, or the n-th non-printable byte."""
    code = ord(character)
    return code if code < 256 else _OTHERS[code - 256]
