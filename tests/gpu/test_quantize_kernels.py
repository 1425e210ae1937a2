"""Fused quantization on a GPU equals that on the CPU bit for bit, or within the stated bound.

A kernel is compiled for each format and scale rule, which takes longer than running it, so only some pairs are tested
here, and fewer of the layouts that the CUDA kernels leave to Triton, whose compiler is slower. All pairs run in the
interpreter and in the emulator. One matrix per operator is large.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.groups import align_groups
from octile.ops.norm import normalized, rms_norm_backward, rms_norm_quantize
from octile.ops.permute import permute, unpermute
from octile.ops.quantize import decode, dequantize, quantize, quantize_with_scale
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize, swiglu_quantize_and_save
from octile.ops.transpose import (
    quantize_and_transpose,
    quantize_joined,
    quantize_joined_rows_and_columns,
    quantize_matrices,
    quantize_rows_and_columns,
    quantize_transposed,
    requantize_transposed,
    transpose_encoded,
)
from tests.kernels.triton.comparison import assert_close_data, assert_same, extreme, finite

pytestmark = pytest.mark.usefixtures("kernels")

FORMATS = ["e4m3", "e5m2", "int8"]
SHAPES = [(1000, 1152), (1300, 2304), (3, 130, 304), (128, 128), (0, 256)]
RAGGED = [(1, 5), (3, 130, 300)]

every_format = pytest.mark.parametrize("fmt", FORMATS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
both_scales = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])
formats_and_scales = pytest.mark.parametrize(
    ("fmt", "power_of_2"), [("e4m3", False), ("e4m3", True), ("e5m2", True), ("int8", False)]
)


def _tiles(x: Tensor, fmt: str, power_of_2: bool) -> tuple[Tensor, ...]:
    data, scale = (t.to(x.device) for t in quantize(x.cpu(), 1, 128, fmt, power_of_2))
    return requantize_transposed(data, scale, power_of_2)


every_operator = pytest.mark.parametrize(
    "operator", [quantize_rows_and_columns, quantize_and_transpose, _tiles], ids=["rows and columns", "blocks", "tiles"]
)


def _cpu(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies with the strides they have on the GPU."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors]


def _assert_as_on_the_cpu(operator: Callable[..., tuple[Tensor, ...]], x: Tensor, fmt: str, power_of_2: bool) -> None:
    assert_same(_cpu(operator(x.cuda(), fmt, power_of_2)), operator(x, fmt, power_of_2))


@every_operator
@every_shape
@formats_and_scales
def test_transposed_quantization(
    operator: Callable[..., tuple[Tensor, ...]], shape: tuple[int, ...], fmt: str, power_of_2: bool
):
    _assert_as_on_the_cpu(operator, finite(*shape).bfloat16(), fmt, power_of_2)


@every_operator
@pytest.mark.parametrize("shape", [(4096, 3584), *RAGGED], ids=str)
def test_transposed_quantization_of_a_large_matrix_and_of_ragged_ones(
    operator: Callable[..., tuple[Tensor, ...]], shape: tuple[int, ...]
):
    _assert_as_on_the_cpu(operator, finite(*shape).bfloat16(), "e4m3", False)


@pytest.mark.parametrize("shape", [(768, 256), (16, 768, 256), (512, 768), (130, 304)], ids=str)
@both_scales
def test_weights_and_their_transposes(shape: tuple[int, ...], power_of_2: bool):
    _assert_as_on_the_cpu(quantize_and_transpose, 0.02 * torch.randn(shape), "e4m3", power_of_2)


@pytest.mark.parametrize("shape", [(768, 256), (16, 768, 256), (130, 304)], ids=str)
@both_scales
def test_transposed_weights_alone(shape: tuple[int, ...], power_of_2: bool):
    w = 0.02 * torch.randn(shape)
    found = quantize_transposed(w.cuda(), "e4m3", power_of_2, w.cuda())
    assert_same(_cpu(found), quantize_transposed(w, "e4m3", power_of_2, w))


@pytest.mark.parametrize("shape", [(768, 256), (16, 768, 256), (130, 305)], ids=str)
def test_encoded_weights_are_transposed(shape: tuple[int, ...]):
    data = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found, expected = transpose_encoded(data.cuda()).cpu(), transpose_encoded(data)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [(384, 320), (2048, 2048), (1536, 512, 512), (128, 3)], ids=str)
@pytest.mark.parametrize(("with_data", "with_transposed"), [(True, True), (True, False), (False, True)])
def test_joined_weights(rows: tuple[int, ...], dtype: torch.dtype, with_data: bool, with_transposed: bool):
    weights = [torch.randn(n, 776).to(dtype) for n in rows]
    settings = ("e4m3", True, with_data, with_transposed)
    found = quantize_joined([w.cuda() for w in weights], *settings)
    assert_same(_cpu(found), quantize_joined(weights, *settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [264, 265])  # on Hopper by its own kernel and by Triton's
@pytest.mark.parametrize("with_transposed", [True, False])
def test_many_matrices(k: int, dtype: torch.dtype, with_transposed: bool):
    shapes = [(768, k), (16, 140, k), *((128 * (1 + i % 3), k) for i in range(69)), (3, k)]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    settings = ([1, 1, *[3] * 23, 1], "e4m3", True, with_transposed)
    found = quantize_matrices([w.cuda() for w in weights], *settings)
    assert_same(_cpu(found), quantize_matrices(weights, *settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [(384, 256, 64), (4096, 1024, 1024), (128, 3)], ids=str)
def test_rows_and_columns_of_parts(columns: tuple[int, ...], dtype: torch.dtype):
    parts = [torch.randn(700, n).to(dtype) for n in columns]
    found = quantize_joined_rows_and_columns([part.cuda() for part in parts], "e4m3", True)
    assert_same(_cpu(found), quantize_joined_rows_and_columns(parts, "e4m3", True))


def _all_magnitudes(k: int) -> Tensor:
    x = extreme(700, k)
    x[3, 5], x[200, 300], x[600, 999] = float("nan"), float("inf"), float("-inf")
    return x


@every_operator
@formats_and_scales
def test_transposed_quantization_of_all_magnitudes(
    operator: Callable[..., tuple[Tensor, ...]], fmt: str, power_of_2: bool
):
    _assert_as_on_the_cpu(operator, _all_magnitudes(1000), fmt, power_of_2)


@every_operator
@pytest.mark.parametrize(("fmt", "power_of_2"), [("e4m3", False), ("int8", True)])
def test_ragged_transposed_quantization_of_all_magnitudes(
    operator: Callable[..., tuple[Tensor, ...]], fmt: str, power_of_2: bool
):
    _assert_as_on_the_cpu(operator, _all_magnitudes(1003), fmt, power_of_2)


@every_format
def test_quotients_near_the_middle_between_two_encoded_values(fmt: str):
    """Scales close to values of few bits, where a quotient other than FP32's could round to another encoded value."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}[fmt]
    scale = (torch.arange(128, 256)[:, None] * 2.0**16 + torch.arange(-16, 17)).flatten()[:, None] * 2.0**-23
    middle = torch.arange(128, 257) * 2.0**-8
    for some, block in ((middle, (1, 256)), (middle[:127], (1, 128)), (middle[2:], (1, 128))):
        x = torch.cat([scale * largest, (scale.double() * some).float()], dim=1)
        for steps in range(-2, 3):
            moved = torch.tensor([0] + len(some) * [steps], dtype=torch.int32)
            near = (x.view(torch.int32) + moved).view(torch.float32)
            assert_same(_cpu(quantize(near.cuda(), *block, fmt, False)), quantize(near, *block, fmt, False))


