"""Tests of the recognition of other people's modules: what computes SwiGLU, and what only looks like it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GemmaConfig, Glm4Config, LlamaConfig, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from octile.nn.mlp import MLP, GateUpMLP, SwiGLU
from octile.nn.structure import is_swiglu, swiglu_class

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "pad_token_id": 0}


class Layers(nn.Module):
    """The three layers of a SwiGLU, for a forward pass of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = nn.SiLU()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Scaled(Layers):
    """What Falcon-H1 computes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x) * 0.5))


class ScaledOutput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Clamped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=100.0)) * self.up_proj(x))


class Dropped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Swapped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class OtherInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1))


class TwoInputs(Layers):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x)


class OwnParameter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Failing(Layers):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")


class Residual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (LlamaMLP(LlamaConfig(**SIZES)), MLP),
        (LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True)), MLP),
        (Layers(), MLP),
        (Phi3MLP(Phi3Config(**SIZES)), GateUpMLP),
        (Glm4MLP(Glm4Config(**SIZES)), GateUpMLP),
    ],
    ids=["Llama", "Llama with biases", "a class of the user's", "Phi3", "Glm4"],
)
def test_a_module_that_computes_swiglu_is_recognized(module: nn.Module, expected: type[SwiGLU]):
    assert swiglu_class(module) is expected


@pytest.mark.parametrize(
    "kind",
    [Scaled, ScaledOutput, Clamped, Dropped, Swapped, OtherInput, TwoInputs, OwnParameter, Failing, Residual],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_computes_something_else_is_not(kind: type[Layers], training: bool):
    assert swiglu_class(kind().train(training)) is None


def test_another_activation_is_not_swiglu():
    assert swiglu_class(GemmaMLP(GemmaConfig(**SIZES))) is None
    assert swiglu_class(LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu"))) is None


def test_a_forward_pass_that_was_replaced_on_the_instance_is_not_swiglu():
    module = Layers()
    module.forward = lambda x: x
    assert swiglu_class(module) is None


def test_a_module_on_the_meta_device_is_recognized():
    with torch.device("meta"):
        assert swiglu_class(LlamaMLP(LlamaConfig(**SIZES))) is MLP


def test_recognition_leaves_the_module_as_it_is():
    module = Layers().eval()
    before = dict(module._modules)
    swiglu_class(module)
    assert dict(module._modules) == before
    assert not any(m.training for m in module.modules())


def test_swiglu_of_one_tensor_is_recognized():
    def swiglu(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    assert is_swiglu(swiglu)
    assert not is_swiglu(lambda t: swiglu(t.clamp(max=100.0)))
    assert not is_swiglu(lambda t: swiglu(t.flip(-1)))
    assert not is_swiglu(lambda t: t[:, ::2])
