"""Tests of the sampler: distributions, truncation, independence of the batch."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.sample_tokens import ALL_MASKED, NOT_A_NUMBER, POSITIVE_INFINITY
from octile.serve.engine import sampler
from octile.serve.engine.request import MAX_TOP_K, Sampling
from octile.serve.engine.sampler import (
    ChosenTokens,
    Row,
    TokenChoice,
    choose,
    choose_each,
    choose_tokens,
    log_probabilities,
)

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])  # probabilities 0.087, 0.644, 0.237, 0.032
N = 4000


def draws(sampling, logits=LOGITS, n=N, seed=0):
    return choose(logits.repeat(n, 1), [Row(sampling, seed, position) for position in range(n)])


def chi_square(tokens, probabilities):
    """Pearson's statistic of tokens [N] under probabilities [V]."""
    expected = probabilities * len(tokens)
    found = tokens.bincount(minlength=len(probabilities))
    return ((found - expected) ** 2 / expected).sum().item()


def test_temperature_zero_takes_the_most_likely_token():
    assert set(draws(Sampling(temperature=0.0)).tolist()) == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_have_the_distribution_of_the_model(temperature):
    tokens = draws(Sampling(temperature=temperature))
    assert chi_square(tokens, (LOGITS / temperature).softmax(-1)) < 16.3  # 99.9% of 3 degrees of freedom


def test_seeds_sample_independently():
    rows = [Row(Sampling(temperature=1.0), seed, 5) for seed in range(N)]
    assert chi_square(choose(LOGITS.repeat(N, 1), rows), LOGITS.softmax(-1)) < 16.3


@pytest.mark.slow
def test_tokens_of_a_large_vocabulary_are_equally_likely():
    tokens = draws(Sampling(temperature=1.0), torch.zeros(1000), n=20_000)
    assert 857 < chi_square(tokens, torch.full((1000,), 1e-3)) < 1143  # 99.9% of 999 degrees of freedom


def test_successive_tokens_are_independent():
    tokens = draws(Sampling(temperature=1.0))
    pairs = tokens[:-1] * 4 + tokens[1:]
    p = LOGITS.softmax(-1)
    assert chi_square(pairs, (p[:, None] * p).flatten()) < 37.7  # 99.9% of 15 degrees of freedom


def test_top_p_samples_from_the_fewest_tokens_that_reach_it():
    tokens = draws(Sampling(temperature=1.0, top_p=0.7))
    assert set(tokens.tolist()) == {1, 2}
    assert chi_square(tokens - 1, LOGITS[1:3].softmax(-1)) < 10.8


def test_top_p_never_excludes_the_most_likely_token():
    assert set(draws(Sampling(temperature=1.0, top_p=0.01)).tolist()) == {1}


def test_top_k_samples_from_the_most_likely_tokens():
    tokens = draws(Sampling(temperature=1.0, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 2}
    assert chi_square(tokens, LOGITS[:3].softmax(-1)) < 13.8


def test_top_p_counts_from_the_tokens_that_top_k_leaves():
    tokens = draws(Sampling(temperature=1.0, top_k=2, top_p=0.73))  # 1 has 0.731 of the two
    assert set(tokens.tolist()) == {1}


def test_the_largest_top_k_leaves_all_tokens():
    largest = draws(Sampling(temperature=1.0, top_k=MAX_TOP_K))
    assert largest.tolist() == draws(Sampling(temperature=1.0)).tolist()


def test_of_equal_logits_top_k_leaves_the_first():
    assert set(draws(Sampling(temperature=1.0, top_k=2), torch.zeros(600)).tolist()) == {0, 1}


def test_min_p_samples_from_tokens_of_its_share_of_the_most_likely_one():
    tokens = draws(Sampling(temperature=1.0, min_p=0.2))  # 2 has 0.368 of the probability of 1, and 0 has 0.135
    assert set(tokens.tolist()) == {1, 2}
    assert chi_square(tokens - 1, LOGITS[1:3].softmax(-1)) < 10.8


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_p=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 7]),
    min_p=st.sampled_from([0.0, 0.1]),
)


@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 2**63 - 1))
def test_a_row_chooses_the_same_token_in_any_batch(samplings, seed):
    rows = [Row(sampling, seed, i) for i, sampling in enumerate(samplings)]
    logits = 3 * torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed))
    alone = [choose(logits[i : i + 1], rows[i : i + 1]).item() for i in range(len(rows))]
    assert choose(logits, rows).tolist() == alone


@pytest.mark.parametrize("temperature", [1.2e-38, 3.4e38])
def test_the_extreme_temperatures_sample_tokens(temperature):
    for sampling in (Sampling(temperature=temperature), Sampling(temperature=temperature, top_p=0.9)):
        assert set(draws(sampling, n=200).tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2, top_p=0.9)]
)
def test_only_the_row_with_nan_has_no_token(sampling):
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = float("nan")
    tokens = choose(logits, [Row(sampling, 0, i) for i in range(3)]).tolist()
    assert [token == NOT_A_NUMBER for token in tokens] == [False, True, False]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2, top_p=0.9)]
)
def test_rows_with_infinite_logits_have_no_token(sampling):
    logits = LOGITS.repeat(4, 1)
    logits[0, 2] = float("inf")
    logits[1] = float("-inf")
    logits[2, :3] = float("-inf")
    tokens = choose(logits, [Row(sampling, 0, i) for i in range(4)]).tolist()
    assert tokens[:3] == [POSITIVE_INFINITY, ALL_MASKED, 3]
    assert tokens[3] >= 0