@both_scales
@pytest.mark.parametrize("k", [1024, 1030])
def test_e5m6(k: int, power_of_2: bool):
    x = extreme(300, k)
    data, scale = quantize(x, 1, 128, "e5m6", power_of_2)
    found, found_scale = quantize(x.cuda(), 1, 128, "e5m6", power_of_2)
    assert torch.equal(found.cpu(), data)
    assert torch.equal(found_scale.cpu(), scale)
    values = dequantize(found, found_scale, 1, 128, torch.bfloat16).cpu()
    torch.testing.assert_close(values, dequantize(data, scale, 1, 128, torch.bfloat16), rtol=0, atol=0)


def test_e5m6_of_nan_is_nan():
    x = torch.ones(2, 256)
    x[1, 200] = float("nan")
    data, _ = quantize(x.cuda(), 1, 128, "e5m6", True)
    assert decode(data).isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "scale", [0.37, 1 - 2.0**-23, 2.0**-10, 2.0**-100, 1e-40, 0.0, -3.0, float("nan"), float("inf")]
)
@pytest.mark.parametrize("k", [1000, 1003])
def test_a_given_scale(k: int, fmt: str, scale: float):
    x, given = extreme(300, k), torch.tensor([scale])
    x[3, 5], x[200, 300] = float("nan"), float("-inf")
    assert_same(_cpu((quantize_with_scale(x.cuda(), given.cuda(), fmt),)), [quantize_with_scale(x, given, fmt)])


