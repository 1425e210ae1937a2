"""Tests of torchtitan's mixture of experts with rows moved by octile's kernels, vs. torchtitan's own in FP32.

Shapes: B texts, S tokens of each, D model, I intermediate, E experts, K experts a token.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octile.nn.conversion import apply_recipe
from tests.saved_bytes import saved_bytes
from tests.torchtitan_on_cpu import count_integers

pytest.importorskip("torchtitan")

from torchtitan.models.moe import moe

from octile.integrations.torchtitan_moe import FusedMoE, fuse_moe

B, S, D, I, E, K = 2, 15, 128, 128, 6, 3


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "histc", count_integers)


def mixture(**arguments: object) -> nn.Module:
    torch.manual_seed(0)
    settings = {"num_experts": E, "top_k": K, "use_grouped_mm": False, "score_before_experts": False, **arguments}
    module = moe.MoE(moe.MoEArgs(**settings), D, I)
    with torch.no_grad():
        module.init_weights(0.1, torch.device("cpu"))
    return module


def fused(module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module)
    fuse_moe(made)
    return made


def results(module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The output, the counts, and the gradients of the input and of all parameters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    y = module(x)
    y.backward(torch.randn(B, S, D, generator=generator).to(dtype))
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "load": module.tokens_per_expert, **gradients}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], of_norm: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert (value - expected[name]).norm() <= of_norm * expected[name].norm(), name


@pytest.mark.parametrize("shared", [0, 1])
def test_results_and_gradients_are_those_of_torchtitan(shared: int):
    module = mixture(num_shared_experts=shared)
    assert_close(results(fused(module)), results(module), 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16_they_are_no_further_from_those_in_fp32(autocast: bool):
    module = mixture()
    exact, dtype = results(copy.deepcopy(module)), torch.float32 if autocast else torch.bfloat16

    def run(m: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return results(m.to(dtype), dtype)

    found, theirs = run(fused(module)), run(copy.deepcopy(module))
    for name in ("y", "x", "router.gate.weight"):
        assert found[name].dtype == theirs[name].dtype
        error, their_error = ((r[name].float() - exact[name]).norm() for r in (found, theirs))
        assert error <= 1.1 * their_error, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant: bool):
    module = fused(mixture())
    expected = results(module)
    again = fused(mixture())
    forward = again.forward
    again.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)
    found = results(again)
    del found["load"], expected["load"]  # which torchtitan counts again, too
    assert_close(found, expected, 0.0)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_with_compiled_parts_results_are_the_same():
    """As torchtitan compiles it: the experts alone are not."""
    module = fused(mixture())
    expected = results(module)
    again = fused(mixture())
    for name in ("router", "reorderer", "shared_experts"):
        setattr(again, name, torch.compile(getattr(again, name), backend="aot_eager", fullgraph=True))
    found = {name.replace("_orig_mod.", ""): t for name, t in results(again).items()}
    assert_close(found, expected, 1e-6)


def test_less_is_saved_for_backward():
    module, x = mixture().bfloat16(), torch.randn(B, S, D, dtype=torch.bfloat16)

    def saved(m: nn.Module) -> int:
        return saved_bytes(lambda: m(x.clone().requires_grad_()), m.parameters())

    assert saved(fused(module)) < 0.9 * saved(module)  # torchtitan saves the rows in FP32


def test_experts_are_in_fp8_and_the_module_stays_with_its_parameters():
    model = nn.ModuleDict({"moe": mixture()})
    module, names = model["moe"], list(model.state_dict())
    apply_recipe(model)
    fuse_moe(model)
    assert model["moe"] is module
    assert list(model.state_dict()) == names
    assert isinstance(module, FusedMoE)
    assert module.experts.recipe.name == "deepseek_v3"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_computes_the_same(copied: Callable[[nn.Module], nn.Module]):
    module = fused(mixture())
    assert_close(results(copied(module)), results(module), 0.0)


def test_subclasses_and_mixtures_with_scores_before_their_experts_stay():
    class Own(moe.MoE):
        pass

    early, own = mixture(score_before_experts=True), mixture()
    own.__class__ = Own
    fuse_moe(nn.ModuleList([early, own]))
    assert (type(early), type(own)) == (moe.MoE, Own)
