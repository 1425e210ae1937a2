"""Tests of what a request may ask for."""

import pickle
from dataclasses import dataclass, fields

import pytest

from octile.serve.engine.request import (
    OF_ENGINE,
    OF_LOGITS,
    OF_OPERATOR,
    OF_PROMPT,
    OF_TEXT,
    RequestFactory,
    Sampling,
)

OTHERS = {  # a value of each field that is not its default
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "top_k": 4,
    "stop": ("end",),
    "logprobs": 1,
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": ((3, 1.0),),
    "stop_token_ids": (5,),
    "min_tokens": 2,
    "bad_words": ((1, 2),),
    "skip_special_tokens": True,
    "shown_tokens": (3,),
    "grammar": 'start: "a"',
}


@dataclass(frozen=True)
class WithTypicalP(Sampling):
    """A sampling with a field that is in no set."""

    typical_p: float = 1.0


def test_every_field_is_honored_by_one_part():
    honored = [*OF_OPERATOR, *OF_ENGINE, *OF_LOGITS, *OF_PROMPT, *OF_TEXT]
    assert sorted(honored) == sorted(f.name for f in fields(Sampling)) == sorted(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_only_fields_of_operator_and_engine_and_of_prompts_join_decode_steps(name):
    sampling = Sampling(**{"temperature": 1.0, name: OTHERS[name]})
    assert sampling.joins_decode_steps == (name in OF_OPERATOR | OF_ENGINE | OF_PROMPT)
    assert sampling.changes_logits == (name in OF_TEXT)


def test_log_probabilities_of_chosen_tokens_join_decode_steps_and_those_of_others_do_not():
    assert [Sampling(logprobs=n).joins_decode_steps for n in (None, 0, 1)] == [True, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_field_that_nobody_honors_joins_no_decode_step(temperature):
    unset, given = WithTypicalP(temperature=temperature), WithTypicalP(temperature=temperature, typical_p=0.9)
    assert unset.joins_decode_steps
    assert not given.joins_decode_steps


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
        ({"min_p": 1.5}, "min_p must be from 0 to 1, not 1.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be from 1.2e-38 to 3.4e\+38, not 0.0"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty must be from 1.2e-38 to 3.4e\+38, not inf"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be from -2 to 2, not 2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be from -2 to 2, not nan"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias must have numbers from -100 to 100"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias must have each token once"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens must be from 0 to max_new_tokens, 8, not 9"),
        ({"grammar": 'start: "a"', "min_tokens": 1}, "min_tokens must be 0 for a text that follows a grammar, not 1"),
        ({"bad_words": ((1,), ())}, "bad_words must have sequences of at least one token"),
        ({"stop_token_ids": tuple(range(1025))}, "stop_token_ids must have at most 1024 tokens, not 1025"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ({"top_k": "1"}, "top_k must be a whole number, not '1'"),
        ({"logprobs": 1.5}, "logprobs must be a whole number or null, not 1.5"),
        ({"temperature": None}, "temperature must be a number, not None"),
    ],
)
def test_settings_of_another_type_are_refused(settings, message):
    with pytest.raises(TypeError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("seed", [True, 1.5, "1"])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(TypeError, match=f"seed must be a whole number or null, not {seed!r}"):
        Sampling(seed=seed)


def test_a_stop_that_is_one_string_is_refused():
    with pytest.raises(TypeError, match="stop must be a tuple of strings, not 'end'"):
        Sampling(stop="end")


def test_later_requests_have_larger_ids():
    factory = RequestFactory(10, 1000)
    requests = [*factory.make([1], Sampling(), Sampling()), *factory.make([2], Sampling())]
    assert [request.id for request in requests] == [0, 1, 2]


def test_a_seed_is_drawn_if_none_is_given():
    requests = RequestFactory(10, 100).make([1], *[Sampling(1, seed=None)] * 4, Sampling(1, seed=7))
    assert len({request.seed for request in requests}) == 5
    assert requests[-1].seed == 7


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt must have at least one token"),
        ([1, 10], "prompt has the token 10, but the model's vocabulary has 10, from 0 to 9"),
        ([-1], "prompt has the token -1"),
        ([1] * 92, r"prompt has 92 tokens and max_new_tokens is 9: together they must not exceed the context of 100"),
    ],
)
def test_what_a_model_cannot_continue_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        RequestFactory(10, 100).make(prompt, Sampling(8), Sampling(9))


def test_another_process_gets_a_request_as_it_was_made():
    (request,) = RequestFactory(10, 100).make([1, 2], Sampling(8, seed=None))
    request.tokens.append(3)
    request.n_computed = 2
    received = pickle.loads(pickle.dumps(request))
    assert (received.id, received.prompt, received.sampling, received.seed) == (
        request.id, (1, 2), request.sampling, request.seed
    )  # fmt: skip
    assert (received.tokens.tolist(), received.n_computed) == ([1, 2], 0)