@pytest.mark.parametrize("end", [0, 1, 700, 1300])
def test_swiglu_of_the_rows_of_groups(end: int):
    gate, up = (4 * torch.randn(1300, 2048)).bfloat16().cuda().chunk(2, 1)
    ends = torch.tensor([end // 2, end], dtype=torch.int32, device="cuda")
    found, whole = (_cpu(swiglu_quantize(gate, up, "e4m3", False, None, of)) for of in (ends, None))
    assert_same([part[:end] for part in found], [part[:end] for part in whole])


@pytest.mark.each_pair
@formats_and_scales
@pytest.mark.parametrize("shape", [(1300, 1024), (999, 256), (1, 128)], ids=str)
def test_swiglu_is_within_its_bound(shape: tuple[int, int], fmt: str, power_of_2: bool):
    m, h = shape
    dh, (gate, up) = torch.randn(shape).bfloat16(), (4 * torch.randn(m, 2 * h)).bfloat16().chunk(2, 1)
    assert_close_data(
        _cpu(swiglu_quantize(gate.cuda(), up.cuda(), fmt, power_of_2)), swiglu_quantize(gate, up, fmt, power_of_2)
    )
    weight = torch.rand(m)
    *_, saved, saved_scale = swiglu_quantize_and_save(gate, up, "e4m3", True, fmt, power_of_2, weight)
    for inputs in ((gate, up, None, None, None), (*saved, *saved_scale, None), (*saved, *saved_scale, weight)):
        settings = (fmt, power_of_2, fmt, not power_of_2)
        found = _cpu(swiglu_backward_quantize(dh.cuda(), *(None if t is None else t.cuda() for t in inputs), *settings))
        expected = swiglu_backward_quantize(dh, *inputs, *settings)
        for pair in (slice(0, 2), slice(2, 4), slice(4, 6)):
            assert_close_data(found[pair], expected[pair])
        assert_sums_are_close(found[6], expected[6], dh, gate, up)


@formats_and_scales
@pytest.mark.parametrize("shape", [(1300, 1024), (999, 304), (1, 128)], ids=str)
def test_swiglu_saves_its_inputs(shape: tuple[int, int], fmt: str, power_of_2: bool):
    _assert_inputs_are_kept(shape, fmt, power_of_2)


def test_swiglu_saves_ragged_inputs():
    _assert_inputs_are_kept((999, 300), "e4m3", False)


def _assert_inputs_are_kept(shape: tuple[int, int], fmt: str, power_of_2: bool) -> None:
    gate, up = (4 * torch.randn(2, *shape)).bfloat16()
    weight = torch.rand(shape[0])
    found = _cpu(swiglu_quantize_and_save(gate.cuda(), up.cuda(), "e4m3", True, fmt, power_of_2, weight.cuda()))
    expected = swiglu_quantize_and_save(gate, up, "e4m3", True, fmt, power_of_2, weight)
    assert_close_data(found[:2], expected[:2])
    assert_same(found[2:], expected[2:])


@pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])
@pytest.mark.parametrize("shape", [(1300, 2304), (999, 300), (5, 8)], ids=str)
def test_e5m6_becomes_8_bits_and_rows_are_reordered(shape: tuple[int, int], power_of_2: bool):
    packed = quantize(finite(*shape).bfloat16(), 1, 128, "e5m6", True)
    found = requantize_transposed(*(t.cuda() for t in packed), power_of_2, "e4m3")
    assert_same(_cpu(found), requantize_transposed(*packed, power_of_2, "e4m3"))
    tiles, rows = quantize(finite(*shape).bfloat16(), 1, 128, "e4m3", True), torch.randint(0, shape[0], (500,))
    arguments = (power_of_2, None, rows.to(torch.int32))
    found = requantize_transposed(*(t.cuda() for t in tiles), power_of_2, None, arguments[2].cuda())
    assert_same(_cpu(found), requantize_transposed(*tiles, *arguments))


