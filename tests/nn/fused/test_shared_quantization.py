"""Tests of shared quantization: layers called together compute what each computes alone, and quantize once."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from octile.nn.conversion import convert
from octile.nn.fused.shared_quantization import share_among_children, shared_by_layers, shared_quantization
from octile.nn.linear import Linear
from octile.nn.mla import MLA
from octile.nn.mlp import MLP
from octile.nn.observer import observe_quantization
from octile.nn.rope import Rope
from octile.recipe import Recipe

K = 256


def layers(name: str, count: int = 2) -> list[Linear]:
    torch.manual_seed(0)
    return [Linear(K, 48, recipe=Recipe.named(name)) for _ in range(count)]


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1), requires_grad=True)


def saved_bytes(call, shape: tuple[int, ...]) -> int:
    """Bytes saved for backward in tensors of that many rows, each memory once."""
    rows = {}

    def keep(t: Tensor) -> Tensor:
        if t.shape[:-1] == shape:
            rows[t.data_ptr()] = t.nbytes
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        call()
    return sum(rows.values())


@pytest.mark.parametrize("name", Recipe.names())
def test_layers_called_together_compute_what_they_do_alone(name):
    results = []
    for call in (lambda x, *layers: [layer(x) for layer in layers], shared_quantization):
        x, (a, b) = x_of(3, 5), layers(name)
        y_a, y_b = call(x, a, b)
        (y_a.sum() + y_b.square().sum()).backward()
        results.append([y_a, y_b, x.grad, a.weight.grad, b.weight.grad])
    assert all(torch.equal(alone, both) for alone, both in zip(*results, strict=True))


@pytest.mark.parametrize(("name", "bytes_a_value"), [("deepseek_v3", 1 + 4 / 128), ("bf16", 2)])
def test_the_input_of_layers_called_together_is_saved_once(name, bytes_a_value):
    x, (a, b) = x_of(40), layers(name)
    alone, both = saved_bytes(lambda: a(x), (40,)), saved_bytes(lambda: shared_quantization(x, a, b), (40,))
    assert alone == both == x.numel() * bytes_a_value


def test_layers_called_one_by_one_save_their_input_each():
    x, (a, b) = x_of(40), layers("deepseek_v3")
    keep = []  # so that no memory is reused
    assert saved_bytes(lambda: keep.extend((a(x), b(x))), (40,)) == 2 * saved_bytes(lambda: a(x), (40,))


def test_layers_of_different_recipes_quantize_separately():
    x, (a, b) = x_of(40), [*layers("deepseek_v3", 1), *layers("per_tensor", 1)]
    y_a, y_b = shared_quantization(x, a, b)
    assert torch.equal(y_a, a(x))
    assert torch.equal(y_b, b(x))


def test_delayed_scales_are_recorded_by_each_layer():
    a, b = layers("delayed")
    shared_quantization(x_of(40), a, b)
    assert a.history.amax_OH[0, 0] == b.history.amax_OH[0, 0] > 0


def test_an_input_that_a_hook_replaces_is_not_shared():
    x, (a, b) = x_of(40), layers("deepseek_v3")
    b.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
    _, y_b = shared_quantization(x, a, b)
    assert torch.equal(y_b, b(x))


def quantizations_of_inputs(model: nn.Module, *inputs: object) -> int:
    seen = []
    with observe_quantization(lambda operand, q: seen.append(operand)):
        model(*inputs)
    return seen.count("x")


def test_gate_and_up_projections_share_their_input():
    assert quantizations_of_inputs(convert(MLP(K, 32)), x_of(4)) == 2  # and the down-projection has its own


@pytest.mark.parametrize(("q_lora_rank", "quantizations"), [(16, 4), (None, 3)])
def test_the_down_projections_of_attention_share_their_input(q_lora_rank, quantizations):
    mla = MLA(K, 2, q_lora_rank=q_lora_rank, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    assert quantizations_of_inputs(convert(mla), x_of(2, 6), Rope(4).cos_sin(torch.arange(6))) == quantizations


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_compiled_without_a_graph_break_they_compute_the_same():
    torch.manual_seed(0)
    mlp, x = convert(MLP(K, 32)), x_of(4).detach()
    assert torch.equal(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x))


# Layers that another library's module calls itself


class Attention(nn.Module):
    """Two projections of the input and one of another tensor."""

    def __init__(self, name: str = "deepseek_v3"):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = layers(name, 3)

    def forward(self, hidden_states: Tensor, other: Tensor, write: bool = False) -> Tensor:
        q = self.q_proj(hidden_states)
        if write:
            with torch.no_grad():
                hidden_states.mul_(0.5)
        return q + self.k_proj(hidden_states) + self.v_proj(other)


def inputs_quantized(call) -> int:
    count = []
    with observe_quantization(lambda operand, q: count.append(operand) if operand == "x" else None):
        call()
    return len(count)


def test_children_of_a_module_quantize_its_input_once():
    attention, x, other = Attention(), x_of(5), x_of(5)
    share_among_children(attention)
    assert inputs_quantized(lambda: attention(x, other)) == 2
    assert inputs_quantized(lambda: attention(hidden_states=x, other=other)) == 2


def test_children_compute_what_they_do_alone():
    results = []
    for share in (False, True):
        attention, x, other = Attention(), x_of(5), x_of(5)
        if share:
            share_among_children(attention)
        y = attention(x, other)
        y.sum().backward()
        results.append([y, x.grad, other.grad, attention.q_proj.weight.grad, attention.k_proj.weight.grad])
    assert all(torch.equal(alone, shared) for alone, shared in zip(*results, strict=True))


def test_an_input_that_was_written_between_two_layers_is_quantized_again():
    attention, x = Attention(), x_of(5).detach()
    share_among_children(attention)
    assert inputs_quantized(lambda: attention(x, x_of(5), write=True)) == 3


def test_nothing_is_shared_after_the_forward_pass():
    attention, x = Attention(), x_of(5)
    share_among_children(attention)
    attention(x, x_of(5))
    assert shared_by_layers(x) is None


def test_nothing_is_shared_after_a_forward_pass_that_raised():
    attention, x = Attention(), x_of(5)
    share_among_children(attention)
    with pytest.raises(ValueError, match="x"):
        attention(x, x_of(5)[:, :3])
    assert shared_by_layers(x) is None


def test_a_module_within_another_leaves_the_others_input_shared():
    class Outer(Attention):
        def forward(self, hidden_states: Tensor, inner: nn.Module) -> Tensor:
            q = self.q_proj(hidden_states)
            return q + inner(x_of(5), x_of(5)) + self.k_proj(hidden_states)

    outer, inner = Outer(), Attention()
    share_among_children(outer)
    share_among_children(inner)
    assert inputs_quantized(lambda: outer(x_of(5), inner)) == 3


def test_sharing_twice_adds_no_more_hooks():
    attention = Attention()
    share_among_children(attention)
    share_among_children(attention)
    assert (len(attention._forward_pre_hooks), len(attention._forward_hooks)) == (1, 1)


def test_a_copy_of_the_module_shares_too():
    attention = Attention()
    share_among_children(attention)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(attention)))
    assert inputs_quantized(lambda: copied(x_of(5), x_of(5))) == 2


def test_delayed_scaling_is_not_shared_among_children():
    attention = Attention("delayed")
    share_among_children(attention)
    assert inputs_quantized(lambda: attention(x_of(5), x_of(5))) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_children_share_when_the_forward_pass_is_recomputed(reentrant: bool):
    attention, x, other = Attention(), x_of(5), x_of(5)
    share_among_children(attention)
    y = checkpoint(attention, x, other, use_reentrant=reentrant)
    assert inputs_quantized(y.sum().backward) == 2
    assert shared_by_layers(x) is None
