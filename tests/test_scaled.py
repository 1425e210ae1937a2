"""Tests of ScaledTensor: quantization, requantization and transposition, and its behavior as a container of tensors."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from octile.formats import E4M3, E5M2, E5M6, FP16, INT8
from octile.scaled import (
    ScaledTensor,
    align_groups,
    dequantize,
    grouped_matmul_nt,
    grouped_wgrad,
    masked_grouped_matmul_nt,
    matmul_nt,
    quantize,
)
from tests.fresh_python import run_python

FORMATS = [E4M3, E5M2, E5M6, INT8]
FLOAT_FORMATS = [E4M3, E5M2, E5M6]
BLOCKS = [(1, 128), (128, 1), (128, 128), (1, None), (None, None)]

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)
a_matrix = {"m": st.integers(1, 300), "k": st.integers(1, 150).map(lambda n: 2 * n), "seed": st.integers(0, 2**32 - 1)}


def matrix(m: int, k: int, seed: int = 0, spread: float = 12.0) -> Tensor:
    """Normal variates times powers of two from 2^−spread to 2^spread, so that blocks reach subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * 2.0 ** rng.uniform(-spread, spread, (m, k)).round()
    return torch.from_numpy(x.astype(np.float32))


def per_element(q: ScaledTensor) -> Tensor:
    """The scale that each element of a matrix has."""
    (rows, cols), (m, k) = q.block, q.shape
    return q.scale.repeat_interleave(rows, 0)[:m].repeat_interleave(cols, 1)[:, :k]


def assert_same(a: ScaledTensor, b: ScaledTensor) -> None:
    """The same bits, format and blocks."""
    assert (a.block, a.data.dtype) == (b.block, b.data.dtype)
    assert torch.equal(a.data.contiguous().view(torch.uint8), b.data.contiguous().view(torch.uint8))
    assert torch.equal(a.scale, b.scale)


# Quantizing


@pytest.mark.parametrize(
    ("block", "extents", "scales"),
    [
        ((1, 128), (1, 128), (200, 3)),
        ((128, 1), (128, 1), (2, 300)),
        ((128, 128), (128, 128), (2, 3)),
        ((1, None), (1, 300), (200, 1)),
        ((None, 1), (200, 1), (1, 300)),
        ((None, None), (200, 300), (1, 1)),
    ],
    ids=str,
)
def test_a_block_may_be_a_tile_a_row_a_column_or_everything(block, extents, scales):
    q = quantize(matrix(200, 300), block)
    assert (q.block, q.scale.shape, q.shape) == (extents, scales, (200, 300))


@every_format
def test_data_are_stored_in_the_dtype_of_the_format(fmt):
    q = quantize(matrix(3, 128), fmt=fmt)
    assert q.fmt is fmt
    assert q.data.dtype == (fmt.dtype or torch.uint8)


@every_format
def test_shape_is_that_of_the_values(fmt):
    assert quantize(torch.zeros(2, 5, 130), fmt=fmt).shape == (2, 5, 130)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantizing_gives_the_requested_dtype(dtype):
    q = quantize(matrix(4, 200))
    values = dequantize(q, dtype)
    assert values.dtype == dtype
    assert torch.equal(values, (q.data.float() * per_element(q)).to(dtype))


@pytest.mark.oldest_torch
@given(**a_matrix, block=st.sampled_from(BLOCKS), fmt=st.sampled_from(FLOAT_FORMATS))
def test_quantizing_quantized_values_changes_nothing(m, k, seed, block, fmt):
    """With powers of two: a block's largest value is exact, so the same scale or a smaller one is found again."""
    once = dequantize(quantize(matrix(m, k, seed), block, fmt, "power_of_2"))
    assert torch.equal(dequantize(quantize(once, block, fmt, "power_of_2")), once)


# Requantizing in other blocks


@given(**a_matrix, fmt=st.sampled_from(FLOAT_FORMATS))
def test_power_of_2_requantization_loses_only_bits_below_the_normal_range_of_the_new_tile(m, k, seed, fmt):
    """Let v = data · scale in a 1×128 tile and s the scale of its new 128×1 tile, both scales powers of two.

    v has at most M + 1 significant bits, and v / s is exact and no larger than fmt.max. So
        |v| ≥ s · smallest normal:   v comes back exactly
        otherwise:                   it is off by at most s · smallest subnormal / 2
    """
    q = quantize(matrix(m, k, seed), (1, 128), fmt, "power_of_2")
    again = q.requantize((128, 1), "power_of_2")
    before, after, scale = dequantize(q).double(), dequantize(again).double(), per_element(again).double()
    lost = (after - before).abs()
    normal = before.abs() >= scale * fmt.smallest_normal
    assert not lost[normal].any()
    assert (lost <= scale * fmt.smallest_subnormal / 2).all()