@pytest.mark.each_pair
@formats_and_scales
@pytest.mark.parametrize(
    "counts", [(130, 0, 128, 1, 500), (0, 0, 0), tuple(range(40)), (2500,)], ids=["some", "none", "many", "one"]
)
@pytest.mark.parametrize("k", [1024, 1000, 9])
def test_groups_have_tiles_of_their_own(k: int, counts: tuple[int, ...], fmt: str, power_of_2: bool):
    offs, t = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32), sum(counts) + 3
    x, rows = finite(t, k).bfloat16(), torch.randperm(t).to(torch.int32)
    tiles, ends = align_groups(offs, t)
    on_gpu = align_groups(offs.cuda(), t)
    assert torch.equal(on_gpu[0].cpu(), tiles)
    assert torch.equal(on_gpu[1].cpu(), ends)

    found = quantize_rows_and_columns(x.cuda(), fmt, power_of_2, on_gpu[0])
    assert_same(_cpu(found), quantize_rows_and_columns(x, fmt, power_of_2, tiles))
    quantized = quantize(x, 1, 128, fmt, power_of_2)
    for order in (None, rows):
        order_on_gpu = None if order is None else order.cuda()
        for in_blocks in (False, True):
            settings = (order_on_gpu, on_gpu[0], in_blocks)
            found = requantize_transposed(*(q.cuda() for q in quantized), power_of_2, fmt, *settings)
            assert_same(_cpu(found), requantize_transposed(*quantized, power_of_2, fmt, order, tiles, in_blocks))


