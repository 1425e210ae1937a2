"""Tests of the norms of gradients: exact arithmetic, values that are not finite, and refusals."""

import pytest
import torch

from octile.ops.gradient_norms import gradient_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_computed_in_fp32(dtype: torch.dtype):
    torch.manual_seed(0)
    gradients = [torch.randn(shape).to(dtype) for shape in ((5, 7), (1000,), ())]
    found = gradient_norms(gradients)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack([g.double().norm() for g in gradients]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_the_norm_of_a_broken_tensor_is_nan(bad: float):
    gradients = [torch.ones(3), torch.tensor([1.0, bad]), torch.ones(5)]
    assert gradient_norms(gradients).isnan().tolist() == [False, True, False]


def test_a_norm_of_finite_elements_that_overflows_is_inf():
    gradients = [torch.full((5,), 3e38), torch.tensor([3e38, torch.inf]), torch.ones(5)]
    torch.testing.assert_close(gradient_norms(gradients), torch.tensor([torch.inf, torch.nan, 5**0.5]), equal_nan=True)


def test_the_norm_of_an_empty_tensor_is_zero():
    assert gradient_norms([torch.ones(4), torch.empty(0, 3)]).tolist() == [2.0, 0.0]


def test_it_is_a_well_formed_operator():
    torch.library.opcheck(gradient_norms.overload, ([torch.randn(5, 7), torch.randn(3).bfloat16()],))


def test_it_refuses_other_dtypes_and_no_tensors():
    with pytest.raises(TypeError, match=r"gradients\[1\] must be float32, bfloat16 or float16, not"):
        gradient_norms([torch.ones(3), torch.ones(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match="gradients must have at least one tensor"):
        gradient_norms([])
