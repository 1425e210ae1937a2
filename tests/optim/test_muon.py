"""Tests of Muon: torch's for single matrices, stacks, formats, what goes to AdamW, refusals."""

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C

from octile.models.config import PRESETS
from octile.models.meta import meta_model
from octile.nn import Gate, Linear, MoE
from octile.nn.conversion import apply_recipe
from octile.optim import AdamW, Muon, muon_groups, muon_update
from octile.optim.muon_update import newton_schulz, temporary_bytes
from octile.optim.row_shards import RowShard
from octile.recipe import OptimizerFormats
from octile.train.memory.cpu import LiveTensors
from tests.optim.conftest import FP8_LM, FP32_MOMENTS, backward, bits, parameters, same_bits, train

MATRICES = [(33, 17), (17, 33), (64, 64), (33, 17), (1, 5)]
STACKS = [(5, 8, 12), (3, 33, 17)]


def muon(params, formats: OptimizerFormats = FP32_MOMENTS, merged: int = 1, **settings) -> Muon:
    return Muon([{"params": params, "use_muon": True, "merged": merged}], 1e-2, formats=formats, **settings)


def matrix(n: int, k: int, seed: int, log2_condition: float) -> Tensor:
    """A matrix whose singular values lie evenly, on a logarithmic scale, between 1 and 2^-log2_condition."""
    torch.manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(n, k, dtype=torch.float64), full_matrices=False)
    return u @ torch.diag(torch.logspace(0, -log2_condition, min(n, k), 2, dtype=torch.float64)) @ v


# Newton–Schulz


def polynomial(sigma: Tensor) -> Tensor:
    """What five iterations make of singular values, in FP64."""
    for _ in range(5):
        sigma = DEFAULT_A * sigma + DEFAULT_B * sigma**3 + DEFAULT_C * sigma**5
    return sigma


def test_singular_values_from_2_thousandths_of_the_norm_become_0_68_to_1_21():
    values = polynomial(torch.logspace(math.log10(2e-3), 0, 100_001, dtype=torch.float64))
    assert values.min() > 0.68
    assert values.max() < 1.21


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 40),
    seed=st.integers(0, 99),
    log2_condition=st.floats(0, 5),
    log2_size=st.integers(-60, 60),
)
def test_newton_schulz_is_near_the_polar_factor(n, k, seed, log2_condition, log2_size):
    u_NK = (matrix(n, k, seed, log2_condition) * 2.0**log2_size).bfloat16()
    u, sigma, v = torch.linalg.svd(u_NK.double(), full_matrices=False)
    sigma = sigma / sigma.norm().clamp(min=1e-7)
    found = newton_schulz(u_NK[None])[0].double()
    # of BF16's 2⁻⁹, the first iterations make 12%
    assert torch.linalg.matrix_norm(found - u @ torch.diag(polynomial(sigma)) @ v, 2) < 0.12
    if log2_size > -20:  # below, the divisor is EPS, as torch's
        assert torch.linalg.matrix_norm(found - u @ v, 2) < 0.32 + 0.12


def test_a_matrix_of_zeros_has_no_direction():
    assert not newton_schulz(torch.zeros(2, 3, 4, dtype=torch.bfloat16)).any()


# One step


def test_equals_torchs_muon_for_single_matrices():
    ours, theirs = parameters(shapes=MATRICES), parameters(shapes=MATRICES)
    optimizer = muon(ours)
    reference = torch.optim.Muon(theirs, 1e-2, adjust_lr_fn="match_rms_adamw")
    train(optimizer, ours, range(4))
    train(reference, theirs, range(4))
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[own]["momentum_buffer"], reference.state[other]["momentum_buffer"])
        torch.testing.assert_close(own, other, rtol=0, atol=1e-7)  # their last operation is one fused multiply-add


def test_a_matrix_without_elements_is_skipped():
    empty, matrix_NK = torch.nn.Parameter(torch.ones(0, 4)), torch.nn.Parameter(torch.ones(4, 4))
    optimizer = muon([empty, matrix_NK])
    empty.grad, matrix_NK.grad = torch.ones(0, 4), torch.eye(4)
    optimizer.step()
    assert (matrix_NK.diagonal() != 1).all()


