"""Tests of angles between gradients, combined from those of single weights."""

import math

import numpy as np
import pytest

from octile.report.compare.gradients import GradientCheck, WeightGradient, layer_of

NAMES = ("model.embed_tokens.weight", "model.layers.0.a.weight", "model.layers.0.b.weight", "model.norm.weight")


def weight(name: str, a, b) -> WeightGradient:
    lengths = np.linalg.norm(a), np.linalg.norm(b)
    cosine = float(a @ b / np.prod(lengths)) if all(lengths) else math.nan
    return WeightGradient(name, cosine, *map(float, lengths))


def angle(a, b) -> float:
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return math.degrees(2 * math.asin(np.linalg.norm(a - b) / 2))


@pytest.fixture
def gradients():
    draw = np.random.default_rng(0)
    ours = [draw.normal(size=n) for n in (7, 20, 5, 3)]
    return ours, [a + draw.normal(0, 0.2, a.shape) for a in ours]


def test_layers_and_the_model_are_treated_as_concatenated_vectors(gradients):
    a, b = gradients
    check = GradientCheck("r", 0, 1, tuple(map(weight, NAMES, a, b)))
    layer = {each.name: each for each in check.by_layer()}
    assert list(layer) == ["embedding", "0", "norm"]
    assert layer["0"].degrees == pytest.approx(angle(np.concatenate(a[1:3]), np.concatenate(b[1:3])))
    assert check.whole().degrees == pytest.approx(angle(np.concatenate(a), np.concatenate(b)))
    assert check.whole().norm_ratio == pytest.approx(
        np.linalg.norm(np.concatenate(a)) / np.linalg.norm(np.concatenate(b))
    )


def test_zero_gradients_of_unused_experts_are_left_out(gradients):
    a, b = gradients
    a[2], b[2] = 0 * a[2], 0 * b[2]
    check = GradientCheck("r", 0, 1, tuple(map(weight, NAMES, a, b)))
    assert check.by_layer()[1].degrees == pytest.approx(angle(a[1], b[1]))


def test_the_angle_of_a_non_finite_gradient_is_nan():
    check = GradientCheck("r", 0, 1, (WeightGradient("lm_head.weight", math.nan, math.inf, 1.0),))
    assert math.isnan(check.whole().degrees)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.12.mlp.experts.down", "12"), ("lm_head.weight", "head"), ("other.bias", "other.bias")],
)
def test_a_parameter_belongs_to_its_layer(name, layer):
    assert layer_of(name) == layer
