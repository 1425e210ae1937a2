"""Kernels on a GPU, and their launches in a few microseconds of host time.

A launch is prepared once: grid, cluster, threads, shared memory and stream in one structure, the arguments in one
buffer. They are not written afterwards, so any thread may launch the kernel any number of times by one call of
cuLaunchKernelEx. The driver copies the arguments before that call returns.

All calls use the device's primary context, which is torch's.
"""

import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver

Argument = bytes | int | float  # a tensor map or a structure; a pointer or a size; a floating-point value

SUCCESS = driver.CUresult.CUDA_SUCCESS
WRONG_CONTEXT = (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, driver.CUresult.CUDA_ERROR_INVALID_HANDLE)
MAX_CONFIGS = 8192  # cached pairs of a launch shape and a stream
CODES = {
    (int, 8): "q",
    (int, 4): "i",
    (float, 4): "f",
}  # format characters of struct, by type and size in bytes


class Launch:
    """A kernel with its launch shape and arguments; every call launches it.

    A call never waits for the GPU and may be captured in a CUDA graph. What the arguments point to must live until the
    kernel has run, as torch's tensors do on one stream.
    """

    def __init__(self, kernel: "Kernel", config: Any, buffer: Any, table: int) -> None:
        """Args: config, the driver's structure; buffer with the arguments; table, the address of their addresses."""
        self._kernel, self._config, self._buffer, self._table = kernel, config, buffer, table

    def __call__(self) -> None:
        """Launch the kernel.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        (error,) = driver.cuLaunchKernelEx(self._config, self._kernel.function, self._table, 0)
        if error != SUCCESS:
            self._in_context(error)

    def _in_context(self, error: Any) -> None:
        """Launch in the kernel's context: a thread's first launch, or one on another GPU, finds another or none."""
        kernel = self._kernel
        if error in WRONG_CONTEXT:
            with kernel.in_context():
                (error,) = driver.cuLaunchKernelEx(self._config, kernel.function, self._table, 0)
        checked(f"launching {kernel.name}", (error,))


class Kernel:
    """A kernel on one GPU."""

    def __init__(self, name: str, image: bytes, device: int) -> None:
        """Load machine code.

        Args:
            name: name of its entry point.
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
        self._layout: struct.Struct | None = None  # from the first arguments: four bytes may be an int or a float

    def ready(
        self,
        grid: int,
        cluster: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
        stream: int | None = None,
        programmatic: bool = False,
    ) -> Launch:
        """Prepare a launch without starting it.

        Args:
            grid: number of thread blocks, a multiple of cluster.
            cluster: thread blocks of a cluster.
            threads: threads of a block.
            shared_bytes: dynamic shared memory of a block.
            arguments: one for each parameter of the kernel: the bytes of a tensor map or of a structure, an address or
                a size as an int, a float.
            stream: the handle of a stream; None: `current_stream`.
            programmatic: programmatic dependent launch: the kernel may start before the previous one of the stream has
                ended, and waits for it by `ptx::wait_for_previous`.

        Raises:
            TypeError: number or types of the arguments are not those of the kernel's parameters.
            ValueError: grid is no multiple of cluster.
            struct.error: a value does not fit its parameter.
        """
        stream = self.current_stream() if stream is None else stream
        config = _config(grid, cluster, threads, shared_bytes, stream, programmatic)
        packing = self._layout = self._layout or layout(self.name, self.parameters, arguments)
        table = -(-packing.size // 8) * 8  # the addresses of the arguments follow them
        buffer = ctypes.create_string_buffer(table + 8 * len(self.parameters))
        start = ctypes.addressof(buffer)
        packing.pack_into(buffer, 0, *arguments)
        struct.pack_into(f"<{len(self.parameters)}Q", buffer, table, *[start + at for at, _ in self.parameters])
        return Launch(self, config, buffer, start + table)

    def current_stream(self) -> int:
        """Return the handle of torch's current stream on this kernel's GPU."""
        return torch._C._cuda_getCurrentRawStream(self.device)

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """Make the kernel's context current: a thread of autograd has none before its first use of the GPU."""
        checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()

    def _allow_shared_memory(self) -> None:
        """Permit all the shared memory that a block can have; a launch takes what it asks for."""
        max_shared = _attribute(self.device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        function_attribute = driver.CUfunction_attribute
        static = checked(
            "cuFuncGetAttribute",
            driver.cuFuncGetAttribute(function_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function),
        )
        dynamic = function_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self.function, dynamic, max_shared - static))


@functools.lru_cache(MAX_CONFIGS)  # they hold no arguments, so kernels share them
def _config(grid: int, cluster: int, threads: int, shared_bytes: int, stream: int, programmatic: bool) -> Any:
    """Return the driver's structure for a launch without its arguments."""
    if grid < 1 or cluster < 1 or grid % cluster:
        raise ValueError(f"grid must be a positive multiple of cluster: {grid} blocks, {cluster} a cluster")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = grid, threads, shared_bytes
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.hStream = driver.CUstream(stream)
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
        attributes.append(attribute)
    if programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def layout(name: str, parameters: Sequence[tuple[int, int]], arguments: Sequence[Argument]) -> struct.Struct:
    """Return how arguments are packed into a kernel's parameters.

    Args:
        name: name of the kernel.
        parameters: (offset, size) of each parameter in bytes.
        arguments: values of the types that later arguments will have.

    Raises:
        TypeError: number or types of the arguments are not those of the parameters.
    """
    if len(arguments) != len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments, not {len(arguments)}")
    form, end = "<", 0
    for index, ((offset, size), argument) in enumerate(zip(parameters, arguments, strict=True)):
        is_structure = isinstance(argument, bytes) and len(argument) == size
        code = f"{size}s" if is_structure else CODES.get((type(argument), size))
        if code is None:
            raise TypeError(f"argument {index} of {name} has {size} bytes and cannot be {type(argument).__name__}")
        form += f"{offset - end}x{code}"
        end = offset + size
    return struct.Struct(form)


@functools.cache
def memory_bandwidth(device: int) -> float:
    """Return the peak bandwidth of a GPU's memory in bytes/s: each line of its bus carries two bits a clock."""
    kilohertz, lines = _attribute(device, "MEMORY_CLOCK_RATE"), _attribute(device, "GLOBAL_MEMORY_BUS_WIDTH")
    return 2 * 1e3 * kilohertz * lines / 8


def _attribute(device: int, name: str) -> int:
    """Return an attribute of a GPU, by its name without the driver's prefix CU_DEVICE_ATTRIBUTE_."""
    which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(which, device)))


@contextmanager
def primary_context(device: int) -> Iterator[None]:
    """Make a GPU's primary context current, which is torch's: a thread has none before its first use of the GPU.

    Args:
        device: torch's index of the GPU.

    Raises:
        RuntimeError: the driver refuses it.
    """
    torch.cuda.init()
    context = checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
    try:
        checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call.

    Raises:
        RuntimeError: the call failed; the message gives the driver's reason.
    """
    error, *values = result
    if error != SUCCESS:
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{what}: {error.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if values else None


def _parameters(function: Any) -> list[tuple[int, int]]:
    """Return (offset, size) in bytes of each parameter; the driver refuses the index after the last one."""
    parameters: list[tuple[int, int]] = []
    while True:
        error, offset, size = driver.cuFuncGetParamInfo(function, len(parameters))
        if error != SUCCESS:
            return parameters
        parameters.append((offset, size))
