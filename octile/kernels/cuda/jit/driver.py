"""Loads machine code on a GPU and starts it, in a few microseconds of host time.

A launch is made ready once: grid, cluster, threads, shared memory and stream in one structure, the arguments in one
buffer. Nobody writes into them afterwards, so any thread may start it, again and again, by one call of
cuLaunchKernelEx. The driver copies the arguments before that returns.

Everything happens in the device's primary context, which is torch's.
"""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver

from octile.kernels.bounded_cache import BoundedCache

Argument = bytes | int | float  # a tensor map; a pointer or a size; a number

SUCCESS = driver.CUresult.CUDA_SUCCESS
WRONG_CONTEXT = (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, driver.CUresult.CUDA_ERROR_INVALID_HANDLE)
MAX_SHAPES = 1024  # of a launch, and streams, that a kernel keeps ready
CODES = {(bytes, 128): "128s", (int, 8): "q", (int, 4): "i", (float, 4): "f"}  # for struct, by type and size


class Launch:
    """A kernel with all that it takes; calling it starts the kernel, once more at every call.

    It never waits for the GPU, and may be captured in a CUDA graph. What the arguments point to must live until the
    kernel has run: torch's tensors do, on one stream.
    """

    def __init__(self, kernel: "Kernel", config: Any, buffer: Any, table: int) -> None:
        """Args: config, the driver's structure; buffer, which holds the arguments; table, the address of theirs."""
        self._kernel, self._config, self._buffer, self._table = kernel, config, buffer, table

    def __call__(self) -> None:
        """Starts the kernel.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        (error,) = driver.cuLaunchKernelEx(self._config, self._kernel.function, self._table, 0)
        if error != SUCCESS:
            self._in_context(error)

    def _in_context(self, error: Any) -> None:
        """The first launch of a thread, or one for a GPU that is not the current one, finds another context or none."""
        kernel = self._kernel
        if error in WRONG_CONTEXT:
            with kernel.in_context():
                (error,) = driver.cuLaunchKernelEx(self._config, kernel.function, self._table, 0)
        checked(f"launching {kernel.name}", (error,))


class Kernel:
    """A kernel on one GPU."""

    def __init__(self, name: str, image: bytes, device: int) -> None:
        """Loads machine code.

        Args:
            name: of its entry point.
            image: the cubin.
            device: torch's index of the GPU.

        Raises:
            RuntimeError: the driver refuses it (another architecture, a driver older than the compiler).
        """
        torch.cuda.init()
        self.name, self.device = name, device
        self.context = checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
        with self.in_context():
            module = checked(f"loading {name}", driver.cuModuleLoadData(image))
            self.function = checked(f"finding {name}", driver.cuModuleGetFunction(module, name.encode()))
            self._allow_shared_memory()
            self.parameters = _parameters(self.function)
        self._configs: BoundedCache[Any] = BoundedCache(MAX_SHAPES)
        self._layout: struct.Struct | None = None  # as the first arguments say: four bytes may be an int or a float

    def ready(
        self,
        grid: int,
        cluster: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
        stream: int | None = None,
    ) -> Launch:
        """Makes a launch, and starts nothing.

        Args:
            grid: blocks, a multiple of cluster.
            cluster: blocks that share their shared memory.
            threads: of a block.
            shared_bytes: dynamic shared memory of a block.
            arguments: one for each parameter of the kernel: the 128 bytes of a tensor map, an address or a size as an
                int, a float.
            stream: the handle of a stream; None: `current_stream`.

        Raises:
            TypeError: number or types of the arguments are not those of the kernel's parameters.
            ValueError: grid is no multiple of cluster.
            struct.error: a value does not fit its parameter.
        """
        key = (grid, cluster, threads, shared_bytes, self.current_stream() if stream is None else stream)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = _config(*key)
        lies = self._layout = self._layout or layout(self.name, self.parameters, arguments)
        table = -(-lies.size // 8) * 8  # of where each argument lies, behind them
        buffer = ctypes.create_string_buffer(table + 8 * len(self.parameters))
        start = ctypes.addressof(buffer)
        lies.pack_into(buffer, 0, *arguments)
        struct.pack_into(f"<{len(self.parameters)}Q", buffer, table, *[start + at for at, _ in self.parameters])
        return Launch(self, config, buffer, start + table)

    def current_stream(self) -> int:
        """Return the handle of torch's current stream on this kernel's GPU."""
        return torch._C._cuda_getCurrentRawStream(self.device)

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """With the kernel's context current: a thread of autograd's has none before its first use of the GPU."""
        checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()

    def _allow_shared_memory(self) -> None:
        """Permits all the shared memory that a block can have; a launch takes what it asks for."""
        most = checked(
            "cuDeviceGetAttribute",
            driver.cuDeviceGetAttribute(
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, self.device
            ),
        )
        function_attribute = driver.CUfunction_attribute
        static = checked(
            "cuFuncGetAttribute",
            driver.cuFuncGetAttribute(function_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function),
        )
        dynamic = function_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self.function, dynamic, most - static))


def _config(grid: int, cluster: int, threads: int, shared_bytes: int, stream: int) -> Any:
    """The driver's structure for all of a launch but its arguments."""
    if grid < 1 or cluster < 1 or grid % cluster:
        raise ValueError(f"grid must be a positive multiple of cluster: {grid} blocks, {cluster} a cluster")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = grid, threads, shared_bytes
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = driver.CUstream(stream)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def layout(name: str, parameters: Sequence[tuple[int, int]], arguments: Sequence[Argument]) -> struct.Struct:
    """How arguments lie in a kernel's parameters.

    Args:
        name: of the kernel.
        parameters: (offset, size) of each in bytes.
        arguments: values of the types that later ones will have.

    Raises:
        TypeError: number or types of the arguments are not those of the parameters.
    """
    if len(arguments) != len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments, not {len(arguments)}")
    form, end = "<", 0
    for index, ((offset, size), argument) in enumerate(zip(parameters, arguments, strict=True)):
        code = CODES.get((type(argument), size))
        if code is None:
            raise TypeError(f"argument {index} of {name} has {size} bytes and cannot be {type(argument).__name__}")
        form += f"{offset - end}x{code}"
        end = offset + size
    return struct.Struct(form)


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call.

    Raises:
        RuntimeError: it failed; says how.
    """
    error, *values = result
    if error != SUCCESS:
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{what}: {error.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if values else None


def _parameters(function: Any) -> list[tuple[int, int]]:
    """(offset, size) in bytes of each parameter; the driver refuses the index after the last one."""
    parameters: list[tuple[int, int]] = []
    while True:
        error, offset, size = driver.cuFuncGetParamInfo(function, len(parameters))
        if error != SUCCESS:
            return parameters
        parameters.append((offset, size))
