"""A training step in which what has two kinds of kernels runs twice: Hopper's CUDA kernels and the portable ones."""

from collections.abc import Callable, Iterator
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
EXPONENTIAL = 2.0**-20  # relative: the bound of a GPU's exponential and of sums, in the docstrings of the operators


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"there is one kind of kernels here: {reason}")


def test_both_kernels_of_every_operator_in_a_step_have_the_same_results(monkeypatch: pytest.MonkeyPatch):
    differences: dict[str, str] = {}
    run, twice = backends.run, {name: _twice(name, monkeypatch, differences) for name in backends.TABLE}
    monkeypatch.setattr(backends, "run", lambda name, *args: run(name, *args) if name == "gemm" else twice[name](*args))
    torch.manual_seed(0)
    shape = replace(preset("small").model, num_hidden_layers=3)
    model = apply_recipe(DeepseekV3(shape).cuda(), Recipe.deepseek_v3())
    for tokens in (1024, 1023):  # of which one compiles most kernels of the other
        ids = torch.randint(10, shape.vocab_size, (4, tokens), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            model(ids, ids).backward()
    assert differences == {}


def _twice(name: str, monkeypatch: pytest.MonkeyPatch, differences: dict[str, str]) -> Callable[..., Any]:
    """Return an operator that runs both kernels, returns Hopper's results, and notes the first difference."""
    operator = partial(backends.run, name)
    compare = COMPARE.get(name, partial(_compare_encoded, name.startswith(("swiglu", "rms_norm"))))

    def both(*args: Any) -> Any:
        ours = operator(*args)
        with monkeypatch.context() as portable:
            portable.setattr(request, "why_not_on", lambda device: "the portable kernels are asked for")
            theirs = operator(*args)
        for difference in compare(args, _tensors(ours), _tensors(theirs)):
            shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in args]
            differences.setdefault(f"{name}, {difference}", f"of {shapes}")
        return ours

    return both


def _compare_encoded(
    is_approximate: bool, args: tuple[Any, ...], ours: list[Tensor], theirs: list[Tensor]
) -> Iterator[str]:
    """Bit for bit, except a few encoded values if they follow an exponential, a root or a sum."""
    allowed = APPROXIMATE if is_approximate else 0.0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        tolerance = LAST_BITS if allowed and a.dtype == torch.float32 else 0.0
        same = torch.isclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True)
        share = 1.0 - float(same.float().mean()) if a.numel() else 0.0
        if share > allowed:
            yield f"result {i}: {share:.2%} of {tuple(b.shape)}"


def _compare_gates(args: tuple[Any, ...], ours: list[Tensor], theirs: list[Tensor]) -> Iterator[str]:
    """The logits within the bound of `octile.ops.gate`; the experts, except where two logits are as close; weights."""
    x, weight = args[:2]
    magnitude_TE = x.float().abs() @ weight.float().abs().mT
    bound_TE = (1 + x.shape[1] / 2048) * 2.0**-23 * magnitude_TE
    (weights, experts, logits), (other_weights, other_experts, other_logits) = ours, theirs
    if not ((logits - other_logits).abs() <= bound_TE).all():
        yield "logits"
    bound_T1 = 2 * bound_TE.amax(1, keepdim=True)
    apart = (logits.gather(1, experts) - logits.gather(1, other_experts)).abs() > bound_T1
    if apart.any():
        yield "experts"
    same = (experts == other_experts).all(1, keepdim=True)
    if (same & ((weights - other_weights).abs() > (bound_T1 + EXPONENTIAL) * other_weights)).any():
        yield "weights"


def _compare_balances(args: tuple[Any, ...], ours: list[Tensor], theirs: list[Tensor]) -> Iterator[str]:
    """The counts bit for bit, the loss within the bound of `octile.ops.sequence_balance`."""
    if not torch.isclose(ours[0], theirs[0], rtol=EXPONENTIAL, atol=0.0):
        yield "loss"
    if not torch.equal(ours[1], theirs[1]):
        yield "counts"


COMPARE = {"gate": _compare_gates, "sequence_balance": _compare_balances}


def _tensors(results: Any) -> list[Tensor]:
    """The tensors among the results, encoded values as integers, in which NaN equals itself."""
    found = [t for t in (results if isinstance(results, tuple) else (results,)) if isinstance(t, Tensor)]
    return [t.view(torch.uint8) if t.element_size() == 1 else t for t in found]
