"""Tests of layers of other libraries' modules that run as one GEMM: results are those of the layers called alone."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from octile.nn.conversion import apply_recipe
from octile.nn.joined_linear import JoinedLinear
from octile.nn.linear import Linear
from octile.recipe import Recipe

D = 256
RECIPE = Recipe.deepseek_v3()


class Attention(nn.Module):
    """What a library's attention does with its layers."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, n, bias) for n in (256, 128, 128))
        self.o_proj = nn.Linear(256, D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (4, 64)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (2, 64)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (2, 64)).transpose(1, 2)
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class SwitchingAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)[..., :128]
        with torch.no_grad():
            k = self.k_proj(x)
        return q + k + self.v_proj(x)


class RenewingAttention(Attention):
    """A method of the module writes a weight between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)[..., :128]
        k = self.renew(q) + self.k_proj(x)
        v = self.v_proj(x)
        return q + k + v

    def renew(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.v_proj.weight.fill_(0.5)
        return x


class LeavingAttention(Attention):
    def forward(self, x: Tensor, queries_only: bool = True) -> Tensor:
        q = self.q_proj(x)[..., :128]
        if queries_only:
            return q
        return q + self.k_proj(x) + self.v_proj(x)


class CrossAttention(Attention):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.q_proj(x)[..., :128] + self.k_proj(memory) + self.v_proj(memory)


def converted(recipe: Recipe = RECIPE, kind: Callable[..., nn.Module] = Attention, **options: Any) -> Any:
    torch.manual_seed(0)
    return apply_recipe(nn.Sequential(kind(**options)), recipe)[0]


def input_of(seed: int = 1) -> Tensor:
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def run(module: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """The result and the gradients of the input and of the parameters."""
    x = input_of()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return [y.detach(), x.grad, *gradients]


def alone(module: nn.Module) -> list[Tensor]:
    """`run` with each layer computed alone."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.joined = None
    return run(module, list(module.parameters()))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers were computed together, at each time."""
    found: list[int] = []
    compute = JoinedLinear._compute

    def counted(self: JoinedLinear, x: Tensor) -> list[Tensor]:
        found.append(len(self.layers))
        return compute(self, x)

    monkeypatch.setattr(JoinedLinear, "_compute", counted)
    return found


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed_weights", ["cached", "recomputed"])
def test_layers_called_on_one_input_equal_layers_called_alone(bias: bool, transposed_weights: Any, computed: list[int]):
    attention = converted(replace(RECIPE, transposed_weights=transposed_weights), bias=bias)
    assert_close(run(attention, list(attention.parameters())), alone(attention))
    assert computed == [3]


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "joined"), [(Attention, [3]), (SwitchingAttention, [])], ids=["joined", "alone"])
def test_a_compiled_module_is_joined_where_nothing_can_happen_in_between(
    kind: Any, joined: list[int], computed: list[int]
):
    attention = converted(kind=kind)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = run(compiled, list(attention.parameters()))
    assert computed == joined
    assert_close(found, alone(attention))


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_joined_module_in_activation_checkpointing_is_one_graph():
    attention = converted()

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(lambda t: attention(t.sin()), x, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    parameters = list(attention.parameters())
    assert_close(run(compiled, parameters), run(checkpointed, parameters))


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_compiled_layers_of_two_modules_that_alternate_have_their_own_results():
    first, second = converted(), converted()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(-2.0)

    def alternate(x: Tensor) -> list[Tensor]:
        return [first.q_proj(x), second.q_proj(x), first.k_proj(x), second.k_proj(x)]

    x = torch.randn(16, D)
    for found, expected in zip(torch.compile(alternate, backend="aot_eager")(x), alternate(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.oldest_torch
@pytest.mark.one_case
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_that_the_module_writes_in_between_is_read_again(is_compiled: bool):
    attention, x = converted(kind=RenewingAttention), input_of().detach()
    expected = copy.deepcopy(attention)
    for layer in (expected.q_proj, expected.k_proj, expected.v_proj):
        layer.joined = None
    module = torch.compile(attention, backend="eager") if is_compiled else attention
    assert torch.equal(module(x), expected(x))


def test_layers_with_other_inputs_are_called_alone(computed: list[int]):
    attention = converted(kind=CrossAttention)
    attention(input_of(), input_of(3))
    assert computed == []


def test_an_input_that_is_written_in_between_is_read_again():
    attention = converted()
    x = input_of().detach()
    attention.q_proj(x)
    x.mul_(2)
    expected = copy.deepcopy(attention).k_proj(x.clone())
    assert torch.equal(attention.k_proj(x), expected)


def test_layers_behind_a_return_are_not_computed_for_it(computed: list[int]):
    attention = converted(kind=LeavingAttention)
    attention(input_of()).sum().backward()
    assert attention.k_proj.weight.grad is None
    assert not computed


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_is_called_from_outside_of_its_module_leaves_the_others_without_gradients(bias: bool):
    attention = converted(bias=bias)
    q, others = attention.q_proj, [*attention.k_proj.parameters(), *attention.v_proj.parameters()]
    found = run(q, [*q.parameters(), *others])
    assert all(gradient is None for gradient in found[-len(others) :])
    assert_close(found[: -len(others)], alone(q))


def test_a_bias_that_is_written_in_between_is_read_again():
    attention = converted(bias=True)
    x = input_of().detach()
    attention.q_proj(x)
    with torch.no_grad():
        attention.k_proj.bias.add_(1)
    assert torch.equal(attention.k_proj(x), copy.deepcopy(attention).k_proj(x.clone()))


def test_a_weight_that_is_replaced_in_between_is_read():
    attention = converted()
    x = input_of().detach()
    attention.q_proj(x)
    attention.k_proj.weight = nn.Parameter(2 * attention.k_proj.weight.detach())
    assert torch.equal(attention.k_proj(x), copy.deepcopy(attention).k_proj(x.clone()))


def test_a_weight_that_is_written_in_between_is_read_again():
    attention = converted()
    x = input_of().detach()
    attention.q_proj(x)
    with torch.no_grad():
        attention.k_proj.weight.mul_(2)
    assert torch.equal(attention.k_proj(x), copy.deepcopy(attention).k_proj(x.clone()))


def test_gradients_and_autocast_that_are_switched_in_between_apply():
    attention = converted()
    x = input_of()
    with torch.no_grad():
        attention.q_proj(x)
    assert attention.k_proj(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        attention.q_proj(x)
    assert attention.k_proj(x).dtype == torch.float32


def test_a_call_out_of_order_computes_its_own_result():
    attention = converted()
    x = input_of().detach()
    attention.q_proj(x)
    assert torch.equal(attention.v_proj(x), attention.v_proj(x.clone()))
    assert torch.equal(attention.k_proj(x), attention.k_proj(x.clone()))


def test_nothing_is_held_after_the_last_call():
    attention = converted()
    attention(input_of())
    assert attention.q_proj.joined._pending is None


@pytest.mark.parametrize("bias", [False, True])
def test_a_result_is_contiguous_and_does_not_hold_the_memory_of_the_others(bias: bool):
    attention, x = converted(bias=bias), input_of()
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        y = layer(x)
        assert y.is_contiguous()
        assert y.untyped_storage().nbytes() == y.nbytes


def test_a_result_may_be_written_in_place():
    attention, x = converted(), input_of()
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    sum(layer(x).mul_(2).sum() for layer in layers).backward()
    assert all(layer.weight.grad is not None for layer in layers)


def test_a_layer_with_a_hook_is_called_alone(computed: list[int]):
    attention, seen = converted(), []
    attention.k_proj.register_forward_hook(lambda *_: seen.append("k"))
    assert_close(run(attention, list(attention.parameters())), alone(attention))
    assert "k" in seen
    assert computed == []


@pytest.mark.parametrize("recipe", ["per_tensor", "bf16"])
def test_a_recipe_that_fuses_nothing_calls_layers_alone(recipe: str, computed: list[int]):
    attention = converted(Recipe.named(recipe))
    run(attention, list(attention.parameters()))
    assert computed == []


def test_a_layer_of_another_recipe_is_called_alone(computed: list[int]):
    attention = converted()
    attention.v_proj.use_recipe(Recipe.named("per_tensor"))
    run(attention, list(attention.parameters()))
    assert computed == []


def test_layers_that_are_not_all_converted_are_joined_as_far_as_they_are(computed: list[int]):
    torch.manual_seed(0)
    attention = apply_recipe(nn.Sequential(Attention()), RECIPE, keep=["*.k_proj"])[0]
    assert_close(run(attention, list(attention.parameters())), alone(attention))
    assert computed == [2]


def test_a_copy_of_a_module_joins_its_own_layers(computed: list[int]):
    attention = converted()
    copied = copy.deepcopy(attention)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert_close(run(copied, list(copied.parameters())), alone(copied))
    assert computed == [3]


def test_threads_get_their_own_results():
    attention, wrong = converted(), []
    expected = [attention(input_of(seed)) for seed in range(4)]

    def call(seed: int) -> None:
        for _ in range(20):
            if not torch.equal(attention(input_of(seed)), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_module_is_saved_and_loaded(tmp_path: Any):
    attention = converted()
    torch.save(attention, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(input_of()), attention(input_of()))
    assert loaded.q_proj.joined.layers[0] is loaded.q_proj


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_compiled_modules_of_one_class_are_compiled_once():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    modules = apply_recipe(nn.ModuleList([Attention() for _ in range(3)]), RECIPE)
    expected = [module(input_of()) for module in modules]
    for module, y in zip(modules, expected, strict=True):
        module.compile(backend=counter)
        assert torch.equal(module(input_of()), y)
    assert counter.frame_count == 1