def test_the_bound_of_requantization_is_reached():
    """The new tile has 448 and 2⁻¹⁰, half the smallest subnormal of scale 1: a tie that rounds to zero."""
    x = torch.tensor([[448.0], [2.0**-10]])
    again = quantize(x, (1, 128), E4M3, "power_of_2").requantize((128, 1), "power_of_2")
    assert dequantize(again).tolist() == [[448], [0]]


def test_float32_scales_round_values_again():
    q = quantize(matrix(128, 128, spread=1))
    assert not torch.equal(dequantize(q.requantize((128, 1))), dequantize(q))


def test_requantizing_preserves_the_format():
    assert quantize(matrix(4, 8), fmt=E5M2).requantize((4, 1)).fmt is E5M2


# Transposing


@every_block
def test_a_transpose_has_the_same_values(block):
    q = quantize(matrix(200, 300), block)
    assert torch.equal(dequantize(q.mT), dequantize(q).mT)


def test_a_transpose_is_a_view():
    q = quantize(matrix(200, 300))
    assert q.mT.data.data_ptr() == q.data.data_ptr()


@given(**a_matrix, fmt=st.sampled_from([E4M3, E5M2, INT8]), scale=st.sampled_from(["float32", "power_of_2"]))
def test_128x128_blocks_transpose_exactly(m, k, seed, fmt, scale):
    q = quantize(matrix(m, k, seed), (128, 128), fmt, scale)
    assert torch.equal(dequantize(q.transpose()), dequantize(q).mT)


@given(**a_matrix, fmt=st.sampled_from([E4M3, E5M2, INT8]), scale=st.sampled_from(["float32", "power_of_2"]))
def test_128x128_blocks_transposed_twice_are_unchanged(m, k, seed, fmt, scale):
    q = quantize(matrix(m, k, seed), (128, 128), fmt, scale)
    assert_same(q.transpose().transpose(), q)


@pytest.mark.parametrize("block", [(128, 128), (None, None)], ids=str)
def test_exact_transposes_are_silent(block):
    q = quantize(matrix(200, 300), block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q.transpose()


def test_tiles_are_requantized_with_a_warning():
    q = quantize(matrix(200, 300))
    with pytest.warns(UserWarning, match="transposing 1×128 tiles requantizes the values"):
        found = q.transpose()
    assert_same(found, quantize(dequantize(q).mT.contiguous()))


def test_transposed_tiles_with_power_of_2_scales_have_such_scales_again():
    q = quantize(matrix(200, 300), scale="power_of_2")
    with pytest.warns(UserWarning, match="requantizes the values"):
        found = q.transpose()
    assert_same(found, quantize(dequantize(q).mT.contiguous(), scale="power_of_2"))


def test_packed_values_have_no_transposed_view():
    with pytest.raises(TypeError, match="packed E5M6 has no transposed view"):
        _ = quantize(torch.ones(2, 4), fmt=E5M6).mT


# A container of tensors


@every_format
def test_it_can_be_moved_to_another_device(fmt):
    q = quantize(matrix(5, 130), fmt=fmt)
    moved = q.to("meta")
    assert (moved.device.type, moved.scale.device.type, moved.shape, moved.block) == ("meta", "meta", q.shape, q.block)


@every_format
def test_meta_tensors_are_quantized_and_dequantized(fmt):
    values = dequantize(quantize(torch.empty(5, 130, device="meta"), fmt=fmt), torch.bfloat16)
    assert (values.shape, values.dtype, values.device.type) == ((5, 130), torch.bfloat16, "meta")


@pytest.mark.parametrize(("fmt", "nbytes"), [(E4M3, 4 * 256 + 32), (E5M6, 4 * 384 + 32)], ids=["e4m3", "e5m6"])
def test_nbytes_counts_data_and_scales(fmt, nbytes):
    assert quantize(torch.ones(4, 256), fmt=fmt).nbytes == nbytes


@every_format
def test_it_is_saved_and_loaded_without_arbitrary_pickles(fmt):
    q = quantize(matrix(5, 130), (2, 128), fmt)
    file = io.BytesIO()
    torch.save({"w": q}, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True)["w"], q)