def test_the_original_factor_is_torchs():
    ours, theirs = parameters(shapes=MATRICES), parameters(shapes=MATRICES)
    train(muon(ours, adjust_lr_fn="original", momentum=0.5, weight_decay=0.3), ours, range(3))
    train(torch.optim.Muon(theirs, 1e-2, 0.3, 0.5, adjust_lr_fn="original"), theirs, range(3))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize("batch", [1, 150, 2**24])
def test_each_matrix_of_a_stack_is_updated_as_if_alone(monkeypatch, merged, batch):
    shapes = [(5, 8, 12), (3, 12, 17)]
    stacks = parameters(shapes=shapes)
    alone = [
        [nn.Parameter(m.clone()) for m in p.detach().reshape(-1, p.shape[1] // merged, p.shape[2])] for p in stacks
    ]
    monkeypatch.setattr(muon_update, "BATCH", batch)
    together, single = muon(stacks, merged=merged), muon([m for of_stack in alone for m in of_stack])
    for step in range(3):
        together.zero_grad()
        backward(stacks, step)
        for stack, of_stack in zip(stacks, alone, strict=True):
            for m, g in zip(of_stack, stack.grad.reshape(-1, *of_stack[0].shape), strict=True):
                m.grad = g.clone()
        together.step()
        single.step()
    for stack, of_stack in zip(stacks, alone, strict=True):
        assert torch.equal(stack, torch.stack(of_stack).view_as(stack))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_no_parameter_and_no_state(dtype):
    params = parameters(dtype, [*STACKS, *MATRICES])
    optimizer = muon(params, OptimizerFormats())
    train(optimizer, params, range(2))
    before = copy.deepcopy((params, list(optimizer.state.values())))
    optimizer.zero_grad()
    backward(params, step=2)
    for param in params:
        param.grad[0] = math.nan
    optimizer.step(skip=torch.tensor(True))
    assert same_bits(params, before[0])
    for state, old in zip(optimizer.state.values(), before[1], strict=True):
        assert all(torch.equal(bits(state[key]), bits(old[key])) for key in old)


def test_a_step_that_may_skip_and_does_not_and_a_rate_in_a_tensor_change_no_bit():
    plain, other = parameters(shapes=MATRICES), parameters(shapes=MATRICES)
    train(muon(plain), plain, range(2))
    optimizer = muon(other)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, dtype=torch.float64)
    for step in range(2):
        optimizer.zero_grad()
        backward(other, step)
        optimizer.step(skip=torch.tensor(False))
    assert same_bits(plain, other)


def test_a_scale_of_the_gradient_equals_multiplied_gradients():
    scaled, multiplied = parameters(shapes=MATRICES), parameters(shapes=MATRICES)
    of_both = muon(scaled), muon(multiplied)
    for params in (scaled, multiplied):
        backward(params, step=0)
    for param in multiplied:
        param.grad *= 0.25
    of_both[0].step(gradient_scale=torch.tensor(0.25))
    of_both[1].step()
    assert same_bits(scaled, multiplied)


def test_a_bf16_parameter_is_its_rounded_master_and_the_momentum_is_bf16():
    params, masters = parameters(torch.bfloat16, MATRICES), parameters(torch.bfloat16, MATRICES)
    masters = [nn.Parameter(p.detach().float()) for p in masters]
    of_both = muon(params, OptimizerFormats()), muon(masters, OptimizerFormats())
    for step in range(3):
        for params_of, optimizer in zip((params, masters), of_both, strict=True):
            optimizer.zero_grad()
            backward(params_of, step)
            for p in params_of:
                p.grad = p.grad.bfloat16().to(p.dtype)
            optimizer.step()
    for param, master in zip(params, masters, strict=True):
        state = of_both[0].state[param]
        assert torch.equal(state["master"], master)
        assert torch.equal(param, master.bfloat16())
        assert state["momentum_buffer"].dtype == torch.bfloat16


def test_resumes_bit_for_bit():
    params, again = (parameters(shapes=[*STACKS, (64,)]) for _ in range(2))

    def optimizer_of(params):
        return Muon([{"params": params[:2], "use_muon": True}, {"params": params[2:], "use_muon": False}], 1e-2)

    first, second = optimizer_of(params), optimizer_of(again)
    train(first, params, range(2))
    for param, own in zip(params, again, strict=True):
        own.data.copy_(param)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, params, range(2, 4))
    train(second, again, range(2, 4))
    assert same_bits(params, again)


