"""Scales under DeepGEMM's names: what `octile.ops.scale_layouts` does, and zeros and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octile.compat.deep_gemm as deep_gemm
from octile.compat.deep_gemm import layout
from octile.ops.scale_layouts import pack_ue8m0, unpack_ue8m0
from tests.compat.deep_gemm.conftest import random

sizes = {"mn": st.integers(1, 130), "k": st.integers(1, 20), "groups": st.sampled_from([(), (1,), (3,)])}


def powers_of_2(*shape: int) -> torch.Tensor:
    return torch.exp2((10 * random(*shape)).round())


@given(**sizes)
def test_aligned_scales_are_the_same_in_columns_of_16_bytes(mn, k, groups):
    sf = random(*groups, mn, k)
    moved = deep_gemm.get_mn_major_tma_aligned_tensor(sf)
    column = deep_gemm.get_tma_aligned_size(mn, 4)
    assert torch.equal(moved, sf)
    assert moved.stride() == (*(column * k for _ in groups), 1, column)


@pytest.mark.parametrize(
    ("element_size", "error"), [(0, ValueError), (32, ValueError), (3, ValueError), (4.0, TypeError)]
)
def test_sizes_that_do_not_divide_16_bytes_are_refused(element_size, error):
    with pytest.raises(error, match="element_size must"):
        deep_gemm.get_tma_aligned_size(5, element_size)


@given(**sizes)
def test_packed_scales_hold_the_scales(mn, k, groups):
    sf = powers_of_2(*groups, mn, k)
    assert torch.equal(unpack_ue8m0(deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf), k), sf)


def test_a_scale_of_zero_is_packed_as_0():
    sf = torch.tensor([[2.0, 0.0]])
    assert deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf).tolist() == [[0x0080]]


def test_padding_between_groups_is_not_read():
    deep_gemm.set_mk_alignment_for_contiguous_layout(8)
    sf = powers_of_2(24, 5)
    sf[3:8], sf[12:] = 3.0, float("nan")
    ends = torch.tensor([3, 12], dtype=torch.int32)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf, ends)
    within = torch.tensor([*range(3), *range(8, 12)])
    assert torch.equal(packed[within], pack_ue8m0(sf[within]))
    assert not packed[3:8].any()
    assert not packed[12:].any()


@pytest.mark.parametrize("given", [True, False])
def test_groups_that_end_where_the_device_says_are_packed_one_by_one(given):
    ks, alignment, gran_k = [100, 0, 700], 160, 32
    ends = torch.tensor([100, 160, 860], dtype=torch.int32)
    counts = [-(-k // gran_k) for k in ks]
    sf = powers_of_2(sum(counts), 6)
    packed = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        sf, ends, ks if given else None, gran_k, alignment, use_psum_layout=True
    )
    alone = torch.cat([pack_ue8m0(group.mT).mT for group in sf.split(counts) if len(group)])
    assert torch.equal(packed[: len(alone)], alone)


# The layout that GEMMs read


def test_tiles_are_aligned_and_blocks_stay():
    tiles, blocks_128 = random(37, 3), random(2, 3)
    required = deep_gemm.transform_sf_into_required_layout(tiles, 37, 300, (1, 128, 128), is_sfa=True)
    assert required.stride() == (1, 40)
    assert deep_gemm.transform_sf_into_required_layout(blocks_128, 150, 300, (1, 128, 128), is_sfa=False) is blocks_128


def test_a_recipe_of_two_is_the_operands_own():
    sf = random(3, 37, 10)
    required = deep_gemm.transform_sf_into_required_layout(sf, 37, 300, (1, 32), num_groups=3)
    assert torch.equal(required, sf)
    assert required.stride() == (400, 1, 40)


def test_on_sm_100_blocks_become_packed_tiles(monkeypatch):
    monkeypatch.setattr(layout, "has_mx_tensor_cores", lambda t: True)
    blocks_128 = powers_of_2(2, 3)
    required = deep_gemm.transform_sf_into_required_layout(blocks_128, 150, 300, (128, 128))
    assert torch.equal(unpack_ue8m0(required, 3), blocks_128.repeat_interleave(128, dim=0)[:150])


SIZES = torch.tensor([256, 256], dtype=torch.int32)


@pytest.mark.parametrize("sf", [None, 1.5, [1.0], torch.ones(3), torch.ones(4, 8).double()])
def test_malformed_scales_are_refused(sf):
    for call in (
        lambda: deep_gemm.get_mn_major_tma_aligned_tensor(sf),
        lambda: deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf),
        lambda: deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, SIZES, [256, 256], 128, 128),
        lambda: deep_gemm.transform_sf_into_required_layout(sf, 4, 1024, (1, 128)),
    ):
        with pytest.raises((TypeError, ValueError), match="sf must"):
            call()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"grouped_layout": None}, TypeError, "grouped_layout must be a tensor, not NoneType"),
        ({"grouped_layout": SIZES.long()}, TypeError, "grouped_layout must be int32, not torch.int64"),
        ({"grouped_layout": SIZES[None]}, ValueError, r"grouped_layout must be \[2\], one for each group"),
        ({"grouped_layout": SIZES.flip(0) - 128}, ValueError, "grouped_layout must agree with ks_cpu"),
        ({"ks_cpu": None}, ValueError, "ks_cpu must be given unless use_psum_layout is"),
        ({"ks_cpu": SIZES}, TypeError, "ks_cpu must be a list of integers"),
        ({"ks_cpu": [256]}, ValueError, "ks_cpu must have 2 sizes, one for each group, not 1"),
        ({"gran_k": 0}, ValueError, "gran_k must be 128 or 32, not 0"),
        ({"gran_k": 64}, ValueError, "gran_k must be 128 or 32, not 64"),
        ({"gran_k": None}, TypeError, "gran_k must be an integer, not None"),
        ({"k_alignment": 0}, ValueError, "k_alignment must be at least 1, not 0"),
        ({"k_alignment": None}, TypeError, "k_alignment must be an integer, not None"),
        (
            {"sf": torch.ones(3, 8)},
            ValueError,
            r"sf must have 4 rows for groups of \[256, 256\] at 128 tokens a scale, not 3$",
        ),
        ({"sf": torch.ones(5, 8)}, ValueError, "sf must have 4 rows for groups of .* not 5$"),
        ({"sf": torch.ones(16, 8)}, ValueError, "sf must have 4 rows for groups of .* not 16; 16 fit gran_k=32"),
        (
            {"grouped_layout": SIZES - 100, "use_psum_layout": True, "k_alignment": 160},
            ValueError,
            r"grouped_layout must hold ends of groups that begin at multiples of 160, not \[156, 156\]",
        ),
    ],
)
def test_groups_that_do_not_fit_their_scales_are_refused(changes, error, message):
    fitting = {"sf": torch.ones(4, 8), "grouped_layout": SIZES, "ks_cpu": [256, 256], "gran_k": 128, "k_alignment": 128}
    deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(**fitting)
    with pytest.raises(error, match=message):
        deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(**(fitting | changes))


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ([1, 2], TypeError),
        (SIZES.long(), TypeError),
        (SIZES, ValueError),
        (SIZES[None], ValueError),
        (SIZES[:0], ValueError),
    ],
)
def test_ends_that_do_not_fit_their_scales_are_refused(ends, error):
    with pytest.raises(error, match="psum_layout must"):
        deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(4, 8), ends)


@pytest.mark.parametrize("recipe", [None, 128, (1,), (1, 0), ("1", 128)])
def test_a_malformed_recipe_is_refused(recipe):
    with pytest.raises((TypeError, ValueError), match="recipe must be"):
        deep_gemm.transform_sf_into_required_layout(torch.ones(4, 8), 4, 1024, recipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": (1, 128, 128)}, "is_sfa must be given with a recipe of three"),
        ({"recipe": (128, 128)}, r"sf must be \(1, 3\), not \(37, 3\)"),
        ({"recipe": (1, 128), "num_groups": 2}, r"sf must be \(2, 37, 3\), not \(37, 3\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        deep_gemm.transform_sf_into_required_layout(random(37, 3), 37, 300, **arguments)
