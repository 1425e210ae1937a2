"""Tests of AdamW with moments, master weights and gradients in small formats: error vs. FP32 and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from octile.optim import AdamW
from octile.recipe import OptimizerFormats
from tests.optim.conftest import ALL_FORMATS, FP8_LM, FP32_MOMENTS, backward, parameters, train

# ---- Small moments ----


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), log2_range=st.floats(0, 4))
def test_bf16_second_moment_stays_within_its_interval(seed, log2_range):
    """v± ← (1 ± 2⁻⁸)(β₂ v± + (1 − β₂) g²), whatever the gradients."""
    generator = torch.Generator().manual_seed(seed)
    param = nn.Parameter(torch.zeros(200))
    optimizer = AdamW([param], 1e-3)
    low = high = torch.zeros(200, dtype=torch.float64)
    for _ in range(40):
        normal, exponent = (torch.randn(200, generator=generator) for _ in range(2))
        param.grad = normal * torch.exp2(exponent * log2_range)
        optimizer.step()
        g2 = param.grad.double().square()
        low, high = ((1 + s * 2.0**-8) * (0.95 * v + 0.05 * g2) for s, v in ((-1, low), (1, high)))
        v = optimizer.state[param]["exp_avg_sq"].double()
        assert ((v >= low * (1 - 1e-5)) & (v <= high * (1 + 1e-5))).all()


def test_bf16_second_moment_of_steady_gradients_is_within_8_percent():
    param = nn.Parameter(torch.zeros(1000))
    optimizer = AdamW([param], 1e-3)
    g = torch.linspace(1e-4, 1, 1000)
    for _ in range(200):
        param.grad = g
        optimizer.step()
    v = optimizer.state[param]["exp_avg_sq"].double() / g.double().square()
    assert (v - 1).abs().max() < 2**-8 / 0.05


@pytest.mark.one_case
@pytest.mark.parametrize(("formats", "bound"), [(OptimizerFormats(), 0.005), (FP8_LM, 0.06)], ids=["bf16", "fp8_lm"])
def test_small_formats_move_the_weights_like_fp32(formats, bound):
    """Relative L2 distance of what 50 steps on gradients like noise did to the weights."""
    start, exact, small = parameters(), parameters(), parameters()
    train(AdamW(exact, 1e-3, formats=FP32_MOMENTS), exact, range(50))
    train(AdamW(small, 1e-3, formats=formats), small, range(50))
    moved, moved_exactly = (
        torch.cat([(p - s).detach().flatten() for p, s in zip(params, start, strict=True)]) for params in (small, exact)
    )
    distance = (moved - moved_exactly).norm() / moved_exactly.norm()
    assert distance < bound


@pytest.mark.parametrize(
    ("betas", "formats", "names"),
    [
        ((0.9, 0.999), OptimizerFormats(), r"betas\[1\]=0.999 .* bfloat16 exp_avg_sq"),
        ((0.997, 0.95), OptimizerFormats(), r"betas\[0\]=0.997 .* bfloat16 exp_avg"),
        ((0.95, 0.95), FP8_LM, r"betas\[0\]=0.95 .* float8_e4m3fn exp_avg"),
    ],
)
def test_refuses_a_moment_that_would_never_decay(betas, formats, names):
    with pytest.raises(ValueError, match=names):
        AdamW(parameters(), 1e-3, betas=betas, formats=formats)


@given(beta=st.floats(0.5, 0.996))
def test_every_accepted_beta_lets_every_bf16_number_decay(beta):
    AdamW(parameters(), 1e-3, betas=(beta, beta))
    x = (torch.arange(128) / 128 + 1).to(torch.bfloat16)
    assert ((x.float() * beta).to(torch.bfloat16) < x).all()


# ---- Masters ----


def test_bf16_parameters_add_up_steps_too_small_for_bf16():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        param.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["master"], torch.full((4,), 0.99), rtol=1e-4, atol=0)
    assert torch.equal(param.detach(), optimizer.state[param]["master"].bfloat16())


def test_reads_main_grad_in_full_precision():
    exact, bf16 = parameters(shapes=[(40, 30)]), parameters(torch.bfloat16, [(40, 30)])
    exact[0].data = bf16[0].detach().float()
    gradient = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    exact[0].grad, bf16[0].main_grad = gradient, gradient.clone()
    optimizer = AdamW(bf16, 1e-2)
    optimizer.step()
    AdamW(exact, 1e-2).step()
    assert torch.equal(optimizer.state[bf16[0]]["master"], exact[0])


def test_zero_grad_keeps_the_main_grad_buffer():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.main_grad = buffer = torch.ones(3)
    AdamW([param], 0.1).zero_grad()
    assert param.main_grad is buffer
    assert buffer.eq(0).all()


def test_refuses_a_gradient_in_two_places():
    param = nn.Parameter(torch.ones(3))
    param.grad, param.main_grad = torch.ones(3), torch.ones(3)
    with pytest.raises(RuntimeError, match="grad and main_grad"):
        AdamW([param], 0.1).step()


# ---- FP8-LM ----


def test_fp8_lm_stores_what_its_paper_says():
    params = parameters()
    optimizer = AdamW(params, 1e-2, formats=FP8_LM)
    train(optimizer, params, range(2))
    state = optimizer.state[params[0]]
    assert (
        state["master"].dtype,
        state["exp_avg"].dtype,
        state["exp_avg_sq"].dtype,
        params[0].scaled_grad.data.dtype,
    ) == (
        torch.float16,
        torch.float8_e4m3fn,
        torch.float16,
        torch.float8_e4m3fn,
    )


def test_fp8_lm_stores_no_high_precision_gradient_after_backward():
    params = parameters()
    AdamW(params, 1e-2, formats=FP8_LM)
    backward(params, 0)
    assert all(p.grad is None for p in params)


def test_fp8_lm_weights_are_its_masters():
    params = parameters()
    optimizer = AdamW(params, 1e-2, formats=FP8_LM)
    train(optimizer, params, range(2))
    state = optimizer.state[params[0]]
    assert torch.equal(params[0], state["master"].float() * state["master_scale"])


def test_fp8_gradients_add_up_over_micro_batches():
    param = nn.Parameter(torch.zeros(8))
    AdamW([param], 0.1, formats=FP8_LM)
    for _ in range(3):
        (param * torch.linspace(-1, 1, 8)).sum().backward()
    total = param.scaled_grad.load()
    torch.testing.assert_close(total, 3 * torch.linspace(-1, 1, 8), rtol=0.15, atol=0)


def test_zero_grad_clears_fp8_gradients():
    param = nn.Parameter(torch.zeros(8))
    optimizer = AdamW([param], 0.1, formats=FP8_LM)
    param.sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(param, torch.zeros(8))


def test_refuses_a_main_grad_where_gradients_are_8_bits():
    param = nn.Parameter(torch.zeros(8))
    param.main_grad = torch.ones(8)
    with pytest.raises(RuntimeError, match="gradient='float8_e4m3fn'"):
        AdamW([param], 0.1, formats=FP8_LM).step()


@pytest.mark.slow
def test_fp8_lm_weights_stop_changing_when_their_gradient_is_zero():
    """The row of a rare token: a first moment stuck above zero would drive it on, faster and faster."""
    param = nn.Parameter(torch.zeros(2, 256))
    optimizer = AdamW([param], 1e-3, weight_decay=0.0, formats=FP8_LM)
    generator = torch.Generator().manual_seed(0)
    rare = []
    for step in range(800):
        gradient = torch.randn(2, 256, generator=generator)
        gradient[1] *= 1e-3 if step < 20 else 0
        (param * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rare.append(param[1].detach().clone())
    assert (rare[-1] - rare[200]).abs().max() <= 2 * 2**-11 * rare[200].abs().max()


def test_fp8_lm_second_moment_below_fp16_does_not_let_a_step_explode():
    """A neighbor's single large gradient sets the second moment's scale long after its first moment has decayed."""
    param = nn.Parameter(torch.zeros(2))
    optimizer = AdamW([param], 1e-3, weight_decay=0.0, formats=FP8_LM)
    for step in range(100):
        (param * torch.tensor([1e6, 0.0] if step == 0 else [0.0, 1e-2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert param[1].abs() <= 100 * 1e-3


# ---- Bytes ----


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (FP32_MOMENTS, {"master": 4, "gradient": 4, "exp_avg": 4, "exp_avg_sq": 4}),
        (OptimizerFormats(), {"master": 4, "gradient": 4, "exp_avg": 2, "exp_avg_sq": 2}),
        (FP8_LM, {"master": 2, "gradient": 1, "exp_avg": 1, "exp_avg_sq": 2}),
    ],
    ids=["fp32_moments", "bf16_moments", "fp8_lm"],
)
def test_bytes_per_parameter(formats, expected):
    assert AdamW(parameters(), 1e-2, formats=formats).bytes_per_parameter() == expected


@ALL_FORMATS
def test_bytes_per_parameter_are_those_of_the_stored_tensors(formats):
    params = parameters()
    optimizer = AdamW(params, 1e-2, formats=formats)
    train(optimizer, params, range(1))
    stored = dict.fromkeys(("master", "gradient", "exp_avg", "exp_avg_sq"), 0)
    for p in params:
        gradient = p.grad if p.grad is not None else p.scaled_grad.data
        for kind, tensor in {"master": p, "gradient": gradient, **optimizer.state[p]}.items():
            if kind in stored:
                stored[kind] += tensor.nbytes
    total = sum(p.numel() for p in params)
    assert optimizer.bytes_per_parameter() == {kind: n / total for kind, n in stored.items()}
