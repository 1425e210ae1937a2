"""Tests of sparse attention's weights: the mean of the heads' softmax over the top-k positions."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from octile.ops import sparse_attention as forward
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_weights import sparse_attention_weights
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.sparse_attention_definition import Case, cases, weights_of
from tests.ops.test_sparse_attention_backward import POSITIONS, a_case


def weights(case: Case) -> Tensor:
    *operands, c, scale = case
    return sparse_attention_weights(*operands, sparse_attention_with_lse(*case)[1], c, scale)


@given(cases())
def test_weights_are_the_mean_of_the_heads(case: Case):
    found = weights(case)
    exact = weights_of(case, case.q.double(), case.latents.double()).mean(1)
    exact = exact.gather(1, case.positions.clamp(min=0).long()).masked_fill(case.positions < 0, 0.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    has_position = (case.positions >= 0).any(1)
    torch.testing.assert_close(found.sum(1), has_position.float(), rtol=1e-5, atol=1e-5)


def test_what_is_absent_or_outside_the_top_k_is_not_read():
    case = a_case()
    before = weights(case)
    latents = case.latents.masked_fill(~case.is_in_top_k.any(0)[:, None], math.nan)
    q = case.q.clone()
    q[2] = math.nan  # it has no position
    assert torch.equal(weights(case._replace(q=q, latents=latents)), before)
    assert torch.equal(before == 0, POSITIONS < 0)


@pytest.mark.parametrize("max_elements", [1, 300])
def test_weights_do_not_depend_on_the_blocks_of_queries(max_elements: int, monkeypatch: pytest.MonkeyPatch):
    whole = weights(a_case())
    monkeypatch.setattr(forward, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(weights(a_case()), whole, rtol=1e-6, atol=1e-6)


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    case = a_case(dtype)
    lse = sparse_attention_with_lse(*case)[1]
    operands = {"q": case.q, "latents": case.latents, "positions": case.positions}
    return {**operands, "lse": lse, "latent_dim": case.latent_dim, "scale": case.scale}


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_well_formed(dtype: torch.dtype):
    assert_well_formed(sparse_attention_weights, [*arguments(dtype).values()])
    assert_fake_is_true(sparse_attention_weights, [*arguments(dtype).values()])


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("q", lambda t: t.double(), TypeError, "q must be float32"),
        ("latents", lambda t: t[:, 1:], ValueError, "q must have the 23 channels of latents, not 24"),
        ("positions", lambda t: t - 1, ValueError, "positions must be from -1 to below 40, not from -2 to 38"),
        ("lse", lambda t: t.bfloat16(), TypeError, "lse must be float32, not torch.bfloat16"),
        ("lse", lambda t: t[1:], ValueError, r"lse must be \(6, 3\), not \(5, 3\)"),
        ("lse", lambda t: t.to("meta"), ValueError, "q is on cpu but lse on meta"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Any, error: type[Exception], message: str):
    given = arguments()
    given[name] = change(given[name])
    with pytest.raises(error, match=message):
        sparse_attention_weights(*given.values())