# Models


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({
        "embed_tokens": nn.Embedding(32, 128),
        "proj": nn.Linear(128, 128),
        "conv": nn.Conv1d(128, 128, 3, groups=128),
        "mlp": MoE(Gate(128, 4, 2), 128, 128, 128),
        "lm_head": nn.Linear(128, 32, bias=False),
    })  # fmt: skip


def names_of(groups: list[dict], model: nn.Module) -> list[tuple[bool, int, float, list[str]]]:
    name_of = {p: n for n, p in model.named_parameters()}
    settings = ((g["use_muon"], g.get("merged", 1), g["weight_decay"]) for g in groups)
    return [(*own, [name_of[p] for p in g["params"]]) for own, g in zip(settings, groups, strict=True)]


def test_hidden_matrices_are_muons_and_the_others_adamws():
    model = mixture()
    shared = "mlp.shared_experts"
    assert names_of(muon_groups(model, 0.1), model) == [
        (
            True, 1, 0.1,
            ["proj.weight", "mlp.experts.down", *(f"{shared}.{n}_proj.weight" for n in ("gate", "up", "down"))],
        ),
        (True, 2, 0.1, ["mlp.experts.gate_up"]),
        (False, 1, 0.1, ["embed_tokens.weight", "conv.weight", "mlp.gate.weight", "lm_head.weight"]),
        (False, 1, 0.0, ["proj.bias", "conv.bias"]),
    ]  # fmt: skip


def test_a_head_that_is_tied_to_the_embedding_and_frozen_matrices_are_not_muons():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "output": nn.Linear(8, 32, bias=False), "wte": nn.Embedding(32, 8)})
    model["wte"].weight = model["output"].weight
    model["a"].weight.requires_grad_(False)
    assert [names for *_, names in names_of(muon_groups(model, 0.1), model)] == [["output.weight"], ["a.bias"]]


def test_of_octiles_models_only_embedding_head_gates_and_norms_are_adamws():
    model = meta_model(PRESETS["v3_671b"]())
    *_, (*_, others), (*_, vectors) = names_of(muon_groups(model, 0.1), model)
    assert {re.sub(r"\.\d+\.", ".", name) for name in others} == {
        "model.embed_tokens.weight", "model.layers.mlp.gate.weight", "lm_head.weight",
    }  # fmt: skip
    assert all("norm" in name for name in vectors)


def test_everything_but_matrices_is_updated_as_by_adamw():
    model, other = mixture(), mixture()
    groups = muon_groups(model, 0.1)
    optimizer = Muon(groups, 1e-2)
    matrices = {p for g in groups if g["use_muon"] for p in g["params"]}
    own, theirs = (list(m.parameters()) for m in (model, other))
    pairs = [(p, q) for p, q in zip(own, theirs, strict=True) if p not in matrices]
    reference = AdamW(
        [
            {"params": [q for _, q in pairs if q.dim() >= 2]},
            {"params": [q for _, q in pairs if q.dim() < 2], "weight_decay": 0.0},
        ],
        1e-2,
    )
    for step in range(3):
        for params, each in ((own, optimizer), (theirs, reference)):
            each.zero_grad()
            backward(params, step)
            each.step()
    assert same_bits([p for p, _ in pairs], [q for _, q in pairs])


def test_cached_fp8_weights_follow_a_step():
    torch.manual_seed(0)
    model = apply_recipe(nn.Sequential(Linear(128, 128, bias=False), Linear(128, 128, bias=False)))
    optimizer = Muon(muon_groups(model, 0.1), 1e-2)
    x = torch.randn(4, 128)
    for _ in range(2):  # from its first step on, an optimizer's weights are cached
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = apply_recipe(nn.Sequential(Linear(128, 128, bias=False), Linear(128, 128, bias=False)))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x))


@pytest.mark.slow
def test_bytes_per_parameter_are_those_of_the_stored_tensors():
    model = mixture()
    optimizer = Muon(muon_groups(model, 0.1), 1e-2)
    params = list(model.parameters())
    train(optimizer, params, range(1))
    each, n = optimizer.bytes_per_parameter(), sum(p.numel() for p in params)
    for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        stored = sum(state[kind].nbytes for state in optimizer.state.values() if kind in state)
        assert each[kind] * n == pytest.approx(stored)


