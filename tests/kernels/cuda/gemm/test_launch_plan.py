"""Tests of the launch plan: layouts of results, operands that are copied, and unsupported requests."""

from dataclasses import replace

import pytest
import torch

from octile.kernels import backends
from octile.kernels.cuda.gemm import launch_cache, launch_plan, request
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.launch_plan import make_tma_readable, plan_launch, problem
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from tests.kernels.cuda.emulated import block_of
from tests.kernels.cuda.emulated import operand as quantized

ROW, BLOCK = Scales.PER_ROW, Scales.PER_BLOCK
M, N, K = 40, 24, 160


def operand(shape: tuple[int, ...], kind: Scales) -> Operand:
    data, scale, _ = quantized(shape, kind)
    return Operand(data, scale, block_of(kind, data))


def _request(out=None, a=None, b=None, **others) -> GemmRequest:
    out = torch.empty(M, N, dtype=torch.bfloat16) if out is None else out
    a, b = a or operand((M, K), ROW), b or operand((N, K), BLOCK)
    return replace(GemmRequest(Schedule.DENSE, a, b, out.dtype, out), **others)


OUTS = {
    "TMA": (torch.empty(M, N, dtype=torch.bfloat16), Store.TMA),
    "strided rows": (torch.empty(M, N + 8, dtype=torch.bfloat16)[:, :N], Store.TMA),
    "float32": (torch.empty(M, N), Store.TMA),
    "float32, rows at 8 bytes": (torch.empty(M, N + 2)[:, :N], Store.PAIRS),
    "rows at 4 bytes": (torch.empty(M, N + 2, dtype=torch.bfloat16)[:, :N], Store.PAIRS),
    "a base at 4 bytes": (torch.empty(M, N + 8, dtype=torch.bfloat16)[:, 2 : N + 2], Store.PAIRS),
    "an odd stride": (torch.empty(M, N + 1)[:, :N], Store.SINGLE),
    "columns first": (torch.empty(N, M).mT, Store.SINGLE),
}


@pytest.mark.parametrize("case", OUTS)
def test_how_a_result_is_stored(case: str):
    out, store = OUTS[case]
    assert problem(_request(out)).store is store


def test_tma_loads_c_for_the_accumulate_epilogue():
    assert problem(_request(torch.empty(M, N), accumulate=True)).store is Store.TMA
    assert problem(_request(accumulate=True)).store is Store.TMA


def test_quantized_tensors_are_readable_by_tma():
    for p in (_request(), _request(b=operand((N, K), ROW))):
        assert make_tma_readable(p) is p


def test_row_major_scales_are_copied():
    a = operand((M, K), ROW)
    p = _request(a=replace(a, scale=a.scale.contiguous()))
    copied = make_tma_readable(p)
    assert copied is not p
    assert make_tma_readable(copied) is copied
    assert torch.equal(copied.a.scale, p.a.scale)
    assert copied.b.data is p.b.data
    assert copied.b.scale is p.b.scale


