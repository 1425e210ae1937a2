"""A buffer of one process whose bytes another process of this machine copies: by CUDA IPC, or by a file in memory.

    of a GPU    the handle of an allocation, and where the buffer begins in it; the other process is on the same GPU
    of a CPU    a file in /dev/shm, or in the folder of temporary files where that has no room

`SharedBuffer` has it, `open_buffer` opens it. The address is JSON and nothing is unpickled. The owner keeps the buffer
until the other process has closed it.

Source: CUDA driver API, "Interprocess communication"; __cuda_array_interface__: Numba's documentation.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

HANDLE_BYTES = 64  # of a CUipcMemHandle
FILES = Path("/dev/shm")  # a file there is memory


class SharedBuffer:
    """A buffer to fill.

    Args:
        size: its bytes, at least 1.
        device: the CPU, or a GPU.

    Attributes:
        bytes: uint8 [size].
        address: what `open_buffer` needs, as JSON.

    Raises:
        RuntimeError: the driver cannot share the memory, as that of torch's expandable segments.
        OSError: there is no room for the file.
    """

    def __init__(self, size: int, device: torch.device):
        self._file = None
        if device.type == "cuda":
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
            self.address: dict[str, Any] = {"cuda_ipc": _export(self.bytes)}
            return
        has_room = FILES.is_dir() and shutil.disk_usage(FILES).free >= size
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115, which `close` closes
            prefix="octile-", dir=FILES if has_room else None
        )
        if hasattr(os, "posix_fallocate"):  # a write without room would end the process
            os.posix_fallocate(self._file.fileno(), 0, size)
        else:  # on macOS
            self._file.truncate(size)
        self.bytes = torch.from_file(self._file.name, shared=True, size=size, dtype=torch.uint8)
        self.address = {"shared_memory": self._file.name}

    def wait(self) -> None:
        """Wait until all that was written to the buffer is there."""
        if self.bytes.is_cuda:
            torch.cuda.synchronize(self.bytes.device)

    def close(self) -> None:
        """Free the memory; nobody reads it any more."""
        del self.bytes
        if self._file is not None:
            self._file.close()


class OpenBuffer(Protocol):
    """The buffer of another process."""

    def read(self, begin: int, end: int) -> Tensor:
        """Return bytes begin … end − 1, uint8; of a GPU they are those of the other process until it is closed."""
        ...

    def close(self) -> None:
        """Read no more."""
        ...


def open_buffer(address: Mapping[str, Any], size: int, device: torch.device) -> OpenBuffer:
    """Open the buffer of another process.

    Args:
        address: its `SharedBuffer.address`.
        size: its bytes.
        device: device of this process, on which a buffer of a GPU must be, too.

    Raises:
        ValueError: there is no such buffer, it is smaller or on another GPU.
    """
    if "shared_memory" in address:
        return _FileBuffer(address["shared_memory"], size)
    return _GpuBuffer(address["cuda_ipc"], size, device)


class _FileBuffer:
    """A buffer of a CPU."""

    def __init__(self, name: str, size: int):
        if not os.path.isfile(name):  # opening a pipe would wait for who writes to it
            raise ValueError(f"shared_memory must be the path of a file on the server's machine, not {name!r}")
        try:
            self._file = open(name, "rb")  # noqa: SIM115, which `close` closes
        except OSError as error:
            raise ValueError(f"shared_memory cannot be opened: {error}") from None
        if (found := os.fstat(self._file.fileno()).st_size) != size:
            self._file.close()
            raise ValueError(f"shared_memory must have {size} bytes, not {found}")

    def read(self, begin: int, end: int) -> Tensor:
        data = torch.empty(end - begin, dtype=torch.uint8)
        self._file.seek(begin)
        if self._file.readinto(data.numpy().data) != end - begin:
            raise ValueError("shared_memory became smaller while it was read")
        return data

    def close(self) -> None:
        self._file.close()


class _GpuBuffer:
    """A buffer of this process's GPU."""

    def __init__(self, shared: Mapping[str, Any], size: int, device: torch.device):
        if device.type != "cuda":
            raise ValueError(f"cuda_ipc needs a server on a GPU, not on {device}")
        if shared["device"] != _uuid(device):
            raise ValueError(
                f"cuda_ipc.device must be the server's GPU, {_uuid(device)}, not {shared['device']}: by shared_memory "
                "weights reach a server on another one"
            )
        try:
            handle = base64.b64decode(shared["handle"], validate=True)
        except binascii.Error:
            handle = b""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"cuda_ipc.handle must be {HANDLE_BYTES} bytes in base64")
        self._device = device
        from octile.kernels.cuda.jit.driver import checked, driver, primary_context  # late: a CPU has no cuda-bindings

        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        with primary_context(_index(device)):
            try:
                base = checked("opening", driver.cuIpcOpenMemHandle(opened, lazily))
            except RuntimeError as error:
                raise ValueError(
                    f"cuda_ipc.handle cannot be opened: {error} (the handle must be of another process, which runs)"
                ) from None
            self._base: int | None = int(base)
            _, found = driver.cuMemGetAddressRange(base)[1:]
        if shared["offset"] + size > found:
            self.close()
            raise ValueError(f"cuda_ipc.offset must leave {size} bytes of the allocation's {found}")
        self._bytes: Tensor | None = torch.as_tensor(_CudaArray(int(base) + shared["offset"], size), device=device)

    def read(self, begin: int, end: int) -> Tensor:
        assert self._bytes is not None
        return self._bytes[begin:end]

    def close(self) -> None:
        from octile.kernels.cuda.jit.driver import checked, driver, primary_context

        if self._base is not None:
            torch.cuda.synchronize(self._device)  # copies of it may run
            base, self._base, self._bytes = self._base, None, None
            with primary_context(_index(self._device)), suppress(RuntimeError):  # its owner has ended
                checked("closing", driver.cuIpcCloseMemHandle(base))


class _CudaArray:
    """Bytes of a GPU at an address, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int):
        data = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = data


def _export(t: Tensor) -> dict[str, Any]:
    """Return the handle of the allocation that a tensor of a GPU is in, and where it begins there."""
    from octile.kernels.cuda.jit.driver import checked, driver, primary_context  # late: a CPU has no cuda-bindings

    with primary_context(_index(t.device)):
        error, base, _ = driver.cuMemGetAddressRange(t.data_ptr())
        checked("cuMemGetAddressRange", (error,))
        try:
            handle = checked("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(base))
        except RuntimeError as error:
            raise RuntimeError(
                f"memory of this process cannot be shared by CUDA IPC: {error}; torch's expandable segments cannot "
                "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
            ) from None
    content = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
    return {
        "handle": base64.b64encode(content).decode(),
        "offset": t.data_ptr() - int(base),
        "device": _uuid(t.device),
    }


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
