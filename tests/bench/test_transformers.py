"""Tests of `octile bench transformers`: which models are measured, and what a step computes."""

import sys
from functools import partialmethod
from types import ModuleType

import pytest
import torch
from torch import nn

from octile.bench import transformers
from octile.bench.goals import BF16, COMPILED, LLAMA, LLAMA_WITH_HEAD, OCTILE, STEP, WHOLE, WHOLE_BF16
from octile.bench.rows import Row, compare
from octile.bench.transformers import CPU_CASES, Case, _convert_experts_with_torchao, _measure, _prepare, rows, show
from octile.nn.conversion import apply_recipe

every_case = pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.config)


@pytest.mark.one_case
@every_case
def test_a_step_computes_the_gradients_of_all_layers(case: Case):
    candidate = _prepare(case, apply_recipe, compilation="none")
    candidate.step()
    without = {name for name, p in candidate.model.named_parameters() if p.grad is None}
    assert without == (set() if case.has_head else {"embed_tokens.weight"})
    assert case.has_head or candidate.x.grad is not None


@pytest.mark.one_case
@every_case
def test_gradients_are_forgotten(case: Case):
    candidate = _prepare(case, lambda model: model, compilation="none")
    candidate.step_and_forget()
    assert all(p.grad is None for p in (*candidate.model.parameters(), candidate.x))


def test_on_a_cpu_the_rows_name_the_models_that_are_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measured = []

    def measure(case: Case):
        measured.append(case.sizes)
        yield Row(case.name, "step", 1.0, "ms")

    monkeypatch.setattr("octile.bench.transformers._measure", measure)
    names = [row.case for row in rows()]
    assert [sizes["hidden_size"] for sizes in measured] == [128, 128, 128]
    assert names == [
        "Llama, 2 layers of width 128",
        "Qwen3-MoE, 2 layers of width 128, 8 experts",
        "Llama, 1 layer of width 128 with head and loss",
    ]


def test_the_table_says_what_a_ratio_is():
    assert "ratio: the value / that of" in show([compare("a", "b", 1.0, "ms", "peer", 2.0)])


@pytest.fixture
def without_a_compiler(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layers"), [(CPU_CASES[0], "layers"), (CPU_CASES[2], "model.layers")], ids=["layers", "head"]
)
def test_each_layer_is_compiled_alone(case: Case, layers: str, without_a_compiler):
    model = _prepare(case, lambda model: model, compilation="layers").model
    assert model._compiled_call_impl is None
    assert all(layer._compiled_call_impl is not None for layer in model.get_submodule(layers))


@pytest.mark.slow
def test_a_model_with_a_head_is_compiled_whole(without_a_compiler):
    model = _prepare(CPU_CASES[2], lambda model: model, compilation="whole").model
    assert model._compiled_call_impl is not None
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


@pytest.mark.slow
def test_the_whole_model_is_compared_with_those_that_are_not(monkeypatch, without_a_compiler):
    monkeypatch.setattr(transformers, "ROUNDS", 1)
    peers = [row.against.peer for row in _measure(CPU_CASES[2]) if row.what == f"{STEP}, {WHOLE}" and row.against]
    assert peers == [WHOLE_BF16, OCTILE, COMPILED]


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (
            compare(LLAMA, f"{STEP}, {COMPILED}", 1.4, "tokens/s", BF16, 1.0),
            "Llama, compiled, vs. compiled BF16: 1.400: floor ≥ 1.35 met, aim ≥ 1.45 MISSED",
        ),
        (
            compare(LLAMA_WITH_HEAD, f"{STEP}, {WHOLE}", 0.99, "tokens/s", OCTILE, 1.0),
            "Llama with head, compiled whole, vs. not compiled: 0.990: floor ≥ 1 MISSED",
        ),
    ],
)
def test_the_floors_are_judged(row: Row, verdict: str):
    assert verdict in show([row])


@pytest.fixture
def prototype(monkeypatch):
    """Stands for torchao's prototype, in BF16; the ends of groups that it was given."""
    ends = []

    def grouped_mm(x, weight, offsets, pad_token_groups_for_grouped_mm):
        assert not pad_token_groups_for_grouped_mm
        ends.append(offsets)
        parts = zip([0, *offsets[:-1]], offsets, weight, strict=True)
        unused = torch.full((len(x) - int(offsets[-1]), weight.shape[2]), torch.nan, dtype=x.dtype)
        return torch.cat([*(x[start:end] @ w for start, end, w in parts), unused])

    module = ModuleType("torchao.prototype.moe_training")
    module._to_fp8_rowwise_then_scaled_grouped_mm = grouped_mm
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(transformers, "_convert_with_torchao", lambda model: model)
    return ends


@pytest.mark.slow
def test_experts_of_torchao_compute_what_those_of_transformers_do(prototype):
    plain, converted = (
        _prepare(CPU_CASES[1], f, compilation="none") for f in (lambda m: m, _convert_experts_with_torchao)
    )
    plain.step()
    converted.step()
    assert prototype
    torch.testing.assert_close(converted.x.grad, plain.x.grad, rtol=0.05, atol=0.05)
    for (name, p), q in zip(converted.model.named_parameters(), plain.model.parameters(), strict=True):
        if name != "embed_tokens.weight":
            torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05 * float(q.grad.abs().max()))


def test_experts_of_torchao_get_rows_in_multiples_of_16(prototype):
    _prepare(CPU_CASES[1], _convert_experts_with_torchao, compilation="none").step()
    assert all((offsets % 16 == 0).all() for offsets in prototype)


def test_a_torchao_without_the_prototype_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training", ModuleType("torchao.prototype.moe_training"))
    with pytest.raises(ImportError, match="torchao has no grouped FP8 GEMM with a scale for each row"):
        _convert_experts_with_torchao(nn.Identity())
