"""Tests of `octile bench transformers`: which models are measured, and what a step computes."""

import pytest

from octile.bench.rows import Row
from octile.bench.transformers import CASES, Case, _prepare, show
from octile.nn.conversion import apply_recipe

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.config)


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


def test_the_table_says_what_a_ratio_is():
    assert "ratio: ours / theirs" in show([Row("a", "b", 1.0, "ms")])
