"""Sampling: the next tokens of a whole batch, each a function of its own logits, seed and position alone.

A token is sampled by the Gumbel-max trick: the largest of logit / temperature + noise, with independent Gumbel noise
for every token of the vocabulary, has the distribution softmax(logits / temperature). The noise is a hash of seed,
position and token, so it needs no state. The same logits give the same text whatever else is in the batch, however its
prompt was cut into chunks, and whether or not it was preempted. A draft that is sampled with the noise of its position
mostly agrees with the token that the model then samples with the same noise, and never changes it.

Every row is computed alone: elementwise operations, comparisons, sums of integers. No sum of floating-point numbers
depends on how many rows there are. So an exception of one row ends only this row: the others are computed again.

Sources: the Gumbel-max trick: Maddison et al., A* Sampling (arXiv 1411.0030) §2; counter-based random numbers: Salmon
et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); drafts with the same noise: Daliri et al., Coupling
without Communication and Drafter-Invariant Speculative Decoding (arXiv 2408.07978); top_p: Holtzman et al. (arXiv
1904.09751).

Shapes: L rows of logits, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from octile.ops import cross_entropy
from octile.ops.sample_tokens import NOT_A_NUMBER, gumbel, sample_tokens, sampling_keys
from octile.serve.engine.history import History
from octile.serve.engine.penalties import penalized
from octile.serve.engine.request import Sampling, TokenLogprobs

T = TypeVar("T")

FIXED_POINT = 2.0**32  # weights are summed as integers
TOKEN_BITS = 24  # of the largest vocabulary; a weight's 33 bits and a token's fit 64
CANDIDATES = 256  # most likely tokens that are looked at first


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
    seeds_L = _on_device([row.seed for row in rows], torch.int64, logits_LV)
    positions_L = _on_device([row.position for row in rows], torch.int64, logits_LV)
    temperature_L = _on_device([row.sampling.temperature for row in rows], torch.float32, logits_LV)
    tokens_L = sample_tokens(logits_LV, seeds_L, positions_L, temperature_L)
    truncated = [i for i, row in enumerate(rows) if not row.sampling.is_of_operator]
    if not truncated:
        return tokens_L
    i = slice(None) if len(truncated) == len(rows) else _on_device(truncated, torch.int64, logits_LV)
    sampled_L = _truncated(logits_LV[i], [rows[i] for i in truncated], seeds_L[i], positions_L[i], temperature_L[i])
    tokens_L[i] = torch.where(tokens_L[i] < 0, tokens_L[i], sampled_L)
    return tokens_L


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


def _truncated(
    logits_LV: Tensor, rows: Sequence[Row], seeds_L: Tensor, positions_L: Tensor, temperature_L: Tensor
) -> Tensor:
    """Sample a token per row of those that min_p, top_k and top_p leave: int64 [L]. Rows with NaN or +Inf give any."""
    vocab_size = logits_LV.shape[1]
    z_LV = (logits_LV - logits_LV.amax(-1, keepdim=True)) / temperature_L[:, None]
    keys_L2 = sampling_keys(seeds_L, positions_L)
    top_k = [[min(row.sampling.top_k or vocab_size, vocab_size)] for row in rows]
    top_k_L1 = _on_device(top_k, torch.int64, logits_LV)
    top_p_L1 = _on_device([[row.sampling.top_p] for row in rows], torch.float64, logits_LV)
    min_p = [row.sampling.min_p for row in rows]
    if any(min_p):
        z_LV = z_LV.masked_fill(z_LV.exp() < _on_device(min_p, torch.float32, logits_LV)[:, None], float("-inf"))
    return _sample_truncated(z_LV, keys_L2, top_k_L1, top_p_L1, min(CANDIDATES, vocab_size))


def _sample_truncated(z_LV: Tensor, keys_L2: Tensor, top_k_L1: Tensor, top_p_L1: Tensor, n: int) -> Tensor:
    """Sample a token per row from its top_k and top_p most likely ones: int64 [L].

    They are looked for among the n most likely tokens, and for rows that need more of them among all.
    """
    vocab_size = z_LV.shape[1]
    weights_LV = (z_LV.exp() * FIXED_POINT).to(torch.int64)
    # one integer of weight and token, so that the order is the same where weights are equal
    last = 2**TOKEN_BITS - 1
    ordered_LV = (weights_LV << TOKEN_BITS) + (last - torch.arange(vocab_size, device=z_LV.device))
    ordered_LN = ordered_LV.topk(n).values
    weights_LN, tokens_LN = ordered_LN >> TOKEN_BITS, last - (ordered_LN & last)
    weights_LN.masked_fill_(torch.arange(n, device=z_LV.device) >= top_k_L1, 0)
    sums_LN = weights_LN.cumsum(-1)
    all_L1 = torch.where(top_k_L1 > n, weights_LV.sum(-1, keepdim=True), sums_LN[:, -1:])
    enough_L1 = top_p_L1 * all_L1
    is_left_out_LN = (weights_LN == 0) | (sums_LN - weights_LN >= enough_L1)
    is_left_out_LN[:, 0] = False  # the most likely token always stays
    z_LN = z_LV.gather(1, tokens_LN).masked_fill(is_left_out_LN, float("-inf"))
    chosen_L = tokens_LN.gather(1, (z_LN + gumbel(tokens_LN, keys_L2)).argmax(-1, keepdim=True))[:, 0]
    if n < vocab_size:
        # a row with n < top_k < vocab_size is sampled again: the sum of its top_k weights is not known
        needs_more_L = ((top_k_L1 > n) & ((top_k_L1 < vocab_size) | (sums_LN[:, -1:] < enough_L1)))[:, 0]
        more = needs_more_L.nonzero()[:, 0]
        if len(more):
            chosen_L[more] = _sample_truncated(z_LV[more], keys_L2[more], top_k_L1[more], top_p_L1[more], vocab_size)
    return chosen_L


def _on_device(numbers: Sequence[object], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Make a tensor on the device of another one; the host does not wait for a GPU."""
    t = torch.tensor(numbers, dtype=dtype, pin_memory=like.is_cuda)
    return t.to(like.device, non_blocking=True)


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
