"""Tests of the CUDA quantization kernels: their unchanged source in the emulator equals the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.cuda.quantize import launcher
from octile.kernels.memory_layout import new_scale
from octile.ops.groups import align_groups
from octile.ops.norm import normalized, rms_norm_quantize
from octile.ops.quantize import STORAGE_DTYPES, decode, dequantize, quantize, quantize_with_scale
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize, swiglu_quantize_and_save
from octile.ops.transpose import (
    quantize_and_transpose,
    quantize_joined,
    quantize_joined_rows_and_columns,
    quantize_matrices,
    quantize_rows_and_columns,
    quantize_transposed,
    requantize_transposed,
)
from tests.kernels.triton.comparison import assert_close_data, assert_same, extreme, finite
from tools import emulator
from tools.emulator import build

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler"),
    pytest.mark.usefixtures("emulated"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = [(1, 128), (128, 1), (128, 128)]
SHAPE = (140, 264)  # two by three 128×128 blocks, of which the last are partial

# Each pair is compiled separately, so not all are tested.
formats_and_scales = pytest.mark.parametrize(
    ("fmt", "power_of_2"), [("e4m3", False), ("e4m3", True), ("e5m2", True), ("int8", False)]
)
both_scales = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernels in the emulator, which guards all tensors that they are given.

    A programmatic kernel begins before the previous one has written what it reads, and writes nothing until then. The
    weight of a norm of few rows, the second tensor, is there before.
    """
    memory: list[Tensor] = []

    def address(t: Tensor | None) -> int:
        if t is None:
            return 0
        memory.append(t)
        return t.data_ptr()

    def launch(name, constants, x, blocks, threads, shared, *arguments, resident=None) -> None:
        given = [t for t in memory if t.numel()]
        grid = blocks if resident is None else min(blocks, 2)  # so that a thread block processes several blocks
        written = memory[:1] + memory[2:] if constants.get("early_weight") else given
        previous = [t for t in written if t.numel() and t.is_contiguous()] if constants.get("programmatic") else []
        emulator.run(
            name, constants, grid=grid, threads=threads, shared_bytes=shared, arguments=arguments, memory=given,
            previous=previous,
        )  # fmt: skip
        memory.clear()

    monkeypatch.setattr(launcher, "address_of", address)
    monkeypatch.setattr(launcher, "_launch", launch)
    for kind, settings in launcher.SETTINGS.items():  # two 128×128 blocks make a strip, so that its edge is tested
        monkeypatch.setitem(
            launcher.SETTINGS, kind, settings | ({"raster_height": 2} if "raster_height" in settings else {})
        )


def _bad(*shape: int) -> Tensor:
    """All magnitudes, and three NaN or Inf values."""
    x = extreme(*shape)
    x[3, 5], x[shape[0] - 30, 200], x[-1, -1] = float("nan"), float("inf"), float("-inf")
    return x


def _hard(*shape: int) -> Tensor:
    """Blocks whose scales are just below a value of few bits, which need an exact division; some zeros."""
    largest = torch.tensor(448.0 * (1 - 2.0**-23))  # / 448 is two units in the last place below 1
    x = torch.randn(shape) * 100
    x[torch.rand(shape) < 0.1] = -0.0
    x[::2, ::8] = largest
    return x


# ---- Matrices ----


@pytest.mark.one_case
@pytest.mark.each_value
@formats_and_scales
@pytest.mark.parametrize("make", [finite, _bad, _hard], ids=["finite", "all magnitudes", "near few bits"])
def test_blocks(make, fmt: str, power_of_2: bool):
    x = make(*SHAPE)
    for block in BLOCKS:
        assert_same(launcher.quantize(x, *block, STORAGE_DTYPES[fmt], power_of_2), quantize(x, *block, fmt, power_of_2))


