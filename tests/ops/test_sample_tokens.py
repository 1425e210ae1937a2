"""Tests of sampling: what a row chooses depends on itself alone, and its hash is that of SplitMix64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.ops.sample_tokens import ALL_MASKED, NOT_A_NUMBER, POSITIVE_INFINITY, sample_tokens, sampling_keys
from tests.ops.operators import assert_fake_is_true, assert_well_formed

WORD = 2**64 - 1


def arguments(rows=5, vocabulary=40, temperature=1.0):
    torch.manual_seed(0)
    return (
        torch.randn(rows, vocabulary),
        torch.arange(rows) * 2**60 + 3,
        torch.arange(rows) + 7,
        torch.full((rows,), temperature),
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
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    numbers = torch.arange(2)
    assert sample_tokens(logits, numbers, numbers, torch.zeros(2)).tolist() == [1, 0]


def test_a_row_does_not_depend_on_the_others():
    given = arguments(rows=9)
    given[3][::2] = 0
    together = sample_tokens(*given)
    alone = [sample_tokens(*(t[i : i + 1] for t in given)).item() for i in range(9)]
    assert together.tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_with_nan_have_no_token(temperature):
    logits, *numbers = arguments(temperature=temperature)
    logits[1, 7] = float("nan")
    assert (sample_tokens(logits, *numbers) == NOT_A_NUMBER).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_with_positive_infinity_have_no_token(temperature):
    logits, *numbers = arguments(temperature=temperature)
    logits[0, 3], logits[1, 7] = float("inf"), float("inf")
    logits[1, 9] = float("nan")
    chosen = sample_tokens(logits, *numbers).tolist()
    assert chosen[:2] == [POSITIVE_INFINITY, NOT_A_NUMBER]
    assert min(chosen[2:]) >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_logits_are_never_chosen(temperature):
    logits, *numbers = arguments(temperature=temperature)
    logits[0] = logits[1, :39] = logits[2, 1:] = float("-inf")
    assert sample_tokens(logits, *numbers)[:3].tolist() == [ALL_MASKED, 39, 0]


def test_no_rows_have_no_tokens():
    assert sample_tokens(*arguments(rows=0)).shape == (0,)


def test_the_operator_is_well_formed():
    assert_well_formed(sample_tokens, arguments())
    assert_fake_is_true(sample_tokens, arguments())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.randn(5, 40).double()}, "logits must be float32, bfloat16 or float16, not torch.float64"),
        ({1: torch.arange(5, dtype=torch.int32)}, "seeds must be int64, not torch.int32"),
        ({3: torch.zeros(5, dtype=torch.float64)}, "temperature must be float32, not torch.float64"),
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
    ],
)
def test_another_shape_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        sample_tokens(*(changed.get(i, t) for i, t in enumerate(arguments())))
