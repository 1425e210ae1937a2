"""Drawn GEMMs: what their classes say, the same for the same seed, and small enough to be measured."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.bench.drawn import CLASSES, LARGE, MAX_FLOPS, drawn_cases
from octile.bench.model_shapes import FAMILIES
from octile.bench.shapes import ALIGNMENT

ROWS = {"large": (2048, 32768), "middle": (257, 2047), "few rows": (8, 256), "fewest rows": (1, 7)}
seeds = st.integers(0, 2**40)


@given(seeds)
def test_a_seed_draws_so_many_of_each_class(seed):
    cases = drawn_cases(seed)
    assert len(set(cases)) == len(cases)
    assert Counter(case.drawn for case in cases) == {drawn.name: drawn.number for drawn in CLASSES}
    assert cases == drawn_cases(seed)


@pytest.mark.slow
@given(seeds)
def test_cases_are_small_enough(seed):
    assert all(case.flops <= MAX_FLOPS for case in drawn_cases(seed))


@pytest.mark.slow
@given(seeds)
def test_dense_cases_have_the_rows_of_their_class(seed):
    for case in drawn_cases(seed):
        if case.drawn in ROWS:
            least, most = ROWS[case.drawn]
            assert least <= case.m <= most


@pytest.mark.slow
@given(seeds)
def test_sums_over_tokens_have_aligned_ones(seed):
    """DeepGEMM takes no others."""
    for case in drawn_cases(seed):
        if case.accumulate:
            assert case.k % ALIGNMENT == 0


@pytest.mark.slow
@given(seeds)
def test_weight_gradients_of_small_experts_are_added_or_stored(seed):
    kinds = {case.drawn: case.accumulate for case in drawn_cases(seed) if "small experts" in case.drawn}
    assert kinds == {"small experts": True, "small experts, stored": False}


@pytest.mark.slow
def test_about_half_of_the_rows_are_aligned():
    rows = [case.m for seed in range(50) for case in drawn_cases(seed) if case.drawn == LARGE.name]
    assert 0.4 < sum(m % ALIGNMENT == 0 for m in rows) / len(rows) < 0.6


@pytest.mark.slow
def test_every_model_is_drawn():
    weights = {(case.n, case.k) for seed in range(200) for case in drawn_cases(seed) if not case.accumulate}
    for models in FAMILIES.values():
        for model in models:
            assert weights & {*model.weights, *model.expert_weights}, model.name


@pytest.mark.parametrize(
    ("name", "weights", "expert_weights"),
    [
        ("Llama-3.1-8B", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], []),
        ("gpt-oss-20b", [(5120, 2880), (2880, 4096)], [(5760, 2880), (2880, 2880)]),
        (
            "DeepSeek-V2-Lite",
            [(576, 2048), (3072, 2048), (4096, 512), (2048, 2048), (21888, 2048), (2048, 10944)],
            [(2816, 2048), (2048, 1408)],
        ),
        (
            "DeepSeek-V3",
            [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432)],
            [(4096, 7168), (7168, 2048)],
        ),
    ],
)
def test_weights_of_a_layer(name, weights, expert_weights):
    (model,) = (model for models in FAMILIES.values() for model in models if model.name == name)
    assert model.weights == weights
    assert model.expert_weights == expert_weights
