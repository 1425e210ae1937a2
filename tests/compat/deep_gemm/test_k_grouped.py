"""k_grouped_*: the weight gradient of every group, from tokens in rows or from transposed groups in one row."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octile.compat.deep_gemm as deep_gemm
from octile.compat.deep_gemm import utils
from tests.compat.deep_gemm.conftest import assert_gemm, random, values

m, n = 24, 40


def quantized(ks: list[int], channels: int, gran_k: int = 128, seed: int = 0, power_of_2: bool = False):
    """Per group: data [K_g, channels], scale [⌈K_g/gran_k⌉, channels]."""
    x = random(sum(ks), channels, seed=seed).split(ks)
    return [utils.per_channel_cast_to_fp8(x_g, power_of_2, gran_k) for x_g in x]


def joined(groups):
    return tuple(torch.cat([g[i].view(torch.uint8) for g in groups]).view(groups[0][i].dtype) for i in (0, 1))


def check(d, a, b, c, gran_k=128):
    for g in range(len(a)):
        left, right = values(a[g], gran_k, 1), values(b[g], gran_k, 1)
        assert_gemm(d[g], left.T, right.T, c[g])


ks_of = {128: st.sampled_from([0, 128, 256]), 32: st.sampled_from([0, 32, 96, 160])}


@given(data=st.data(), gran_k=st.sampled_from([128, 32]), step=st.sampled_from([128, 32]))
def test_tokens_in_rows(data, gran_k, step):
    ks = data.draw(st.lists(ks_of[step], min_size=1, max_size=4))
    a, b, c = quantized(ks, m, gran_k), quantized(ks, n, gran_k, seed=1), random(len(ks), m, n, seed=2)
    d = c.clone()
    layout = torch.tensor(ks, dtype=torch.int32)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(joined(a), joined(b), d, ks, layout, d, recipe=(1, 1, gran_k))
    check(d, a, b, c, gran_k)


@given(ks=st.lists(ks_of[128] | ks_of[32], min_size=1, max_size=4))
def test_transposed_groups_one_after_the_other(ks):
    a, b, c = quantized(ks, m), quantized(ks, n, seed=1), random(len(ks), m, n, seed=2)
    d = torch.full_like(c, float("nan"))

    def flat(groups):
        data, scale = joined([(data.T.contiguous().view(-1), scale) for data, scale in groups])
        return data, scale.T

    layout = torch.tensor(ks, dtype=torch.int32)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(flat(a), flat(b), d, ks, layout, c)
    check(d, a, b, c)


@given(
    ks=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    alignment=st.sampled_from([32, 128, 160]),
    gran_k=st.sampled_from([32, 128]),
    given=st.booleans(),
)
def test_groups_that_end_where_the_device_says(ks, alignment, gran_k, given):
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    a, b, c = quantized(ks, m, gran_k), quantized(ks, n, gran_k, seed=1), random(len(ks), m, n, seed=2)
    starts = [0]
    for k in ks:
        starts.append(-(-(starts[-1] + k) // alignment) * alignment)

    def with_gaps(groups):
        data = torch.zeros(starts[-1], groups[0][0].shape[1], dtype=torch.float8_e4m3fn)
        for (start, _), (group, _) in zip(pairwise(starts), groups, strict=True):
            data.view(torch.uint8)[start : start + len(group)] = group.view(torch.uint8)
        return data, torch.cat([scale for _, scale in groups])

    ends = torch.tensor([start + k for start, k in zip(starts, ks, strict=False)], dtype=torch.int32)
    d, recipe, sizes = c.clone(), (1, 1, gran_k), ks if given else None
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(
        with_gaps(a), with_gaps(b), d, sizes, ends, d, recipe, use_psum_layout=True
    )  # fmt: skip
    check(d, a, b, c, gran_k)


def test_a_scale_of_nan_reaches_its_group_and_not_the_gap_before_it():
    deep_gemm.set_mk_alignment_for_contiguous_layout(160)
    data, scale = torch.zeros(260, m, dtype=torch.float8_e4m3fn), torch.ones(8, m)
    scale[4:] = float("nan")  # the second group's: the first has 100 tokens, so 4 of 32
    d, ends = torch.ones(2, m, m), torch.tensor([100, 260], dtype=torch.int32)
    pair = (data, scale)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(pair, pair, d, None, ends, None, (1, 1, 32), use_psum_layout=True)
    assert d[0].isfinite().all()
    assert d[1].isnan().all()


def test_groups_that_would_share_a_block_of_32_tokens_are_refused():
    deep_gemm.set_mk_alignment_for_contiguous_layout(48)
    pair, d = (torch.zeros(96, m, dtype=torch.float8_e4m3fn), torch.ones(2, m)), torch.zeros(2, m, m)
    ends = torch.tensor([48, 96], dtype=torch.int32)
    with pytest.raises(ValueError, match="alignment must be a multiple of 32 with use_psum_layout, not 48"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous(pair, pair, d, None, ends, use_psum_layout=True)


def test_gradients_of_empty_groups_with_packed_scales_are_zero():
    pair = torch.zeros(0, m, dtype=torch.float8_e4m3fn), torch.zeros(0, m, dtype=torch.int32)
    d, sizes = torch.ones(2, m, m), torch.zeros(2, dtype=torch.int32)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(pair, pair, d, [0, 0], sizes)
    assert not d.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_c_gradients_are_stored(dtype):
    ks = [128, 0]
    a, b, d = quantized(ks, m), quantized(ks, n, seed=1), torch.full((2, m, n), float("nan"), dtype=dtype)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(joined(a), joined(b), d, ks, torch.tensor(ks, dtype=torch.int32))
    check(d, a, b, torch.zeros_like(d))


def test_packed_scales_are_the_same_scales():
    ks, recipe = [256, 128, 640], (1, 1, 128)
    a, b = joined(quantized(ks, m, power_of_2=True)), joined(quantized(ks, n, seed=1, power_of_2=True))
    layout = torch.tensor(ks, dtype=torch.int32)
    expected, d = torch.zeros(3, m, n), torch.zeros(3, m, n)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(a, b, expected, ks, layout)
    packed = [
        (data, deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scale, layout, ks, 128, 128))
        for data, scale in (a, b)
    ]
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(*packed, d, ks, layout, recipe=recipe)
    assert torch.equal(d, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": torch.zeros(256, m)}, TypeError, r"a must be a pair \(data, scale\), not Tensor"),
        ({"ks_cpu": [128, 100]}, ValueError, r"ks_cpu must be multiples of 32, not \[128, 100\]"),
        ({"ks_cpu": [128]}, ValueError, "ks_cpu must have 2 sizes, one for each group, not 1"),
        ({"ks_cpu": None}, ValueError, "ks_cpu must be given unless use_psum_layout is"),
        ({"ks_cpu": [128, 256]}, ValueError, r"a must be \[384, 24\], not \(256, 24\)"),
        ({"recipe": (1, 128, 128)}, ValueError, r"recipe must be \(1, 1, 128\) or \(1, 1, 32\)"),
        ({"grouped_layout": torch.tensor([128.0, 128.0])}, TypeError, "grouped_layout must be int32"),
        ({"d": torch.zeros(2, n, m).mT}, ValueError, "d must be contiguous"),
        ({"c": torch.zeros(1, m, n)}, ValueError, r"c must be \(2, 24, 40\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    ks = [128, 128]
    arguments = {
        "a": joined(quantized(ks, m)),
        "b": joined(quantized(ks, n)),
        "d": torch.zeros(2, m, n),
        "ks_cpu": ks,
        "grouped_layout": torch.tensor(ks, dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous(**(arguments | change))


@pytest.mark.parametrize(("gran_k", "recipe", "rows", "found"), [(32, 128, 5, 20), (128, 32, 20, 5)])
def test_scales_of_another_granularity_are_refused_with_the_recipe_that_fits(gran_k, recipe, rows, found):
    ks = [128, 512]
    (a, scale), d, layout = joined(quantized(ks, m, gran_k)), torch.zeros(2, m, m), torch.tensor(ks, dtype=torch.int32)
    fitting = f"; {found} fit recipe=\\(1, 1, {gran_k}\\)"
    message = f"for groups of \\[128, 512\\] at {recipe} tokens a scale, not {found}{fitting}"
    options = {"recipe": (1, 1, recipe)}
    with pytest.raises(ValueError, match=f"a's scale must have {rows} rows {message}"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous((a, scale), (a, scale), d, ks, layout, **options)
    flat = torch.cat([group.T.flatten().view(torch.uint8) for group in a.split(ks)]).view(a.dtype), scale.T
    with pytest.raises(ValueError, match=f"a's scale must have {rows} columns {message}"):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(flat, flat, d, ks, layout, **options)
    assert not d.any()


def test_only_a_single_transposed_group_may_be_a_matrix():
    def call(ks):
        a, layout, d = quantized([256], m), torch.tensor(ks, dtype=torch.int32), torch.zeros(len(ks), m, m)
        data, scale = a[0]
        pair = data.T, scale.T
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(pair, pair, d, ks, layout)
        check(d, a, a, torch.zeros_like(d))

    call([256])
    with pytest.raises(ValueError, match=r"a must be \[24 · 256\], each group \[24, K_g\] .*, not \(24, 256\)"):
        call([128, 128])


def test_transposed_groups_need_their_sizes_on_the_host():
    pair = (torch.zeros(0, dtype=torch.float8_e4m3fn), torch.zeros(m, 0))
    for ks_cpu, message in ((None, "the nt form needs ks_cpu"), ([], "ks_cpu must have 1 sizes, one for each group")):
        with pytest.raises(ValueError, match=message):
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
                pair, pair, torch.zeros(1, m, m), ks_cpu, torch.zeros(1, dtype=torch.int32)
            )


# BF16


@given(ks=st.lists(st.integers(0, 100), min_size=1, max_size=4), add=st.booleans())
def test_bf16_gradients_are_stored_or_added_in_fp32(ks, add):
    a, b = random(sum(ks), m).bfloat16(), random(sum(ks), n, seed=1).bfloat16()
    c = random(len(ks), m, n, seed=2)
    d, layout = c.clone(), torch.tensor(ks, dtype=torch.int32)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout, d if add else None)
    for g, (a_g, b_g) in enumerate(zip(a.double().split(ks), b.double().split(ks), strict=True)):
        assert_gemm(d[g], a_g.T, b_g.T, c[g] * add)


def test_bf16_gradients_of_a_psum_layout_are_refused():
    with pytest.raises(ValueError, match="use_psum_layout must be False for BF16"):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(
            torch.zeros(4, m, dtype=torch.bfloat16),
            torch.zeros(4, n, dtype=torch.bfloat16),
            torch.zeros(1, m, n),
            [4],
            torch.tensor([4], dtype=torch.int32),
            use_psum_layout=True,
        )
