"""Tests of what a launch passes to the CUDA driver, byte for byte, with a small fake driver."""

import ctypes
import struct
import sys
import threading

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("the CUDA driver's bindings are there on Linux", allow_module_level=True)

from cuda.bindings import driver as cuda

from octile.kernels.cuda.jit.driver import Kernel, layout, memory_bandwidth

PARAMETERS = [(0, 128), (128, 8), (136, 4), (140, 4)]  # a tensor map, a pointer, an int, a float
ARGUMENTS = (bytes(range(128)), 0x7F0000001000, -5, 0.5)
OK, WRONG_CONTEXT = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT


class FakeDriver:
    """A fake driver that accepts everything and records each launch: configuration, parameters, current context."""

    def __init__(self) -> None:
        self.launches: list[dict] = []
        self.shared_bytes = 0
        self.contexts: list[str | None] = ["octile's"]
        self.refusal = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in dir(self) if name.startswith("cu")]:
            monkeypatch.setattr(cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "init", lambda: None)

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, "octile's"

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self):
        return OK, self.contexts.pop()

    def cuModuleLoadData(self, image):
        return (OK, image) if image == b"cubin" else (cuda.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None)

    def cuModuleGetFunction(self, module, name):
        return OK, name

    def cuDeviceGetAttribute(self, attribute, device):
        return OK, 227 * 1024

    def cuFuncGetAttribute(self, attribute, function):
        return OK, 1024

    def cuFuncSetAttribute(self, function, attribute, value):
        self.shared_bytes = value
        return (OK,)

    def cuFuncGetParamInfo(self, function, index):
        return (OK, *PARAMETERS[index]) if index < len(PARAMETERS) else (cuda.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)

    def cuGetErrorString(self, error):
        return OK, b"what the driver says"

    def cuLaunchKernelEx(self, config, function, table, extra):
        if self.refusal:
            return (self.refusal,)
        if self.contexts[-1] != "octile's":
            return (WRONG_CONTEXT,)
        addresses = (ctypes.c_uint64 * len(PARAMETERS)).from_address(table)
        parameters = [ctypes.string_at(at, size) for at, (_, size) in zip(addresses, PARAMETERS, strict=True)]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        clusters = [(a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z) for a in config.attrs]
        self.launches.append(
            {
                "function": function,
                "grid": grid,
                "block": block,
                "cluster": clusters,
                "shared": config.sharedMemBytes,
                "stream": int(config.hStream),
                "parameters": parameters,
            }
        )
        return (OK,)


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def kernel(fake) -> Kernel:
    return Kernel("product", b"cubin", 0)


def test_arguments_arrive_in_the_kernels_parameters(fake, kernel):
    kernel.ready(132, 2, 384, 200_000, ARGUMENTS, stream=0x55)()
    (launch,) = fake.launches
    assert launch["parameters"] == [
        ARGUMENTS[0],
        struct.pack("q", ARGUMENTS[1]),
        struct.pack("i", -5),
        struct.pack("f", 0.5),
    ]


def test_the_launch_has_the_requested_configuration(fake, kernel):
    kernel.ready(132, 2, 384, 200_000, ARGUMENTS, stream=0x55)()
    (launch,) = fake.launches
    assert launch["function"] == b"product"
    assert (launch["grid"], launch["block"], launch["cluster"]) == ((132, 1, 1), (384, 1, 1), [(2, 1, 1)])
    assert (launch["shared"], launch["stream"]) == (200_000, 0x55)


def test_without_a_cluster_none_is_asked_for(fake, kernel):
    kernel.ready(132, 1, 384, 0, ARGUMENTS, stream=0)()
    assert fake.launches[0]["cluster"] == []


def test_a_second_launch_has_separate_arguments(fake, kernel):
    first = kernel.ready(132, 1, 384, 0, ARGUMENTS, stream=0)
    kernel.ready(132, 1, 384, 0, (bytes(128), 16, 7, 1.0), stream=0)()
    first()
    assert fake.launches[0]["parameters"] == [
        bytes(128),
        struct.pack("q", 16),
        struct.pack("i", 7),
        struct.pack("f", 1.0),
    ]
    assert fake.launches[1]["parameters"][:2] == [ARGUMENTS[0], struct.pack("q", ARGUMENTS[1])]


