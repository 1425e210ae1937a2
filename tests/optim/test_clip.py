"""Tests of gradient clipping: every kind of gradient is found and its norm computed in FP32."""

import pytest
import torch

from octile.optim import clip_factor, clip_grad_norm_
from octile.optim.gradient import gradient_norm, gradient_of, load, store_scaled


def with_gradients(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(5, 7), (11,), ()]]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_equals_torch_on_plain_gradients(max_norm):
    ours, theirs = with_gradients(), with_gradients()
    norm = clip_grad_norm_(ours, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_norm_of_bf16_gradients_is_computed_in_fp32():
    params = with_gradients(torch.bfloat16)
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm()
    norm = clip_grad_norm_(params, float("inf"))
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)


def test_clips_main_gradients():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    param.main_grad = torch.full((4,), 3.0)
    assert clip_grad_norm_([param], 1.0) == 6.0
    torch.testing.assert_close(param.main_grad, torch.full((4,), 0.5))


def test_clips_scaled_gradients_by_their_scale_alone():
    param = torch.nn.Parameter(torch.zeros(4))
    store_scaled(param, torch.float8_e4m3fn)
    (param * 3.0).sum().backward()
    data = param.scaled_grad.data.clone()
    norm = clip_grad_norm_([param], 1.0)
    torch.testing.assert_close(norm, torch.tensor(6.0))
    torch.testing.assert_close(load(gradient_of(param)), torch.full((4,), 0.5))
    assert torch.equal(param.scaled_grad.data.float(), data.float())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_returned_and_changes_nothing(broken):
    params = with_gradients()
    params[0].grad[2, 3] = broken
    before = [p.grad.clone() for p in params]
    assert not clip_grad_norm_(params, 1.0).isfinite()
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_the_factor_of_a_norm_is_that_of_the_clipped_gradients(max_norm):
    params = with_gradients()
    before = params[0].grad.clone()
    norm = clip_grad_norm_(params, max_norm)
    assert torch.equal(params[0].grad, before * clip_factor(norm, max_norm))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_the_factor_of_a_norm_that_is_not_finite_is_1(broken):
    assert clip_factor(torch.tensor(broken), 0.5) == 1.0


def test_takes_an_iterator_of_parameters():
    params = with_gradients()
    clip_grad_norm_(iter(params), 1.0)
    assert clip_grad_norm_(params, 1.0) <= 1.0


def test_takes_a_single_parameter():
    parameter = with_gradients()[0]
    norm = clip_grad_norm_(parameter, 1.0)
    assert norm > 1
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(1.0))


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(3))], 1.0) == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_refuses_a_norm_that_is_not_above_zero(max_norm):
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clip_grad_norm_(with_gradients(), max_norm)
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clip_factor(torch.tensor(1.0), max_norm)


# Which gradient is not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("broken", [(), (0,), (1,), (2,), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_gradient_that_is_not_finite_is_found(broken, value, dtype):
    params = with_gradients(dtype)
    for i in broken:
        params[i].grad.view(-1)[-1] = value
    found = gradient_norm(params).last_non_finite
    assert (found.item(), found.dtype, found.shape) == (max(broken, default=-1), torch.int64, ())


def test_finite_gradients_whose_norm_overflows_are_finite():
    params = with_gradients()
    params[0].grad.fill_(3e38)
    assert not clip_grad_norm_(params, 1.0).isfinite()
    assert gradient_norm(params).last_non_finite == -1


def test_parameters_without_a_gradient_count_in_the_index():
    params = with_gradients()
    params[0].grad = None
    params[1].grad[3] = torch.nan
    assert gradient_norm(params).last_non_finite == 1


def test_a_gradient_without_elements_is_finite():
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    assert gradient_norm([empty]).last_non_finite == -1


def test_a_scaled_gradient_that_is_not_finite_is_found():
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    for param in params:
        store_scaled(param, torch.float8_e4m3fn)
    (params[0].sum() + params[1].sum() * torch.inf + params[2].sum()).backward()
    assert gradient_norm(params).last_non_finite == 1


def test_scaled_gradients_count_in_the_index_and_in_the_norm():
    params = with_gradients()
    store_scaled(params[1], torch.float8_e4m3fn)
    params[1].grad = None
    (params[1] * 3.0).sum().backward()
    params[0].grad[0] = torch.nan
    assert gradient_norm(params).last_non_finite == 0
    params[0].grad.fill_(1.0)
    params[2].grad.fill_(2.0)
    torch.testing.assert_close(gradient_norm(params).norm, torch.tensor(35.0 + 11 * 9 + 4).sqrt())
