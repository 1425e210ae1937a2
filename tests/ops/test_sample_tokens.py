"""Tests of sampling: what a row chooses depends on itself alone, and its hash is that of SplitMix64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.ops.sample_tokens import (
    ALL_MASKED,
    FIXED_POINT,
    NOT_A_NUMBER,
    POSITIVE_INFINITY,
    sample_tokens,
    sampling_keys,
)
from tests.ops.operators import assert_fake_is_true, assert_well_formed

WORD = 2**64 - 1


def arguments(rows=5, vocabulary=40, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    torch.manual_seed(0)
    return (
        torch.randn(rows, vocabulary),
        torch.arange(rows) * 2**60 + 3,
        torch.arange(rows) + 7,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        *(torch.full((rows,), share, dtype=torch.float64) for share in (top_p, min_p)),
    )


def splitmix(seed, position):
    """The keys of a row, by Python's integers."""
    x = seed
    for y in (0, position):
        x = (x + (y + 1) * 0x9E3779B97F4A7C15) & WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        x ^= x >> 31
    return [x & 0xFFFFFFFF, x >> 32]


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_keys_are_those_of_splitmix64(seed, position):
    keys = sampling_keys(torch.tensor([seed]), torch.tensor([position]))
    assert [key % 2**32 for key in keys[0].tolist()] == splitmix(seed, position)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_converted_to_float32(dtype, temperature):
    logits, *numbers = arguments(temperature=temperature)
    chosen = sample_tokens(logits.to(dtype), *numbers)
    assert torch.equal(chosen, sample_tokens(logits.to(dtype).float(), *numbers))


def test_temperature_zero_takes_the_first_of_the_most_likely_tokens():
    _, *numbers = arguments(rows=2, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    assert sample_tokens(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]]), *numbers).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_truncated_leave_all_tokens_whatever_they_ask_for(temperature):
    plain, truncated = arguments(temperature=temperature), arguments(9, 40, temperature, 1, 0.1, 0.9)
    assert torch.equal(sample_tokens(*plain, truncates=False), sample_tokens(*plain))
    assert torch.equal(sample_tokens(*truncated, truncates=False), sample_tokens(*arguments(9, 40, temperature)))


def test_a_row_does_not_depend_on_the_others():
    given = arguments(rows=9)
    given[3][::2], given[4][1::4], given[5][3::4], given[6][5] = 0, 7, 0.5, 0.1
    together = sample_tokens(*given)
    alone = [sample_tokens(*(t[i : i + 1] for t in given)).item() for i in range(9)]
    assert together.tolist() == alone


HOW = pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}], ids=str)


@HOW
def test_logits_with_nan_have_no_token(how):
    logits, *numbers = arguments(**how)
    logits[1, 7] = float("nan")
    assert (sample_tokens(logits, *numbers) == NOT_A_NUMBER).tolist() == [False, True, False, False, False]


@HOW
def test_logits_with_positive_infinity_have_no_token(how):
    logits, *numbers = arguments(**how)
    logits[0, 3], logits[1, 7] = float("inf"), float("inf")
    logits[1, 9] = float("nan")
    chosen = sample_tokens(logits, *numbers).tolist()
    assert chosen[:2] == [POSITIVE_INFINITY, NOT_A_NUMBER]
    assert min(chosen[2:]) >= 0


@HOW
def test_masked_logits_are_never_chosen(how):
    logits, *numbers = arguments(**how)
    logits[0] = logits[1, :39] = logits[2, 1:] = float("-inf")
    assert sample_tokens(logits, *numbers)[:3].tolist() == [ALL_MASKED, 39, 0]


