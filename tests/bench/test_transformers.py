"""Tests of `octile bench transformers`: which models are measured, and what a step computes."""

from functools import partialmethod

import pytest
from torch import nn

from octile.bench.goals import BF16, COMPILED, LLAMA, STEP
from octile.bench.rows import Row, compare
from octile.bench.transformers import CPU_CASES, Case, _prepare, rows, show
from octile.nn.conversion import apply_recipe

every_case = pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.config)


@every_case
def test_a_step_computes_the_gradients_of_all_layers(case: Case):
    candidate = _prepare(case, apply_recipe, compiled=False)
    candidate.step()
    without = {name for name, p in candidate.model.named_parameters() if p.grad is None}
    assert without == {"embed_tokens.weight"}
    assert candidate.x.grad is not None


@every_case
def test_gradients_are_forgotten(case: Case):
    candidate = _prepare(case, lambda model: model, compiled=False)
    candidate.forget_gradients()
    assert all(p.grad is None for p in (*candidate.model.parameters(), candidate.x))


def test_on_a_cpu_the_rows_name_the_models_that_are_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measured = []

    def measure(case: Case):
        measured.append(case.sizes)
        yield Row(case.name, "step", 1.0, "ms")

    monkeypatch.setattr("octile.bench.transformers._measure", measure)
    names = [row.case for row in rows()]
    assert [sizes["hidden_size"] for sizes in measured] == [128, 128]
    assert names == ["Llama, 2 layers of width 128", "Qwen3-MoE, 2 layers of width 128, 8 experts"]


def test_the_table_says_what_a_ratio_is():
    assert "ratio: ours / theirs" in show([compare("a", "b", 1.0, "ms", "peer", 2.0)])


def test_each_layer_is_compiled_by_itself(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))  # without a compiler
    candidate = _prepare(CPU_CASES[0], lambda model: model, compiled=True)
    assert candidate.model._compiled_call_impl is None
    assert all(layer._compiled_call_impl is not None for layer in candidate.model.layers)


def test_the_floors_are_judged():
    row = compare(LLAMA, f"{STEP}, {COMPILED}", 1.4, "tokens/s", BF16, 1.0)
    assert "Llama, compiled, vs. compiled BF16: 1.400: floor ≥ 1.35 met, aim ≥ 1.45 MISSED" in show([row])
