"""Sampling: the next tokens of a whole batch, each a function of its own logits, seed and position alone.

A token is sampled by the Gumbel-max trick: the largest of logit / temperature + noise, with independent Gumbel noise
for every token of the vocabulary, has the distribution softmax(logits / temperature). The noise is a hash of seed,
position and token, so it needs no state. The same logits give the same text whatever else is in the batch, however its
prompt was cut into chunks, and whether or not it was preempted. A draft that is sampled with the noise of its position
mostly agrees with the token that the model then samples with the same noise, and never changes it.

Every row is computed alone (`octile.ops.sample_tokens`). So an exception of one row ends only this row: the others are
computed again.

Source: drafts with the same noise: Daliri et al., Coupling without Communication and Drafter-Invariant Speculative
Decoding (arXiv 2408.07978).

Shapes: L rows of logits, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from octile.ops import cross_entropy
from octile.ops.sample_tokens import NOT_A_NUMBER, sample_tokens
from octile.serve.engine.history import History
from octile.serve.engine.penalties import LogitChange, changed_logits, logit_changes
from octile.serve.engine.request import Sampling, TokenLogprobs
from octile.serve.send import HostCopy, send, send_arrays

T = TypeVar("T")


class Row(NamedTuple):
    """Which token a row of logits chooses.

    Attributes:
        sampling: how it is chosen.
        seed: with which seed.
        position: its position in the text, from 0.
        text: what is before it; needed where `sampling.changes_logits`.
    """

    sampling: Sampling
    seed: int
    position: int
    text: History | None = None


def choose(logits_LV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Choose the next token of each row.

    Args:
        logits_LV: float32 [L, V].
        rows: L of them.

    Returns:
        int64 [L] on the same device; negative where the logits choose no token, as `sample_tokens` says.
    """
    samplings = [row.sampling for row in rows]
    how = (
        np.array([row.seed for row in rows], np.int64),
        np.array([row.position for row in rows], np.int64),
        np.array([s.temperature for s in samplings], np.float32),
        np.array([s.top_k for s in samplings], np.int64),
        np.array([s.top_p for s in samplings], np.float64),
        np.array([s.min_p for s in samplings], np.float64),
    )
    changes: Sequence[LogitChange] = ()
    if any(s.changes_logits for s in samplings):
        changes = logit_changes([(row.sampling, row.text) for row in rows], logits_LV.shape[1])
    numbers = [array for change in changes for array in change.numbers]
    sent = send_arrays([*how, *numbers], logits_LV.device)
    if changes:
        logits_LV = changed_logits(logits_LV, changes, sent[len(how) :])
    truncates = any(s.top_k or s.top_p < 1 or s.min_p for s in samplings)
    return sample_tokens(logits_LV, *sent[: len(how)], truncates)


