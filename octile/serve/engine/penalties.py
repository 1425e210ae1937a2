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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octile.serve.engine.grammar import WORD
from octile.serve.engine.history import History
from octile.serve.engine.request import Sampling

BITS = np.left_shift(1, np.arange(WORD), dtype=np.int32)  # of a mask's word


class LogitChange(NamedTuple):
    """One of the changes of some rows.

    Attributes:
        apply: takes logits [L, V], contiguous, which it overwrites, and `numbers` on their device.
        numbers: which logits are changed and how, on the host.
    """

    apply: Callable[..., None]
    numbers: Sequence[np.ndarray]


def logit_changes(how: Sequence[tuple[Sampling, History | None]], vocabulary: int) -> list[LogitChange]:
    """Return the changes of logits that their rows ask for, in their order.

    Args:
        how: sampling and text of each row; the text may be None where the sampling changes no logits.
        vocabulary: V.
    """
    masks: list[tuple[int, np.ndarray]] = []
    forbidden, biased, seen, generated = (list[tuple[np.ndarray, ...]]() for _ in range(4))
    for i, (sampling, text) in enumerate(how):
        if not sampling.changes_logits:
            continue
        assert text is not None
        first = i * vocabulary
        if text.mask is not None:
            masks.append((i, text.mask))
        forbidden.append((first + _forbidden(sampling, text, vocabulary),))
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            biased.append((first + np.array(tokens, np.int64), np.array(biases, np.float32)))
        if sampling.repetition_penalty != 1:
            positions = first + text.seen()
            seen.append((positions, np.full(len(positions), sampling.repetition_penalty, np.float32)))
        if sampling.frequency_penalty or sampling.presence_penalty:
            generated_N, counts_N = text.generated_counts()
            # in FP64, so that a penalty of 0.1 is subtracted three times as 0.3
            off_N = sampling.frequency_penalty * counts_N + sampling.presence_penalty
            generated.append((first + generated_N, off_N.astype(np.float32)))
    changes: list[LogitChange] = []
    if masks:
        rows = [] if len(masks) == len(how) else [np.array([i for i, _ in masks], np.int64)]
        changes.append(LogitChange(_mask, [np.stack([mask for _, mask in masks]), BITS, *rows]))
    for apply, parts in (_forbid, forbidden), (_add, biased), (_divide, seen), (_subtract, generated):
        numbers = [np.concatenate(each) for each in zip(*parts, strict=True)]
        if numbers and len(numbers[0]):
            changes.append(LogitChange(apply, numbers))
    return changes


def changed_logits(logits_LV: Tensor, changes: Sequence[LogitChange], numbers: Sequence[Tensor]) -> Tensor:
    """Return logits with changes, as a new tensor.

    Args:
        logits_LV: float32 [L, V].
        changes: as `logit_changes` returns them.
        numbers: those of all changes, one after the other, on the logits' device.
    """
    logits_LV = logits_LV.clone(memory_format=torch.contiguous_format)
    sent = iter(numbers)
    for apply, arrays in changes:
        apply(logits_LV, *(next(sent) for _ in arrays))
    return logits_LV


def _mask(logits_LV: Tensor, words_RW: Tensor, bits: Tensor, rows_R: Tensor | None = None) -> None:
    """Mask the tokens whose bits are 0, of all rows or of some."""
    is_masked_RV = ((words_RW[:, :, None] & bits) == 0).flatten(1)[:, : logits_LV.shape[1]]
    if rows_R is None:
        logits_LV.masked_fill_(is_masked_RV, -math.inf)
    else:
        logits_LV[rows_R] = logits_LV[rows_R].masked_fill_(is_masked_RV, -math.inf)


def _forbid(logits_LV: Tensor, at_N: Tensor) -> None:
    """Mask some logits, by their numbers among all."""
    logits_LV.view(-1).scatter_(0, at_N, -math.inf)


def _add(logits_LV: Tensor, at_N: Tensor, values_N: Tensor) -> None:
    logits = logits_LV.view(-1)
    logits.scatter_(0, at_N, logits.gather(0, at_N) + values_N)


def _divide(logits_LV: Tensor, at_N: Tensor, penalties_N: Tensor) -> None:
    """Divide positive logits, and multiply negative ones."""
    logits = logits_LV.view(-1)
    x = logits.gather(0, at_N)
    logits.scatter_(0, at_N, torch.where(x > 0, x / penalties_N, x * penalties_N))


def _subtract(logits_LV: Tensor, at_N: Tensor, values_N: Tensor) -> None:
    logits = logits_LV.view(-1)
    logits.scatter_(0, at_N, logits.gather(0, at_N) - values_N)


def _forbidden(sampling: Sampling, text: History, vocabulary: int) -> np.ndarray:
    """The tokens of the vocabulary that may not follow a text."""
    tokens = {word[-1] for word in sampling.bad_words if text.ends_with(word[:-1])}
    if text.n_generated < sampling.min_tokens:
        tokens.update(text.end_tokens, sampling.stop_token_ids)
    return np.array([token for token in tokens if token < vocabulary], dtype=np.int64)
