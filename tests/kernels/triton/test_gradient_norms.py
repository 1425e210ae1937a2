"""The Triton kernels of the norms of gradients equal exact arithmetic and depend on no order of programs."""

import pytest
import torch

from octile.kernels.triton import gradient_norms as kernel
from octile.kernels.triton.launch_config import GRADIENT_NORMS, GRADIENT_NORMS_SUM
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
ELEMENTS = GRADIENT_NORMS["ELEMENTS"]


@pytest.mark.one_case
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16]], ids=str)
@pytest.mark.parametrize("sizes", [[1], [ELEMENTS], [3, 0, 2 * ELEMENTS + 5, 1], [*range(30)]], ids=len)
def test_they_equal_exact_norms(sizes: list[int], dtypes: list[torch.dtype]):
    torch.manual_seed(0)
    gradients = [torch.randn(size).to(dtypes[i % len(dtypes)]) for i, size in enumerate(sizes)]
    expected = torch.stack([g.double().norm() for g in gradients])
    torch.testing.assert_close(kernel.launch(gradients).double(), expected, rtol=2.0**-20, atol=0)


@pytest.mark.slow
def test_a_tensor_with_more_partial_sums_than_a_program_adds_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(GRADIENT_NORMS, "ELEMENTS", 2)
    sizes = [5, 4 * GRADIENT_NORMS_SUM["ELEMENTS"] + 3, 1]
    found = kernel.launch([torch.ones(size) for size in sizes])
    torch.testing.assert_close(found, torch.tensor([float(size) for size in sizes]).sqrt())


def test_addresses_may_be_unaligned():
    gradients = [torch.ones(ELEMENTS + 3)[i:] for i in range(3)]
    torch.testing.assert_close(kernel.launch(gradients), torch.tensor([len(g) for g in gradients]).sqrt())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [2, ELEMENTS], ids=["masked", "whole"])
def test_only_the_norm_of_a_broken_tensor_is_nan(bad: float, size: int):
    broken = torch.ones(size)
    broken[1] = bad
    assert kernel.launch([torch.ones(3), broken, torch.ones(5)]).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_finite_elements_that_overflows_is_inf(dtype: torch.dtype):
    huge, broken = torch.full((2 * ELEMENTS,), 3e38), torch.tensor([3e38, torch.inf])
    found = kernel.launch([huge.to(dtype), broken.to(dtype), torch.ones(4, dtype=dtype)])
    torch.testing.assert_close(found, torch.tensor([torch.inf, torch.nan, 2.0]), equal_nan=True)
