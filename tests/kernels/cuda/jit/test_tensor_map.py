"""Tests of tensor maps: they describe the tensor as torch does, and impossible ones are refused before the driver."""

import ctypes
import sys

import pytest
import torch

from octile.kernels.cuda.jit import tensor_map
from octile.kernels.cuda.jit.tensor_map import TensorMap, check, encode

GOOD = TensorMap(0x1000, torch.float8_e4m3fn, (32, 4096, 7168), (4096 * 7168, 7168, 1), (1, 128, 128), swizzle=128)


@pytest.fixture
def encoder(monkeypatch):
    """A fake of the driver's encoder that records its arguments and returns numbered maps."""
    if sys.platform != "linux":
        pytest.skip("the CUDA driver's bindings are there on Linux")
    pytest.importorskip("cuda.bindings")
    calls = []

    def encode_tiled(made, kind, rank, pointer, *arrays_and_kinds):
        *arrays, interleave, swizzle, promotion, fill = arrays_and_kinds
        at = ctypes.cast(made, ctypes.c_void_p).value
        kinds = {"kind": kind, "interleave": interleave, "swizzle": swizzle, "promotion": promotion, "fill": fill}
        calls.append({"at": at, "rank": rank, "pointer": pointer.value, "arrays": [list(a) for a in arrays]} | kinds)
        ctypes.memset(at, len(calls), 128)
        return 0

    monkeypatch.setattr(tensor_map, "_encoder", lambda: encode_tiled)
    tensor_map.encode.cache_clear()
    yield calls
    tensor_map.encode.cache_clear()


def test_the_driver_gets_sizes_innermost_first_and_strides_in_bytes(encoder):
    from cuda.bindings import driver

    encode(GOOD._replace(dtype=torch.bfloat16, box=(1, 128, 64)))
    (call,) = encoder
    shape, strides, box, steps = call["arrays"]
    assert (call["rank"], call["pointer"]) == (3, 0x1000)
    assert shape == [7168, 4096, 32]
    assert strides[:2] == [7168 * 2, 4096 * 7168 * 2]
    assert box == [64, 128, 1]
    assert steps == [1, 1, 1]
    assert call["kind"] == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert call["swizzle"] == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert call["interleave"] == driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert call["promotion"] == driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert call["fill"] == driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_the_driver_writes_the_map_at_a_multiple_of_its_size(encoder):
    for pointer in range(0x1000, 0x9000, 0x1000):
        encode(GOOD, pointer)
    assert [call["at"] % 128 for call in encoder] == [0] * 8


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.uint8, "UINT8"),
        (torch.int8, "UINT8"),
        (torch.float8_e4m3fn, "UINT8"),
        (torch.float8_e5m2, "UINT8"),
        (torch.float32, "FLOAT32"),
        (torch.int32, "INT32"),
        (torch.bfloat16, "BFLOAT16"),
    ],
)
def test_each_dtype_has_the_drivers_type(encoder, dtype, name):
    from cuda.bindings import driver

    encode(TensorMap(0x1000, dtype, (64, 64), (64, 1), (8, 16)))
    assert encoder[0]["kind"] == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")
    assert encoder[0]["swizzle"] == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE


@pytest.mark.parametrize("fetch", [64, 128, 256])
def test_the_bytes_that_are_fetched_are_the_drivers_promotion(encoder, fetch):
    from cuda.bindings import driver

    encode(GOOD._replace(fetch=fetch))
    assert encoder[0]["promotion"] == getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetch}B")


def test_an_encoded_map_is_cached_until_something_changes(encoder):
    assert encode(GOOD) == encode(GOOD) == b"\x01" * 128
    others = [
        GOOD._replace(pointer=0x2000),
        GOOD._replace(shape=(32, 4095, 7168)),
        GOOD._replace(box=(1, 64, 128)),
        GOOD._replace(dtype=torch.float8_e5m2),
        GOOD._replace(strides=(4096 * 8192, 8192, 1)),
        GOOD._replace(swizzle=0),
        GOOD._replace(fetch=128),
    ]
    assert len({encode(other) for other in others}) == len(others)
    assert len(encoder) == 1 + len(others)


def test_a_given_address_replaces_that_of_the_map(encoder):
    encode(GOOD, 0x2000)
    assert encode(GOOD, 0x3000) != encode(GOOD, 0x2000)
    assert [call["pointer"] for call in encoder] == [0x2000, 0x3000]


def test_the_cache_of_maps_is_bounded():
    assert tensor_map.encode.cache_info().maxsize == tensor_map.MAX_ENCODED


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": torch.float64}, TypeError, "dtype must be one of .*, not torch.float64"),
        ({"pointer": 0x1008}, ValueError, "pointer must be a multiple of 16 bytes, not 0x1008"),
        ({"pointer": 0}, ValueError, "pointer must be"),
        ({"shape": (4096, 7168)}, ValueError, "same 1 to 5 dimensions, not 2, 3, 3"),
        ({"shape": (), "strides": (), "box": ()}, ValueError, "same 1 to 5 dimensions, not 0, 0, 0"),
        ({"shape": (32, 0, 7168)}, ValueError, "each extent of shape must be from 1 to 2³²"),
        ({"strides": (1, 7168, 4096 * 7168)}, ValueError, "the last of strides must be 1"),
        ({"strides": (4096 * 7168, 7160, 1)}, ValueError, r"strides must be multiples of 16 elements \(16 bytes\)"),
        ({"strides": (0, 7168, 1)}, ValueError, "strides must be multiples"),
        ({"strides": (2**40, 7168, 1)}, ValueError, "under 2⁴⁰ bytes"),
        ({"box": (1, 257, 128)}, ValueError, "each extent of box must be from 1 to 256"),
        ({"box": (0, 128, 128)}, ValueError, "each extent of box must be from 1 to 256"),
        ({"box": (1, 128, 120)}, ValueError, "a row of box must be a multiple of 16 bytes, not 120"),
        ({"swizzle": 16}, ValueError, "swizzle must be 0, 32, 64 or 128, not 16"),
        ({"fetch": 32}, ValueError, "fetch must be 64, 128 or 256, not 32"),
        ({"swizzle": 64}, ValueError, "a row of box must fit the swizzle of 64 bytes, not be 128 bytes"),
        ({"dtype": torch.bfloat16}, ValueError, "not be 256 bytes"),
    ],
)
def test_an_impossible_map_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        check(GOOD._replace(**change))


def test_a_possible_map_is_not_refused():
    check(GOOD)
    check(TensorMap(0x1000, torch.float32, (5,), (1,), (4,)))
