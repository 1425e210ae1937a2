"""The choice of the tokens of several requests, of which an exception ends only those that raise it.

Shapes: L rows of logits, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from octile.ops.sample_tokens import NOT_A_NUMBER
from octile.serve.engine.request import TokenLogprobs
from octile.serve.engine.sampler import Row, choose, log_probabilities

T = TypeVar("T")


class TokenChoice(NamedTuple):
    """The tokens of rows of logits.

    Attributes:
        tokens: of all rows; negative where there is none: why, as of `sample_tokens`, or NOT_A_NUMBER with an error.
        logprobs: of the rows that ask for them and have a token, by the row's number.
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
        logits, chosen, of_asked = logits_LV[asked], [tokens[i] for i in asked], [rows[i] for i in asked]
        results = _isolated(lambda part: log_probabilities(logits[part], chosen[part], of_asked[part]), len(asked))
        for i, result in zip(asked, results, strict=True):
            if isinstance(result, Exception):
                tokens[i], errors[i] = NOT_A_NUMBER, _describe(result)
            else:
                logprobs[i] = result
    return TokenChoice(tokens, logprobs, errors)


def choose_each(logits_LV: Tensor, rows: Sequence[Row]) -> list[int | Exception]:
    """Choose the next token of each row as `choose`; an exception takes the place of the tokens that raise it."""
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
