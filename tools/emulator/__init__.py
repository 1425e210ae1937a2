"""CPU emulator of octile's CUDA kernels: it runs their unchanged source, to test their logic without a GPU.

Each CUDA thread is a fiber. At every point where threads synchronize, a seeded random choice decides which one runs
next. mbarriers, TMA, cp.async, wgmma, mma, named barriers, clusters and setmaxnreg follow the PTX specification. Copies
and wgmmas happen at a random moment between the instruction and the wait for it. With programmatic dependent launch the
previous kernel ends when all threads wait. What a GPU leaves undefined is an error here, or garbage (NaN): a missing
wait, a stage released too early, a wrong byte count, a barrier that nobody completes, a prefetch of what is not stored.

Not detected: a thread without fence_proxy_async after ordinary stores where another thread called it (after stmatrix it
is detected); memory orders weaker than sequential consistency; bank conflicts; speed; what the CUDA compiler does to
the source. Not supported: `__shared__` variables, tiles without swizzle.

    emulator.run("gemm", constants, grid=1, threads=384, shared_bytes=…, arguments=[…], headers=…, seed=3)
"""

import ctypes
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from octile.kernels.cuda.jit import tensor_map
from octile.kernels.cuda.jit.prepared import Structures
from octile.kernels.cuda.jit.tensor_map import TensorMap
from octile.kernels.hopper import SHARED_BYTES
from tools.emulator import build
from tools.emulator.memory import Guarded

Argument = Tensor | TensorMap | Structures | int | float | bytes
_running = threading.Lock()


class EmulatorError(RuntimeError):
    """The kernel did what a GPU does not allow, or does not end. The message names the thread and the reason."""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("lazy", ctypes.c_int32),
        ("hopper", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("written", ctypes.c_void_p),
        ("n_written", ctypes.c_uint64),
        ("storages", ctypes.c_void_p),
        ("n_storages", ctypes.c_uint64),
        ("switches", ctypes.c_uint64),
        ("prefetched", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("message", ctypes.c_char * 8192),
    ]


class _Written(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_size_t),
        ("bytes", ctypes.c_uint64),
        ("values", ctypes.c_void_p),
    ]


class _Pages(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_size_t),
        ("bytes", ctypes.c_uint64),
    ]


class _Entry(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_size_t)),
        ("count", ctypes.c_size_t),
    ]


