"""Tests of scale layouts: values are preserved, at the addresses that the hardware reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.formats import UE8M0
from octile.ops.scale_layouts import (
    from_ue8m0,
    max_packed_rows,
    mn_major,
    pack_grouped_ue8m0,
    pack_ue8m0,
    tile_128x4,
    tma_aligned,
    to_ue8m0,
    unpack_exponents,
    unpack_grouped_ue8m0,
    unpack_ue8m0,
)
from tests.ops.operators import untile_128x4

sizes = {"mn": st.integers(1, 300), "k": st.integers(1, 20)}


def powers_of_2(*shape: int) -> torch.Tensor:
    exponents = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(sum(shape)))
    return torch.exp2(exponents.double()).float()


# UE8M0


def test_every_encoded_value_has_the_value_of_the_format():
    encoded = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(from_ue8m0(encoded), UE8M0.decode(encoded), rtol=0, atol=0, equal_nan=True)


def test_every_value_of_the_format_is_encoded():
    encoded = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_ue8m0(UE8M0.decode(encoded)), encoded)


@pytest.mark.parametrize("scale", [0.0, 3.0, -2.0, float("inf"), 2.0**-128, 1 + 2.0**-23])
def test_scales_that_are_no_powers_of_2_are_refused(scale):
    with pytest.raises(ValueError, match="scale must be powers of two"):
        pack_ue8m0(torch.tensor([[1.0, scale]]))


def test_scales_are_float32():
    with pytest.raises(TypeError, match=r"scale must be float32, not torch.float64"):
        pack_ue8m0(torch.ones(1, 1, dtype=torch.float64))


# Packed scales


@given(**sizes, groups=st.sampled_from([(), (1,), (3,)]))
def test_packed_scales_are_unpacked_exactly(mn, k, groups):
    scale = powers_of_2(*groups, mn, k)
    assert torch.equal(unpack_ue8m0(pack_ue8m0(scale), k), scale)


def test_the_first_of_four_neighbours_is_the_lowest_byte():
    packed = pack_ue8m0(torch.tensor([[2.0, 4.0, 8.0, 16.0, 32.0]]))
    assert [word % 2**32 for word in packed.flatten().tolist()] == [0x83828180, 0x84]


@given(**sizes)
def test_packed_columns_begin_at_multiples_of_16_bytes_and_rows_are_neighbors(mn, k):
    packed = pack_ue8m0(powers_of_2(2, mn, k))
    columns, aligned = -(-k // 4), -(-mn // 4) * 4
    assert packed.shape == (2, mn, columns)
    assert packed.stride() == (columns * aligned, 1, aligned)


def test_packed_scales_may_have_any_strides():
    scale = powers_of_2(7, 9)
    assert torch.equal(unpack_ue8m0(pack_ue8m0(scale.mT.contiguous().mT).contiguous(), 9), scale)


def test_a_wrong_number_of_packed_scales_is_refused():
    with pytest.raises(ValueError, match="packed must have 3 columns for 9 scales, not 2"):
        unpack_exponents(pack_ue8m0(powers_of_2(3, 8)), 9)


# MN-major


@given(**sizes, transposed=st.booleans())
def test_mn_major_scales_are_the_same_in_aligned_columns(mn, k, transposed):
    scale = torch.randn(k, mn).mT if transposed else torch.randn(mn, k)
    moved = mn_major(scale)
    assert torch.equal(moved, scale)
    assert moved.stride() == (1, tma_aligned(mn, 4))


def test_scales_in_the_right_layout_are_not_copied():
    scale = mn_major(torch.randn(3, 10, 5))
    assert mn_major(scale) is scale


@pytest.mark.parametrize(("rows", "size", "aligned"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (9, 2, 16), (9, 1, 16)])
def test_alignment_is_16_bytes(rows, size, aligned):
    assert tma_aligned(rows, size) == aligned


# Packed scales of groups


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), mn=st.integers(1, 9))
def test_grouped_scales_are_unpacked_exactly(counts, mn):
    scale, sizes = powers_of_2(sum(counts), mn), torch.tensor(counts, dtype=torch.int32)
    rows = sum(-(-count // 4) for count in counts)
    assert torch.equal(unpack_grouped_ue8m0(pack_grouped_ue8m0(scale, sizes, rows), sizes, sum(counts)), scale)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), mn=st.integers(1, 9))
def test_every_group_is_packed_as_if_it_were_alone(counts, mn):
    scale, sizes = powers_of_2(sum(counts), mn), torch.tensor(counts, dtype=torch.int32)
    packed = pack_grouped_ue8m0(scale, sizes, max_packed_rows(sum(counts), len(counts)))
    alone = torch.cat([pack_ue8m0(group.mT).mT for group in scale.split(counts) if len(group)])
    assert torch.equal(packed[: len(alone)], alone)
    assert not packed[len(alone) :].any(), "spare rows hold 0"


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_maximum_of_packed_rows_suffices(counts):
    assert max_packed_rows(sum(counts), len(counts)) >= sum(-(-count // 4) for count in counts)


# 128×4 tiles


@given(**sizes)
def test_tiled_scales_are_read_back_exactly(mn, k):
    encoded = to_ue8m0(powers_of_2(mn, k))
    assert torch.equal(untile_128x4(tile_128x4(encoded), mn, k), encoded)


@given(**sizes)
def test_every_scale_has_its_documented_address(mn, k):
    encoded = torch.randint(1, 256, (mn, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(mn + k))
    tiles = tile_128x4(encoded)
    assert tiles.shape == (-(-mn // 128) * -(-k // 4) * 512,)
    i, j = torch.meshgrid(torch.arange(mn), torch.arange(k), indexing="ij")
    tile = i // 128 * -(-k // 4) + j // 4
    at = 512 * tile + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    assert torch.equal(tiles[at], encoded)
    assert tiles.count_nonzero() == encoded.numel(), "what is padded is 0"
