"""`torch.export`, `torch.compile` with shapes that change, transforms of `torch.func`, and torch's counter of FLOPs."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from octile.nn import MLP, Gate, MoE
from octile.nn.conversion import apply_recipe
from octile.ops.attention import attention
from octile.recipe import Recipe
from tests.models_of_transformers import small_model


class Logits(nn.Module):
    """A language model of transformers, of one layer, as a function of tokens [B, S]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: LlamaForCausalLM = apply_recipe(small_model(name, num_hidden_layers=1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def tokens(rows: int, columns: int = 16) -> Tensor:
    return torch.randint(160, (rows, columns), generator=torch.Generator().manual_seed(rows))


def values(rows: int) -> Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))


MODELS = {
    "layers": (lambda: apply_recipe(nn.Sequential(nn.Linear(128, 200), nn.SiLU(), nn.Linear(200, 128))), values),
    "fused block": (lambda: apply_recipe(MLP(128, 256)), values),
    "llama": (lambda: Logits("llama"), tokens),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.oldest_torch
@pytest.mark.one_case
@pytest.mark.parametrize("name", [*MODELS, pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_exported_model_computes_the_same(name: str, grad: bool):
    make, inputs = MODELS.get(name, (lambda: Logits(name), tokens))
    torch.manual_seed(0)
    model = make().eval()
    with torch.set_grad_enabled(grad):
        exported = torch.export.export(model, (inputs(6),)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(inputs(6)), model(inputs(6)), rtol=0, atol=0)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_an_exported_mixture_runs_without_gradients():
    exported = torch.export.export(Logits("qwen3_moe").eval(), (tokens(6),)).module()
    with pytest.raises(RuntimeError, match=r"what torch\.export has exported runs under torch\.no_grad\(\)"):
        exported(tokens(6))


@pytest.mark.oldest_torch
@pytest.mark.one_case
@every_model
def test_a_model_is_exported_with_a_dynamic_number_of_rows(name: str):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    rows = torch.export.Dim("rows", min=2, max=1024)
    exported = torch.export.export(model, (inputs(6),), dynamic_shapes=({0: rows},)).module()
    with torch.no_grad():
        for n in (6, 13):
            torch.testing.assert_close(exported(inputs(n)), model(inputs(n)), rtol=0, atol=0)


@pytest.mark.oldest_torch
@pytest.mark.slow
@torch._dynamo.config.patch(specialize_float=True)  # torch makes them inputs, finds no use for that, and traces again
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("layers", "aot_eager", id="layers", marks=pytest.mark.exhaustive),
        pytest.param("fused block", "aot_eager", id="fused block"),
        pytest.param("llama", "eager", id="llama", marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph_without_breaks_serves_all_numbers_of_rows(name: str, backend: str):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for n in (6, 13):
        y, expected = compiled(inputs(n)), model(inputs(n))
        y.square().mean().backward()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def operators(n_layers: int, is_whole: bool) -> tuple[Counter[str], Counter[str]]:
    """octile's operators, and copies for those that write an argument, in a Llama's forward and backward graphs."""
    torch._dynamo.reset()
    forward, backward = Counter[str](), Counter[str]()

    def counting(calls: Counter[str]) -> Callable[[torch.fx.GraphModule, object], torch.fx.GraphModule]:
        def compile_graph(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
            targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            calls.update(target for target in targets if "octile" in target or "functionalized" in target)
            return graph

        return compile_graph

    # inductor's own partition, which may have the backward pass recompute
    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=counting(forward), bw_compiler=counting(backward), partition_fn=partition)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": n_layers}
    model = apply_recipe(small_model("llama", **sizes).bfloat16().train())
    for module in (model,) if is_whole else model.model.layers:
        module.compile(backend=backend)
    model(input_ids=tokens(2), labels=tokens(2), use_cache=False).loss.backward()
    return forward, backward


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_whole_graph_calls_the_operators_of_its_layers_and_copies_nothing_for_them():
    whole, layer = operators(2, is_whole=True), operators(1, is_whole=False)
    assert [*whole] == [Counter({name: 2 * n for name, n in calls.items()}) for calls in layer]
    assert [calls["octile.matmul_nt.default"] for calls in layer] == [4, 8]  # none is recomputed
    assert not any("functionalized" in name for calls in whole for name in calls)


@every_model
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_of_torch_func_are_refused(name: str, transform: Callable):
    make, inputs = MODELS[name]
    model, x = make(), inputs(6)
    parameters = {key: p[None] if transform is torch.func.vmap else p for key, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match=r"inside a transform of torch\.func"):
        transform(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)


def flops(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """What torch counts in a forward and a backward pass."""
    with FlopCounterMode(display=False) as forward:
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.backward(torch.ones_like(y))
    return forward.get_total_flops(), backward.get_total_flops()


RECIPES = [name for name in Recipe.names() if not Recipe.named(name).batch_invariant]  # those of any model


@pytest.mark.parametrize("name", RECIPES)
def test_torch_counts_the_flops_of_quantized_layers(name: str):
    model, x = nn.Sequential(nn.Linear(128, 200), nn.SiLU(), nn.Linear(200, 128)), values(6).requires_grad_()
    expected = flops(model, x)
    assert flops(apply_recipe(model, Recipe.named(name)), x) == expected


def test_torch_counts_the_flops_of_a_fused_block():
    x = values(6).requires_grad_()
    assert flops(apply_recipe(MLP(128, 256)), x) == flops(MLP(128, 256), x)


def test_torch_counts_the_flops_of_a_mixture_with_the_rows_that_pad_experts_in_weight_gradients():
    model, x = apply_recipe(MoE(Gate(128, 4, 2), 128, 256, 128)), values(6)[None].requires_grad_()
    gate, shared, a_row = 6 * 2 * 128 * 4, 6 * 2 * 128 * 3 * 128, 2 * 128 * 3 * 256
    rows = 6 * 2
    padded = 128 + 4 * 128  # rounded up to tiles of 128 rows, and a tile for each expert
    assert flops(model, x) == (gate + shared + rows * a_row, 2 * (gate + shared) + (rows + padded) * a_row)


def test_torch_counts_no_flops_of_octiles_attention():
    q, k, v = torch.randn(3, 1, 2, 16, 32)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, 32**-0.5)
    assert counter.get_total_flops() == 0
