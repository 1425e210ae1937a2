"""Hopper's GEMM of BF16 operands in the emulator: the bits of its tensor cores, for ragged shapes and NaN."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import bf16, request
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.launch_plan import plan_launch
from octile.lab.tensor_core import tensor_core_matmul
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    made = bf16.request_of(out, a, b)
    config = bf16.config_of(made)
    plan = plan_launch(made, Chip(3), config)
    at_scale, at_sizes = made.a.scale.data_ptr(), 0 if made.sizes is None else made.sizes.data_ptr()
    pointers = a.data_ptr(), b.data_ptr(), at_scale, at_scale, at_sizes, out.data_ptr()
    emulator.run(
        "gemm",
        config.constants(),
        grid=plan.grid,
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        arguments=plan.arguments(pointers, 0, 0, lambda tensor, pointer: tensor._replace(pointer=pointer)),
        headers=config.headers(),
        memory=[a, b, made.a.scale, out, *([] if made.sizes is None else [made.sizes])],
        arithmetic="hopper",
    )
    return out


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize(("m", "n", "k"), [(128, 132, 64), (200, 260, 72), (300, 64, 200)])
def test_bits(m: int, n: int, k: int):
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(1, rows, k, generator=generator).bfloat16() for rows in (m, n))
    assert torch.equal(multiply(a, b, torch.full((1, m, n), math.nan))[0], tensor_core_matmul(a[0], b[0]))


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize(("m", "n", "k"), [(130, 72, 128), (200, 136, 40), (70, 320, 64)])
def test_bits_of_several_matrices(m: int, n: int, k: int):
    """Those of heads: rows of all heads lie together, and results are written between others."""
    generator = torch.Generator().manual_seed(m)
    a, b = (
        torch.randn(m, 3, k + 8, generator=generator).bfloat16(),
        torch.randn(3, n, k, generator=generator).bfloat16(),
    )
    out = torch.full((m, 3, n + 64), math.nan).bfloat16()
    multiply(a[..., :k].transpose(0, 1), b, out[..., :n].transpose(0, 1))
    expected = [tensor_core_matmul(a[:, g, :k].contiguous(), b[g]).bfloat16() for g in range(3)]
    assert torch.equal(out[..., :n], torch.stack(expected, dim=1))
    assert out[..., n:].isnan().all()


@emulated
def test_rows_apart():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 96, generator=generator).bfloat16()[:, :64] for rows in (130, 40))
    out = torch.full((130, 48), math.nan)
    multiply(a[None], b[None], out[None, :, :40])
    assert torch.equal(out[:, :40], tensor_core_matmul(a.contiguous(), b.contiguous()))
    assert out[:, 40:].isnan().all()


@emulated
def test_a_nan_reaches_its_row_only():
    a, b = torch.ones(128, 64).bfloat16(), torch.ones(8, 64).bfloat16()
    a[3, 5], a[4, 0] = math.nan, math.inf
    found = multiply(a[None], b[None], torch.zeros(1, 128, 8))[0]
    assert found[3].isnan().all()
    assert found[4].isinf().all()
    assert (found[5:] == 64).all()


def test_calls_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda device: None)
    out, a, b = torch.empty(1, 128, 64), torch.empty(1, 128, 32).bfloat16(), torch.empty(1, 64, 32).bfloat16()
    assert bf16.why_unsupported(out, a, b) is None
    assert "operands are torch.float32" in str(bf16.why_unsupported(out, a.float(), b))
    assert "127 rows" in str(bf16.why_unsupported(out[:, :127], a[:, :127], b))
    assert "128 rows, fewer than 1024" in str(bf16.why_unsupported(*(t.expand(2, -1, -1) for t in (out, a, b))))
    assert "multiples of 16 bytes" in str(bf16.why_unsupported(out, a[..., 1:], b[..., 1:]))
    assert "62 columns" in str(bf16.why_unsupported(out[..., :62], a, b[:, :62]))


def test_sums_of_bf16_products_are_not_promoted():
    with pytest.raises(ValueError, match="not promoted"):
        replace(bf16.CONFIG, promote=True, tile_n=64)
