"""Tests of changes of logits before sampling: distributions of a reference in FP64, independence of the batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.serve.engine import penalties, sampler
from octile.serve.engine.history import History, TokenCounts
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row, choose
from octile.serve.send import send_arrays

PROMPT, GENERATED, END_TOKENS = [3, 3, 5], [1, 7, 1, 2], (0,)
LOGITS = [1.5, 2.0, -0.5, -1.0, 0.3, 1.2, 0.0, 0.8]
N = 6000


def text_of(generated=GENERATED, drafts=(), prompt=PROMPT):
    counts = TokenCounts(prompt)
    counts.read([*prompt, *generated])
    return History(counts, generated, drafts, END_TOKENS)


def changed_logits(sampling: Sampling, generated: list[int]) -> list[float]:
    """Logits by the definitions, in FP64."""
    found = []
    for token, logit in enumerate(LOGITS):
        for word in sampling.bad_words:
            before = list(word[:-1])
            if word[-1] == token and generated[len(generated) - len(before) :] == before:
                logit = -math.inf
        if len(generated) < sampling.min_tokens and token in {*END_TOKENS, *sampling.stop_token_ids}:
            logit = -math.inf
        logit += dict(sampling.logit_bias).get(token, 0.0)
        if token in PROMPT or token in generated:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * generated.count(token)
        logit -= sampling.presence_penalty * (token in generated)
        found.append(logit)
    return found


def probabilities(sampling: Sampling, generated: list[int]) -> list[float]:
    """The probability of each token, by the definitions, in FP64."""
    logits = [logit / sampling.temperature for logit in changed_logits(sampling, generated)]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    weights = [weight if weight >= sampling.min_p else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def penalized(logits, how):
    changes = penalties.logit_changes(how, logits.shape[1])
    arrays = [array for change in changes for array in change.numbers]
    return penalties.changed_logits(logits, changes, send_arrays(arrays, logits.device))


def p_value(tokens: torch.Tensor, expected: list[float]) -> float:
    """That of Pearson's statistic; 0 if a token has appeared whose probability is 0."""
    counts = tokens.bincount(minlength=len(expected)).tolist()
    if any(count and not p for count, p in zip(counts, expected, strict=True)):
        return 0.0
    possible = [(count, p * len(tokens)) for count, p in zip(counts, expected, strict=True) if p]
    statistic = sum((count - n) ** 2 / n for count, n in possible)
    half = torch.tensor([(len(possible) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


EACH = {
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "a repetition_penalty below 1": {"repetition_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "a negative frequency_penalty": {"frequency_penalty": -0.5},
    "presence_penalty": {"presence_penalty": 1.1},
    "logit_bias": {"logit_bias": ((2, 2.0), (1, -1.5))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (4,)},
    "bad_words": {"bad_words": ((6,), (1, 2, 0), (2, 1), (9, 5))},
    "a temperature": {"temperature": 0.7, "min_p": 0.1},
    "all of them": {
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logit_bias": ((7, 1.0), (6, 0.5)),
        "min_tokens": 6,
        "bad_words": ((2, 4),),
        "temperature": 1.4,
    },
}


@pytest.mark.one_case
@pytest.mark.parametrize("fields", EACH.values(), ids=EACH)
def test_tokens_have_the_distribution_of_the_reference(fields):
    sampling = Sampling(**{"temperature": 1.0, **fields})
    rows = [Row(sampling, 11, position, text_of()) for position in range(N)]
    tokens = choose(torch.tensor(LOGITS).repeat(N, 1), rows)
    assert p_value(tokens, probabilities(sampling, GENERATED)) > 1e-3


def test_the_statistic_notices_another_penalty():
    """The test above could fail."""
    sampling = Sampling(temperature=1.0, presence_penalty=1.1)
    rows = [Row(sampling, 11, position, text_of()) for position in range(N)]
    tokens = choose(torch.tensor(LOGITS).repeat(N, 1), rows)
    assert p_value(tokens, probabilities(replace(sampling, presence_penalty=0.9), GENERATED)) < 1e-3


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("fields", EACH.values(), ids=EACH)
def test_drafts_count_as_generated_tokens(fields, drafts):
    sampling, n = Sampling(**fields), len(GENERATED) - drafts
    text = text_of(GENERATED[:n], GENERATED[n:])
    (found,) = penalized(torch.tensor([LOGITS]), [(sampling, text)]).tolist()
    assert found == pytest.approx(changed_logits(sampling, GENERATED), rel=1e-6, abs=1e-6)


def test_a_text_without_generated_tokens_has_penalties_of_its_prompt_alone():
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=1.0, bad_words=((1, 2), (6,)))
    (found,) = penalized(torch.tensor([LOGITS]), [(sampling, text_of([]))]).tolist()
    assert found == pytest.approx(changed_logits(sampling, []), rel=1e-6)


def test_greedy_texts_follow_the_changed_logits():
    rows = [Row(Sampling(logit_bias=((6, 9.0),)), 0, 0, text_of()), Row(Sampling(), 0, 0)]
    assert choose(torch.tensor(LOGITS).repeat(2, 1), rows).tolist() == [6, 1]


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (Sampling(temperature=0.5, top_k=3), None),
        (Sampling(presence_penalty=1.0), text_of([])),  # nothing is generated that it could be subtracted from
    ],
)
def test_logits_that_no_row_changes_are_not_copied(sampling, text, monkeypatch):
    read = []
    monkeypatch.setattr(sampler, "sample_tokens", lambda logits, *how: read.append(logits))
    logits = torch.tensor([LOGITS])
    choose(logits, [Row(sampling, 0, 0, text)])
    assert read[0] is logits


def test_the_given_logits_are_not_changed():
    logits = torch.tensor([LOGITS])
    penalized(logits, [(Sampling(presence_penalty=1.0), text_of())])
    assert logits.tolist() == torch.tensor([LOGITS]).tolist()


@pytest.mark.parametrize("masked", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("vocabulary", [64, 70])
def test_tokens_that_a_grammar_does_not_allow_are_masked(masked, vocabulary):
    draw = torch.Generator().manual_seed(vocabulary)
    logits, allows = torch.randn(3, vocabulary, generator=draw), torch.rand(3, vocabulary, generator=draw) < 0.5
    how = []
    for i, allowed in enumerate(allows):
        bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
        bits[:vocabulary] = allowed
        words = np.packbits(bits, bitorder="little").view(np.int32)
        history = text_of()._replace(mask=words) if i in masked else text_of()
        how.append((Sampling(grammar="start: /a/"), history))
        if i not in masked:
            allows[i] = True
    assert torch.equal(penalized(logits, how), logits.masked_fill(~allows, -torch.inf))


def test_end_tokens_beyond_the_vocabulary_change_no_other_row():
    how = [(Sampling(min_tokens=9), text_of()._replace(end_tokens=(2, 8, 9))), (Sampling(), None)]
    first, second = penalized(torch.tensor([LOGITS] * 2), how).tolist()
    assert first == [*LOGITS[:2], -math.inf, *torch.tensor(LOGITS[3:]).tolist()]
    assert second == torch.tensor(LOGITS).tolist()


@given(st.lists(st.sampled_from(list(EACH)), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_row_has_the_same_bits_in_any_batch(names, seed):
    logits = torch.randn(len(names), len(LOGITS), generator=torch.Generator().manual_seed(seed))
    how = [(Sampling(**EACH[name]), text_of(GENERATED[: i % 5])) for i, name in enumerate(names)]
    alone = [penalized(logits[i : i + 1], how[i : i + 1]) for i in range(len(how))]
    assert torch.equal(penalized(logits, how), torch.cat(alone))
