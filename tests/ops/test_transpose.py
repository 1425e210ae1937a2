"""Tests of quantization with a transpose: equal to quantization, then a transpose, in the layout that GEMMs read."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octile.ops.groups import align_groups, take_tiles
from octile.ops.quantize import dequantize, quantize
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

SHAPES = [(130, 300), (128, 128), (1, 5), (64, 1000), (2, 140, 130), (0, 128), (5, 0)]
FORMATS = ["e4m3", "e5m2", "int8"]

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_format = pytest.mark.parametrize("fmt", FORMATS)
both_scales = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])


def matrix(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 8)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def assert_rows_of_whole_vectors(t: Tensor) -> None:
    """Contiguous along the last side, rows beginning at multiples of 16 bytes."""
    *batch, rows, _ = t.stride()
    assert t.stride(-1) == 1
    assert all(step * t.element_size() % 16 == 0 for step in (rows, *batch))


@every_shape
@every_format
@both_scales
def test_rows_and_columns_are_two_quantizations(shape: tuple[int, ...], fmt: str, power_of_2: bool):
    x = matrix(shape)
    data, scale, data_t, scale_t = quantize_rows_and_columns(x, fmt, power_of_2)
    columns, columns_scale = quantize(x, 128, 1, fmt, power_of_2)
    for found, expected in zip((data, scale), quantize(x, 1, 128, fmt, power_of_2), strict=True):
        assert_same(found, expected)
    assert_same(data_t, columns.mT)
    assert_same(scale_t, columns_scale.mT)


@every_shape
@every_format
@both_scales
def test_requantizing_quantizes_the_values(shape: tuple[int, ...], fmt: str, power_of_2: bool):
    data, scale = quantize(matrix(shape), 1, 128, fmt, True)
    data_t, scale_t = requantize_transposed(data, scale, power_of_2)
    columns, columns_scale = quantize(dequantize(data, scale, 1, 128, torch.float32), 128, 1, fmt, power_of_2)
    assert_same(data_t, columns.mT)
    assert_same(scale_t, columns_scale.mT)


@both_scales
def test_e5m6_becomes_8_bits(power_of_2: bool):
    data, scale = quantize(matrix((130, 200)), 1, 128, "e5m6", True)
    data_t, scale_t = requantize_transposed(data, scale, power_of_2, "e4m3")
    columns, columns_scale = quantize(dequantize(data, scale, 1, 128, torch.float32), 128, 1, "e4m3", power_of_2)
    assert_same(data_t, columns.mT)
    assert_same(scale_t, columns_scale.mT)


@every_format
def test_rows_are_reordered_on_request(fmt: str):
    data, scale = quantize(matrix((130, 200)), 1, 128, fmt, True)
    rows = torch.tensor([7, 129, 7, 0, 64], dtype=torch.int32)
    data_t, scale_t = requantize_transposed(data, scale, True, None, rows)
    values = dequantize(data, scale, 1, 128, torch.float32)[rows.long()]
    columns, columns_scale = quantize(values, 128, 1, fmt, True)
    assert_same(data_t, columns.mT)
    assert_same(scale_t, columns_scale.mT)


@every_format
@both_scales
def test_groups_have_tiles_of_their_own(fmt: str, power_of_2: bool):
    x, rows = matrix((130, 200)), torch.arange(130, dtype=torch.int32).flip(0)
    tiles, _ = align_groups(torch.tensor([3, 3, 101], dtype=torch.int32), 130)
    data, scale, data_t, scale_t = quantize_rows_and_columns(x, fmt, power_of_2, tiles)
    for found, expected in zip((data, scale), quantize(x, 1, 128, fmt, power_of_2), strict=True):
        assert_same(found, expected)
    columns, columns_scale = quantize(take_tiles(x, tiles), 128, 1, fmt, power_of_2)
    assert_same(data_t, columns.mT)
    assert_same(scale_t, columns_scale.mT)

    data_t, scale_t = requantize_transposed(data, scale, power_of_2, fmt, rows, tiles)
    values = dequantize(data, scale, 1, 128, torch.float32)[rows.long()]
    columns, columns_scale = quantize(take_tiles(values, tiles), 128, 1, fmt, power_of_2)
    assert_same(data_t, columns.mT)
    assert_same(scale_t, columns_scale.mT)


@every_format
@both_scales
def test_the_requantized_transpose_may_have_blocks(fmt: str, power_of_2: bool):
    x = matrix((130, 200))
    tiles, _ = align_groups(torch.tensor([3, 3, 101], dtype=torch.int32), 130)
    data, scale = quantize(x, 1, 128, fmt, True)
    values = dequantize(data, scale, 1, 128, torch.float32)
    for groups in (None, tiles):
        data_t, scale_t = requantize_transposed(data, scale, power_of_2, fmt, None, groups, in_blocks=True)
        blocks, blocks_scale = quantize(
            values if groups is None else take_tiles(values, groups), 128, 128, fmt, power_of_2
        )
        assert_same(data_t, blocks.mT)
        assert_same(scale_t, blocks_scale.mT)


@every_shape
@every_format
@both_scales
def test_blocks_are_quantized_once_and_transposed(shape: tuple[int, ...], fmt: str, power_of_2: bool):
    x = matrix(shape)
    data, scale, data_t = quantize_and_transpose(x, fmt, power_of_2)
    for found, expected in zip((data, scale), quantize(x, 128, 128, fmt, power_of_2), strict=True):
        assert_same(found, expected)
    assert_same(data_t, data.mT)


@every_shape
@every_format
@both_scales
def test_a_transpose_alone_is_that_of_both_forms(shape: tuple[int, ...], fmt: str, power_of_2: bool):
    x = matrix(shape)
    _, scale, data_t = quantize_and_transpose(x, fmt, power_of_2)
    for found, expected in zip(quantize_transposed(x, fmt, power_of_2, x), (data_t, scale), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("shape", [(130, 300), (3, 5, 77)], ids=str)
def test_transposed_rows_begin_at_whole_vectors(shape: tuple[int, ...]):
    _, scale, data_t, scale_t = quantize_rows_and_columns(matrix(shape), "e4m3", False)
    for t in (data_t, scale.mT, scale_t.mT):
        assert_rows_of_whole_vectors(t)


TILES = torch.tensor([[0, 3], [3, 5], [0, 0]], dtype=torch.int32)
CALLS: dict[str, Any] = {
    "quantize_rows_and_columns": lambda: (quantize_rows_and_columns, (matrix((5, 130)), "int8", False)),
    "requantize_transposed": lambda: (
        requantize_transposed,
        (*quantize(matrix((5, 130)), 1, 128, "int8", False), False),
    ),
    "rows of E5M6": lambda: (
        requantize_transposed,
        (
            *quantize(matrix((5, 130)), 1, 128, "e5m6", True),
            True,
            "int8",
            torch.tensor([1, 1, 4], dtype=torch.int32),
        ),
    ),
    "quantize_and_transpose": lambda: (quantize_and_transpose, (matrix((2, 5, 130)), "int8", False)),
    "quantize_transposed": lambda: (quantize_transposed, (matrix((2, 5, 130)), "int8", False, matrix((5, 3)))),
    "transpose_encoded": lambda: (transpose_encoded, (matrix((2, 5, 130)).to(torch.int8), matrix((5, 3)))),
    "requantize to blocks": lambda: (
        requantize_transposed,
        (*quantize(matrix((5, 130)), 1, 128, "int8", False), False, None, None, TILES, True),
    ),
    "rows and columns of groups": lambda: (quantize_rows_and_columns, (matrix((5, 130)), "int8", False, TILES)),
    "requantize groups": lambda: (
        requantize_transposed,
        (*quantize(matrix((5, 130)), 1, 128, "int8", False), False, None, None, TILES),
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    operator, arguments = CALLS[name]()
    torch.library.opcheck(operator.overload, arguments)  # INT8: torch's comparison of an operator's inputs knows no FP8


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(name: str):
    operator, arguments = CALLS[name]()
    meta = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    for m, real in zip(meta, operator(*arguments), strict=True):
        assert (m.shape, m.dtype, m.stride()) == (real.shape, real.dtype, real.stride())


# Refusals


@pytest.mark.parametrize("operator", [quantize_rows_and_columns, quantize_and_transpose])
@pytest.mark.parametrize(
    ("x", "fmt", "error", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.float64), "e4m3", TypeError, "x must be float32, bfloat16 or float16, not"),
        (torch.zeros(4), "e4m3", ValueError, r"x must be a matrix \[..., M, K\], not \(4,\)"),
        (torch.zeros(4, 4), "e5m6", ValueError, "for a transposed result, not 'e5m6'"),
    ],
    ids=["dtype", "vector", "format"],
)
def test_unsupported_inputs_are_refused(operator: Any, x: Tensor, fmt: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        operator(x, fmt, False)


@pytest.mark.parametrize(
    ("data", "scale", "error", "message"),
    [
        (torch.zeros(4, 6), torch.ones(4, 1), TypeError, r"uint8 \(E5M6\), not torch.float32"),
        (torch.zeros(4, 6, dtype=torch.uint8), torch.ones(4, 1), ValueError, "for a transposed result, not None"),
        (torch.zeros(4, dtype=torch.int8), torch.ones(1), ValueError, r"data must be a matrix .* not \(4,\)"),
        (torch.zeros(4, 200, dtype=torch.int8), torch.ones(4, 1), ValueError, r"scale must be \(4, 2\)"),
    ],
    ids=["dtype", "format", "vector", "scale"],
)
def test_data_that_is_not_in_tiles_is_refused(data: Tensor, scale: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        requantize_transposed(data, scale, False)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), TypeError, "rows must be int32, not torch.int64"),
        (torch.zeros(3, 1, dtype=torch.int32), ValueError, r"rows must be \[R\] for a matrix \[M, K\], not \(3, 1\)"),
    ],
    ids=["dtype", "shape"],
)
def test_rows_that_do_not_fit_are_refused(rows: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        requantize_transposed(*quantize(matrix((5, 130)), 1, 128, "int8", False), False, None, rows)


# Gradients that are quantized as one matrix


@both_scales
@pytest.mark.parametrize("columns", [(128,), (256, 128), (384, 256, 64), (128, 3)], ids=str)
def test_joined_gradients_have_the_tiles_of_each_alone(columns: tuple[int, ...], power_of_2: bool):
    parts = [matrix((130, k)) for k in columns]
    found = quantize_joined_rows_and_columns(parts, "e4m3", power_of_2)
    alone = [quantize_rows_and_columns(part, "e4m3", power_of_2) for part in parts]
    for i, dim in enumerate((1, 1, 0, 0)):
        of_parts = [results[i].view(torch.uint8) if i in (0, 2) else results[i] for results in alone]
        whole = found[i].view(torch.uint8) if i in (0, 2) else found[i]
        assert_same(whole, torch.cat(of_parts, dim))


def test_joining_gradients_is_a_well_formed_operator():
    parts = [torch.randn(5, 128), torch.randn(5, 3)]
    torch.library.opcheck(quantize_joined_rows_and_columns.overload, (parts, "e4m3", True))


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([], ValueError, "parts must have at least one matrix"),
        ([torch.ones(8, 130), torch.ones(8, 8)], ValueError, r"parts\[0\] must have a multiple of 128 columns, .*130"),
        (
            [torch.ones(8, 128), torch.ones(9, 8)],
            ValueError,
            r"parts\[1\] must be a matrix with the rows of parts\[0\]",
        ),
        ([torch.ones(8, 128), torch.ones(8, 8).half()], TypeError, r"parts\[1\] must be torch.float32 as parts\[0\]"),
    ],
    ids=["none", "columns", "rows", "dtypes"],
)
def test_gradients_that_cannot_be_joined_are_refused(parts: list[Tensor], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        quantize_joined_rows_and_columns(parts, "e4m3", True)


# Weights that are quantized as one matrix


@both_scales
@pytest.mark.parametrize("rows", [(128,), (128, 128), (256, 130), (128, 384, 5)], ids=str)
@pytest.mark.parametrize("k", [128, 200])
def test_joined_weights_have_the_blocks_of_each_alone(rows: tuple[int, ...], k: int, power_of_2: bool):
    weights = list(matrix((sum(rows), k)).split(rows))
    data, scale, data_t = quantize_joined(weights, "e4m3", power_of_2, True, True)
    alone = [quantize(w, 128, 128, "e4m3", power_of_2) for w in weights]
    assert_same(data, torch.cat([data.view(torch.uint8) for data, _ in alone]).view(data.dtype))
    assert_same(scale, torch.cat([scale for _, scale in alone]))
    assert_same(data_t, data.mT)
    assert_rows_of_whole_vectors(data_t)


@pytest.mark.parametrize(("with_data", "with_transposed"), [(True, False), (False, True)])
def test_of_joined_weights_only_what_is_asked_for_is_computed(with_data: bool, with_transposed: bool):
    weights = list(matrix((256, 200)).split(128))
    whole = quantize_joined(weights, "e4m3", True, True, True)
    found = quantize_joined(weights, "e4m3", True, with_data, with_transposed)
    for t, expected, is_asked in zip(found, whole, (with_data, True, with_transposed), strict=True):
        if is_asked:
            assert_same(t, expected)
        else:
            assert t.shape == (0, 0)


def test_joining_weights_is_a_well_formed_operator():
    weights = [torch.randn(128, 130), torch.randn(5, 130)]
    torch.library.opcheck(quantize_joined.overload, (weights, "e4m3", True, True, True))
    torch.library.opcheck(quantize_joined.overload, (weights, "e4m3", True, False, True, torch.randn(2)))


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ([], ValueError, "weights must have at least one matrix"),
        ([torch.ones(130, 8), torch.ones(8, 8)], ValueError, r"weights\[0\] must have a multiple of 128 rows, .*130"),
        (
            [torch.ones(128, 8), torch.ones(8, 9)],
            ValueError,
            r"weights\[1\] must be a matrix with the K of weights\[0\]",
        ),
        (
            [torch.ones(128, 8), torch.ones(8, 8).half()],
            TypeError,
            r"weights\[1\] must be torch.float32 as weights\[0\]",
        ),
    ],
    ids=["none", "rows", "columns", "dtypes"],
)
def test_weights_that_cannot_be_joined_are_refused(weights: list[Tensor], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        quantize_joined(weights, "e4m3", True, True, True)


@pytest.fixture
def groups() -> list[list[Tensor]]:
    """Weights of several shapes, of which the second and third are quantized as one."""
    return [[matrix((2, 140, 200))], [matrix((128, 264)), matrix((70, 264))], [matrix((5, 130))]]


def many(groups: list[list[Tensor]], *settings: object) -> list[Tensor]:
    return quantize_matrices([w for group in groups for w in group], [*map(len, groups)], *settings)


@both_scales
def test_many_matrices_are_quantized_as_each_alone(groups: list[list[Tensor]], power_of_2: bool):
    found = iter(many(groups, "e4m3", power_of_2, True))
    for group in groups:
        whole = group[0] if len(group) == 1 else torch.cat(group)
        for expected in quantize_and_transpose(whole, "e4m3", power_of_2):
            assert_same(next(found), expected)


def test_many_matrices_are_transposed_only_where_that_is_asked_for(groups: list[list[Tensor]]):
    whole, found = (many(groups, "e4m3", True, with_transposed) for with_transposed in (True, False))
    for i, (t, expected) in enumerate(zip(found, whole, strict=True)):
        if i % 3 == 2:
            assert t.shape == (0, 0)
        else:
            assert_same(t, expected)


@pytest.mark.slow
@pytest.mark.parametrize("with_transposed", [True, False])
def test_quantizing_many_matrices_is_a_well_formed_operator(groups: list[list[Tensor]], with_transposed: bool):
    weights = [w for group in groups for w in group]
    torch.library.opcheck(quantize_matrices.overload, (weights, [1, 2, 1], "e4m3", True, with_transposed))


@pytest.mark.parametrize(
    ("weights", "sizes", "error", "text"),
    [
        ([], [], ValueError, "whose sum is the number of weights, 0, not"),
        ([torch.ones(8, 8)], [2], ValueError, r"whose sum is the number of weights, 1, not \[2\]"),
        ([torch.ones(8, 8)], [1, 0], ValueError, r"sizes must be positive numbers .*, not \[1, 0\]"),
        ([torch.ones(8, 8), torch.ones(8, 8)], [2], ValueError, r"weights\[0\] must have a multiple of 128 rows"),
        ([torch.ones(8, 8), torch.ones(8, 8).half()], [1, 1], TypeError, r"weights\[1\] must be torch.float32"),
    ],
    ids=["none", "too many", "zero", "rows", "dtypes"],
)
def test_matrices_that_cannot_be_quantized_by_one_launch_are_refused(
    weights: list[Tensor], sizes: list[int], error: type[Exception], text: str
):
    with pytest.raises(error, match=text):
        quantize_matrices(weights, sizes, "e4m3", True, True)


def test_only_encoded_matrices_are_transposed():
    with pytest.raises(TypeError, match=r"data must be one of torch\.float8_e4m3fn, .* not torch\.float32"):
        transpose_encoded(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"data must be a matrix \[..., M, K\], not \(2,\)"):
        transpose_encoded(torch.ones(2, dtype=torch.int8))
