"""Tests of planning: the shapes and dtypes that it computes are torch's, and operators plan launches on meta."""

import pytest
import torch
import torch.nn.functional as F

from octile.kernels.cuda.gemm.cost_model import Chip
from octile.ops.matmul import matmul_nt
from octile.ops.planning import planned_kernels
from octile.ops.quantize import quantize

CASES = {
    "scalar": lambda x, y: x * 2.0,
    "integers and a float": lambda x, y: y * 0.5,
    "two dtypes": lambda x, y: x + y,
    "broadcast": lambda x, y: x[:, :1] + y[:1],
    "in place": lambda x, y: x.clone().add_(1),
    "comparison": lambda x, y: x > y,
    "choice": lambda x, y: torch.where(x > 0, x, 0.0),
    "clamp": lambda x, y: x.clamp(min=0),
    "unary": lambda x, y: torch.sigmoid(x).neg(),
    "floor division": lambda x, y: y // 3,
    "choice of low precision": lambda x, y: torch.where(x > 0, x.bfloat16(), 0.0),
    "a scalar tensor": lambda x, y: x.sum() * x.bfloat16(),
    "low precision": lambda x, y: x.bfloat16() * x[0].bfloat16(),
    "empty": lambda x, y: x[:0] + x[:0],
    "joined": lambda x, y: torch.cat([x, x], dim=-1),
    "arange": lambda x, y: torch.arange(1, 8, 2, dtype=torch.float32, device=x.device),
    "product": lambda x, y: x @ x.mT,
    "sum": lambda x, y: x.sum(),
    "sum of rows": lambda x, y: x.sum(-1, keepdim=True),
    "sum over two": lambda x, y: x[None].sum((0, 2)),
    "stacked": lambda x, y: torch.stack([x, x], dim=-1),
    "layer norm": lambda x, y: F.layer_norm(x, (4,), torch.ones(4, device=x.device)),
    "softmax": lambda x, y: x.log_softmax(-1),
    "mean": lambda x, y: x.mean(0),
    "maximum": lambda x, y: x.amax(-1),
    "any": lambda x, y: (x > 0).any(),
    "all of a dimension": lambda x, y: (x > 0).all(1),
    "triangle": lambda x, y: x.tril(1),
    "rows": lambda x, y: x[y[:, 0] % 3],
    "like": lambda x, y: torch.zeros_like(x),
    "like, another dtype": lambda x, y: torch.ones_like(x, dtype=torch.float64),
    "arange from 0": lambda x, y: torch.arange(7, device=x.device),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_dtypes_are_those_of_torch(case):
    x, y = torch.randn(3, 4), torch.arange(12).reshape(3, 4)
    expected = CASES[case](x, y)
    with planned_kernels(Chip(132), torch.bfloat16):
        found = CASES[case](x.to("meta"), y.to("meta"))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_layers_compute_in_the_dtype_of_autocast():
    layer, embedding = torch.nn.Linear(4, 3, device="meta"), torch.nn.Embedding(5, 4, device="meta")
    with planned_kernels(Chip(132), torch.bfloat16):
        x = embedding(torch.empty(2, dtype=torch.int64, device="meta"))
        assert (x.dtype, layer(x).dtype, x.is_cuda) == (torch.bfloat16, torch.bfloat16, True)
    assert not x.is_cuda


def test_an_operator_plans_its_launch():
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    with planned_kernels(Chip(132), torch.bfloat16) as kernels:
        data, scale = quantize(x, 1, 128, "e4m3", False)
        y = matmul_nt(data, scale, (1, 128), data, scale, (1, 128), torch.bfloat16)
        matmul_nt(data, scale, (1, 128), data, scale, (1, 128), torch.bfloat16)
    assert [kernel.name for kernel in kernels.values()] == ["tiles", "gemm"]
    assert (y.shape, y.dtype, y.device.type) == ((256, 256), torch.bfloat16, "meta")
    assert {"tile_m", "tile_n", "split_k"} <= set(list(kernels.values())[1].constants)


def test_outside_of_a_plan_operators_plan_nothing():
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    data, _ = quantize(x, 1, 128, "e4m3", False)
    assert data.shape == x.shape
