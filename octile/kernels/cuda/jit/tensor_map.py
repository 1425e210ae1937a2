"""Tensor maps: the descriptors by which TMA copies boxes of a tensor.

A map is described by a named tuple, which the emulator reads too, and encoded into 128 opaque bytes by the driver. A
part of a box that lies outside of the tensor arrives as zeros.

Source: CUDA driver API, cuTensorMapEncodeTiled.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BYTES = 128
MAX_ENCODED = 16384  # cached maps: three for each GEMM of a layer forward and backward, in every layer
TYPES = {
    torch.uint8: "UINT8",
    torch.int8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.bfloat16: "BFLOAT16",
    torch.int32: "INT32",
    torch.float32: "FLOAT32",
}


class TensorMap(NamedTuple):
    """A tensor in global memory and the box that one copy moves; sizes outermost first, as torch counts.

    It is a named tuple, whose encoding is quickly found in a cache.

    Attributes:
        pointer: address of the first element.
        dtype: dtype of the elements.
        shape: elements of each dimension.
        strides: elements between neighbors of each dimension; the last is 1.
        box: elements of each dimension that one copy moves.
        swizzle: 0, or the bytes (32, 64 or 128) of a row of the box in shared memory within which vectors of 16 bytes
            are permuted, so that those of a column lie in different banks.
        fetch: the bytes (64, 128 or 256) that the L2 cache reads from global memory at a time. Where rows of boxes are
            shorter, the rest is there for the next box, unless it has been evicted.
    """

    pointer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fetch: int = 256


def check(tensor_map: TensorMap) -> None:
    """Refuse a map that TMA cannot use.

    Raises:
        TypeError: TMA does not support the dtype.
        ValueError: shape, strides, alignment, box, swizzle or fetch are not possible; names it, and what is needed.
    """
    pointer, dtype, shape, strides, box, swizzle, fetch = tensor_map
    if dtype not in TYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, TYPES))}, not {dtype}")
    size = dtype.itemsize
    if not len(shape) == len(strides) == len(box) or not 1 <= len(shape) <= 5:
        raise ValueError(
            f"shape, strides and box must have the same 1 to 5 dimensions, not {len(shape)}, {len(strides)}, {len(box)}"
        )
    if not all(1 <= extent <= 2**32 for extent in shape):
        raise ValueError(f"each extent of shape must be from 1 to 2³², not {tuple(shape)}")
    _check_pointer(pointer)
    if strides[-1] != 1:
        raise ValueError(f"the last of strides must be 1, not {strides[-1]}")
    if not all(stride > 0 and stride * size % 16 == 0 and stride * size < 2**40 for stride in strides[:-1]):
        raise ValueError(
            f"strides must be multiples of {16 // size} elements (16 bytes) under 2⁴⁰ bytes, not {tuple(strides)}"
        )
    if not all(1 <= extent <= 256 for extent in box):
        raise ValueError(f"each extent of box must be from 1 to 256, not {tuple(box)}")
    row = box[-1] * size
    if row % 16:
        raise ValueError(f"a row of box must be a multiple of 16 bytes, not {row}")
    if swizzle not in (0, 32, 64, 128):
        raise ValueError(f"swizzle must be 0, 32, 64 or 128, not {swizzle}")
    if swizzle and row > swizzle:
        raise ValueError(f"a row of box must fit the swizzle of {swizzle} bytes, not be {row} bytes")
    if fetch not in (64, 128, 256):
        raise ValueError(f"fetch must be 64, 128 or 256, not {fetch}")


def _check_pointer(pointer: int) -> None:
    if pointer <= 0 or pointer % 16:
        raise ValueError(f"pointer must be a multiple of 16 bytes, not {pointer:#x}")


@functools.lru_cache(MAX_ENCODED)
def encode(tensor_map: TensorMap, pointer: int | None = None) -> bytes:
    """Return the 128 bytes that a kernel takes as its parameter; cached, as most tensors come again.

    Args:
        tensor_map: the description.
        pointer: an address that replaces its own; faster than a new description.

    Raises:
        TypeError, ValueError: as for `check`.
        RuntimeError: the driver refuses the map.
    """
    if pointer is None:
        pointer = tensor_map.pointer
    _check_pointer(pointer)
    kind_and_rank, others = _arguments(tensor_map)
    buffer = ctypes.create_string_buffer(2 * BYTES)
    start = -ctypes.addressof(buffer) % BYTES
    error = _encoder()(ctypes.byref(buffer, start), *kind_and_rank, ctypes.c_void_p(pointer), *others)
    if error:
        from cuda.bindings import driver

        from octile.kernels.cuda.jit.driver import checked

        checked("cuTensorMapEncodeTiled", (driver.CUresult(error),))
    return buffer.raw[start : start + BYTES]


@functools.lru_cache(MAX_ENCODED)
def _arguments(tensor_map: TensorMap) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """Return the arguments of the driver's function before and after the address; they depend on the layout alone."""
    check(tensor_map)
    from cuda.bindings import driver

    _, dtype, shape, strides, box, swizzle, fetch = tensor_map
    swizzles, rank = driver.CUtensorMapSwizzle, len(shape)
    kind = int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{TYPES[dtype]}"))
    return (kind, rank), (
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(stride * dtype.itemsize for stride in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),  # every element of the box, not each second one
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B" if swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE")),
        int(getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetch}B")),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )


@functools.cache
def _encoder() -> Callable[..., int]:
    """Return the driver's own function: it needs the map aligned to its size, which cuda-bindings does not ensure."""
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