def test_log_probabilities_are_those_of_the_model_before_temperature():
    rows = [Row(Sampling(temperature=0.5, logprobs=n), 0, 0) for n in (0, 2)]
    found = log_probabilities(LOGITS.repeat(2, 1), [2, 0], rows)
    expected = LOGITS.log_softmax(-1).tolist()
    assert (found[0].token, found[0].logprob, found[0].top) == (2, pytest.approx(expected[2]), ())
    assert found[1].top == ((1, pytest.approx(expected[1])), (2, pytest.approx(expected[2])))
    # not counted where no other tokens are asked for
    assert [entry.rank for entry in found] == [None, 1 + sum(value > expected[0] for value in expected)]


def test_the_vocabulary_is_not_sorted_where_no_other_tokens_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    logits, rows = 3 * torch.randn(3, 300), [Row(Sampling(temperature=1.0, logprobs=0), i, 7) for i in range(3)]
    tokens = choose(logits, rows).tolist()
    expected = log_probabilities(logits, tokens, [Row(Sampling(logprobs=1), 0, 0)] * 3)
    monkeypatch.setattr(Tensor, "topk", None)
    for found in (log_probabilities(logits, tokens, rows), [entry for _, entry in ChosenTokens(logits, rows).wait()]):
        assert found == [entry._replace(top=(), rank=None) for entry in expected]  # with the same bits


def test_a_draft_of_a_similar_distribution_is_mostly_the_token_itself():
    similar = LOGITS + torch.tensor([0.1, -0.1, 0.05, 0.1])
    overlap = torch.minimum(LOGITS.softmax(-1), similar.softmax(-1)).sum()
    agree = (draws(Sampling(temperature=1.0)) == draws(Sampling(temperature=1.0), similar)).float().mean()
    assert agree >= overlap / (2 - overlap) - 0.01  # Daliri et al., theorem 2


RANDOM = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
ROWS = [Row(Sampling(8, 1.0, seed=seed, logprobs=logprobs), seed, 7) for seed, logprobs in enumerate((2, None, 0, 1))]


def raising_for(seed: int, right: Callable[..., object]) -> Callable[..., object]:
    """Return a function as `right`, which raises an exception if one of the rows has a seed."""

    def wrong(*arguments: Sequence[Row]) -> object:
        if any(row.seed == seed for row in arguments[-1]):
            raise ArithmeticError(f"seed {seed}")
        return right(*arguments)

    return wrong


def test_all_rows_have_their_tokens_and_what_they_ask_for():
    found = choose_tokens(RANDOM, ROWS)
    assert found.tokens == choose(RANDOM, ROWS).tolist()
    asked = [0, 2, 3]
    expected = log_probabilities(RANDOM[asked], [found.tokens[i] for i in asked], [ROWS[i] for i in asked])
    assert found.logprobs == dict(zip(asked, expected, strict=True))
    assert not found.errors


def test_no_rows_have_no_tokens():
    assert choose_tokens(RANDOM[:0], []) == TokenChoice([], {}, {})


def test_a_row_without_a_token_has_no_log_probabilities():
    logits = RANDOM.clone()
    logits[2, 5] = torch.nan
    found, whole = choose_tokens(logits, ROWS), choose_tokens(RANDOM, ROWS)
    assert found.tokens == [*whole.tokens[:2], NOT_A_NUMBER, whole.tokens[3]]
    assert found.logprobs == {i: whole.logprobs[i] for i in (0, 3)}
    assert not found.errors


@pytest.mark.parametrize("function", ["choose", "log_probabilities"])
def test_only_the_row_that_raises_an_exception_has_no_token(monkeypatch: pytest.MonkeyPatch, function: str):
    whole = choose_tokens(RANDOM, ROWS)
    monkeypatch.setattr(sampler, function, raising_for(2, getattr(sampler, function)))
    found = choose_tokens(RANDOM, ROWS)
    assert found.tokens == [*whole.tokens[:2], NOT_A_NUMBER, whole.tokens[3]]
    assert found.logprobs == {i: whole.logprobs[i] for i in (0, 3)}
    assert found.errors == {2: "ArithmeticError when its next token was chosen: seed 2"}


def test_an_exception_takes_the_place_of_a_token(monkeypatch: pytest.MonkeyPatch):
    expected = choose_each(RANDOM, ROWS)
    monkeypatch.setattr(sampler, "choose", raising_for(1, choose))
    found = choose_each(RANDOM, ROWS)
    assert isinstance(found[1], ArithmeticError)
    assert [found[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_an_exception_that_no_row_raises_alone_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    def too_many(logits_LV: Tensor, rows: Sequence[Row]) -> Tensor:
        if len(rows) > 1:
            raise MemoryError("too many rows")
        return choose(logits_LV, rows)

    expected = choose_each(RANDOM, ROWS)
    monkeypatch.setattr(sampler, "choose", too_many)
    with pytest.warns(RuntimeWarning, match="one by one, which is slower: MemoryError: too many rows"):
        assert choose_each(RANDOM, ROWS) == expected
