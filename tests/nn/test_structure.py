"""Tests of the recognition of other people's modules: what computes SwiGLU, and what only looks like it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GemmaConfig, Glm4Config, LlamaConfig, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.glm4.modeling_glm4 import Glm4MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from octile.nn.mlp import MLP, GateUpMLP, SwiGLU
from octile.nn.structure import (
    called_on_one_input,
    eps_of_rms_norm,
    is_called_in_a_row,
    is_swiglu,
    rotary_functions,
    swiglu_class,
)

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


class OtherInEvaluation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x.clamp(max=10.0))


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
    [Scaled, ScaledOutput, Clamped, Dropped, OtherInEvaluation, Swapped, OtherInput, TwoInputs, OwnParameter, Failing,
     Residual],
)  # fmt: skip
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


# RMSNorm


class Norm(nn.Module):
    """What Llama computes, with hooks for variants."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * unit.to(x.dtype)


class RoundedOnce(Norm):
    """What OLMo 2 computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class OnePlusWeight(Norm):
    """What Gemma computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x) / self.weight


class OtherEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centered(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class NormOfAll(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean() + self.variance_epsilon)


class OtherNormInEvaluation(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x - x.mean(-1, keepdim=True))


class InFloat32(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


class WithBias(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))


class Broken(Norm):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")


@pytest.mark.parametrize("kind", [Norm, RoundedOnce])
def test_what_computes_rms_norm_is_recognized(kind: type[Norm]):
    assert eps_of_rms_norm(kind()) == "variance_epsilon"
    assert eps_of_rms_norm(kind().to("meta")) == "variance_epsilon"


@pytest.mark.parametrize(
    "kind",
    [OnePlusWeight, OtherEps, Centered, NormOfAll, OtherNormInEvaluation, InFloat32, Gated, WithBias, Broken],
    ids=lambda k: k.__name__,
)
def test_what_only_looks_like_rms_norm_is_not_recognized(kind: type[Norm]):
    assert eps_of_rms_norm(kind()) is None


def test_other_norms_are_not_recognized():
    assert eps_of_rms_norm(nn.LayerNorm(6, bias=False)) is None
    assert eps_of_rms_norm(nn.BatchNorm1d(6)) is None


# Rotary embeddings: the global functions of a forward pass


def half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def whole(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def part(q, k, cos, sin):
    r = cos.shape[-1]
    rotated = whole(q[..., :r], k[..., :r], cos, sin)
    return tuple(torch.cat((y, x[..., r:]), dim=-1) for y, x in zip(rotated, (q, k), strict=True))


def backwards(q, k, cos, sin):
    return whole(q, k, cos, -sin)


def only_q(q, k, cos, sin):
    return whole(q, k, cos, sin)[0], k


def adjacent_pairs(q, k, cos, sin):
    def paired(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return q * cos[:, None] + paired(q) * sin[:, None], k * cos[:, None] + paired(k) * sin[:, None]


def with_another_argument(q, k, cos, sin, positions):
    return whole(q, k, cos, sin)


def of_other_names(x, y, cos, sin):
    return whole(x, y, cos, sin)


def forward_of(function) -> object:
    """A forward pass that calls a function by a global name."""
    names = {"rotate": function}
    exec("def forward(self, q, k, cos, sin):\n    return rotate(q, k, cos, sin)", names)
    return names["forward"]


@pytest.mark.parametrize(("function", "found"), [(whole, (True, False)), (part, (True, True))])
def test_rotary_embeddings_are_recognized(function, found):
    assert rotary_functions(forward_of(function)) == [("rotate", found)]


@pytest.mark.parametrize(
    "function", [backwards, only_q, adjacent_pairs, with_another_argument, of_other_names, 3, nn.Module, None]
)
def test_what_is_no_rotation_of_halves_is_not_recognized(function):
    assert rotary_functions(forward_of(function)) == []


def test_a_forward_pass_that_may_rotate_otherwise_is_not_recognized():
    names = {"rotate": whole, "rotate_pairs": adjacent_pairs}
    exec("def forward(self, *a):\n    return rotate(*a) if self.halves else rotate_pairs(*a)", names)
    assert rotary_functions(names["forward"]) == []


def test_a_forward_pass_without_code_has_no_rotary_embedding():
    assert rotary_functions(len) == []


# Layers that are always called on the first argument


class Projections(nn.Module):
    """Three layers for a forward pass of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.norm(self.b(x)) + F.relu(self.a(x)) + self.c(self.a.weight)


class Conditional(Projections):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        a = self.a(x)
        b = self.b(x) if y is None else self.b(y)
        if y is not None:
            a = a + self.c(x)
        return a + b


class Repeated(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + sum(self.c(x) for _ in range(2)) + self.a(x)


class Assigned(Projections):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x)


class OtherArgument(Projections):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(y) + self.c(x + y)


@pytest.mark.parametrize(
    ("module", "names"),
    [(Projections, ["b", "a"]), (Conditional, ["a"]), (Repeated, []), (Assigned, []), (OtherArgument, ["a"])],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_layers_that_are_always_called_on_the_first_argument_are_found(module: type[nn.Module], names: list[str]):
    assert called_on_one_input(module()) == names


class InARow(Projections):
    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        b = self.c(self.b(x).view(shape)).flatten(0)
        a = self.a(x)
        b.add_(helper(a))
        return b


class WrittenArgument(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        x.mul_(2)
        return b + self.a(x)


class WrittenInACall(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x).add(x.mul_(2))
        a = self.a(x)
        return a + b


class WrittenByAFunction(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        y = helper(x)
        a = self.a(x)
        return a + b + y


class WrittenRows(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        x[0] = 0.0
        a = self.a(x)
        return a + b


class WrittenWeight(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        w = self.a.weight.mul_(2)
        a = self.a(x)
        return a + b + w


class Switched(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        with torch.no_grad():
            a = self.a(x)
        return a + b


class WrittenByAMethod(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.renew(self.b(x))
        a = self.a(x)
        return a + b

    def renew(self, x: Tensor) -> Tensor:
        self.a.weight.data.mul_(2)
        return x


class WrittenByAMethodOfAResult(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x).map2_(x, x).apply(x)
        a = self.a(x)
        return a + b


class WrittenByAnArgument(Projections):
    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x).contiguous(out=x)
        a = self.a(x)
        return a + b


class WrittenByAChild(Projections):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        b = self.norm(x) + self.b(x)
        a = self.a(x)
        return a + b


class HookedChild(Projections):
    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_hook(lambda *_: self.a.weight.data.mul_(2))

    def forward(self, x: Tensor) -> Tensor:
        b = self.norm(self.b(x))
        a = self.a(x)
        return a + b


class Norms(Projections):
    """As in transformers' Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.RMSNorm(8), LlamaRMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        b = self.norm(self.b(x).view(-1, 8)).transpose(0, 1)
        a = self.other_norm(self.a(x).view(-1, 8)).transpose(0, 1)
        return a + b


def helper(x: Tensor) -> Tensor:
    return x.mul_(2)


IN_A_ROW = [InARow, Norms]
NOT_IN_A_ROW = [
    *(WrittenArgument, WrittenInACall, WrittenByAFunction, WrittenRows, WrittenWeight, Switched, HookedChild),
    *(WrittenByAMethod, WrittenByAMethodOfAResult, WrittenByAnArgument, WrittenByAChild),
]


@pytest.mark.parametrize("module", [*IN_A_ROW, *NOT_IN_A_ROW])
def test_a_forward_pass_that_may_write_between_its_layers_is_recognized(module: type[nn.Module]):
    made = module()
    assert called_on_one_input(made) == ["b", "a"]
    assert is_called_in_a_row(made, ["b", "a"]) == (module in IN_A_ROW)


def test_without_its_source_a_forward_pass_has_none():
    scope: dict[str, object] = {"Projections": Projections}
    exec("class Made(Projections):\n    def forward(self, x):\n        return self.a(x) + self.b(x)\n", scope)
    assert called_on_one_input(scope["Made"]()) == []  # type: ignore[operator]


def test_a_replaced_forward_pass_is_not_read():
    module = Projections()
    module.forward = lambda x: module.a(x)
    assert called_on_one_input(module) == []
