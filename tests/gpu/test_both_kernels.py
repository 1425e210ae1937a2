"""A training step in which every quantization runs twice: with Hopper's CUDA kernels and with the portable ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels import backends
from octile.kernels.cuda.gemm import request
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.train.config import preset

APPROXIMATE = 1e-3  # of the encoded values may differ where an exponential, a root or a sum comes first
LAST_BITS = 1e-3  # of scales and sums there, relative: sums may cancel


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"there is one kind of kernels here: {reason}")


@pytest.mark.parametrize("tokens", [1024, 1023])
def test_every_quantization_of_a_step_is_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch):
    differences: dict[str, str] = {}
    run, twice = backends.run, {name: _twice(name, monkeypatch, differences) for name in backends.TABLE}
    monkeypatch.setattr(backends, "run", lambda name, *args: run(name, *args) if name == "gemm" else twice[name](*args))
    torch.manual_seed(0)
    shape = replace(preset("small").model, num_hidden_layers=3)
    model = apply_recipe(DeepseekV3(shape).cuda(), Recipe.deepseek_v3())
    ids = torch.randint(10, shape.vocab_size, (4, tokens), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        model(ids, ids).backward()
    assert differences == {}


def _twice(name: str, monkeypatch: pytest.MonkeyPatch, differences: dict[str, str]) -> Callable[..., Any]:
    """Return a quantization that runs both kernels, returns Hopper's result, and notes the first difference."""
    quantization = partial(backends.run, name)
    allowed = APPROXIMATE if name.startswith(("swiglu", "rms_norm")) else 0.0

    def both(*args: Any) -> Any:
        ours = quantization(*args)
        with monkeypatch.context() as portable:
            portable.setattr(request, "why_not_on", lambda device: "the portable kernels are asked for")
            theirs = quantization(*args)
        for i, (a, b) in enumerate(zip(_tensors(ours), _tensors(theirs), strict=True)):
            tolerance = LAST_BITS if allowed and a.dtype == torch.float32 else 0.0
            same = torch.isclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True)
            share = 1.0 - float(same.float().mean()) if a.numel() else 0.0
            if share > allowed:
                shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in args]
                differences.setdefault(f"{name}, result {i}", f"{share:.2%} of {tuple(b.shape)}, of {shapes}")
        return ours

    return both


def _tensors(results: Any) -> list[Tensor]:
    """The tensors among the results, encoded values as integers, in which NaN equals itself."""
    found = [t for t in (results if isinstance(results, tuple) else (results,)) if isinstance(t, Tensor)]
    return [t.view(torch.uint8) if t.element_size() == 1 else t for t in found]