def run(
    name: str,
    constants: Mapping[str, int | bool],
    *,
    grid: int,
    cluster: int = 1,
    threads: int,
    shared_bytes: int,
    arguments: Sequence[Argument],
    memory: Iterable[Tensor] = (),
    previous: Sequence[Tensor] = (),
    headers: Mapping[str, str] | None = None,
    seed: int = 0,
    lazy: bool | None = None,
    arithmetic: Literal["float32", "hopper"] = "float32",
    resident: bool = False,
) -> int:
    """Launch a kernel. Return, when all its thread blocks have ended, the number of boxes that TMA prefetched.

    Args:
        name, constants, headers: as for `jit.source`; a header that holds a wgmma instruction is replaced.
        grid, cluster, threads, shared_bytes: as for `Kernel.launch`.
        arguments: as for `Kernel.launch`; or a tensor for its address, a TensorMap for the 128 bytes of its encoding,
            structures.
        memory: tensors that addresses among the arguments point into. Their storages, and those of the arguments, are
            copied between inaccessible pages, so that an access outside of them is an error.
        previous: contiguous tensors, or rows of tensors, that the previous kernel of the stream writes. All their bytes
            are 0xFF (NaN, or −1) and no tensor may be written until the threads call `wait_for_previous`, as each of
            them must. Without such tensors the previous kernel has ended.
        seed: determines all that is random.
        lazy: copies and wgmmas happen as late as is allowed (True), as early (False), or as the seed decides (None).
        arithmetic: of wgmma and mma: "float32", exact products that are summed in double precision and rounded once per
            instruction; or "hopper", the bits of Hopper's tensor core.
        resident: all thread blocks run at the same time, for kernels whose blocks wait for each other.

    Raises:
        EmulatorError: the kernel did what a GPU does not allow, or does not end.
        MemoryError: the kernel wrote just before a tensor, or between its end and the next 16 bytes.
        RuntimeError: the kernel does not compile.
        TypeError, ValueError: the number or types of the arguments, or the launch, are not possible.
        FileNotFoundError: there is no C++ compiler.
    """
    if grid < 1 or cluster < 1 or grid % cluster or cluster > 8:
        raise ValueError(f"grid must be a positive multiple of cluster, 1 … 8: {grid} blocks, {cluster} a cluster")
    if threads < 1 or threads > 1024:
        raise ValueError(f"a block has 1 to 1024 threads, not {threads}")
    if not 0 <= shared_bytes <= SHARED_BYTES:
        raise ValueError(f"shared_bytes must be at most {SHARED_BYTES}, not {shared_bytes}")
    if not all(tensor.is_contiguous() for tensor in previous):
        raise ValueError("the tensors in previous must be contiguous")
    library = build.kernel(name, constants, headers or {})
    library.octile_entry.restype = ctypes.POINTER(_Entry)
    entry = library.octile_entry().contents
    guarded = Guarded([*memory, *previous, *(argument for argument in arguments if isinstance(argument, Tensor))])
    values = _pack(name, list(entry.sizes[: entry.count]), arguments, guarded)
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    values_of = [ctypes.create_string_buffer(tensor.nbytes) for tensor in previous]
    written = (_Written * len(previous))(
        *(
            (guarded.address(tensor.data_ptr()), tensor.nbytes, ctypes.addressof(room))
            for tensor, room in zip(previous, values_of, strict=True)
        )
    )
    storages = (_Pages * len(guarded.copies))(*((copy.middle, copy.room) for copy in guarded.copies.values()))
    launch = _Launch(
        entry.call,
        addresses,
        grid,
        cluster,
        threads,
        shared_bytes,
        seed,
        -1 if lazy is None else lazy,
        arithmetic == "hopper",
        resident,
        ctypes.addressof(written),
        len(written),
        ctypes.addressof(storages),
        len(storages),
    )
    with _running:
        failed = build.core().octile_emulate(ctypes.byref(launch))
    try:
        if failed:
            where = f": {guarded.describe(launch.fault)}" if launch.fault else ""
            raise EmulatorError(f"{launch.message.decode()}{where}\n(seed {seed})")
        guarded.copy_back()
        return int(launch.prefetched)
    finally:
        guarded.close()


def _pack(
    name: str, sizes: Sequence[int], arguments: Sequence[Argument], memory: Guarded
) -> list[ctypes.Array[ctypes.c_char]]:
    """Pack each argument as the bytes of its parameter, 64-byte aligned."""
    if len(arguments) != len(sizes):
        raise TypeError(f"{name} takes {len(sizes)} arguments, not {len(arguments)}")
    values = []
    for index, (size, argument) in enumerate(zip(sizes, arguments, strict=True)):
        if isinstance(argument, TensorMap):
            raw = _encode(argument._replace(pointer=memory.address(argument.pointer)))
        elif isinstance(argument, Structures):
            raw = argument.pack(memory.address)
        elif isinstance(argument, Tensor):
            raw = struct.pack("<q", memory.address(argument.data_ptr()))
        elif isinstance(argument, float):
            raw = struct.pack("<f", argument)
        elif isinstance(argument, int):
            raw = (
                struct.pack("<q", memory.address(argument))
                if size == 8
                else struct.pack("<i" if size == 4 else "<?", argument)
            )
        else:
            raw = argument
        if len(raw) != size:
            raise TypeError(f"argument {index} of {name} has {size} bytes and cannot be {type(argument).__name__}")
        room = ctypes.create_string_buffer(size + 64)
        parameter = (ctypes.c_char * size).from_buffer(room, -ctypes.addressof(room) % 64)
        parameter.raw = raw
        values.append(parameter)
    return values


def _encode(described: TensorMap) -> bytes:
    """Encode a tensor map as the emulator reads it: struct Map of core/tma.cpp."""
    tensor_map.check(described)
    pointer, dtype, shape, strides, box, swizzle, _ = described
    rank, size = len(shape), dtype.itemsize
    if swizzle and box[-1] * size != swizzle:
        raise ValueError(f"a row of the box must be as long as its swizzle, {swizzle} bytes, not {box[-1] * size}")

    def inner_first(values: Sequence[int], length: int) -> list[int]:
        return [*reversed(values), *[0] * (length - len(values))]

    return struct.pack(
        "<Q4Q5I5H3B55s",
        pointer,
        *inner_first([stride * size for stride in strides[:-1]], 4),
        *inner_first(shape, 5),
        *inner_first(box, 5),
        rank,
        size,
        swizzle,
        b"octile",
    )
