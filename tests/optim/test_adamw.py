"""Tests of AdamW: bit-identical to torch's where all formats are FP32, refusals, convergence."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from octile.optim import AdamW, param_groups, update
from octile.optim.gradient import gradient_of, multiply_
from tests.fresh_python import run_python
from tests.optim.conftest import ALL_FORMATS, FP32_MOMENTS, backward, bits, parameters, same_bits, train

WHOLE_VECTORS = [(32, 18), (64,), (16,), (2, 4, 8), (300, 80)]  # torch computes what is left of 16 values in FP64


def test_equals_torch_bit_for_bit_with_fp32_moments():
    ours, theirs = parameters(shapes=WHOLE_VECTORS), parameters(shapes=WHOLE_VECTORS)
    settings = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-7, "weight_decay": 0.2}
    train(AdamW(ours, formats=FP32_MOMENTS, **settings), ours, range(10))
    train(torch.optim.AdamW(theirs, fused=True, **settings), theirs, range(10))
    assert same_bits(ours, theirs)


def test_equals_torch_bit_for_bit_where_a_parameter_misses_steps():
    def run(make, params: list[nn.Parameter]) -> None:
        optimizer = make(params, lr=1e-2)
        train(optimizer, params[:3], range(4))
        train(optimizer, params, range(4, 8))

    ours, theirs = parameters(shapes=WHOLE_VECTORS), parameters(shapes=WHOLE_VECTORS)
    run(lambda p, lr: AdamW(p, lr, formats=FP32_MOMENTS), ours)
    run(lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True), theirs)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("lr_is_tensor", [False, True])
def test_the_update_that_a_gpu_runs_equals_torchs(lr_is_tensor):
    torch.manual_seed(0)
    betas, eps, weight_decay, lr = (0.9, 0.95), 1e-8, 0.1, 1e-2
    ours, theirs = torch.randn(50), nn.Parameter(torch.empty(50))
    theirs.data.copy_(ours)
    moments, t = (torch.zeros(50), torch.zeros(50)), torch.zeros(())
    optimizer = torch.optim.AdamW([theirs], lr, betas, eps, weight_decay)
    for _ in range(5):
        t += 1
        theirs.grad = torch.randn(50)
        rate = torch.tensor(lr) if lr_is_tensor else lr
        lists = ([tensor] for tensor in (ours, theirs.grad, *moments))
        update.update_together_([update.UpdateGroup(*lists, [], [t], rate, betas, eps, weight_decay)])
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [64, 1024, 10_000])
def test_size_of_batches_changes_no_bit(monkeypatch, size):
    whole, cut = parameters(), parameters()
    monkeypatch.setattr(update.cpu, "can_update", lambda *moments: False)  # as without a compiler
    train(AdamW(whole, 1e-2), whole, range(3))
    monkeypatch.setattr(update, "CPU_BATCH", size)
    train(AdamW(cut, 1e-2), cut, range(3))
    assert same_bits(whole, cut)


@ALL_FORMATS
def test_a_compiler_changes_no_bit_of_whole_vectors(monkeypatch, formats):
    compiled, without = parameters(shapes=WHOLE_VECTORS), parameters(shapes=WHOLE_VECTORS)
    train(AdamW(compiled, 1e-2, formats=formats), compiled, range(3))
    monkeypatch.setattr(update.cpu, "can_update", lambda *moments: False)
    train(AdamW(without, 1e-2, formats=formats), without, range(3))
    assert same_bits(compiled, without)


def test_groups_have_their_own_settings():
    params, alone = parameters(), parameters()
    train(
        AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.0}], 1e-2), params, range(3)
    )
    train(AdamW(alone[:2], 1e-3), alone, range(3))
    for param in alone[:2]:
        param.requires_grad_(False)
    fresh = parameters()
    train(AdamW(fresh[2:], 1e-2, weight_decay=0.0), fresh, range(3))
    assert same_bits(params, alone[:2] + fresh[2:])


def test_a_learning_rate_in_a_tensor_is_read_at_each_step():
    numbers, tensors = parameters(), parameters()
    rate = torch.zeros((), dtype=torch.float64)
    first, second = AdamW(numbers, 1.0), AdamW(tensors, rate)
    for step in range(3):
        first.param_groups[0]["lr"] = 1e-2 / (step + 1)
        rate.fill_(1e-2 / (step + 1))
        train(first, numbers, range(step, step + 1))
        train(second, tensors, range(step, step + 1))
    assert same_bits(numbers, tensors)


@ALL_FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_no_parameter_and_no_state(formats, dtype):
    params = parameters(dtype)
    optimizer = AdamW(params, 1e-2, formats=formats)
    train(optimizer, params, range(2))
    before = copy.deepcopy((params, list(optimizer.state.values())))
    optimizer.zero_grad()
    backward(params, step=2)
    optimizer.step(skip=torch.tensor(True))
    assert same_bits(params, before[0])
    for state, old in zip(optimizer.state.values(), before[1], strict=True):
        assert {key: bits(t).tolist() for key, t in state.items()} == {k: bits(t).tolist() for k, t in old.items()}


@ALL_FORMATS
def test_a_step_that_may_skip_and_does_not_equals_any_other(formats):
    params, others = parameters(), parameters()
    optimizer = AdamW(params, 1e-2, formats=formats)
    for step in range(3):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step(skip=torch.tensor(False))
    train(AdamW(others, 1e-2, formats=formats), others, range(3))
    assert same_bits(params, others)


@pytest.mark.parametrize(
    ("skip", "error", "message"),
    [
        (torch.tensor(1), TypeError, "skip must be bool, not torch.int64"),
        (torch.tensor([True]), ValueError, r"skip must have the shape \[\], not \[1\]"),
    ],
)
def test_refuses_a_flag_of_another_dtype_or_shape(skip, error, message):
    with pytest.raises(error, match=message):
        AdamW(parameters(), 1e-2).step(skip=skip)


@ALL_FORMATS
def test_a_scale_of_the_gradient_equals_multiplied_gradients(formats):
    params, others = parameters(), parameters()
    optimizer, other = AdamW(params, 1e-2, formats=formats), AdamW(others, 1e-2, formats=formats)
    factor = torch.tensor(0.25)
    for step in range(3):
        for model, its_optimizer in ((params, optimizer), (others, other)):
            its_optimizer.zero_grad()
            backward(model, step)
        optimizer.step(gradient_scale=factor)
        multiply_([gradient_of(p) for p in others], factor)
        other.step()
    assert same_bits(params, others)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.5, TypeError, "gradient_scale must be a tensor, not 0.5"),
        (torch.ones(1), ValueError, r"gradient_scale must be float32 \[\], not torch.float32 \[1\]"),
        (torch.ones((), dtype=torch.float64), ValueError, r"gradient_scale must be float32 \[\], not torch.float64"),
        (torch.ones((), device="meta"), ValueError, "a parameter is on cpu but gradient_scale on meta"),
    ],
)
def test_a_refused_scale_changes_no_state(scale, error, message):
    params = parameters()
    optimizer = AdamW(params, 1e-2)
    backward(params, 0)
    optimizer.step()
    before = [state["step"].item() for state in optimizer.state.values()]
    backward(params, 1)
    with pytest.raises(error, match=message):
        optimizer.step(gradient_scale=scale)
    assert [state["step"].item() for state in optimizer.state.values()] == before


def test_weight_decay_is_decoupled():
    params = parameters()
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    AdamW(params, lr=0.1, weight_decay=0.5).step()
    for p, old in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), old * 0.95)


def test_a_parameter_without_a_gradient_stays_and_takes_no_memory():
    params = parameters()
    optimizer = AdamW(params, 0.1)
    before = params[-1].detach().clone()
    train(optimizer, params[:-1], range(2))
    assert torch.equal(params[-1], before)
    assert params[-1] not in optimizer.state


@ALL_FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_seen_by_caches_keyed_by_version(formats, dtype):
    params = parameters(dtype)
    versions = [p._version for p in params]
    train(AdamW(params, 1e-2, formats=formats), params, range(1))
    assert all(p._version > old for p, old in zip(params, versions, strict=True))


def test_closure_returns_its_loss():
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], 0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = param.square().sum()
        value.backward()
        return value

    assert optimizer.step(loss) == 3.0


@pytest.mark.one_case
@ALL_FORMATS
def test_fits_a_linear_map(formats):
    torch.manual_seed(0)
    x, truth = torch.randn(256, 16), torch.randn(16, 4)
    net = nn.Linear(16, 4)
    optimizer = AdamW(param_groups(net, 0.0), 3e-2, formats=formats)
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 3e-2 * (1 - step / 300)
        optimizer.zero_grad()
        loss = (net(x) - x @ truth).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, not -1.0"),
        ({"lr": 1.0, "eps": -1e-8}, "eps must be at least 0"),
        ({"lr": 1.0, "weight_decay": float("nan")}, "weight_decay must be at least 0, not nan"),
        ({"lr": 1.0, "betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\), not 1.0"),
    ],
)
def test_refuses_numbers_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **settings)


def test_refuses_float64_parameters():
    with pytest.raises(TypeError, match="float64; needs one of"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.float64))], 0.1)


def test_refuses_a_parameter_that_is_not_contiguous():
    with pytest.raises(ValueError, match="must be contiguous"):
        AdamW([nn.Parameter(torch.zeros(2, 3).mT)], 0.1)


def test_param_groups_decay_matrices_only():
    net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    net[1].bias.requires_grad_(False)
    decayed, not_decayed = param_groups(net, 0.1)
    assert decayed == {"params": [net[0].weight], "weight_decay": 0.1}
    assert [id(p) for p in not_decayed["params"]] == [id(net[0].bias), id(net[1].weight)]
    assert not_decayed["weight_decay"] == 0.0


def test_param_groups_leave_an_empty_group_out():
    assert len(param_groups(nn.LayerNorm(4), 0.1)) == 1


@pytest.mark.slow
def test_an_optimizer_does_not_import_torchs_compiler():
    program = """
import sys, torch
from octile.optim import AdamW

parameter = torch.nn.Parameter(torch.ones(3))
optimizer = AdamW([parameter], lr=0.1)
parameter.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    assert run_python(program).stdout.strip() == "False"


def test_a_method_of_torchs_optimizer_that_somebody_has_wrapped_is_called(monkeypatch: pytest.MonkeyPatch):
    calls, zero_grad = [], torch.optim.Optimizer.zero_grad

    @functools.wraps(zero_grad)
    def wrapped(self, *args):
        calls.append(args)
        return zero_grad(self, *args)

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", wrapped)
    AdamW([nn.Parameter(torch.ones(2))], lr=0.1).zero_grad()
    assert calls == [(True,)]