@pytest.mark.one_case
@pytest.mark.each_value
@formats_and_scales
@pytest.mark.parametrize("make", [finite, _bad, _hard], ids=["finite", "all magnitudes", "near few bits"])
def test_transposed(make, fmt: str, power_of_2: bool):
    x, dtype = make(*SHAPE), STORAGE_DTYPES[fmt]
    assert_same(launcher.rows_and_columns(x, dtype, power_of_2), quantize_rows_and_columns(x, fmt, power_of_2))
    assert_same(launcher.quantize_and_transpose(x, dtype, power_of_2), quantize_and_transpose(x, fmt, power_of_2))
    tiles = quantize(x, 1, 128, fmt, power_of_2)
    assert_same(launcher.requantize(*tiles, dtype, power_of_2), requantize_transposed(*tiles, power_of_2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype):
    x = finite(*SHAPE).clamp(-6e4, 6e4).to(dtype)
    for block in BLOCKS:
        assert_same(launcher.quantize(x, *block, E4M3, False), quantize(x, *block, "e4m3", False))
    assert_same(launcher.rows_and_columns(x, E4M3, False), quantize_rows_and_columns(x, "e4m3", False))
    assert_same(launcher.quantize_and_transpose(x, E4M3, False), quantize_and_transpose(x, "e4m3", False))


@pytest.mark.each_value
@both_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("with_data", "with_transposed"), [(True, True), (True, False), (False, True)])
def test_joined_weights(with_data: bool, with_transposed: bool, dtype: torch.dtype, power_of_2: bool):
    weights = [_bad(128, 264).to(dtype), finite(256, 264).to(dtype), finite(140, 264).to(dtype)]
    found = launcher.quantize_joined(weights, E4M3, power_of_2, with_data, with_transposed)
    assert_same(found, quantize_joined(weights, "e4m3", power_of_2, with_data, with_transposed))


@pytest.mark.each_value
@both_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_transposed", [True, False])
def test_many_matrices_by_one_launch(with_transposed: bool, dtype: torch.dtype, power_of_2: bool):
    groups = [
        [_bad(140, 264).to(dtype)],
        [finite(3, 140, 136).to(dtype)],  # experts
        [_bad(128, 264).to(dtype), finite(10, 264).to(dtype)],
        [finite(8, 8).to(dtype)],
        [finite(300, 272).to(dtype)[:, 8:264]],
    ]
    weights, sizes = [w for group in groups for w in group], [*map(len, groups)]
    found = launcher.quantize_matrices(groups, E4M3, power_of_2, True, with_transposed)
    expected = quantize_matrices(weights, sizes, "e4m3", power_of_2, with_transposed)
    assert_same([part for results in found for part in results], expected)


def test_more_matrices_than_a_launch_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "CAPACITY", 2)
    weights = [finite(10 * i, 264) for i in range(1, 6)]
    found = launcher.quantize_matrices([[w] for w in weights], E4M3, True, True, True)
    expected = quantize_matrices(weights, [1] * 5, "e4m3", True, True)
    assert_same([part for results in found for part in results], expected)


@pytest.mark.each_value
@both_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_columns_of_parts(dtype: torch.dtype, power_of_2: bool):
    parts = [_bad(140, 384).to(dtype), finite(140, 256).to(dtype)[:, :128], finite(140, 72).to(dtype)]
    found = launcher.joined_rows_and_columns(parts, E4M3, power_of_2)
    assert_same(found, quantize_joined_rows_and_columns(parts, "e4m3", power_of_2))


def test_transposed_weights_of_experts():
    x = finite(3, 140, 264).bfloat16()
    assert_same(launcher.quantize_transposed(x, E4M3, True), quantize_transposed(x, "e4m3", True, x))


def test_nan_and_inf_of_half_precision():
    x = _bad(*SHAPE).bfloat16()
    assert_same(launcher.rows_and_columns(x, E4M3, False), quantize_rows_and_columns(x, "e4m3", False))