def test_preparing_a_launch_starts_nothing(fake, kernel):
    kernel.ready(132, 1, 384, 0, ARGUMENTS, stream=0)
    assert fake.launches == []


def test_a_launch_is_started_again_by_any_thread(fake, kernel):
    launch = kernel.ready(132, 2, 384, 0, ARGUMENTS, stream=0x55)
    launch()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert fake.launches[0] == fake.launches[1]


def test_launches_of_one_shape_differ_in_their_stream(fake, kernel):
    for stream in (1, 2, 1):
        kernel.ready(132, 2, 384, 0, ARGUMENTS, stream)()
    assert [launch["stream"] for launch in fake.launches] == [1, 2, 1]


def test_all_shared_memory_of_a_block_is_permitted(fake, kernel):
    assert fake.shared_bytes == 226 * 1024  # what a block can have, less what the source declares


def test_the_bandwidth_of_memory_follows_from_its_clock_and_its_bus(monkeypatch):
    """2,619 MHz and 5,120 lines are an H100's."""
    attributes = cuda.CUdevice_attribute
    found = {
        attributes.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 2_619_000,
        attributes.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 5120,
    }
    monkeypatch.setattr(cuda, "cuDeviceGetAttribute", lambda attribute, device: (OK, found[attribute]))
    memory_bandwidth.cache_clear()
    try:
        assert memory_bandwidth(0) == pytest.approx(3.35e12, rel=1e-3)
    finally:
        memory_bandwidth.cache_clear()


@pytest.mark.parametrize("current", ["another device's", None])
def test_a_launch_sets_its_context_and_restores_the_current_one(fake, kernel, current):
    fake.contexts = [current]
    kernel.ready(132, 1, 384, 0, ARGUMENTS, stream=0)()
    assert len(fake.launches) == 1
    assert fake.contexts == [current]


def test_a_refused_launch_reports_the_error(fake, kernel):
    fake.refusal = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="launching product: CUDA_ERROR_INVALID_VALUE: what the driver says"):
        kernel.ready(132, 1, 384, 0, ARGUMENTS, stream=0)()


def test_a_refused_image_reports_the_error(fake):
    with pytest.raises(RuntimeError, match="loading product: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        Kernel("product", b"for another GPU", 0)
    assert fake.contexts == ["octile's"]


@pytest.mark.parametrize(("grid", "cluster"), [(0, 1), (131, 2), (132, 0)])
def test_a_grid_that_is_no_multiple_of_the_cluster_is_refused(kernel, grid, cluster):
    with pytest.raises(ValueError, match="grid must be a positive multiple of cluster"):
        kernel.ready(grid, cluster, 384, 0, ARGUMENTS, stream=0)()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ARGUMENTS[:3], "product takes 4 arguments, not 3"),
        ((0x1000, *ARGUMENTS[1:]), "argument 0 of product has 128 bytes and cannot be int"),
        ((*ARGUMENTS[:2], 2.0, 0.5), None),
        ((*ARGUMENTS[:1], 2.0, 5, 0.5), "argument 1 of product has 8 bytes and cannot be float"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments, message):
    if message is None:  # int or float: the first launch decides, and a later one of another type fails
        with pytest.raises(struct.error):
            layout("product", PARAMETERS, ARGUMENTS).pack(*arguments)
    else:
        with pytest.raises(TypeError, match=message):
            layout("product", PARAMETERS, arguments)


def test_padding_between_parameters_is_skipped():
    packed = layout("product", [(0, 4), (8, 8), (64, 128)], (1, 2, bytes(128))).pack(1, 2, b"\xff" * 128)
    assert packed == struct.pack("<iiq48x", 1, 0, 2) + b"\xff" * 128
