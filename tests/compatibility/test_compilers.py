"""`torch.export` and `torch.compile` with shapes that change."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaForCausalLM

from octile.nn import MLP
from octile.nn.conversion import apply_recipe
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


@every_model
def test_an_exported_model_computes_the_same(name: str):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    exported = torch.export.export(model, (inputs(6),)).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(inputs(6)), model(inputs(6)), rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("layers", "aot_eager", id="layers"),
        pytest.param("fused block", "aot_eager", id="fused block", marks=pytest.mark.exhaustive),
        pytest.param("llama", "eager", id="llama"),
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