def test_batches_and_strided_rows():
    x = finite(2, 3, 40, 304).bfloat16()[:, :, :35, 8:272]
    assert launcher.layout_error(x) is None
    assert_same(launcher.quantize(x, 1, 128, E4M3, False), quantize(x, 1, 128, "e4m3", False))
    assert_same(launcher.rows_and_columns(x, E4M3, False), quantize_rows_and_columns(x, "e4m3", False))
    tiles = quantize(x, 1, 128, "e4m3", False)
    assert_same(launcher.requantize(*tiles, E4M3, False), requantize_transposed(*tiles, False))
    values = launcher.dequantize(*tiles, 1, 128, torch.bfloat16)
    assert_same([values], [dequantize(*tiles, 1, 128, torch.bfloat16)])


def test_padding_after_the_scales_of_rows_is_ignored():
    data, scale = quantize(finite(35, 264), 1, 128, "e4m3", False)  # three columns of 36, of which 35 are scales
    expected = requantize_transposed(data, scale, False)
    saved = scale.clone()
    torch.empty(0).set_(scale.untyped_storage()).fill_(float("nan"))
    assert_same(launcher.requantize(data, scale.copy_(saved), E4M3, False), expected)


def test_rows_are_picked():
    rows = torch.randint(0, 140, (200,), dtype=torch.int32)
    tiles = quantize(finite(*SHAPE), 1, 128, "int8", False)
    found = launcher.requantize(*tiles, E4M3, True, rows)
    assert_same(found, requantize_transposed(*tiles, True, "e4m3", rows))


@pytest.fixture
def tiles() -> Tensor:
    """The tiles of groups of 130, 0, 3 and 1 rows, with 6 rows after them."""
    return align_groups(torch.tensor([130, 130, 133, 134], dtype=torch.int32), 140)[0]


@pytest.mark.one_case
@pytest.mark.each_value
@both_scales
@pytest.mark.parametrize("make", [finite, _bad, _hard], ids=["finite", "all magnitudes", "near few bits"])
def test_groups(make, power_of_2: bool, tiles: Tensor):
    x = make(*SHAPE).bfloat16()
    found = launcher.rows_and_columns(x, E4M3, power_of_2, tiles)
    assert_same(found, quantize_rows_and_columns(x, "e4m3", power_of_2, tiles))
    quantized, rows = quantize(x, 1, 128, "e4m3", power_of_2), torch.randperm(140).to(torch.int32)
    for order in (None, rows):
        for in_blocks in (False, True):
            found = launcher.requantize(*quantized, E4M3, power_of_2, order, tiles, in_blocks)
            assert_same(found, requantize_transposed(*quantized, power_of_2, "e4m3", order, tiles, in_blocks))


@formats_and_scales
def test_a_requantized_transpose_in_blocks(fmt: str, power_of_2: bool):
    tiles = quantize(_bad(*SHAPE), 1, 128, fmt, power_of_2)
    found = launcher.requantize(*tiles, STORAGE_DTYPES[fmt], power_of_2, in_blocks=True)
    assert_same(found, requantize_transposed(*tiles, power_of_2, in_blocks=True))


# ---- E5M6 ----


