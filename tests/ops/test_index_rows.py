import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.nn.rope import Rope
from octile.ops.index_rows import hadamard, index_rows, rotate_first
from tests.ops.operators import assert_well_formed

E, R = 32, 8


def angles(first: int, n: int, rotary: int = R) -> tuple[Tensor, Tensor]:
    return Rope(rotary).cos_sin(torch.arange(first, first + n))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def definition(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotated rows in float64, by complex numbers and by the matrix."""
    half, width = cos.shape[1], x.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    pairs = torch.complex(x[..., first].double(), x[..., second].double())
    rotated = pairs * torch.complex(cos.double(), sin.double())[:, None]
    rows = x.double()
    rows[..., first], rows[..., second] = rotated.real, rotated.imag
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)]  # Sylvester's matrix
    return rows @ torch.tensor(signs, dtype=torch.float64) * width**-0.5


@pytest.mark.parametrize(("width", "rotary"), [(2, 2), (32, 8), (64, 64), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_rotated_and_quantized(width, rotary, dtype, interleaved):
    x, cos_sin = draw(2, 5, 3, width).to(dtype), angles(3, 5, rotary)
    data, scale = index_rows(x, *cos_sin, interleaved)
    expected = definition(x.clone(), *cos_sin, interleaved)
    assert torch.equal(scale, torch.exp2((expected.abs().amax(-1) / 448).log2().ceil()).float())
    error = (data.double() * scale[..., None] - expected).abs()
    assert (error <= 2**-4 * expected.abs() * 1.001 + 2**-10 * scale[..., None]).all()


@given(log2=st.integers(0, 7), seed=st.integers(0, 2**31))
def test_the_hadamard_rotation_changes_no_product(log2, seed):
    x, y = draw(2, 3, 2**log2, seed=seed).double()
    torch.testing.assert_close(hadamard(x) @ hadamard(y).T, x @ y.T)
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_the_hadamard_rotation_spreads_an_outlier_over_all_channels():
    x = torch.zeros(1, 64)
    x[0, 5] = 64.0
    assert (hadamard(x).abs() == 8.0).all()


def test_products_of_rotated_rows_depend_on_the_distance_alone():
    q, k = draw(2, 1, 1, E)
    products = [
        rotate_first(q, *angles(s, 1)).flatten() @ rotate_first(k, *angles(t, 1)).flatten()
        for s, t in ((3, 1), (30, 28), (300, 298))
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reversed_rotation_is_the_inverse(interleaved):
    x, (cos, sin) = draw(2, 5, 3, E), angles(7, 5)
    rotated = rotate_first(x, cos, sin, interleaved)
    torch.testing.assert_close(rotate_first(rotated, cos, -sin, interleaved), x)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(value):
    x = draw(1, 2, 2, E)
    x[0, 1, 0, 3] = value
    data, scale = index_rows(x, *angles(0, 2))
    is_nan = (data.float() * scale[..., None]).isnan().all(-1)
    assert is_nan.tolist() == [[[False, False], [True, False]]]


def test_rows_of_zeros_and_no_rows():
    data, scale = index_rows(torch.zeros(1, 2, 2, E), *angles(0, 2))
    assert (bool(data.float().any()), scale.unique().tolist()) == (False, [1.0])
    assert index_rows(torch.zeros(1, 0, 2, E), *angles(0, 0))[0].shape == (1, 0, 2, E)


def test_a_rows_bits_depend_on_no_other_row():
    x, cos_sin = draw(1, 9, 4, E), angles(0, 9)
    whole = index_rows(x, *cos_sin)
    alone = index_rows(x[:, 3:4, 1:2], *(t[3:4] for t in cos_sin))
    for all_rows, one in zip(whole, alone, strict=True):
        assert torch.equal(all_rows[:, 3:4, 1:2].float(), one.float())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(1, 2, 2, E, dtype=torch.int32)}, TypeError, "x must be float32"),
        ({"x": torch.zeros(2, 2, E)}, ValueError, r"x must be \[B, S, H, E\], not \(2, 2, 32\)"),
        ({"x": torch.zeros(1, 2, 2, 48)}, ValueError, "a power of two from 2 to 128 channels, not 48"),
        ({"x": torch.zeros(1, 2, 2, 256)}, ValueError, "a power of two from 2 to 128 channels, not 256"),
        ({"x": torch.zeros(1, 2, E, 2).mT}, ValueError, "channels of x must be contiguous"),
        ({"cos": torch.zeros(2, 4, dtype=torch.float64)}, TypeError, "cos must be float32"),
        ({"cos": torch.zeros(3, 4)}, ValueError, r"cos must be \(2, R/2\), contiguous, R at most 32, not \(3, 4\)"),
        ({"sin": torch.zeros(2, 17)}, ValueError, r"sin must be \(2, R/2\), contiguous, R at most 32, not \(2, 17\)"),
        ({"sin": torch.zeros(2, 3)}, ValueError, r"sin must be \(2, 4\) as cos, not \(2, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(changes, error, message):
    arguments = {"x": torch.zeros(1, 2, 2, E), "cos": torch.zeros(2, 4), "sin": torch.zeros(2, 4), **changes}
    with pytest.raises(error, match=message):
        index_rows(*arguments.values())


def test_the_operator_is_well_formed():
    assert_well_formed(index_rows, (draw(2, 3, 4, E), *angles(0, 3)))