def most_likely(weights: list[int], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that min_p, top_k and top_p leave, one after the other."""
    left = [(weight, token) for token, weight in enumerate(weights) if weight >= max(int(min_p * FIXED_POINT), 1)]
    left = sorted(left, key=lambda entry: (-entry[0], entry[1]))[: top_k or None]
    wanted, found, tokens = top_p * sum(weight for weight, _ in left), 0, set[int]()
    for weight, token in left:
        if found < wanted:
            tokens.add(token)
        found += weight
    return tokens


LOGITS = st.integers(-40, 8).map(lambda x: x / 4) | st.floats(-30, 3, width=32) | st.just(-math.inf)


@given(
    logits=st.lists(LOGITS, min_size=1, max_size=50).filter(lambda logits: max(logits) > -math.inf),
    temperature=st.sampled_from([0.3, 1.0, 7.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 2**31 - 1]),
    top_p=st.sampled_from([5e-324, 1e-9, 0.1, 0.5, 0.9, 1 - 2**-40, 1.0]),
    min_p=st.sampled_from([0.0, 1e-12, 0.01, 0.5, 1.0]),
)
def test_tokens_are_sampled_from_the_most_likely_ones(logits, temperature, top_k, top_p, min_p):
    n = 8
    _, *numbers = arguments(n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits_V = torch.tensor(logits, dtype=torch.float32)
    found = sample_tokens(logits_V.repeat(n, 1), *numbers).tolist()
    if top_p == 1 and min_p == 0 and not 0 < top_k < len(logits):
        left = set(range(len(logits)))
    else:
        weights_V = ((logits_V - logits_V.max()) / numbers[2][0]).exp() * FIXED_POINT
        left = most_likely(weights_V.long().tolist(), top_k, top_p, min_p)
    is_left_out_V = torch.tensor([token not in left for token in range(len(logits))])
    among_those = logits_V.masked_fill(is_left_out_V, -math.inf)
    _, *numbers = arguments(n, temperature=temperature)
    assert found == sample_tokens(among_those.repeat(n, 1), *numbers).tolist()
    assert set(found) <= left


@pytest.mark.parametrize(("how", "n_left"), [({"top_k": 3}, 3), ({"top_p": 0.7}, 7), ({"top_k": 5, "top_p": 0.5}, 3)])
def test_of_equal_logits_the_first_are_left(how, n_left):
    _, *numbers = arguments(400, **how)
    assert set(sample_tokens(torch.zeros(400, 10), *numbers).tolist()) == set(range(n_left))


def test_a_token_that_is_alone_is_chosen_whatever_its_noise_is():
    """Its hash is among the largest 64, which are 1 as FP32 numbers between 0 and 1."""
    _, _, position, temperature, *how = arguments(rows=1)
    logits = torch.full((1, 2000), -math.inf)
    logits[0, 1150] = 0.0
    assert sample_tokens(logits, torch.tensor([68]), position * 0, temperature, *how).tolist() == [1150]


def test_no_rows_have_no_tokens():
    assert sample_tokens(*arguments(rows=0)).shape == (0,)


def test_the_operator_is_well_formed():
    given = arguments(top_k=7, top_p=0.9)
    assert_well_formed(sample_tokens, given)
    assert_fake_is_true(sample_tokens, given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.randn(5, 40).double()}, "logits must be float32, bfloat16 or float16, not torch.float64"),
        ({1: torch.arange(5, dtype=torch.int32)}, "seeds must be int64, not torch.int32"),
        ({3: torch.zeros(5, dtype=torch.float64)}, "temperature must be float32, not torch.float64"),
        ({4: torch.arange(5, dtype=torch.int32)}, "top_k must be int64, not torch.int32"),
        ({5: torch.ones(5)}, "top_p must be float64, not torch.float32"),
    ],
)
def test_another_dtype_is_refused(changed, message):
    with pytest.raises(TypeError, match=message):
        sample_tokens(*(changed.get(i, t) for i, t in enumerate(arguments())))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.randn(5, 40).mT.contiguous().mT}, "rows contiguous, not"),
        ({0: torch.randn(5, 0)}, "V from 1"),
        ({2: torch.arange(4)}, r"positions must be \(5,\), one for each row of logits, not \(4,\)"),
        ({6: torch.zeros(4, dtype=torch.float64)}, r"min_p must be \(5,\), one for each row of logits, not \(4,\)"),
    ],
)
def test_another_shape_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        sample_tokens(*(changed.get(i, t) for i, t in enumerate(arguments())))