def _assert_same_packed(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Check for the same bytes, except that any NaN equals any other."""
    numbers, expected_numbers = decode(found[0]), decode(expected[0])
    torch.testing.assert_close(numbers, expected_numbers, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
    if not expected_numbers.isnan().any():
        assert torch.equal(found[0], expected[0])


@pytest.mark.one_case
@pytest.mark.each_value
@both_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_e5m6(dtype: torch.dtype, power_of_2: bool):
    for x in (finite(70, 288).clamp(-6e4, 6e4), extreme(70, 288), _bad(70, 288), _hard(70, 288)):
        x = x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
        found = launcher.quantize(x, 1, 128, torch.uint8, power_of_2)
        _assert_same_packed(found, quantize(x, 1, 128, "e5m6", power_of_2))


def test_e5m6_becomes_transposed_e4m3():
    tiles = quantize(finite(*SHAPE), 1, 128, "e5m6", True)
    assert_same(launcher.requantize(*tiles, E4M3, True), requantize_transposed(*tiles, True, "e4m3"))


# ---- Dequantize ----


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8", "e5m6"])
@pytest.mark.parametrize("block", [*BLOCKS, SHAPE], ids=str)
def test_dequantize(block: tuple[int, int], fmt: str):
    data, scale = quantize(_bad(*SHAPE), *block, fmt, False)
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if (block, fmt) == ((1, 128), "e4m3") else (torch.bfloat16,)
    for dtype in dtypes:
        values = launcher.dequantize(data, scale, *block, dtype)
        torch.testing.assert_close(values, dequantize(data, scale, *block, dtype), rtol=0, atol=0, equal_nan=True)


def test_every_encoded_value_dequantizes():
    encoded = torch.arange(256, dtype=torch.uint8)[None]
    for dtype in (E4M3, E5M2, torch.int8):
        values = launcher.dequantize(encoded.view(dtype), torch.ones(1, 2), 1, 128, torch.bfloat16)
        torch.testing.assert_close(values, encoded.view(dtype).bfloat16(), rtol=0, atol=0, equal_nan=True)


# ---- A given scale ----


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_given_scale(fmt: str):
    x = _bad(*SHAPE)
    for scale in (0.37, 1 - 2.0**-23, 2.0**-10, 2.0**-100, 1e-40, 0.0, -3.0, float("nan"), float("inf")):
        given = torch.tensor([scale])
        assert_same([launcher.quantize_with_scale(x, given, STORAGE_DTYPES[fmt])], [quantize_with_scale(x, given, fmt)])


# ---- SwiGLU ----


def _gate_up(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate and up as the halves of one GEMM's output."""
    m, h = shape
    both = finite(m, 2 * h).clamp(-60, 60) * torch.tensor([2.0, 0.5]).repeat_interleave(h)
    gate, up = both.to(dtype).chunk(2, 1)
    return gate, up


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("dtype", "power_of_2"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_swiglu(dtype: torch.dtype, power_of_2: bool):
    gate, up = _gate_up(SHAPE, dtype)
    found = launcher.swiglu(gate, up, E4M3, power_of_2, None)[:2]
    assert_close_data(found, swiglu_quantize(gate, up, "e4m3", power_of_2))
    for ends in (0, 1, SHAPE[0]):
        data, scale = launcher.swiglu(gate, up, E4M3, power_of_2, None, ends=torch.tensor([0, ends]).int())[:2]
        assert_close_data((data[:ends], scale[:ends]), [part[:ends] for part in found])
    weight = torch.rand(2 * SHAPE[0])[::2] + 0.5
    found = launcher.swiglu(gate, up, E4M3, power_of_2, weight, E5M2, power_of_2)
    expected = swiglu_quantize_and_save(gate, up, "e4m3", power_of_2, "e5m2", power_of_2, weight)
    assert_close_data(found[:2], expected[:2])
    assert_same(found[2:], expected[2:])


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("saved", "weighted", "power_of_2"),
    [(None, False, False), (None, True, True), ("e4m3", True, False), ("int8", False, True)],
)
def test_swiglu_backward(saved: str | None, weighted: bool, power_of_2: bool):
    m, h = 140, 256
    gate, up = _gate_up((m, h), torch.bfloat16)
    scales, dh = (None, None), torch.randn(m, h).bfloat16()
    if saved:
        both = quantize(torch.stack((gate, up)), 1, 128, saved, power_of_2)
        (gate, up), scales = both[0], (both[1][0], both[1][1])
    weight = torch.rand(m) + 0.5 if weighted else None
    found = launcher.swiglu_backward(dh, gate, up, *scales, weight, E4M3, power_of_2, E5M2, True)
    expected = swiglu_backward_quantize(dh, gate, up, *scales, weight, "e4m3", power_of_2, "e5m2", True)
    for pair in (slice(0, 2), slice(2, 4), slice(4, 6)):
        assert_close_data(found[pair], expected[pair])
    torch.testing.assert_close(found[6], expected[6], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("h_in_blocks", [False, True], ids=["tiles", "blocks"])
@pytest.mark.parametrize("saved", [None, "e4m3"])
def test_swiglu_backward_of_groups(saved: str | None, h_in_blocks: bool, tiles: Tensor):
    m, h = 140, 256
    gate, up = _gate_up((m, h), torch.bfloat16)
    scales, dh, weight = (None, None), torch.randn(m, h).bfloat16(), torch.rand(m) + 0.5
    if saved:
        both = quantize(torch.stack((gate, up)), 1, 128, saved, False)
        (gate, up), scales = both[0], (both[1][0], both[1][1])
    found = launcher.swiglu_backward(dh, gate, up, *scales, weight, E4M3, False, E4M3, True, tiles, h_in_blocks)
    settings = ("e4m3", False, "e4m3", True, tiles, h_in_blocks)
    expected = swiglu_backward_quantize(dh, gate, up, *scales, weight, *settings)
    for pair in (slice(0, 2), slice(2, 4), slice(4, 6)):
        rows_of_a_scale = 128 if h_in_blocks and pair.start == 4 else 1
        assert_close_data(*([t[0], t[1].repeat_interleave(rows_of_a_scale, 0)] for t in (found[pair], expected[pair])))
    torch.testing.assert_close(found[6], expected[6], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gate", [-100.0, -90.0, -88.5, -87.5, 0.0, 88.0, 200.0, float("inf"), float("nan")])
def test_silu_of_large_values(gate: float):
    """Gates at which the exponential, or its sum with 1, leaves FP32's normal range."""
    x, up = torch.full((2, 128), gate), torch.ones(2, 128)
    (data, scale), (wanted, wanted_scale) = (
        launcher.swiglu(x, up, E4M3, False, None)[:2], swiglu_quantize(x, up, "e4m3", False),
    )  # fmt: skip
    torch.testing.assert_close(scale, wanted_scale, rtol=(8 + 100) * 2.0**-23, atol=0, equal_nan=True)
    torch.testing.assert_close(data.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


# ---- RMSNorm ----


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("few", [0, launcher.FEW_ROWS], ids=["several rows of a block", "a block each"])
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "values", "power_of_2"),
    [
        ((5, 304), torch.float32, torch.float32, False, False),
        ((9, 7168), torch.bfloat16, torch.bfloat16, False, False),
        ((9, 7168), torch.bfloat16, torch.bfloat16, True, True),
        ((2, 5000), torch.float16, torch.float32, True, False),
        ((1, 8), torch.float32, torch.bfloat16, True, True),
        ((2, launcher.MAX_COLUMNS), torch.bfloat16, torch.float16, False, True),
    ],
    ids=str,
)
def test_rms_norm_is_bit_for_bit_after_its_rstd(
    shape, dtype, weight_dtype, values: bool, power_of_2: bool, few: int, monkeypatch
):
    monkeypatch.setattr(launcher, "FEW_ROWS", few)
    x, weight = finite(*shape).clamp(-6e4, 6e4).to(dtype), (torch.rand(shape[1]) + 0.5).to(weight_dtype)
    *found, rstd, y = launcher.rms_norm(x, weight, 1e-6, E4M3, power_of_2, values)
    torch.testing.assert_close(rstd, rms_norm_quantize(x, weight, 1e-6, "e4m3", False)[2], rtol=2.0**-20, atol=0)
    assert_same(found, quantize(normalized(x, rstd, weight), 1, 128, "e4m3", power_of_2))
    assert_same([y], [normalized(x, rstd, weight).to(dtype) if values else x[:0]])
    alone = launcher.rms_norm_high_precision(x, weight, 1e-6)
    assert_same(alone, [normalized(x, rstd, weight).to(dtype), rstd])


def test_rms_norm_of_zeros_and_of_nan():
    x = torch.zeros(3, 264)
    x[1] = torch.randn(264)
    x[2, 3] = float("nan")
    data, scale, rstd, _ = launcher.rms_norm(x, torch.ones(264), 1e-6, E4M3, False, False)
    assert rstd.isnan().tolist() == scale.isnan().all(1).tolist() == data.float().isnan().all(1).tolist()
    assert rstd.isnan().tolist() == [False, False, True]
    assert not data[0].float().any()


# ---- Kernels that begin before the previous one of the stream has ended ----


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, 256])
def test_nothing_but_a_weight_is_read_before_the_previous_kernel_has_ended(few: int, monkeypatch):
    monkeypatch.setattr(launcher, "FEW_ROWS", few)
    gate, up = (half.contiguous() for half in _gate_up(SHAPE, torch.bfloat16))
    weight, ends = torch.rand(SHAPE[1]).bfloat16() + 0.5, torch.tensor([100], dtype=torch.int32)
    with overlapping_launches():
        tiles = launcher.quantize(gate, 1, 128, E4M3, True)
        normed, rstd = launcher.rms_norm_high_precision(gate, weight, 1e-6)
        *quantized, own_rstd, _ = launcher.rms_norm(gate, weight, 1e-6, E4M3, False, False)
        data, scale = launcher.swiglu(gate, up, E4M3, True, None, ends=ends)[:2]
    assert_same(tiles, quantize(gate, 1, 128, "e4m3", True))
    assert_same([normed], [normalized(gate, rstd, weight).bfloat16()])
    assert_same(quantized, quantize(normalized(gate, own_rstd, weight), 1, 128, "e4m3", False))
    assert_close_data((data[:100], scale[:100]), [part[:100] for part in swiglu_quantize(gate, up, "e4m3", True)])