@every_format
def test_it_is_pickled(fmt):
    q = quantize(matrix(5, 130), (2, 128), fmt)
    assert_same(pickle.loads(pickle.dumps(q)), q)


def test_a_transposed_view_is_pickled():
    q = quantize(matrix(5, 130)).mT
    assert_same(pickle.loads(pickle.dumps(q)), q)


def test_a_fresh_process_loads_it_once_it_has_named_the_class(tmp_path):
    torch.save({"w": quantize(matrix(5, 130))}, tmp_path / "w.pt")
    program = (
        f"import octile, torch; octile.ScaledTensor; print(torch.load({str(tmp_path / 'w.pt')!r}, weights_only=True))"
    )
    process = run_python(program)
    assert process.stdout.startswith("{'w': ScaledTensor([5, 130] e4m3"), process.stderr


def test_it_is_a_value_of_a_modules_state_dict():
    class Holder(torch.nn.Module):
        q = quantize(matrix(5, 130))

        def get_extra_state(self) -> ScaledTensor:
            return self.q

        def set_extra_state(self, state: ScaledTensor) -> None:
            self.q = state

    file = io.BytesIO()
    torch.save(Holder().state_dict(), file)
    file.seek(0)
    loaded = Holder()
    loaded.q = quantize(torch.zeros(5, 130))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert_same(loaded.q, Holder.q)


def test_its_state_dict_has_the_names_of_published_checkpoints():
    q = quantize(matrix(200, 300), (128, 128))
    state = q.state_dict("mlp.weight")
    assert list(state) == ["mlp.weight", "mlp.weight_scale_inv"]
    assert_same(ScaledTensor.from_state_dict(state, "mlp.weight"), q)


@every_format
def test_its_state_dict_is_read_back(fmt):
    q = quantize(matrix(5, 130), fmt=fmt)
    assert_same(ScaledTensor.from_state_dict(q.state_dict(), block=(1, 128)), q)


def test_a_state_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match="weight must be float8_e4m3fn, float8_e5m2, int8 or uint8"):
        ScaledTensor.from_state_dict({"weight": torch.zeros(2, 2), "weight_scale_inv": torch.ones(1, 1)})


def test_packed_values_that_are_cut_are_refused():
    with pytest.raises(ValueError, match="data must have E5M6's two values in three bytes, not rows of 4 bytes"):
        ScaledTensor(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), (1, 128)).dequantize()


def test_a_state_of_other_blocks_is_refused():
    state = quantize(matrix(200, 300), (1, 128)).state_dict()
    with pytest.raises(ValueError, match=r"weight's scale must be \(2, 3\) .* in blocks of 128×128, not \(200, 3\)"):
        ScaledTensor.from_state_dict(state)


def test_a_state_without_scale_is_refused():
    with pytest.raises(KeyError, match="weight_scale_inv"):
        ScaledTensor.from_state_dict({"weight": torch.zeros(2, 2)})


@every_format
def test_it_is_deep_copied(fmt):
    q = quantize(matrix(5, 130), fmt=fmt)
    copied = copy.deepcopy(q)
    assert_same(copied, q)
    assert copied.data.data_ptr() != q.data.data_ptr()


def test_as_a_pytree_it_is_its_two_tensors():
    q = quantize(matrix(5, 130))
    leaves, spec = pytree.tree_flatten(q)
    assert [leaf.data_ptr() for leaf in leaves] == [q.data.data_ptr(), q.scale.data_ptr()]
    assert_same(pytree.tree_unflatten(leaves, spec), q)


@pytest.mark.parametrize(
    ("block", "fmt", "expected"),
    [
        ((1, 128), E4M3, "ScaledTensor([4, 256] e4m3, 1×128 blocks, 1.031 bytes a value, cpu)"),
        ((None, None), E5M6, "ScaledTensor([4, 256] e5m6, 4×256 blocks, 1.504 bytes a value, cpu)"),
    ],
    ids=["e4m3", "e5m6"],
)
def test_its_repr_describes_it(block, fmt, expected):
    assert repr(quantize(torch.ones(4, 256), block, fmt)) == expected


# GEMMs: what these functions add to the operators


