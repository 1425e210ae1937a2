"""The choice of the tokens of several requests: an exception ends only the rows that raise it."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from octile.ops.sample_tokens import NOT_A_NUMBER
from octile.serve.engine import token_choice
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row, choose, log_probabilities
from octile.serve.engine.token_choice import TokenChoice, choose_each, choose_tokens

LOGITS = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
ROWS = [Row(Sampling(8, 1.0, seed=seed, logprobs=logprobs), seed, 7) for seed, logprobs in enumerate((2, None, 0, 1))]


def raising_for(seed: int, right: Callable[..., object]) -> Callable[..., object]:
    """Return a function as `right`, which raises an exception if one of the rows has a seed."""

    def wrong(*arguments: Sequence[Row]) -> object:
        if any(row.seed == seed for row in arguments[-1]):
            raise ArithmeticError(f"seed {seed}")
        return right(*arguments)

    return wrong


def test_all_rows_have_their_tokens_and_what_they_ask_for():
    found = choose_tokens(LOGITS, ROWS)
    assert found.tokens == choose(LOGITS, ROWS).tolist()
    asked = [0, 2, 3]
    expected = log_probabilities(LOGITS[asked], [found.tokens[i] for i in asked], [ROWS[i] for i in asked])
    assert found.logprobs == dict(zip(asked, expected, strict=True))
    assert not found.errors


def test_no_rows_have_no_tokens():
    assert choose_tokens(LOGITS[:0], []) == TokenChoice([], {}, {})


def test_a_row_without_a_token_has_no_log_probabilities():
    logits = LOGITS.clone()
    logits[2, 5] = torch.nan
    found, whole = choose_tokens(logits, ROWS), choose_tokens(LOGITS, ROWS)
    assert found.tokens == [*whole.tokens[:2], NOT_A_NUMBER, whole.tokens[3]]
    assert found.logprobs == {i: whole.logprobs[i] for i in (0, 3)}
    assert not found.errors


@pytest.mark.parametrize("function", ["choose", "log_probabilities"])
def test_only_the_row_that_raises_an_exception_has_no_token(monkeypatch: pytest.MonkeyPatch, function: str):
    whole = choose_tokens(LOGITS, ROWS)
    monkeypatch.setattr(token_choice, function, raising_for(2, getattr(token_choice, function)))
    found = choose_tokens(LOGITS, ROWS)
    assert found.tokens == [*whole.tokens[:2], NOT_A_NUMBER, whole.tokens[3]]
    assert found.logprobs == {i: whole.logprobs[i] for i in (0, 3)}
    assert found.errors == {2: "ArithmeticError when its next token was chosen: seed 2"}


def test_an_exception_takes_the_place_of_a_token(monkeypatch: pytest.MonkeyPatch):
    expected = choose_each(LOGITS, ROWS)
    monkeypatch.setattr(token_choice, "choose", raising_for(1, choose))
    found = choose_each(LOGITS, ROWS)
    assert isinstance(found[1], ArithmeticError)
    assert [found[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_an_exception_that_no_row_raises_alone_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    def too_many(logits_LV: Tensor, rows: Sequence[Row]) -> Tensor:
        if len(rows) > 1:
            raise MemoryError("too many rows")
        return choose(logits_LV, rows)

    expected = choose_each(LOGITS, ROWS)
    monkeypatch.setattr(token_choice, "choose", too_many)
    with pytest.warns(RuntimeWarning, match="one by one, which is slower: MemoryError: too many rows"):
        assert choose_each(LOGITS, ROWS) == expected