# ---- Which part of a matrix a thread block processes ----


@pytest.mark.parametrize("d", [1, 2, 3, 7, 56, 448, 12345, 2**31 - 1])
def test_quotients_of_the_host_are_at_most_one_too_small(d: int):
    """`quotient` of tile.cuh corrects the difference of one."""
    numbers = {0, 1, d - 1, d, 2 * d - 1, 1000 * d, 2**31 - 1, *torch.randint(2**31, (1000,)).tolist()}
    assert {n // d - (n * launcher._inverse(d) >> 31) for n in numbers if n < 2**31} <= {0, 1}


# ---- Supported layouts ----


@pytest.mark.parametrize(
    ("x", "out", "reason"),
    [
        (torch.empty(3, 100), None, "its rows of 100 are not a multiple of 8"),
        (torch.empty(0, 128), None, "it is empty"),
        (torch.empty(128, 64).mT, None, "its rows are not contiguous"),
        (torch.empty(4, 3, 130, 128)[:, :2], None, "its matrices are not one stride apart"),
        (torch.empty(4, 136)[:, 1:129], None, "its rows do not begin at multiples of 16 bytes"),
        (torch.empty(4, 136, dtype=torch.bfloat16)[:, :128], None, None),
        (torch.empty(4, 132, dtype=torch.bfloat16)[:, :128], None, "its rows do not begin at multiples of 16 bytes"),
        (torch.empty(4, 72), torch.uint8, "its rows of 72 are not a multiple of 32"),
        (torch.empty(4, 18, dtype=torch.uint8), None, "its rows of 18 are not a multiple of 12"),
        (torch.empty(2, 5, 96, dtype=torch.bfloat16), torch.uint8, None),
    ],
)
def test_matrices_in_other_layouts_are_left_to_triton(x: Tensor, out: torch.dtype | None, reason: str | None):
    error_text = launcher.layout_error(x, out=out)
    assert error_text is None if reason is None else error_text is not None and reason in error_text


def test_scales_in_other_layouts_are_left_to_triton():
    x = torch.empty(5, 256)
    assert launcher.reads_tile_scales(new_scale(x, 1, 128))
    assert not launcher.reads_tile_scales(torch.empty(5, 2))
    assert launcher.reads_scale(new_scale(x, 128, 1), 1)
    assert not launcher.reads_scale(torch.empty(256, 1).mT, 1)
