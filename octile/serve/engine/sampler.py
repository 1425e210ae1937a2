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

import torch
from torch import Tensor

from octile.ops import cross_entropy
from octile.ops.sample_tokens import NOT_A_NUMBER, sample_tokens
from octile.serve.engine.history import History
from octile.serve.engine.penalties import penalized
from octile.serve.engine.request import Sampling, TokenLogprobs
from octile.serve.send import send

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
    if any(row.sampling.changes_logits for row in rows):
        logits_LV = penalized(logits_LV, [(row.sampling, row.text) for row in rows])
    samplings = [row.sampling for row in rows]
    integers = [row.seed for row in rows], [row.position for row in rows], [s.top_k for s in samplings]
    shares = [s.temperature for s in samplings], [s.top_p for s in samplings], [s.min_p for s in samplings]
    seeds_L, positions_L, top_k_L = send(torch.tensor(integers, dtype=torch.int64), logits_LV.device)
    temperature_L, top_p_L, min_p_L = send(torch.tensor(shares, dtype=torch.float64), logits_LV.device)
    return sample_tokens(logits_LV, seeds_L, positions_L, temperature_L.float(), top_k_L, top_p_L, min_p_L)


def log_probabilities(logits_LV: Tensor, tokens: Sequence[int], rows: Sequence[Row]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's chosen token and of its most likely tokens, before temperature.

    Args:
        logits_LV: float32 [L, V].
        tokens: the L chosen ones.
        rows: L of them, each with sampling.logprobs.
    """
    found = token_logprobs(logits_LV, tokens, [row.sampling.logprobs or 0 for row in rows])
    return [entry if entry.top else entry._replace(rank=None) for entry in found]  # as steps launched ahead return it


def token_logprobs(logits_LV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token of each row and of the row's most likely tokens, before temperature.

    Args:
        logits_LV: float32 [L, V].
        tokens: L of them, one for each row.
        counts: how many most likely tokens of each row are wanted.
    """
    logprobs_LV = cross_entropy.log_probabilities(logits_LV)
    token_logprobs_L1 = logprobs_LV.gather(1, torch.tensor(tokens, device=logits_LV.device)[:, None])
    ranks = (logprobs_LV >= token_logprobs_L1).sum(-1).tolist()
    top, top_tokens = (t.tolist() for t in logprobs_LV.topk(min(max(counts), logits_LV.shape[1])))
    rows = zip(tokens, token_logprobs_L1[:, 0].tolist(), top_tokens, top, counts, ranks, strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(best[:count], values[:count], strict=True)), rank)
        for token, logprob, best, values, count, rank in rows
    ]


class ChosenTokens:
    """The tokens of rows of logits, which a GPU may not have computed yet.

    Args:
        tokens_L: int64 [L]; negative as in `choose`.

    Attributes:
        on_device: these.
    """

    def __init__(self, tokens_L: Tensor):
        self.on_device = tokens_L
        self._ready: torch.cuda.Event | None = None
        self._on_host = torch.empty_like(tokens_L, device="cpu", pin_memory=tokens_L.is_cuda)
        self._on_host.copy_(tokens_L, non_blocking=True)
        if tokens_L.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(tokens_L.device))

    def wait_for_chosen(self) -> list[int]:
        """Wait for the tokens, and return them."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._on_host.tolist()


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