@pytest.mark.parametrize("layout", ["unaligned rows", "unaligned base", "columns first"])
def test_data_that_tma_cannot_read_is_copied(layout: str, monkeypatch):
    copied = []
    monkeypatch.setattr(launch_plan, "_k_major", lambda t: copied.append(t) or operand((M, K), ROW).data)
    data = torch.empty(M, K + 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    data = {
        "unaligned rows": torch.empty(M, K + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :K],
        "unaligned base": data[:, 1 : K + 1],
        "columns first": torch.empty(K, M, dtype=torch.uint8).view(torch.float8_e4m3fn).mT,
    }[layout]
    p = make_tma_readable(_request(a=replace(operand((M, K), ROW), data=data)))
    assert copied[0] is data
    assert make_tma_readable(p) is p


def test_the_grid_is_no_larger_than_the_work():
    kernel = GemmConfig(128, 64, 3, staged_boxes=1, cluster_m=2)
    assert plan_launch(_request(), Chip(132), kernel).grid == 2
    large = _request(torch.empty(3000, N, dtype=torch.bfloat16), operand((3000, K), ROW))
    assert plan_launch(large, Chip(132), kernel).grid == 24
    assert plan_launch(large, Chip(7), kernel).grid == 6


def test_empty_gemms_launch_no_kernel():
    a, b = torch.empty(M, 0, dtype=torch.float8_e4m3fn), torch.empty(N, 0, dtype=torch.float8_e4m3fn)
    scale = torch.empty(M, 0)
    out = torch.ones(M, N)
    empty = GemmRequest(
        Schedule.DENSE, Operand(a, scale, (1, 128)), Operand(b, torch.empty(1, 0), (128, 128)), out.dtype, out
    )
    launch_cache.launch(replace(empty, accumulate=True))
    assert out.eq(1).all()
    launch_cache.launch(empty)
    assert not out.any()
    launch_cache.launch(replace(empty, a=Operand(a[:0], scale[:0], (1, 128)), out=out[:0]))


def test_a_request_without_promotion_has_one_scale(monkeypatch):
    pytest.importorskip("triton")
    p = _request(torch.empty(M, N), promote=False)
    monkeypatch.setattr(request, "why_not_on", lambda device: None)
    request._why_unsupported.cache_clear()
    assert "one scale an operand" in request.why_unsupported(p)
    with pytest.raises(ValueError, match="one scale an operand"):
        backends.run("gemm", p)
    request._why_unsupported.cache_clear()


def _reason(monkeypatch, a_block=(1, 128), b_block=(128, 128), dtype=torch.float8_e4m3fn, groups=None) -> str | None:
    monkeypatch.setattr(request, "why_not_on", lambda device: None)
    request._why_unsupported.cache_clear()
    return request.why_unsupported(_dense_request(a_block, b_block, dtype, groups))


def _dense_request(a_block=(1, 128), b_block=(128, 128), dtype=torch.float8_e4m3fn, groups=None) -> GemmRequest:
    x, scale = torch.empty(256, 256, dtype=dtype), torch.empty(0)
    schedule, sizes = (Schedule.GROUPED, torch.empty(groups)) if groups else (Schedule.DENSE, None)
    return GemmRequest(schedule, Operand(x, scale, a_block), Operand(x, scale, b_block), torch.float32, sizes=sizes)


def test_which_operands_are_supported(monkeypatch):
    assert _reason(monkeypatch) is None
    assert _reason(monkeypatch, (1, 128), (1, 128)) is None
    assert _reason(monkeypatch, (256, 256), (256, 256)) is None
    assert _reason(monkeypatch, groups=4) is None
    assert "not torch.int8" in _reason(monkeypatch, dtype=torch.int8)
    assert "not 1×256" in _reason(monkeypatch, (1, 256))
    assert "128×128 with 128×128" in _reason(monkeypatch, (128, 128))
    assert "256×256 with 256×256" in _reason(monkeypatch, (256, 256), (256, 256), groups=2)
    assert "1024 at most" in _reason(monkeypatch, groups=1025)


def test_no_other_device_is_supported():
    request._why_unsupported.cache_clear()
    assert request.why_unsupported(_dense_request()) == "they are written for Hopper (sm_90)"


def test_k_of_zero_leaves_the_rows_past_the_groups_of_a_given_result():
    a, b = torch.empty(5, 0, dtype=torch.float8_e4m3fn), torch.empty(2, 3, 0, dtype=torch.float8_e4m3fn)
    out, offs = torch.ones(5, 3, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    operands = Operand(a, torch.empty(5, 0), (1, 128)), Operand(b, torch.empty(2, 1, 0), (128, 128))
    launch_cache.launch(GemmRequest(Schedule.GROUPED, *operands, out.dtype, out, offs, zero_rest=False))
    assert torch.equal(out, torch.tensor([0, 0, 0, 0, 1]).bfloat16()[:, None].expand(5, 3))


def test_without_groups_a_given_result_is_unchanged():
    a, b = torch.empty(5, 8, dtype=torch.float8_e4m3fn), torch.empty(0, 3, 8, dtype=torch.float8_e4m3fn)
    out, offs = torch.ones(5, 3, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)
    operands = Operand(a, torch.empty(5, 1), (1, 128)), Operand(b, torch.empty(0, 1, 1), (128, 128))
    new = GemmRequest(Schedule.GROUPED, *operands, out.dtype, sizes=offs)
    assert launch_cache.launch(replace(new, out=out, zero_rest=False)) is out
    assert out.eq(1).all()
    assert not launch_cache.launch(new).any()


@pytest.mark.parametrize(
    ("a_block", "a_shape", "b_block", "b_shape", "expected"),
    [
        ((1, 128), (5, 300), (128, 128), (70, 300), (Scales.PER_ROW, Scales.PER_BLOCK)),
        ((128, 128), (128, 128), (200, 128), (200, 128), (Scales.PER_TENSOR, Scales.PER_TENSOR)),
        ((1, 128), (1, 128), (1, 128), (1, 128), (Scales.PER_TENSOR, Scales.PER_TENSOR)),
        ((1, 128), (1, 256), (200, 256), (200, 256), (Scales.PER_ROW, Scales.PER_TENSOR)),
    ],
)
def test_a_scale_is_per_tensor_if_its_block_covers_the_tensor(a_block, a_shape, b_block, b_shape, expected):
    a, b = (torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in (a_shape, b_shape))
    operands = Operand(a, torch.empty(0), a_block), Operand(b, torch.empty(0), b_block)
    assert GemmRequest(Schedule.DENSE, *operands, torch.float32).scale_kinds() == expected