def log_probabilities(logits_LV: Tensor, tokens: Sequence[int], rows: Sequence[Row]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's chosen token and of its most likely tokens, before temperature.

    Args:
        logits_LV: float32 [L, V].
        tokens: the L chosen ones.
        rows: L of them, each with sampling.logprobs.
    """
    counts = [row.sampling.logprobs or 0 for row in rows]
    n_top = max(counts)
    scores = _scores(logits_LV, send(torch.tensor(tokens), logits_LV.device), n_top, ranks=n_top > 0)
    return [*map(_without_rank, _read_scores(HostCopy(scores).wait(), tokens, counts))]


def _without_rank(entry: TokenLogprobs) -> TokenLogprobs:
    """Leave out a rank that was not asked for: decode steps do not count it."""
    return entry if entry.top else entry._replace(rank=None)


def token_logprobs(logits_LV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token of each row and of the row's most likely tokens, before temperature.

    Args:
        logits_LV: float32 [L, V].
        tokens: L of them, one for each row.
        counts: how many most likely tokens of each row are wanted.
    """
    scores = _scores(logits_LV, send(torch.tensor(tokens), logits_LV.device), max(counts), ranks=True)
    return _read_scores(HostCopy(scores).wait(), tokens, counts)


def _scores(logits_LV: Tensor, tokens_L: Tensor, n_top: int, ranks: bool) -> list[Tensor]:
    """Compute the log-probability of a token of each row, without `ranks` nothing else.

    With them its rank, the n_top most likely tokens of the row, and their log-probabilities follow.
    """
    if not ranks:
        losses, _ = cross_entropy.cross_entropy(logits_LV, tokens_L)
        return [0.0 - losses]  # with the bits of `cross_entropy.log_probabilities`
    logprobs_LV = cross_entropy.log_probabilities(logits_LV)
    token_logprobs_L1 = logprobs_LV.gather(1, tokens_L[:, None])
    top_LN, top_tokens_LN = logprobs_LV.topk(min(n_top, logits_LV.shape[1]))
    return [token_logprobs_L1[:, 0], (logprobs_LV >= token_logprobs_L1).sum(-1), top_tokens_LN, top_LN]


def _read_scores(scores: Sequence[np.ndarray], tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Convert the results of `_scores`, on the host, to log-probabilities; counts: most likely tokens of each row."""
    logprobs, *others = (t.tolist() for t in scores)
    if not others:
        return [TokenLogprobs(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
    return [
        TokenLogprobs(token, logprob, tuple(zip(best[:count], values[:count], strict=True)), rank)
        for token, count, logprob, rank, best, values in zip(tokens, counts, logprobs, *others, strict=True)
    ]


class ChosenTokens:
    """The tokens of rows of logits, and the log-probabilities that some ask for, which a GPU may not have computed yet.

    Args:
        logits_LV: float32 [L, V]; they may be overwritten afterwards.
        rows: L of them.

    Attributes:
        on_device: the tokens, int64 [L]; negative as in `choose`.
    """

    def __init__(self, logits_LV: Tensor, rows: Sequence[Row]):
        self._counts = {i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling.logprobs is not None}
        self.on_device = choose(logits_LV, rows) if rows else logits_LV.new_empty(0, dtype=torch.int64)
        tensors = [self.on_device]
        if self._counts:
            tokens = self.on_device.clamp(min=0)  # scores of rows without a token are dropped
            if len(self._counts) < len(rows):
                at = send(torch.tensor([*self._counts]), logits_LV.device)
                logits_LV, tokens = logits_LV.index_select(0, at), tokens.index_select(0, at)
            n_top = max(self._counts.values())
            tensors += _scores(logits_LV, tokens, n_top, ranks=n_top > 0)
        self._on_host = HostCopy(tensors)

    def wait(self) -> list[tuple[int, TokenLogprobs | None]]:
        """Wait for the tokens, and return each with its log-probabilities, if there is one and they were asked for."""
        tokens_L, *scores = self._on_host.wait()
        tokens = tokens_L.tolist()
        asked = [tokens[i] for i in self._counts]
        found = _read_scores(scores, asked, [*self._counts.values()]) if asked else []
        logprobs = dict(zip(self._counts, map(_without_rank, found), strict=True))
        return [(token, logprobs.get(i) if token >= 0 else None) for i, token in enumerate(tokens)]


class TokenChoice(NamedTuple):
    """The tokens of rows of logits.

    Attributes:
        tokens: tokens of all rows; negative where there is none: why, as `sample_tokens` says, or NOT_A_NUMBER with an
            error.
        logprobs: log-probabilities of the rows that ask for them and have a token, by the row's number.
        errors: what the choice of a row has raised, as a sentence, by the row's number.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


def choose_tokens(logits_LV: Tensor, rows: Sequence[Row]) -> TokenChoice:
    """Choose the tokens of all rows, and compute the log-probabilities that some ask for.

    Args:
        logits_LV: float32 [L, V].
        rows: L of them.
    """
    if not rows:
        return TokenChoice([], {}, {})
    found = choose_each(logits_LV, rows)
    errors = {i: _describe(result) for i, result in enumerate(found) if isinstance(result, Exception)}
    tokens = [NOT_A_NUMBER if isinstance(result, Exception) else result for result in found]
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and tokens[i] >= 0]
    logprobs = dict[int, TokenLogprobs]()
    if asked:
        logits, chosen, asking = logits_LV[asked], [tokens[i] for i in asked], [rows[i] for i in asked]
        results = _isolated(lambda part: log_probabilities(logits[part], chosen[part], asking[part]), len(asked))
        for i, result in zip(asked, results, strict=True):
            if isinstance(result, Exception):
                tokens[i], errors[i] = NOT_A_NUMBER, _describe(result)
            else:
                logprobs[i] = result
    return TokenChoice(tokens, logprobs, errors)


def choose_each(logits_LV: Tensor, rows: Sequence[Row]) -> list[int | Exception]:
    """Choose the next token of each row as `choose`; an exception stands for the tokens that raise it."""
    return _isolated(lambda part: choose(logits_LV[part], rows[part]).tolist(), len(rows))


def _isolated(compute: Callable[[slice], Sequence[T]], n_rows: int) -> list[T | Exception]:
    """Compute something of all rows at once, or, if that raises an exception, of each row alone.

    Args:
        compute: takes a slice of the rows and returns a result for each.
        n_rows: how many there are.

    Returns:
        the results; the exception of a row that has none. A warning says so if each row alone has one.
    """
    try:
        return [*compute(slice(0, n_rows))]
    except Exception as error:  # of one row or several, which must not end the others
        results = [_alone(compute, i) for i in range(n_rows)]
        if not any(isinstance(result, Exception) for result in results):
            what = f"tokens are chosen one by one, which is slower: {type(error).__name__}: {error}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        return results


def _alone(compute: Callable[[slice], Sequence[T]], i: int) -> T | Exception:
    try:
        return compute(slice(i, i + 1))[0]
    except Exception as error:
        return error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} when its next token was chosen: {error}"
