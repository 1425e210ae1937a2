"""Captured steps with stand-ins for CUDA graphs, whose replays do nothing: what the host does in each step."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import octile
from octile.recipe import Recipe
from octile.train.step import captured
from octile.train.step.captured import WARM_UP_STEPS, CapturedStep

TOKENS_BS = torch.zeros(2, 3, dtype=torch.int64)


class NoGraph:
    """Stands for a CUDA graph."""

    def pool(self) -> None:
        """Return no memory pool."""

    def replay(self) -> None:
        """Compute nothing."""


class Model(nn.Sequential):
    """Two layers, which count how often the host walks through them."""

    walks = 0

    def modules(self):
        self.walks += 1
        return super().modules()

    def named_parameters(self, *args, **settings):
        self.walks += 1
        return super().named_parameters(*args, **settings)


@pytest.fixture
def model() -> Model:
    return octile.convert(Model(nn.Linear(128, 128), nn.Linear(128, 128)))


@pytest.fixture
def step(model: Model, monkeypatch: pytest.MonkeyPatch) -> CapturedStep:
    """A step of the model that was captured."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(captured, "_stream", lambda _: None)

    def compute(tokens_BS: torch.Tensor) -> None:
        model(torch.ones(128, 128)).sum().backward()

    made = CapturedStep(model, compute, lambda learning_rate, result: None, torch.device("cpu"))
    for _ in range(WARM_UP_STEPS + 1):
        run(made)
    assert made.is_captured
    return made


def run(step: CapturedStep) -> None:
    step.update(0.1, step.compute(TOKENS_BS))


def test_a_replay_walks_through_no_modules(step, model):
    model.walks = 0
    run(step)
    assert step.is_captured
    assert model.walks == 0


def test_a_replay_leaves_the_gradients_of_the_captured_step_and_counts_a_write_of_each_weight(step, model):
    gradients, versions = ([getattr(p, name) for p in model.parameters()] for name in ("grad", "_version"))
    for parameter in model.parameters():
        parameter.grad = None
    run(step)
    assert [p.grad for p in model.parameters()] == gradients
    assert [p._version for p in model.parameters()] == [version + 1 for version in versions]


def test_another_recipe_of_a_layer_ends_the_captured_step(step, model):
    model[1].use_recipe(replace(Recipe.deepseek_v3().without("wgrad")))
    run(step)
    assert not step.is_captured


def test_a_recipe_of_another_model_does_not(step):
    octile.convert(nn.Sequential(nn.Linear(128, 128)))
    run(step)
    assert step.is_captured


def test_a_released_step_has_no_gradients_and_is_captured_again(step, model):
    step.release()
    assert not step.is_captured
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(WARM_UP_STEPS + 1):
        run(step)
    assert step.is_captured
