"""The functions of GRPO, compared with float64 references, and their properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octile.rl.grpo import (
    EPSILON,
    completion_mean,
    group_advantages,
    importance_weights,
    kl_k3,
    token_losses,
)

SHAPE = st.tuples(st.integers(1, 4), st.integers(2, 6))
rewards = SHAPE.flatmap(lambda shape: arrays(np.float64, shape, elements=st.floats(-100, 100)))
log_probs = arrays(np.float64, (3, 5), elements=st.floats(-20, 0))
advantages = arrays(np.float64, (3,), elements=st.floats(-5, 5))


@given(rewards)
def test_advantages_are_rewards_minus_their_mean_over_their_standard_deviation(rewards_PG):
    found = group_advantages(torch.from_numpy(rewards_PG)).numpy()
    for row, group in zip(found, rewards_PG, strict=True):
        mean = math.fsum(group) / len(group)
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / len(group))
        np.testing.assert_allclose(row, (group - mean) / (deviation + EPSILON), rtol=1e-6, atol=1e-7)


@given(rewards, st.floats(-10, 10))
def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_a_common_reward(rewards_PG, common):
    first, second = (group_advantages(torch.from_numpy(r)) for r in (rewards_PG, rewards_PG + common))
    torch.testing.assert_close(first.sum(1), torch.zeros(len(first), dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 9))
def test_a_group_of_equal_rewards_has_zero_advantages(reward, size):
    assert not group_advantages(torch.full((1, size), reward)).any()


@given(log_probs, log_probs)
def test_the_estimate_of_the_divergence_is_that_of_float64_and_never_negative(new, reference):
    found = kl_k3(torch.from_numpy(new), torch.from_numpy(reference)).numpy()
    np.testing.assert_allclose(found, np.expm1(reference - new) - (reference - new), rtol=1e-12)
    assert (found >= 0).all()


def test_the_estimate_of_the_divergence_has_the_divergence_as_its_mean():
    new, reference = (torch.randn(50, generator=torch.manual_seed(i)).double().log_softmax(0) for i in (0, 1))
    expected = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close((new.exp() * kl_k3(new, reference)).sum(), expected)


def reference_loss(new, old, ref, advantage, clip, beta, weight):
    ratio = math.exp(new - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
    d = ref - new
    return -weight * surrogate + beta * (math.expm1(d) - d)


@given(log_probs, log_probs, log_probs, advantages, st.floats(0.05, 0.9), st.floats(0, 1), st.floats(0.5, 3))
def test_losses_of_tokens_are_those_of_a_reference_in_float64(new, old, ref, advantages_B, clip, beta, limit):
    tensors = [torch.from_numpy(x) for x in (new, old, ref)]
    weights = importance_weights(tensors[1], tensors[2], limit)
    found = token_losses(
        *tensors[:2],
        torch.from_numpy(advantages_B),
        clip,
        reference_BT=tensors[2],
        kl_coefficient=beta,
        weights_BT=weights,
    )
    for (row, column), value in np.ndenumerate(found.loss.numpy()):
        n, o, r = new[row, column], old[row, column], ref[row, column]
        weight = min(math.exp(o - r), limit)
        assert value == pytest.approx(reference_loss(n, o, r, advantages_B[row], clip, beta, weight), rel=1e-9)


@given(log_probs, advantages, st.floats(0.05, 0.9))
def test_where_nothing_has_changed_the_gradient_is_the_advantage_and_nothing_is_clipped(new, advantages_B, clip):
    new_BT = torch.from_numpy(new).requires_grad_()
    found = token_losses(new_BT, new_BT.detach(), torch.from_numpy(advantages_B), clip)
    found.loss.sum().backward()
    assert not found.is_clipped.any()
    np.testing.assert_allclose(new_BT.grad.numpy(), np.broadcast_to(-advantages_B[:, None], new.shape))


@given(log_probs, log_probs, advantages, st.floats(0.05, 0.9))
def test_a_clipped_token_has_no_gradient_and_others_have_one_where_the_advantage_has(new, old, advantages_B, clip):
    new_BT = torch.from_numpy(new).requires_grad_()
    found = token_losses(new_BT, torch.from_numpy(old), torch.from_numpy(advantages_B), clip)
    found.loss.sum().backward()
    assert not new_BT.grad[found.is_clipped].any()
    ratio, advantage = np.exp(new - old), np.broadcast_to(advantages_B[:, None], new.shape)
    inside = (ratio > 1 - clip) & (ratio < 1 + clip)
    assert not found.is_clipped.numpy()[inside].any()
    np.testing.assert_allclose(new_BT.grad.numpy()[inside], (-advantage * ratio)[inside])


@given(log_probs)
def test_equal_bits_have_importance_weights_of_one(old):
    old_BT = torch.from_numpy(old)
    assert (importance_weights(old_BT, old_BT, 1.0) == 1).all()


def test_the_mean_is_that_of_each_completion_and_then_of_all():
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.nan, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = completion_mean(values, mask)
    found.backward()
    assert found.item() == (1.5 + 4) / 2
    assert values.grad.tolist() == [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]


@given(log_probs, st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_the_mean_is_that_of_float64(values, lengths):
    mask = np.arange(5) < np.array(lengths)[:, None]
    expected = np.mean([row[:length].mean() for row, length in zip(values, lengths, strict=True)])
    found = completion_mean(torch.from_numpy(values), torch.from_numpy(mask)).item()
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


ROWS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: group_advantages(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "rewards must be floating point"),
        (lambda: group_advantages(torch.zeros(2, 1)), ValueError, r"2 completions or more\], not \[2, 1\]"),
        (lambda: group_advantages(torch.tensor([[1.0, math.nan]])), ValueError, "rewards must be finite"),
        (lambda: group_advantages(ROWS, 0.0), ValueError, "eps must be above 0, not 0.0"),
        (lambda: kl_k3(ROWS, ROWS[:1]), ValueError, r"reference must be \[2, 3\], not \[1, 3\]"),
        (lambda: importance_weights(ROWS, ROWS[:, :1], 1), ValueError, r"engine must be \[2, 3\]"),
        (lambda: importance_weights(ROWS, ROWS, 0), ValueError, "limit must be above 0, not 0"),
        (lambda: token_losses(ROWS, ROWS[:1], ROWS[:, 0], 0.2), ValueError, r"old must be \[2, 3\]"),
        (lambda: token_losses(ROWS, ROWS, ROWS[0], 0.2), ValueError, r"advantages must be \[2\], not \[3\]"),
        (lambda: token_losses(ROWS, ROWS, ROWS[:, 0], 1.0), ValueError, "clip must be above 0 and below 1, not 1.0"),
        (
            lambda: token_losses(ROWS, ROWS, ROWS[:, 0], 0.2, kl_coefficient=-1.0),
            ValueError,
            "kl_coefficient must be at least 0, not -1.0",
        ),
        (
            lambda: token_losses(ROWS, ROWS, ROWS[:, 0], 0.2, kl_coefficient=0.1),
            ValueError,
            "reference is missing, which kl_coefficient above 0 needs",
        ),
        (lambda: completion_mean(ROWS, ROWS), TypeError, "mask must be bool"),
        (lambda: completion_mean(ROWS, ROWS.bool()), ValueError, "mask must have a token of each completion"),
    ],
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
