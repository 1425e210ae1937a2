"""Changes of a row's logits before a token is chosen, each a function of the row's own text.

    grammar              tokens that it does not allow are masked
    bad words            the last token of a forbidden sequence is masked where the text ends with those before it
    min_tokens           end-of-text tokens are masked until so many tokens are generated
    logit_bias           is added to the logits of its tokens
    repetition_penalty   divides positive logits of all tokens of prompt and text, and multiplies negative ones
    frequency_penalty    is subtracted as often as a token was generated
    presence_penalty     is subtracted once from each token that was generated

in this order, which is vLLM's. They are single operations on single logits, so no bit depends on other rows.

Sources: Keskar et al., CTRL (arXiv 1909.05858) §4.1, for repetition_penalty; OpenAI's API reference for
frequency_penalty, presence_penalty and logit_bias; vLLM's documentation of its sampling parameters.
Shapes: L rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octile.serve.engine.grammar import WORD
from octile.serve.engine.history import History
from octile.serve.engine.request import Sampling
from octile.serve.send import send


class _Entries(NamedTuple):
    """Some logits: their rows and tokens, int64 [N], and a number for each."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


def penalized(logits_LV: Tensor, how: Sequence[tuple[Sampling, History | None]]) -> Tensor:
    """Return logits with the changes that their rows ask for; the same tensor where none does.

    Args:
        logits_LV: float32 [L, V].
        how: sampling and text of each row; the text may be None where the sampling changes no logits.
    """
    changed = [(i, *each) for i, each in enumerate(how) if each[0].changes_logits]
    if not changed:
        return logits_LV
    logits_LV = logits_LV.clone()
    masks = [(i, text.mask) for i, _, text in changed if text is not None and text.mask is not None]
    if masks:
        _apply_masks(logits_LV, *zip(*masks, strict=True))
    masked, biases, seen, generated = list[tuple[int, np.ndarray, float]](), [], [], []
    penalties: list[tuple[float, float]] = []
    for i, sampling, text in changed:
        assert text is not None
        forbidden = _forbidden(sampling, text)
        if len(forbidden):
            masked.append((i, forbidden, -math.inf))
        biases += [(i, np.array([token]), bias) for token, bias in sampling.logit_bias]
        if sampling.repetition_penalty != 1:
            seen.append((i, text.seen(), sampling.repetition_penalty))
        if sampling.frequency_penalty or sampling.presence_penalty:
            generated.append((i, *text.generated_counts()))
            penalties.append((sampling.frequency_penalty, sampling.presence_penalty))
    if masked:
        at = _entries(masked, logits_LV)
        logits_LV[at.rows, at.tokens] = at.values
    if biases:
        at = _entries(biases, logits_LV)
        logits_LV[at.rows, at.tokens] += at.values
    if seen:
        at = _entries(seen, logits_LV)
        x = logits_LV[at.rows, at.tokens]
        logits_LV[at.rows, at.tokens] = torch.where(x > 0, x / at.values, x * at.values)
    if generated:
        # in FP64, so that a penalty of 0.1 is subtracted three times as 0.3
        off = [(i, tokens, f * counts + p) for (i, tokens, counts), (f, p) in zip(generated, penalties, strict=True)]
        at = _entries(off, logits_LV)
        logits_LV[at.rows, at.tokens] -= at.values
    return logits_LV


def _apply_masks(logits_LV: Tensor, rows: Sequence[int], masks: Sequence[np.ndarray]) -> None:
    """Mask the tokens of some rows whose bits are 0; masks: int32 [V / 32] each."""
    device = logits_LV.device
    words_RW1 = send(torch.from_numpy(np.stack(masks)), device)[:, :, None]
    bits_RV = (words_RW1 >> torch.arange(WORD, dtype=torch.int32, device=device) & 1).flatten(1)[
        :, : logits_LV.shape[1]
    ]
    at = send(torch.tensor(rows), device)
    logits_LV[at] = logits_LV[at].masked_fill(bits_RV == 0, -math.inf)


def _forbidden(sampling: Sampling, text: History) -> np.ndarray:
    """The tokens that may not follow a text."""
    tokens = {word[-1] for word in sampling.bad_words if text.ends_with(word[:-1])}
    if text.n_generated < sampling.min_tokens:
        tokens.update(text.end_tokens, sampling.stop_token_ids)
    return np.array(sorted(tokens), dtype=np.int64)


def _entries(parts: Sequence[tuple[int, np.ndarray, float | np.ndarray]], like: Tensor) -> _Entries:
    """Concatenate the tokens of rows, each row with one number or with one for each token, on the device of `like`."""
    sizes = [len(tokens) for _, tokens, _ in parts]
    rows = np.repeat(np.array([i for i, _, _ in parts], dtype=np.int64), sizes)
    tokens = np.concatenate([tokens for _, tokens, _ in parts])
    values = [np.broadcast_to(np.asarray(value, np.float32), len(at)) for _, at, value in parts]
    numbers = rows, tokens, np.concatenate(values)
    return _Entries(*(send(torch.from_numpy(each), like.device) for each in numbers))
