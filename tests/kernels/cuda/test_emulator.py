"""Tests of the CPU emulator: a correct kernel has its result for every seed, and each kind of mistake is found."""

import math
import re

import pytest
import torch

from octile.kernels.cuda.jit import wgmma
from tests.kernels.cuda.emulated import map_of
from tools import emulator
from tools.emulator import EmulatorError, build
from tools.emulator.examples import SOURCES

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")

SEEDS = range(24)
PIPELINE_BYTES = 64 * 128 + 2 * 2 * 64 * 128 + 4 * 8
NAMED = {  # a mistake: part of the emulator's message
    "mbarrier_initialized_twice": "is initialized a second time",
    "no_init_fence": "was initialized without fence_mbarrier_init",
    "no_sync_after_init": "was not initialized",
    "half_of_the_warps_setmaxnreg": "did not all execute the same",
    "no_setmaxnreg_dec": "waits for registers: setmaxnreg_inc<256>",
    "unaligned_tile": "is not 128-byte aligned",
    "acquire_with_another_parity": "deadlock",
    "expects_too_much": "lacks 0 of 1 arrivals and 16 bytes",
    "expects_too_little": "more bytes landed",
    "arrives_twice": "one arrival too many",
    "one_block_gets_b": "4096 bytes",
    "no_such_block": "multicast to blocks 7 of a cluster of 2",
    "never_released": "lacks 8 of 8 arrivals",
    "no_wgmma_fence": "wgmma without wgmma_fence",
    "descriptors_differ": "gave other descriptors",
    "tile_off_its_swizzle": "does not begin where its 128-byte swizzle does",
    "accumulator_written_in_flight": "accumulator register 3 was written",
    "accumulator_read_in_flight": "accumulator register 0 was written",
    "no_wgmma_commit": "wgmma_wait_group is missing",
    "reads_past_the_bias": "byte 256 of a storage of 256 bytes",
    "unaligned_matrix": "is not 16-byte aligned",
    "no_fence_before_store": "without fence_proxy_async",
    "one_fence_before_store": "without fence_proxy_async",
    "threads_differ": "comes to named barrier 1",
    "a_warp_too_many": "waits at named barrier 1, where 128 of 160 threads are",
    "no_store_commit": "were not committed",
    "no_store_wait": "bulk_wait_group_read is missing",
    "past_shared_memory": f"the byte at offset {PIPELINE_BYTES} was written",
    "over_an_mbarrier": "something was written over it",
    "polls_for_ever": "livelock",
    "ends_before_its_peer": "whose threads have all ended",
}
RACES = [  # mistakes that change the result, or end in an error, for some of the seeds
    "no_producer_acquire",
    "no_consumer_wait",
    "wrong_parity",
    "released_too_early",
    "one_warp_releases_for_all",
    "no_wgmma_wait",
    "no_barrier_before_store",
]
FAULTS = {name: index for index, name in enumerate([*NAMED, *RACES], start=1)}


def pipeline(
    fault: str = "", seed: int = 0, k: int = 640, lazy: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of pipeline.cu, and the expected one."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (rows, k), generator=generator).float() for rows in (128, 64))
    bias = torch.randint(-100, 100, (64,), generator=generator).float()
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e5m2)
    out = torch.full((1, 128, 64), math.nan, dtype=torch.bfloat16)
    maps = [
        map_of(a8[None], (1, 64, 128), 128),
        map_of(b8[None], (1, 32, 128), 128),
        map_of(out, (1, 64, 64), 128),
    ]
    emulator.run(
        "pipeline",
        FAULTS | {"shared_bytes": PIPELINE_BYTES},
        grid=2,
        cluster=2,
        threads=256,
        shared_bytes=PIPELINE_BYTES,
        arguments=[*maps, bias, k, FAULTS.get(fault, 0)],
        headers=SOURCES | {"wgmma.cuh": wgmma.header(64, "e4m3", "e5m2")},
        seed=seed,
        lazy=lazy,
    )
    return out[0], (a8.float() @ b8.float().T + bias).bfloat16()


@pytest.mark.one_case
@pytest.mark.parametrize("lazy", [None, True, False])
def test_a_correct_kernel_gives_the_result_for_every_seed(lazy: bool | None) -> None:
    for seed in SEEDS:
        got, expected = pipeline(seed=seed, lazy=lazy)
        assert torch.equal(got, expected), seed


@pytest.mark.parametrize("fault", NAMED)
def test_a_mistake_is_named(fault: str) -> None:
    def until_it_fails() -> None:
        for seed in SEEDS:
            pipeline(fault, seed)

    with pytest.raises(EmulatorError, match=re.escape(NAMED[fault])):
        until_it_fails()


@pytest.mark.parametrize("fault", RACES)
def test_a_race_is_lost_for_some_seed(fault: str) -> None:
    def goes_wrong(seed: int) -> bool:
        try:
            got, expected = pipeline(fault, seed)
        except EmulatorError:
            return True
        return not torch.equal(got, expected)

    assert any(map(goes_wrong, SEEDS))


