"""Shared by the tests of the DeepGEMM interface: operands, their values in FP64, and the bound of FP32 summation."""

import pytest
import torch
from torch import Tensor

import octile
import octile.compat.deep_gemm as deep_gemm


@pytest.fixture(autouse=True)
def alignment_of_128():
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    yield
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiles(*shape: int, seed: int = 0, power_of_2: bool = False, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """[..., M, K] in tiles of 1×gran_k."""
    return _pair(random(*shape, seed=seed), (1, gran_k), power_of_2)


def blocks_128(*shape: int, seed: int = 0, power_of_2: bool = False) -> tuple[Tensor, Tensor]:
    """[..., N, K] in blocks of 128×128."""
    return _pair(random(*shape, seed=seed), (128, 128), power_of_2)


def _pair(x: Tensor, block: tuple[int, int], power_of_2: bool) -> tuple[Tensor, Tensor]:
    q = octile.quantize(x, block, scale="power_of_2" if power_of_2 else "float32")
    return q.data, q.scale


def values(pair: tuple[Tensor, Tensor], rows: int, cols: int) -> Tensor:
    """data · scale in float64."""
    data, scale = pair
    m, k = data.shape[-2:]
    scale = scale.repeat_interleave(rows, dim=-2).repeat_interleave(cols, dim=-1)[..., :m, :k]
    return data.double() * scale.double()


def assert_gemm(d: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None) -> None:
    """d is c + a · bᵀ of float64 operands, within the rounding of K FP32 sums and of d's own dtype."""
    c = torch.zeros_like(d) if c is None else c
    exact = c.double() + a @ b.mT
    size = c.double().abs() + a.abs() @ b.abs().mT
    bound = (a.shape[-1] + 3) * 2.0**-24 * size + torch.finfo(d.dtype).eps / 2 * exact.abs()
    assert ((d.double() - exact).abs() <= bound * (1 + 1e-3) + 1e-30).all()
