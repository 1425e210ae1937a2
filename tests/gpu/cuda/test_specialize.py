"""CUDA kernels on a GPU from source to result: compiled, loaded, launched, captured in a graph."""

import threading

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.driver import Kernel
from octile.kernels.cuda.jit.tensor_map import encode
from tests.kernels.cuda.emulated import map_of

ADD = """
extern "C" __global__ void __launch_bounds__(128) add(float* x, const float* y, int n, float factor) {
    extern __shared__ float staged[];
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) staged[threadIdx.x + config::gap] = y[i];
    __syncthreads();
    if (i < n) x[i] += factor * staged[threadIdx.x + config::gap];
}
"""
COPY = """
#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(128) copy(
    const __grid_constant__ TensorMap map, uint8_t* out, int x, int y) {
    __shared__ ptx::Mbarrier barrier;
    uint8_t* box = ptx::dynamic_shared();
    if (threadIdx.x == 0) {
        barrier.init(1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier.arrive_expect_tx(config::bytes);
        ptx::tma_load(box, &map, &barrier, x, y, 0);
    }
    barrier.wait(0);
    for (int i = threadIdx.x; i < config::bytes; i += 128) out[i] = box[i];
}
"""
CLUSTER = """
#include "ptx.cuh"
extern "C" __global__ void cluster(int* ranks) {
    if (threadIdx.x == 0) ranks[blockIdx.x] = ptx::cluster_ctarank();
    ptx::cluster_sync();
}
"""
N, GAP = 1000, 20_000  # with the gap the launch needs more than 48 KB, which must be requested


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "kernels"))


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs a GPU of sm_90, not {torch.cuda.get_device_name()}")


def load(name: str, text: str, **constants: int) -> Kernel:
    return specialize.load(name, constants, torch.device("cuda", torch.cuda.current_device()), {f"{name}.cu": text})


def add(x: Tensor, y: Tensor, factor: float) -> None:
    kernel = specialize.load("add", {"gap": GAP}, x.device, {"add.cu": ADD})
    arguments = (x.data_ptr(), y.data_ptr(), x.numel(), factor)
    kernel.ready(8, 1, 128, 4 * (128 + GAP), arguments)()


def vectors(device: str = "cuda:0") -> tuple[Tensor, Tensor]:
    return torch.arange(N, dtype=torch.float32, device=device), torch.ones(N, device=device)


def expected(factor: float) -> Tensor:
    return torch.arange(N, dtype=torch.float32) + factor


def test_a_kernel_computes_its_result():
    x, y = vectors()
    add(x, y, 0.5)
    assert torch.equal(x.cpu(), expected(0.5))


def test_a_kernel_runs_on_the_current_stream():
    x, y = vectors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.mul_(2)
        add(x, y, 1.0)
    side.synchronize()
    assert torch.equal(x.cpu(), 2 * torch.arange(N, dtype=torch.float32) + 1)


def test_a_graph_replays_a_launch():
    x, y = vectors()
    add(x, y, 0.0)  # loads it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(x, y, 1.0)
        add(x, y, 2.0)
    y.fill_(10.0)
    for _ in range(3):
        graph.replay()
    assert torch.equal(x.cpu(), expected(90.0))


def test_a_thread_that_never_saw_the_gpu_can_launch():
    x, y = vectors()
    add(x, y, 0.0)
    torch.cuda.synchronize()
    thread = threading.Thread(target=add, args=(x, y, 3.0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(x.cpu(), expected(3.0))


def test_a_kernel_can_be_launched_on_a_gpu_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, y = vectors("cuda:1")
    add(x, y, 4.0)
    assert torch.cuda.current_device() == 0
    assert torch.equal(x.cpu(), expected(4.0))


def test_a_launch_that_the_driver_refuses_is_an_exception():
    x, y = vectors()
    kernel = load("add", ADD, gap=GAP)
    with pytest.raises(RuntimeError, match="launching add: CUDA_ERROR_"):
        kernel.ready(8, 1, 2048, 0, (x.data_ptr(), y.data_ptr(), N, 1.0))()


def test_blocks_of_a_cluster_know_their_rank(hopper):
    ranks = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    load("cluster", CLUSTER).ready(8, 4, 32, 0, (ranks.data_ptr(),))()
    assert ranks.tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(("row", "column"), [(8, 32), (44, 240), (-4, -16)], ids=["inside", "past the end", "before"])
def test_tma_loads_a_box_with_zeros_outside_of_the_tensor(hopper, row, column):
    whole = torch.randint(1, 256, (64, 288), dtype=torch.uint8, device="cuda")
    x = whole[:50, :250]
    box = torch.full((16, 32), 99, dtype=torch.uint8, device="cuda")
    arguments = (encode(map_of(x[None], (1, 16, 32))), box.data_ptr(), column, row)
    load("copy", COPY, bytes=16 * 32).ready(1, 1, 128, 2048, arguments)()
    padded = torch.nn.functional.pad(x, (16, 64, 4, 64))
    assert torch.equal(box, padded[row + 4 : row + 20, column + 16 : column + 48])


def test_a_swizzled_box_has_its_16_byte_chunks_permuted(hopper):
    x = torch.randint(1, 256, (8, 128), dtype=torch.uint8, device="cuda")
    box = torch.empty_like(x)
    arguments = (encode(map_of(x[None], (1, 8, 128), swizzle=128)), box.data_ptr(), 0, 0)
    load("copy", COPY, bytes=8 * 128).ready(1, 1, 128, 4096, arguments)()
    row, chunk = torch.arange(8, device="cuda")[:, None], torch.arange(8, device="cuda")
    assert torch.equal(box.view(8, 8, 16), x.view(8, 8, 16)[row, chunk ^ row])