# The memory of a step

STACKED, SINGLE = [(6, 40, 24)], [(40, 24)] * 3 + [(24, 40)] * 2 + [(64, 64)]


@contextmanager
def fake_ranks(ranks: int, rank: int) -> Iterator[None]:
    """Be a rank of so many, which exchange nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def temporary(shapes: list[tuple[int, ...]], ranks: int, rank: int) -> int:
    """The most bytes that a rank's step had in addition at a time."""
    params = []
    for shape in shapes:
        rows = tuple(len(part) for part in torch.arange(shape[0]).chunk(ranks)) if len(shape) == 2 else ()
        params.append(nn.Parameter(torch.ones((rows[rank], shape[1]) if ranks > 1 and rows else shape)))
        if ranks > 1 and rows:
            params[-1].row_shard = RowShard(rows, dist.group.WORLD)
        params[-1].grad = torch.ones_like(params[-1])
    optimizer = muon(params, OptimizerFormats())
    with LiveTensors([t for p in params for t in (p, p.grad)]) as live:
        optimizer.step(skip=torch.tensor(False), gradient_scale=torch.ones(()))
    return live.peak - live.now


@pytest.mark.one_case
@pytest.mark.parametrize("batch", [1, 2000, 10**6], ids=["a matrix", "a few", "all"])
@pytest.mark.parametrize(("shapes", "ranks"), [(STACKED, 1), (SINGLE, 1), (SINGLE, 2), (SINGLE, 4)])
def test_a_step_takes_the_bytes_that_are_estimated(monkeypatch, shapes, ranks, batch):
    monkeypatch.setattr(muon_update, "BATCH", batch)
    matrices = Counter(shape[-2:] for shape in shapes for _ in range(shape[0] if len(shape) == 3 else 1))
    estimate = temporary_bytes(matrices if ranks == 1 else {}, {} if ranks == 1 else matrices, ranks)
    found = 0
    for rank in range(ranks):
        with fake_ranks(ranks, rank):
            found = max(found, temporary(shapes, ranks, rank))
    assert found - 200 <= estimate <= 1.45 * found  # besides, there are a few scalars


# Refusals


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ({}, {}, r"each group of parameters must have use_muon, True or False: make them with .*muon_groups"),
        ({"use_muon": True}, {"momentum": 1.0}, r"momentum must be in \[0, 1\), not 1\.0"),
        ({"use_muon": True}, {"momentum": 0.9999}, r"momentum=0\.9999 never lets a bfloat16 momentum_buffer decay"),
        ({"use_muon": True}, {"adjust_lr_fn": "other"}, "adjust_lr_fn must be one of match_rms_adamw, original"),
        ({"use_muon": True, "merged": 0}, {}, "merged must be a number of matrices, not 0"),
        (
            {"use_muon": True},
            {"formats": FP8_LM},
            "formats must have float32 masters and no scales for Muon, not OptimizerFormats",
        ),
        ({"use_muon": True, "merged": 2}, {}, r"merged must divide the rows of a parameter \[33, 17\], not 2"),
        ({"use_muon": True}, {"weight_decay": -1.0}, "weight_decay must be at least 0"),
    ],
)
def test_refuses_settings_without_a_meaning(group, settings, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": parameters(shapes=[(33, 17)]), **group}], 1e-2, **settings)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 4, 5)])
def test_refuses_what_is_no_matrix_and_keeps_its_groups(shape):
    optimizer = muon(parameters(shapes=[(4, 5)]))
    with pytest.raises(ValueError, match=r"a parameter of Muon must be \[N, K\] or \[E, N, K\], not"):
        optimizer.add_param_group({"params": parameters(shapes=[shape]), "use_muon": True})
    assert len(optimizer.param_groups) == 1


def test_refuses_the_state_of_other_groups():
    params = parameters(shapes=[(4, 5)])
    adamw = Muon([{"params": params, "use_muon": False}], 1e-2)
    with pytest.raises(ValueError, match=r"state_dict has groups with use_muon \[False\], this optimizer \[True\]"):
        muon(params).load_state_dict(adamw.state_dict())
