"""Tests of what a request may ask for."""

import pytest

from octile.serve.request import Sampling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 1, not -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -0.5}, "temperature must be 0, or from"),
        ({"temperature": float("nan")}, "temperature must be 0, or from"),
        ({"temperature": float("inf")}, "temperature must be 0, or from"),
        ({"temperature": 1e-300}, r"temperature must be 0, or from 1.2e-38 to 3.4e\+38, not"),
        ({"temperature": 1e300}, r"from 1.2e-38 to 3.4e\+38, not 1e\+300"),
        ({"seed": 2**70}, "seed must be at most 9,223,372,036,854,775,807"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k must be from 0 to 2147483647, not -1"),
        ({"top_k": 10**30}, "top_k must be from 0 to 2147483647, not 10"),
        ({"stop": ("",)}, "none of them empty"),
        ({"stop": ("a",) * 33}, "stop must have at most 32 strings"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, not 21"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("seed", [True, 1.5, "1"])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(TypeError, match=f"seed must be a whole number or null, not {seed!r}"):
        Sampling(seed=seed)


def test_a_stop_that_is_one_string_is_refused():
    with pytest.raises(TypeError, match="stop must be a tuple of strings, not 'end'"):
        Sampling(stop="end")
