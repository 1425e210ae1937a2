"""What ranks under tensor parallelism check of linear layers, on gloo (test_tensor_parallel.py) and on GPUs."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import octile
from octile.nn import MLA, MLP, Linear
from octile.nn.conversion import apply_recipe
from octile.nn.indexer import Indexer
from octile.nn.rope import Rope
from octile.optim import AdamW
from tests.compatibility.processes import RANKS


def mesh() -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (RANKS,))


def two_layers(recipe: octile.Recipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    return apply_recipe(nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)), recipe)


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 16, 128)


def check(alone: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Compare results and gradients, but for the order in which two ranks' parts are summed."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [m(i) for m, i in zip((alone, model), inputs, strict=True)]
    torch.testing.assert_close(ys[1], ys[0], rtol=1e-6, atol=1e-6)
    for y in ys:
        (y - 1).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        found = p.grad.full_tensor()
        assert (found - q.grad).norm() <= 1e-6 * q.grad.norm(), name


def column_and_row(rank: int, folder: Path) -> None:
    alone = two_layers()
    model = parallelize_module(copy.deepcopy(alone), mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight.to_local().shape == (128, 128)
    check(alone, model, tokens())


def sequence(rank: int, folder: Path) -> None:
    """The tokens of input and output are sharded: torch communicates asynchronously before and after the layers."""
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    alone, model = two_layers(), parallelize_module(two_layers(), mesh(), plan)
    x = tokens()
    expected, y = alone(x), model(x.chunk(RANKS, 1)[rank])
    torch.testing.assert_close(y, expected.chunk(RANKS, 1)[rank], rtol=1e-6, atol=1e-6)
    for t in (expected, y):
        (t - 1).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (p.grad.full_tensor() - q.grad).norm() <= 1e-6 * q.grad.norm(), name


def replicated(rank: int, folder: Path) -> None:
    alone, on = two_layers(), mesh()
    model = copy.deepcopy(alone)
    for layer in (model[0], model[2]):
        for name, p in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), on, [Replicate()])))
    x = distribute_tensor(tokens(), on, [Replicate()])
    assert torch.equal(model(x).to_local(), alone(tokens()))


def attention_to_top_k_keys(rank: int, folder: Path) -> None:
    """A sharded layer for keys and values is called, although sparse attention otherwise reads its weight."""
    torch.manual_seed(0)
    dims = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    alone = MLA(128, 2 * RANKS, q_lora_rank=32, **dims, indexer=Indexer(128, 32, 2, 16, 5))
    plan = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(alone), mesh(), plan)
    model.num_heads //= RANKS
    cos_sin = Rope(8).cos_sin(torch.arange(16))
    expected, found = (m(tokens(), cos_sin) for m in (alone, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for y in (expected, found):
        y.square().sum().backward()
    for name in plan:
        shard, whole = model.get_submodule(name).weight.grad, alone.get_submodule(name).weight.grad
        torch.testing.assert_close(shard.full_tensor(), whole, rtol=1e-4, atol=1e-6)


def swiglu(rank: int, folder: Path) -> None:
    """Under tensor parallelism the layers of a block are called one by one."""
    torch.manual_seed(0)
    alone = apply_recipe(MLP(128, 256))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(alone), mesh(), plan)
    alone.down_proj.register_forward_hook(lambda *_: None)
    check(alone, model, tokens())


def optimizer(rank: int, folder: Path) -> None:
    alone, model = (
        two_layers(),
        parallelize_module(two_layers(), mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    )
    for m in (alone, model):
        step = AdamW(m.parameters(), lr=1e-3)
        (m(tokens()) - 1).square().mean().backward()
        step.step()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-5, msg=name)


def partial_gradients(rank: int, folder: Path) -> None:
    """The gradient of a norm that each rank computes of its tokens is a DTensor that is yet to be summed."""
    torch.manual_seed(0)
    alone = apply_recipe(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256)))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    model = parallelize_module(copy.deepcopy(alone), mesh(), plan)
    for m, x in ((alone, tokens()), (model, tokens().chunk(RANKS, 1)[rank])):
        step = AdamW(m.parameters(), lr=1e-3)
        m(x).square().mean().backward()
        step.step()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-5, msg=name)


def autocast(rank: int, folder: Path) -> None:
    """Row-wise, each rank's part is rounded to BF16 before the sum."""
    device = torch.get_default_device().type
    alone, model = (
        two_layers(),
        parallelize_module(two_layers(), mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    )
    with torch.autocast(device, torch.bfloat16):
        expected, y = alone(tokens()), model(tokens())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)


def bf16_recipe(rank: int, folder: Path) -> None:
    """A layer in high precision has no tiles, so any even layout is right."""
    recipe = octile.Recipe.float32()
    torch.manual_seed(0)
    alone = apply_recipe(nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 128)), recipe)
    model = parallelize_module(copy.deepcopy(alone), mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    check(alone, model, tokens())


def refused(rank: int, folder: Path) -> None:
    on = mesh()

    def layer(k: int, n: int, style: object, recipe: octile.Recipe | None = None) -> nn.Module:
        return parallelize_module(nn.Sequential(Linear(k, n, recipe=recipe)), on, {"0": style})

    with pytest.raises(
        ValueError, match=r"in_features must be a multiple of 128 × 2 ranks .* not 192: tiles and blocks"
    ):
        layer(192, 128, RowwiseParallel())(torch.randn(4, 96))
    with pytest.raises(ValueError, match=r"out_features must be a multiple of 128 × 2 ranks .* not 384"):
        layer(128, 384, ColwiseParallel())(torch.randn(4, 128))
    with pytest.raises(
        ValueError, match="recipe 'per_tensor' has one scale for a whole tensor, of which each rank has a"
    ):
        layer(128, 256, ColwiseParallel(), octile.Recipe.per_tensor())(torch.randn(4, 128))
    model = layer(128, 256, ColwiseParallel())
    with pytest.raises(ValueError, match=r"must be column-wise .* or row-wise .* not x \[Shard\(dim=0\)\], weight"):
        octile.nn.functional.linear(
            distribute_tensor(torch.randn(4, 128), on, [Shard(0)]), model[0].weight, None, model[0].recipe
        )
    with pytest.raises(
        TypeError, match="x must be a DTensor as the layer's other tensors are, not Tensor: parallelize"
    ):
        octile.nn.functional.linear(torch.randn(4, 128), model[0].weight, None, model[0].recipe)
    model[0].weight.main_grad = torch.zeros(256, 128)
    with pytest.raises(TypeError, match="a weight that is a DTensor must have no main_grad"):
        model(torch.randn(4, 128))
    stacked = distribute_tensor(torch.randn(2, 128, 128), on, [Shard(0)])
    with pytest.raises(
        TypeError, match="experts and fused layers take local tensors: tensor parallelism is supported for"
    ):
        octile.nn.functional.grouped_linear(torch.randn(4, 128), stacked, torch.tensor([2, 4]), model[0].recipe)