@pytest.fixture
def pair() -> tuple[ScaledTensor, ScaledTensor]:
    """x[5, 300] in tiles and w[130, 300] in blocks."""
    return quantize(matrix(5, 300, spread=1)), quantize(matrix(130, 300, seed=1, spread=1), (128, 128))


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Check for equality up to the order of FP32 additions, relative to the largest value."""
    assert (found.double() - expected.double()).abs().amax() <= 1e-6 * expected.abs().amax()


def test_a_matmul_is_that_of_the_values(pair):
    x, w = pair
    assert_close(matmul_nt(x, w, torch.float32), dequantize(x).double() @ dequantize(w).double().T)


def test_a_matmul_is_bfloat16_by_default(pair):
    assert matmul_nt(*pair).dtype == torch.bfloat16


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_matmul_overwrites_out_or_accumulates(pair, accumulate):
    out = torch.full((5, 130), 3.0)
    found = matmul_nt(*pair, out=out, accumulate=accumulate)
    assert found is out
    assert_close(out, matmul_nt(*pair, torch.float32) + 3.0 * accumulate)


def test_each_group_is_multiplied_by_its_own_weight(pair):
    x, _ = pair
    w = quantize(torch.stack([matrix(130, 300, seed, spread=1) for seed in (1, 2, 3)]), (128, 128))
    found = grouped_matmul_nt(x, w, torch.tensor([2, 2, 4], dtype=torch.int32), torch.float32)
    x_TK, w_GNK = dequantize(x).double(), dequantize(w).double()
    assert_close(found, torch.cat([x_TK[:2] @ w_GNK[0].T, x_TK[2:4] @ w_GNK[2].T, torch.zeros(1, 130)]))


def test_masked_groups_are_multiplied_up_to_their_counts():
    x_GMK, w_GNK = matrix(10, 200, spread=1).view(2, 5, 200), matrix(14, 200, seed=1, spread=1).view(2, 7, 200)
    x, w = quantize(x_GMK), quantize(w_GNK, (128, 128))
    found = masked_grouped_matmul_nt(x, w, torch.tensor([5, 2], dtype=torch.int32), torch.float32)
    expected = dequantize(x).double() @ dequantize(w).double().mT
    assert_close(found[0], expected[0])
    assert_close(found[1, :2], expected[1, :2])


def test_weight_gradients_are_summed_over_the_rows_of_their_group():
    dy, x = quantize(matrix(9, 7, spread=1), (128, 1)), quantize(matrix(9, 20, seed=1, spread=1), (128, 1))
    found = grouped_wgrad(dy, x, torch.tensor([4, 4, 9], dtype=torch.int32))
    dy_TN, x_TK = dequantize(dy).double(), dequantize(x).double()
    assert_close(found, torch.stack([dy_TN[:4].T @ x_TK[:4], torch.zeros(7, 20), dy_TN[4:].T @ x_TK[4:]]))


def test_aligned_groups_have_tiles_of_their_own():
    x, offs = matrix(300, 20, spread=1), torch.tensor([4, 4, 299], dtype=torch.int32)
    aligned, ends = align_groups(x, offs)
    assert (aligned.shape, ends.tolist()) == ((768, 20), [128, 128, 512])
    expected = torch.zeros(768, 20)
    expected[:4], expected[128:423], expected[512] = x[:4], x[4:299], x[299]
    assert torch.equal(aligned, expected)


def test_a_nan_of_one_group_reaches_no_other_where_groups_are_aligned():
    x, offs = matrix(9, 20, spread=1), torch.tensor([4, 9], dtype=torch.int32)
    x[2, 3] = torch.nan
    aligned, ends = align_groups(x, offs)
    q = quantize(aligned, (128, 1))
    assert grouped_wgrad(q, q, ends).isnan().flatten(1).any(1).tolist() == [True, False]


def test_groups_of_a_stack_are_not_aligned():
    with pytest.raises(ValueError, match=r"x must be a matrix \[T, K\], not \(2, 3, 4\)"):
        align_groups(torch.zeros(2, 3, 4), torch.tensor([3], dtype=torch.int32))


def test_a_nan_stays_visible_in_a_matmul(pair):
    _, w = pair
    x = matrix(5, 300, spread=1)
    x[2, 7] = torch.nan
    rows = matmul_nt(quantize(x), w).isnan()
    assert rows[2].all()
    assert not rows[[0, 1, 3, 4]].any()


# Refusals


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"x must be a matrix \[..., M, K\], not \(5,\)"):
        quantize(torch.zeros(5))


def test_unknown_scale_rules_are_refused():
    with pytest.raises(ValueError, match="scale must be 'float32' or 'power_of_2', not 'ue8m0'"):
        quantize(torch.zeros(2, 2), scale="ue8m0")


def test_formats_without_data_are_refused():
    with pytest.raises(ValueError, match="not 'fp16'"):
        quantize(torch.zeros(2, 2), fmt=FP16)


def test_double_precision_is_refused():
    with pytest.raises(TypeError, match=r"x must be float32, bfloat16 or float16, not torch\.float64"):
        quantize(torch.zeros(2, 2, dtype=torch.float64))


def test_accumulating_needs_something_to_add_to(pair):
    with pytest.raises(ValueError, match="accumulate=True needs out"):
        matmul_nt(*pair, accumulate=True)


def test_out_and_out_dtype_must_agree(pair):
    with pytest.raises(TypeError, match=r"out_dtype is torch\.bfloat16 but out is torch\.float32"):
        matmul_nt(*pair, torch.bfloat16, out=torch.empty(5, 130))


def test_an_out_of_another_shape_is_refused(pair):
    with pytest.raises(ValueError, match=r"out must be \(5, 130\), not \(130, 5\)"):
        matmul_nt(*pair, out=torch.empty(130, 5))


def test_operands_must_agree_in_k(pair):
    with pytest.raises(ValueError, match=r"a and b must agree in K: a is \(5, 300\), b is \(2, 4\)"):
        matmul_nt(pair[0], quantize(torch.ones(2, 4)))


def test_packed_values_are_no_operands(pair):
    with pytest.raises(TypeError, match=r"a must be float8_e4m3fn, float8_e5m2 or int8, not torch\.uint8"):
        matmul_nt(quantize(torch.ones(5, 300), fmt=E5M6), pair[1])


@pytest.mark.parametrize("block", [128, (128,), None], ids=str)
def test_a_block_is_two_extents(block):
    with pytest.raises(TypeError, match=r"block must be two extents \(rows, columns\), not"):
        quantize(torch.zeros(2, 2), block)


@pytest.mark.parametrize("block", [("a", 128), (1, 128.0), (True, 128)], ids=str)
def test_extents_are_whole_numbers(block):
    with pytest.raises(TypeError, match="block's extents must be integers or None, not"):
        quantize(torch.zeros(2, 2), block)


def test_a_list_is_refused():
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, not list"):
        quantize([[1.0, 2.0]])


def test_a_dtype_that_values_do_not_have_is_refused():
    with pytest.raises(TypeError, match=r"dtype must be float32, bfloat16 or float16, not torch\.float64"):
        dequantize(quantize(torch.ones(2, 2)), torch.float64)


@pytest.mark.parametrize("gemm", [grouped_matmul_nt, grouped_wgrad, masked_grouped_matmul_nt, matmul_nt])
def test_the_name_of_a_dtype_is_refused(gemm):
    x, offs = quantize(torch.ones(2, 2, 2)), torch.tensor([1, 2], dtype=torch.int32)
    sizes = () if gemm is matmul_nt else (offs,)
    with pytest.raises(TypeError, match="out_dtype must be bfloat16 or float32, not 'float32'"):
        gemm(x, x, *sizes, out_dtype="float32")


def test_a_quantized_parameter_is_ordinary_data(tmp_path):
    q = quantize(torch.nn.Parameter(torch.randn(4, 200)))
    torch.save(q, tmp_path / "q.pt")
    assert_same(torch.load(tmp_path / "q.pt"), copy.deepcopy(q))


@pytest.mark.parametrize("fmt", ["e4m3", torch.float8_e4m3fn], ids=str)
def test_a_name_or_dtype_in_place_of_a_format_is_refused(fmt):
    with pytest.raises(TypeError, match=r"fmt must be a format such as octile\.E4M3, not"):
        quantize(torch.zeros(2, 2), fmt=fmt)


@pytest.mark.parametrize("operand", [torch.zeros(2, 2), (torch.zeros(2, 2), torch.ones(1, 1))], ids=["Tensor", "tuple"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_operands_that_are_no_scaled_tensors_are_refused(name, operand):
    operands = {"a": quantize(torch.ones(2, 2)), "b": quantize(torch.ones(2, 2)), name: operand}
    with pytest.raises(TypeError, match=f"{name} must be a ScaledTensor, .*, not {type(operand).__name__}"):
        matmul_nt(**operands)


def test_to_with_a_dtype_is_refused():
    with pytest.raises(TypeError, match=r"device must be a device, not torch\.bfloat16: dequantize"):
        quantize(torch.ones(2, 2)).to(torch.bfloat16)