def test_a_deadlock_is_reported_with_all_waiting_threads() -> None:
    with pytest.raises(EmulatorError) as caught:
        pipeline("never_released", seed=3)
    assert "1 threads of warps 4 of block 0: waits with parity 0 for the mbarrier" in str(caught.value)
    assert "waits at cluster_sync" in str(caught.value)


def test_a_seed_determines_the_run() -> None:
    def report(seed: int) -> str:
        with pytest.raises(EmulatorError) as caught:
            pipeline("one_block_gets_b", seed)
        return str(caught.value)

    assert report(5) == report(5)
    assert len({report(seed) for seed in range(5)}) > 1


# ---- Launches ----


def test_blocks_that_wait_for_each_other_run_concurrently() -> None:
    for seed in range(5):
        turn, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        emulator.run(
            "flags",
            {},
            grid=4,
            threads=64,
            shared_bytes=0,
            arguments=[turn, total],
            headers=SOURCES,
            seed=seed,
            resident=True,
        )
        assert total.item() == 123


def test_arguments_that_do_not_match_the_kernel_are_refused() -> None:
    with pytest.raises(TypeError, match="flags takes 2 arguments, not 1"):
        emulator.run("flags", {}, grid=1, threads=32, shared_bytes=0, arguments=[1], headers=SOURCES)
    with pytest.raises(TypeError, match="argument 1 of flags has 8 bytes and cannot be float"):
        emulator.run("flags", {}, grid=1, threads=32, shared_bytes=0, arguments=[1, 1.0], headers=SOURCES)


def test_source_that_does_not_compile_is_shown_by_its_own_lines() -> None:
    wrong = 'extern "C" __global__ void wrong() {\n    int x = nothing;\n}\n'
    with pytest.raises(RuntimeError, match=r"wrong\.cu:2:"):
        emulator.run("wrong", {}, grid=1, threads=32, shared_bytes=0, arguments=[], headers={"wrong.cu": wrong})


TOUCH = 'extern "C" __global__ void touch(unsigned char* data, int at) { if (threadIdx.x == 0) data[at] = 1; }\n'


@pytest.mark.parametrize(
    ("at", "error", "error_text"),
    [
        (-1, MemoryError, "outside of a storage of 20 bytes"),
        (20, MemoryError, "outside of a storage of 20 bytes"),
        (32, EmulatorError, "byte 32 of a storage of 20 bytes"),
    ],
)
def test_a_write_outside_of_a_tensor_is_caught(at: int, error: type[Exception], error_text: str) -> None:
    data = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(error, match=error_text):
        emulator.run("touch", {}, grid=1, threads=32, shared_bytes=0, arguments=[data, at], headers={"touch.cu": TOUCH})


def test_an_address_inside_of_the_given_memory_is_redirected() -> None:
    data = torch.zeros(20, dtype=torch.uint8)
    arguments = [data.data_ptr() + 2, 17]
    emulator.run(
        "touch", {}, grid=1, threads=32, shared_bytes=0, arguments=arguments, memory=[data], headers={"touch.cu": TOUCH}
    )
    assert data.tolist() == [0] * 19 + [1]


DEPENDENT = """
#include "ptx.cuh"
extern "C" __global__ void dependent(const int* from, int* to, int fault) {
    const int own = blockIdx.x * blockDim.x + threadIdx.x;
    const int early = from[own];
    if (fault == 1) to[own] = 0;
    if (fault == 2 && own == 100) return;
    ptx::wait_for_previous();
    to[own] = fault == 3 ? early : from[own];
}
"""


def depend(fault: int, seed: int, previous: bool = True) -> list[int]:
    """Copy the numbers 0 … 127, which the previous kernel writes."""
    numbers, copied = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    emulator.run(
        "dependent", {}, grid=4, threads=32, shared_bytes=0, headers={"dependent.cu": DEPENDENT}, seed=seed,
        arguments=[numbers, copied, fault], previous=[numbers] if previous else [],
    )  # fmt: skip
    assert numbers.tolist() == [*range(128)]
    return copied.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_what_the_previous_kernel_writes_is_there_after_waiting_for_it(seed: int) -> None:
    assert depend(0, seed) == [*range(128)]
    assert depend(3, seed) == [-1] * 128
    assert depend(3, seed, previous=False) == [*range(128)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, "writes to global memory before wait_for_previous"),
        (2, "block 3, warp 0, lane 4: ends without wait_for_previous"),
    ],
)
def test_a_kernel_that_does_not_wait_for_the_previous_one_is_found(fault: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        depend(fault, 0)
    depend(fault, 0, previous=False)


@pytest.mark.slow
def test_a_busy_loop_is_ended() -> None:
    spin = 'extern "C" __global__ void spin(volatile int* flag) { while (!*flag) {} }\n'
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(EmulatorError, match="runs for ever"):
        emulator.run("spin", {}, grid=1, threads=32, shared_bytes=0, arguments=[flag], headers={"spin.cu": spin})
