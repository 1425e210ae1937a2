"""fp8_gemm_*: the GEMM of the values of the pairs, in every layout, dtype and recipe."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import octile.compat.deep_gemm as deep_gemm
from octile.ops.scale_layouts import pack_ue8m0
from tests.compat.deep_gemm.conftest import assert_gemm, blocks_128, random, tiles, values

M, N, K = 37, 150, 300


def empty(m=M, n=N, dtype=torch.bfloat16):
    return torch.full((m, n), float("nan"), dtype=dtype)


@given(m=st.integers(1, 140), n=st.integers(1, 140), k=st.integers(1, 300), dtype=st.sampled_from(["bf16", "fp32"]))
def test_tiles_times_blocks_at_any_size(m, n, k, dtype):
    a, b = tiles(m, k), blocks_128(n, k, seed=1)
    d = empty(m, n, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert_gemm(d, values(a, 1, 128), values(b, 128, 128))


@pytest.mark.parametrize("gran_k", [32, 128])
def test_tiles_times_tiles(gran_k):
    a, b = tiles(M, K, gran_k=gran_k), tiles(N, K, seed=1, gran_k=gran_k)
    d = empty(dtype=torch.float32)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, gran_k))
    assert_gemm(d, values(a, 1, gran_k), values(b, 1, gran_k))


def test_each_operand_may_have_a_recipe_of_its_own():
    a, b = tiles(M, K, gran_k=32), blocks_128(N, K, seed=1)
    d = empty(dtype=torch.float32)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 32), recipe_b=(128, 128))
    assert_gemm(d, values(a, 1, 32), values(b, 128, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_c_that_is_d_is_added_to(dtype):
    a, b = tiles(M, K), tiles(N, K, seed=1)
    d = (32 * random(M, N, seed=2)).to(dtype)
    c = d.clone()
    deep_gemm.fp8_gemm_nt(a, b, d, c=d, recipe=(1, 1, 128))
    assert_gemm(d, values(a, 1, 128), values(b, 1, 128), c)


def test_a_c_of_its_own_is_added_and_is_unchanged():
    a, b = tiles(M, K), blocks_128(N, K, seed=1)
    c, d = random(M, N, seed=2), empty(dtype=torch.float32)
    before = c.clone()
    deep_gemm.fp8_gemm_nt(a, b, d, c)
    assert_gemm(d, values(a, 1, 128), values(b, 128, 128), c)
    assert torch.equal(c, before)


@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
def test_transposed_operands_are_the_same_operands(form):
    a, b = tiles(M, K), blocks_128(N, K, seed=1)
    expected, d = empty(), empty()
    deep_gemm.fp8_gemm_nt(a, b, expected)
    transposed = {"n": lambda pair: pair, "t": lambda pair: (pair[0].T.contiguous(), pair[1].T.contiguous())}
    given_a = transposed["t" if form[0] == "t" else "n"](a)
    given_b = transposed["t" if form[1] == "n" else "n"](b)
    getattr(deep_gemm, f"fp8_gemm_{form}")(given_a, given_b, d)
    assert torch.equal(d, expected)


def test_aligned_scales_are_the_same_scales():
    a, b = tiles(M, K), blocks_128(N, K, seed=1)
    expected, d = empty(), empty()
    deep_gemm.fp8_gemm_nt(a, b, expected)
    moved = deep_gemm.transform_sf_into_required_layout(a[1], M, K, (1, 128, 128), is_sfa=True)
    deep_gemm.fp8_gemm_nt((a[0], moved), b, d)
    assert torch.equal(d, expected)


def test_packed_scales_are_the_same_scales():
    a, b = tiles(M, K, power_of_2=True), tiles(N, K, seed=1, power_of_2=True)
    expected, d = empty(), empty()
    deep_gemm.fp8_gemm_nt(a, b, expected, recipe=(1, 1, 128))
    deep_gemm.fp8_gemm_nt((a[0], pack_ue8m0(a[1])), (b[0], pack_ue8m0(b[1])), d)
    assert torch.equal(d, expected)


def test_on_sm_100_scales_are_packed_unless_disabled(monkeypatch):
    """What reaches the GEMM for sm_100, seen on a CPU."""
    from octile.compat.deep_gemm import dense

    monkeypatch.setattr(dense, "has_mx_tensor_cores", lambda t: True)
    seen = []

    def packed_gemm(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype):
        seen.append((a_scale.dtype, a_scale.shape, b_scale.shape))
        return original(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)

    original = dense.packed_matmul_nt
    monkeypatch.setattr(dense, "packed_matmul_nt", packed_gemm)
    a, b = tiles(M, K, power_of_2=True), blocks_128(N, K, seed=1, power_of_2=True)
    d, c = torch.zeros(M, N), random(M, N, seed=2)
    deep_gemm.fp8_gemm_nt(a, b, d, c)
    assert seen == [(torch.int32, (M, 1), (N, 1))]
    assert_gemm(d, values(a, 1, 128), values(b, 128, 128), c)
    deep_gemm.fp8_gemm_nt(a, b, d, disable_ue8m0_cast=True)
    assert len(seen) == 1


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 3, 0)])
def test_an_empty_side_is_no_error_and_an_empty_sum_is_c(m, n, k):
    a, b = tiles(m, k), blocks_128(n, k)
    c, d = random(m, n), empty(m, n, torch.float32)
    deep_gemm.fp8_gemm_nt(a, b, d, c)
    assert torch.equal(d, c)


def test_the_second_names_are_the_same_functions():
    assert deep_gemm.fp8_fp4_gemm_nt is deep_gemm.fp8_gemm_nt
    assert deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked is deep_gemm.m_grouped_fp8_gemm_nt_masked


# Refusals: of the standard type, before anything is written


def fitting(**changes):
    arguments = {"a": tiles(M, K), "b": blocks_128(N, K), "d": torch.zeros(M, N), "c": torch.ones(M, N)}
    return arguments | {name: change(arguments[name]) for name, change in changes.items()}


REFUSED = {
    "no pair": ({"a": lambda a: a[0]}, TypeError, r"a must be a pair \(data, scale\), not Tensor"),
    "FP4": ({"b": lambda b: (b[0].view(torch.int8), b[1])}, TypeError, "b must be float8_e4m3fn, not torch.int8"),
    "K": ({"b": lambda b: blocks_128(N, K + 1)}, ValueError, "a and b must agree in K"),
    "scales": ({"a": lambda a: (a[0], a[1][:, :2])}, ValueError, r"a's scale must be \(37, 3\)"),
    "scales' dtype": (
        {"a": lambda a: (a[0], a[1].double())},
        TypeError,
        r"a's scale must be float32, or int32 \(packed UE8M0\), not torch.float64",
    ),
    "packed blocks_128": (
        {"b": lambda b: (b[0], b[1].int())},
        ValueError,
        r"b's scale must be \(150, 1\) where it is packed",
    ),
    "d's dtype": ({"d": lambda d: d.half()}, TypeError, "d must be bfloat16 or float32, not torch.float16"),
    "d's shape": ({"d": lambda d: d.T}, ValueError, r"d must be \(37, 150\), not \(150, 37\)"),
    "c's dtype": ({"c": lambda c: c.bfloat16()}, TypeError, "c must be torch.float32 as d is, not torch.bfloat16"),
    "c's shape": ({"c": lambda c: c[1:]}, ValueError, r"c must be \(37, 150\)"),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_and_d_is_unchanged(changes, error, message):
    arguments = fitting(**changes)
    before = arguments["d"].clone()
    with pytest.raises(error, match=message):
        deep_gemm.fp8_gemm_nt(**arguments)
    assert torch.equal(arguments["d"], before)


def test_a_c_that_lies_where_d_does_has_its_strides():
    d = torch.zeros(20, 20)
    with pytest.raises(ValueError, match=r"c shares d's memory, so it must have d's strides \(20, 1\), not \(1, 20\)"):
        deep_gemm.fp8_gemm_nt(tiles(20, K), blocks_128(20, K), d, d.T)


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ({"recipe_a": (1, 128)}, "recipe_a and recipe_b must be given both"),
        ({"recipe": (1, 1, 128), "recipe_a": (1, 128), "recipe_b": (1, 128)}, "recipe must not be given together with"),
    ],
)
def test_recipes_that_contradict_each_other_are_refused(recipes, message):
    with pytest.raises(ValueError, match=message):
        deep_gemm.fp8_gemm_nt(**fitting(), **recipes)


# cuBLASLt's GEMM, for comparison


@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
def test_cublaslt_takes_e4m3_without_scales(form):
    a, b = tiles(M, K)[0], tiles(N, K, seed=1)[0]
    d = empty(dtype=torch.float32)
    given_a = a.T.contiguous() if form[0] == "t" else a
    given_b = b.T.contiguous() if form[1] == "n" else b
    getattr(deep_gemm, f"cublaslt_gemm_{form}")(given_a, given_b, d)
    assert_gemm(d, a.double(), b.double())


def test_on_a_gpu_cublaslt_is_given_scales_of_one(monkeypatch):
    from octile.compat.deep_gemm.bf16 import _per_tensor

    def library(a, b, a_scale, a_scaling, b_scale, b_scaling, output_dtype):
        assert a_scaling == b_scaling == F.ScalingType.TensorWise
        return ((a.float() @ b.float()) * a_scale * b_scale).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", library)
    a, b = tiles(M, K)[0], tiles(N, K, seed=1)[0]
    assert_gemm(_per_tensor(a, b, torch.float32), a.double(), b.double())


@pytest.mark.parametrize("head_splits", [(50, 7, 25), (75, 20, 0), (0, 3, 10), (64, 0, 11), (150, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_are_written_around_their_middle(head_splits, dtype):
    left, mid, right = head_splits
    heads = N // (left + right)
    a, b = tiles(M, K), blocks_128(N, K, seed=1)
    d, dense = torch.full((M, N + heads * mid), 7.0, dtype=dtype), empty(dtype=dtype)
    deep_gemm.fp8_gemm_nt(a, b, dense)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, head_splits)
    first, middle, last = d.view(M, heads, -1).split(head_splits, 2)
    assert torch.equal(torch.cat([first, last], 2).flatten(1), dense)
    assert middle.eq(7).all()


def test_heads_are_written_to_a_transposed_result():
    a, b = tiles(M, K), blocks_128(N, K, seed=1)
    d, transposed = torch.zeros(M, N + 6), torch.zeros(N + 6, M)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, (50, 3, 25))
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, transposed.mT, (50, 3, 25))
    assert torch.equal(transposed.mT, d)
