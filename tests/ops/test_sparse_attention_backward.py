"""Tests of sparse attention's backward pass: the gradients of autograd in float64, of top-k rows alone."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops import sparse_attention as forward
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.paged_keys import int32
from tests.ops.sparse_attention_definition import Case, attention, cases

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
POSITIONS = int32([[3, 7, -1, -1], [39, 0, 1, 2], [-1, -1, -1, -1], [-1, 5, -1, 9], [8, -1, -1, -1], [4, 3, 2, 1]])


def a_case(dtype: torch.dtype = torch.float32, positions: Tensor = POSITIONS) -> Case:
    generator = torch.Generator().manual_seed(0)
    q, latents = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 3, 24), (40, 24)))
    return Case(q, latents, positions, 16, 0.2)


def gradient_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*case.q.shape[:2], case.latent_dim, generator=generator).to(case.q.dtype)


def gradients(case: Case, do: Tensor) -> tuple[Tensor, Tensor]:
    q, latents, positions, c, scale = case
    return sparse_attention_backward(do, q, latents, positions, *sparse_attention_with_lse(*case), c, scale)


def expected(case: Case, do: Tensor) -> tuple[Tensor, ...]:
    inputs = [t.double().requires_grad_() for t in (case.q, case.latents)]
    return torch.autograd.grad(attention(case, *inputs), inputs, do.double())


def assert_close(found: tuple[Tensor, Tensor], exact: tuple[Tensor, ...], case: Case) -> None:
    """Check the gradients: those of rows have errors of o alone, which is saved in q's dtype, and of FP32."""
    rounding = ROUNDING[case.q.dtype]
    assert [t.dtype for t in found] == [case.q.dtype, torch.float32]
    for ours, theirs in zip(found, exact, strict=True):
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours.double(), theirs, rtol=rounding, atol=30 * rounding * max(largest, 1.0))


@given(cases())
def test_gradients_are_those_of_dense_attention(case: Case):
    do = gradient_of(case)
    assert_close(gradients(case, do), expected(case, do), case)


@given(cases(), st.data())
def test_rows_outside_the_top_k_have_no_gradient_and_are_not_read(case: Case, data: st.DataObject):
    do, unread = gradient_of(case), ~case.is_in_top_k.any(0)
    dq, dlatents = gradients(case, do)
    assert not dlatents[unread].any()
    assert not dq[~case.is_in_top_k.any(1)].any()
    latents = case.latents.masked_fill(unread[:, None], data.draw(st.sampled_from([math.nan, math.inf])))
    for ours, before in zip(gradients(case._replace(latents=latents), do), (dq, dlatents), strict=True):
        assert torch.equal(ours, before)


@pytest.mark.parametrize("max_elements", [1, 300])
def test_gradients_do_not_depend_on_the_blocks_of_queries(max_elements: int, monkeypatch: pytest.MonkeyPatch):
    case = a_case()
    do = gradient_of(case)
    whole = gradients(case, do)
    monkeypatch.setattr(forward, "MAX_ELEMENTS", max_elements)
    torch.testing.assert_close(gradients(case, do), whole, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_the_only_position_is_that_of_a_copy():
    case = a_case(positions=int32([[5]]).expand(6, 1))
    do = gradient_of(case)
    dq, dlatents = gradients(case, do)
    torch.testing.assert_close(dq, torch.zeros_like(dq), rtol=0, atol=1e-6)
    torch.testing.assert_close(dlatents[5, :16], do.sum((0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ugly", [math.nan, math.inf])
def test_a_query_without_positions_adds_nothing_whatever_its_gradient(ugly: float):
    case = a_case()
    do = gradient_of(case)
    before = gradients(case, do)
    do[2], case.q[2] = ugly, ugly
    for ours, theirs in zip(gradients(case, do), before, strict=True):
        assert torch.equal(ours, theirs)


def test_a_nan_of_a_query_reaches_its_own_rows_alone():
    case = a_case()
    do = gradient_of(case)
    do[3, 1] = math.nan
    dq, dlatents = gradients(case, do)
    assert dq.isnan().any(-1).nonzero().tolist() == [[3, 1]]
    assert dlatents.isnan().any(-1).nonzero().flatten().tolist() == [5, 9]


def test_it_reads_the_output_and_lse_that_it_is_given():
    q, latents, positions, c, scale = case = a_case()
    do, (o, lse) = gradient_of(case), sparse_attention_with_lse(*case)
    before = sparse_attention_backward(do, q, latents, positions, o, lse, c, scale)
    for other in ((2 * o, lse), (o, lse + 1)):
        found = sparse_attention_backward(do, q, latents, positions, *other, c, scale)
        assert not any(torch.allclose(a, b) for a, b in zip(found, before, strict=True))


def test_scores_far_above_and_below_have_finite_gradients():
    case = a_case()._replace(scale=1e4)
    assert all(t.isfinite().all() for t in gradients(case, gradient_of(case)))


@pytest.mark.parametrize("positions", [POSITIONS[:, :0], POSITIONS.clamp(max=-1)])
def test_without_positions_gradients_are_zero(positions: Tensor):
    case = a_case(positions=positions)
    assert not any(t.any() for t in gradients(case, gradient_of(case)))


def test_gradients_are_the_same_bits_at_every_call():
    case = a_case()
    do = gradient_of(case)
    first = gradients(case, do)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(case, do), first, strict=True))


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    case = a_case(dtype)
    o, lse = sparse_attention_with_lse(*case)
    named = case._asdict()
    of_forward = {"positions": named["positions"], "o": o, "lse": lse}
    last = {"latent_dim": case.latent_dim, "scale": case.scale}
    return {"do": gradient_of(case), "q": case.q, "latents": case.latents, **of_forward, **last}


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_well_formed(dtype: torch.dtype):
    assert_well_formed(sparse_attention_backward, [*arguments(dtype).values()])
    assert_fake_is_true(sparse_attention_backward, [*arguments(dtype).values()])


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("do", lambda t: t.double(), TypeError, "do must be torch.float32 as q, not torch.float64"),
        ("do", lambda t: t[1:], ValueError, r"do must be \(6, 3, 16\), not \(5, 3, 16\)"),
        ("do", lambda t: t.to("meta"), ValueError, "do is on meta but q on cpu"),
        ("q", lambda t: t.double(), TypeError, "q must be float32"),
        ("q", lambda t: t[0], ValueError, r"q must be \[S, H, W\]"),
        ("latents", lambda t: t.byte(), TypeError, "latents must be float32, bfloat16 or float16, not FP8 rows"),
        ("latents", lambda t: t[:, 1:], ValueError, "q must have the 23 channels of latents, not 24"),
        ("positions", lambda t: t.long(), TypeError, "positions must be int32"),
        ("positions", lambda t: t + 1, ValueError, "positions must be from -1 to below 40, not from 0 to 40"),
        ("o", lambda t: t.bfloat16(), TypeError, "o must be torch.float32 as q, not torch.bfloat16"),
        ("o", lambda t: t[..., 1:], ValueError, r"o must be \(6, 3, 16\), not \(6, 3, 15\)"),
        ("lse", lambda t: t.double(), TypeError, "lse must be float32, not torch.float64"),
        ("lse", lambda t: t.mT, ValueError, r"lse must be \(6, 3\), not \(3, 6\)"),
        ("latent_dim", lambda _: 25, ValueError, "latent_dim must be from 1 to the 24 channels, not 25"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Any, error: type[Exception], message: str):
    given = arguments()
    given[name] = change(given[name])
    with pytest.raises(error, match=message):
        sparse_attention_backward(*given.values())