@pytest.mark.each_pair
@formats_and_scales
@pytest.mark.parametrize("h_in_blocks", [False, True], ids=["tiles", "blocks"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["", "saved"])
def test_swiglu_backward_of_groups(is_saved: bool, h_in_blocks: bool, fmt: str, power_of_2: bool):
    offs, (m, h) = torch.tensor([130, 130, 258, 900], dtype=torch.int32), (1000, 1024)
    dh, (gate, up) = torch.randn(m, h).bfloat16(), (4 * torch.randn(m, 2 * h)).bfloat16().chunk(2, 1)
    inputs: tuple[Tensor | None, ...] = (gate, up, None, None, torch.rand(m))
    if is_saved:
        *_, saved, saved_scale = swiglu_quantize_and_save(gate, up, "e4m3", True, fmt, power_of_2)
        inputs = (*saved, *saved_scale, torch.rand(m))
    settings, (tiles, _) = (fmt, power_of_2, fmt, not power_of_2), align_groups(offs, m)
    on_gpu = [None if t is None else t.cuda() for t in inputs]
    found = _cpu(swiglu_backward_quantize(dh.cuda(), *on_gpu, *settings, tiles.cuda(), h_in_blocks))
    expected = swiglu_backward_quantize(dh, *inputs, *settings, tiles, h_in_blocks)
    for pair in (slice(0, 2), slice(2, 4), slice(4, 6)):
        rows_of_a_scale = 128 if h_in_blocks and pair.start == 4 else 1
        assert_close_data(*([t[0], t[1].repeat_interleave(rows_of_a_scale, 0)] for t in (found[pair], expected[pair])))
    assert_sums_are_close(found[6], expected[6], dh, gate, up)


def assert_sums_are_close(found: Tensor, expected: Tensor, dh: Tensor, gate: Tensor, up: Tensor) -> None:
    """Compare sums of dh · SwiGLU over rows, which FP32 adds in any order; the terms may cancel."""
    assert found.shape == expected.shape
    terms = (dh.float() * F.silu(gate.float()) * up.float())[: len(found)]  # none without a weight
    assert ((found - expected).abs() <= 2.0**-22 * terms.abs().sum(1)).all()


@pytest.mark.parametrize("shape", [(512, 8, 7168), (333, 3, 300), (1, 1, 5)], ids=str)
def test_permute_and_unpermute(shape: tuple[int, int, int]):
    t, k, d = shape
    row_ids = torch.randperm(t * k).view(t, k).to(torch.int32)
    tiles = quantize(finite(t, d).bfloat16(), 1, 128, "e4m3", True)
    places = row_ids, row_ids.flatten().argsort().to(torch.int32)
    assert_same(_cpu(permute(*(x.cuda() for x in (*tiles, *places)))), permute(*tiles, *places))
    y, add = torch.randn(t * k, d).bfloat16(), torch.randn(t, d).bfloat16()
    assert_same(_cpu((unpermute(y.cuda(), row_ids.cuda(), add.cuda()),)), [unpermute(y, row_ids, add)])


@formats_and_scales
@pytest.mark.parametrize("shape", [(1300, 2304), (999, 304), (1, 128)], ids=str)
def test_rms_norm_is_bit_for_bit_after_its_rstd(shape: tuple[int, int], fmt: str, power_of_2: bool):
    _assert_normalized(shape, fmt, power_of_2)


@pytest.mark.parametrize("shape", [(4096, 3584), (999, 300), (5, 32768)], ids=str)
def test_rms_norm_of_large_ragged_and_wide_matrices(shape: tuple[int, int]):
    _assert_normalized(shape, "e4m3", False)


def _assert_normalized(shape: tuple[int, int], fmt: str, power_of_2: bool) -> None:
    x, weight = finite(*shape).bfloat16(), torch.rand(shape[1]) + 0.5
    *found, rstd, y = _cpu(rms_norm_quantize(x.cuda(), weight.cuda(), 1e-6, fmt, power_of_2, True))
    torch.testing.assert_close(rstd, rms_norm_quantize(x, weight, 1e-6, fmt, power_of_2)[2], rtol=2.0**-20, atol=0)
    values = normalized(x, rstd, weight)
    assert_same([*found, y], [*quantize(values, 1, 128, fmt, power_of_2), values.bfloat16()])


@pytest.mark.parametrize("shape", [(4096, 7168), (999, 300), (1, 128), (5, 32768)], ids=str)
def test_gradients_of_rms_norm(shape: tuple[int, int]):
    x, weight, dy = finite(*shape).bfloat16(), torch.rand(shape[1]) + 0.5, torch.randn(shape).bfloat16()
    rstd = rms_norm_quantize(x, weight, 1e-6, "e4m3", False)[2]
    found = [t.cpu() for t in rms_norm_backward(*(t.cuda() for t in (dy, x, weight, rstd)))]
    expected = rms_norm_backward(dy, x, weight, rstd)
    size = expected[0].float().abs().amax(-1, keepdim=True)
    assert ((found[0].float() - expected[0].float()).abs() <= 2.0**-8 * size).all()
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-3)
