"""Tests of GEMMs with packed scales: equal to those with unpacked scales, also in the call for sm_100."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from octile.ops import packed
from octile.ops.matmul import matmul_nt
from octile.ops.packed import packed_matmul_nt
from octile.ops.quantize import quantize
from octile.ops.scale_layouts import from_ue8m0, pack_ue8m0
from tests.ops.operators import untile_128x4

sides = {"m": st.integers(1, 140), "n": st.integers(1, 40), "k": st.integers(1, 300)}


def operand(rows: int, k: int, cols: int, seed: int):
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    data, scale = quantize(x, 1, cols, "e4m3", True)
    return data, scale, cols


def packed_operand(data, scale, cols):
    return data, pack_ue8m0(scale), cols


@given(**sides, a_cols=st.sampled_from([32, 128]), b_cols=st.sampled_from([32, 128]))
def test_packed_scales_give_the_result_of_unpacked_ones(m, n, k, a_cols, b_cols):
    a, b = operand(m, k, a_cols, 0), operand(n, k, b_cols, 1)
    y = packed_matmul_nt(*packed_operand(*a), *packed_operand(*b), torch.float32)
    expected = matmul_nt(a[0], a[1], (1, a_cols), b[0], b[1], (1, b_cols), torch.float32)
    assert torch.equal(y, expected)


def as_the_library_reads_them(data, tiles):
    """The values of an MXFP8 operand [rows, K], from its 128×4 tiles of scales."""
    codes = untile_128x4(tiles.view(torch.uint8), data.shape[0], data.shape[1] // 32)
    return data.float() * from_ue8m0(codes).repeat_interleave(32, dim=1)


@given(**sides, cols=st.sampled_from([32, 128]))
def test_operands_for_sm_100_have_the_same_values_padded_with_zeros(m, n, k, cols):
    data, scale, _ = operand(m, k, cols, 2)
    filled, tiles = packed.mx_operand(data, pack_ue8m0(scale), cols)
    assert filled.shape == (-(-m // 16) * 16, -(-k // 32) * 32)
    expected = data.float() * scale.repeat_interleave(cols, dim=1)[:, :k]
    assert torch.equal(as_the_library_reads_them(filled, tiles), F.pad(expected, (0, -k % 32, 0, -m % 16)))


def test_the_call_for_sm_100_gives_the_result(monkeypatch):
    """torch's function is replaced by what its documentation says it computes; the chip itself is not asked."""

    def library(a, b, a_tiles, a_scaling, b_tiles, b_scaling, a_swizzle, b_swizzle, output_dtype):
        assert a_scaling == b_scaling == F.ScalingType.BlockWise1x32
        assert a_swizzle == b_swizzle == F.SwizzleType.SWIZZLE_32_4_4
        assert a_tiles.dtype == b_tiles.dtype == torch.float8_e8m0fnu
        assert a.is_contiguous()
        assert b.mT.is_contiguous()
        y = as_the_library_reads_them(a, a_tiles) @ as_the_library_reads_them(b.mT, b_tiles).mT
        return y.to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", library)
    a, b = operand(37, 300, 128, 0), operand(21, 300, 32, 1)
    y = packed.mx_matmul(*packed_operand(*a), *packed_operand(*b), torch.bfloat16)
    expected = matmul_nt(a[0], a[1], (1, 128), b[0], b[1], (1, 32), torch.bfloat16)
    assert y.shape == (37, 21)
    torch.testing.assert_close(y, expected)


def test_torch_takes_the_shapes_that_sm_100_is_given():
    """As far as torch checks without a GPU: its function for tensors without data."""
    a, b = operand(37, 300, 128, 0), operand(21, 300, 32, 1)
    on_meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in (*packed_operand(*a), *packed_operand(*b))]
    assert packed.mx_matmul(*on_meta, torch.float32).shape == (37, 21)


def test_it_is_a_well_formed_operator():
    a, b = packed_operand(*operand(5, 130, 128, 0)), packed_operand(*operand(7, 130, 128, 1))
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(packed_matmul_nt.overload, (*a, *b, torch.bfloat16), test_utils=checks)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: torch.zeros(5, 130, dtype=torch.int8)}, TypeError, "a must be float8_e4m3fn, not torch.int8"),
        (
            {1: torch.ones(5, 1)},
            TypeError,
            "a's scale must be int32, four UE8M0 exponents each, not torch.float32",
        ),
        ({1: torch.ones(5, 2, dtype=torch.int32)}, ValueError, r"a's scale must be \(5, 1\) for \(5, 130\), not"),
        ({2: 64}, ValueError, "a_cols must be 32 or 128, not 64"),
        ({6: torch.float16}, TypeError, "out_dtype must be bfloat16 or float32, not torch.float16"),
        ({3: operand(7, 129, 128, 1)[0]}, ValueError, r"agree in K: a is \(5, 130\), b is \(7, 129\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, message):
    arguments = [*packed_operand(*operand(5, 130, 128, 0)), *packed_operand(*operand(7, 130, 128, 1)), torch.bfloat16]
    for place, wrong in change.items():
        arguments[place] = wrong
    with pytest.raises(error, match=message):
        packed_matmul_nt(*arguments)
