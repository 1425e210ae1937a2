"""Tests of the emulator's TMA, wgmma and warp-level primitives, compared with torch or the tensor core model."""

import math
import re
from pathlib import Path

import pytest
import torch

from octile.kernels.cuda.jit import specialize, wgmma
from octile.lab.tensor_core import tensor_core_matmul
from tests.kernels.cuda.emulated import map_of
from tools import emulator
from tools.emulator import EmulatorError, build
from tools.emulator.examples import SOURCES

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")

# ---- TMA ----


def copy(
    kind: str,
    box: tuple[int, ...],
    swizzle: int,
    tensor: torch.Tensor,
    raw: torch.Tensor,
    at: tuple[int, ...],
    fence: bool = True,
    other: int = 0,
) -> None:
    kinds = ["load", "store", "add", "prefetch"]
    size = math.prod(box) * tensor.element_size()
    settings = [size, size, kinds.index(kind), int(fence), other]  # the barrier follows the box
    emulator.run(
        "copies",
        {},
        grid=1,
        threads=64,
        shared_bytes=size + 8,
        arguments=[map_of(tensor, box, swizzle), raw, *settings, *reversed(at)],
        headers=SOURCES,
    )


def swizzled(rows: torch.Tensor, swizzle: int) -> torch.Tensor:
    """Bytes [rows, swizzle] as TMA swizzles them: chunks of 16 bytes are permuted within a row."""
    count = swizzle // 16
    out = torch.empty_like(rows)
    for row in range(rows.shape[0]):
        for chunk in range(count):
            other = chunk ^ (row * swizzle // 128) % count
            out[row, other * 16 : other * 16 + 16] = rows[row, chunk * 16 : chunk * 16 + 16]
    return out


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0), (7, 32), (30, -16), (-3, 144)])
def test_a_load_swizzles_and_fills_with_zeros(swizzle: int, at: tuple[int, int]) -> None:
    tensor = torch.randint(1, 255, (37, 160), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    columns = swizzle or 48
    raw = torch.empty(16 * columns, dtype=torch.uint8)
    copy("load", (1, 16, columns), swizzle, tensor[None], raw, (0, *at))
    padded = torch.nn.functional.pad(tensor, (256, 256, 256, 256))
    expected = padded[256 + at[0] :, 256 + at[1] :][:16, :columns]
    assert torch.equal(raw.view(16, columns), swizzled(expected, swizzle) if swizzle else expected)


def test_a_load_in_three_dimensions_takes_strides() -> None:
    tensor = torch.arange(3 * 20 * 24, dtype=torch.float32).view(20, 3, 24).transpose(0, 1)
    raw = torch.empty(2, 4, 8)
    copy("load", (2, 4, 8), 32, tensor, raw, (1, 18, 20))
    expected = torch.zeros(2, 4, 8)
    expected[:, :2, :4] = tensor[1:3, 18:20, 20:24]
    assert torch.equal(raw.view(torch.uint8).view(8, 32), swizzled(expected.view(torch.uint8).view(8, 32), 32))


def test_a_box_that_is_prefetched_is_stored_or_added_to() -> None:
    tensor, raw = torch.zeros(1, 4, 16), torch.ones(1, 4, 8)
    copy("prefetch", (1, 4, 8), 32, tensor, raw, (0, 0, 8), other=8)
    assert tensor.sum() == 32
    copy("prefetch", (1, 4, 8), 32, tensor, raw, (0, 0, 16), other=8)  # outside of the tensor: nothing is loaded
    with pytest.raises(
        EmulatorError, match="the box at 0, 0, 0 was loaded to the L2 cache and neither stored nor added to"
    ):
        copy("prefetch", (1, 4, 8), 32, tensor, raw, (0, 0, 0), other=8)


def gathered(
    waits: bool, fences: bool, seed: int, count: int = 64, arrives: bool = False, lazy: bool | None = None
) -> torch.Tensor:
    """What a kernel of 64 threads reads of vectors that cp.async copies, which follow from their indices."""
    rows = torch.arange(1, 41).to(torch.uint8)[:, None].expand(40, 16).contiguous()
    indices = torch.arange(64, dtype=torch.int32) * 7 % 41 - 1
    found = torch.zeros(64, 16, dtype=torch.uint8)
    emulator.run(
        "gather", {}, grid=1, threads=64, shared_bytes=64 * 16 + 8, headers=SOURCES, seed=seed, lazy=lazy,
        arguments=[rows, indices, found, int(waits), int(fences), count, int(arrives)],
    )  # fmt: skip
    assert (found == found[:, :1]).all()
    return found[:, 0] - (indices + 1).to(torch.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_cp_async_copies_vectors_and_writes_zeros_where_it_does_not_read(seed: int) -> None:
    assert not gathered(True, True, seed).any()


@pytest.mark.parametrize(("waits", "fences"), [(False, True), (True, False)], ids=["no wait", "no fence"])
def test_what_cp_async_copies_is_seen_after_a_wait_and_a_fence_alone(waits: bool, fences: bool) -> None:
    assert any(gathered(waits, fences, seed).any() for seed in range(4))


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_after_cp_async_and_others_are_counted_together(seed: int) -> None:
    assert not gathered(True, True, seed, count=65, arrives=True).any()


@pytest.mark.parametrize(("count", "arrives"), [(63, False), (64, True)], ids=["cp.async", "arrive"])
def test_an_arrival_too_many_is_found_while_others_wait_for_cp_async(count: int, arrives: bool) -> None:
    with pytest.raises(EmulatorError, match=r"one arrival too many at .*, of which [1-9][0-9]* wait for copies"):
        gathered(True, True, 0, count, arrives, lazy=True)


@pytest.mark.parametrize("open_groups", [0, 1, 2])
def test_what_a_thread_copies_is_there_after_a_wait_for_its_group(open_groups: int) -> None:
    vectors = torch.arange(32 * 32).to(torch.uint8).clamp_(max=254).view(32, 2, 16)
    found = torch.zeros_like(vectors)
    emulator.run(
        "own_copies", {}, grid=1, threads=32, shared_bytes=32 * 32, headers=SOURCES,
        arguments=[vectors, found, open_groups],
    )  # fmt: skip
    arrived = 2 - open_groups
    assert torch.equal(found[:, :arrived], vectors[:, :arrived])
    assert (found[:, arrived:] == 0xFF).all()


def exchanged(
    seed: int, announced: int = 32 * 16, *, fences: bool = True, waits: bool = True, ends_together: bool = True
) -> torch.Tensor:
    """What 2 · 32 threads find where the other thread block of the cluster has copied; each has copied its number."""
    rows = torch.arange(64, dtype=torch.int32)[:, None].expand(64, 4).contiguous()
    found = torch.zeros(64, 4, dtype=torch.int32)
    emulator.run(
        "exchange", {}, grid=2, cluster=2, threads=32, shared_bytes=32 * 32 + 8, headers=SOURCES, seed=seed,
        arguments=[rows, found, announced, int(fences), int(waits), int(ends_together)],
    )  # fmt: skip
    assert (found == found[:, :1]).all()
    return found[:, 0]


@pytest.mark.parametrize("seed", range(4))
def test_bulk_copy_writes_to_the_other_thread_block(seed: int) -> None:
    assert exchanged(seed).tolist() == [*range(32, 64), *range(32)]


def test_what_bulk_copy_writes_is_there_after_a_wait_alone() -> None:
    assert any((exchanged(seed, waits=False) < 0).any() for seed in range(4))  # 0xFFFFFFFF until it lands


def test_bulk_copy_reads_what_was_fenced_alone() -> None:
    assert (exchanged(0, fences=False) < 0).all()


def test_bulk_copy_reads_no_thread_block_that_has_ended() -> None:
    with pytest.raises(EmulatorError, match=r"reads .*, whose threads have all ended"):
        torch.stack([exchanged(seed, ends_together=False) for seed in range(16)])


def test_a_barrier_waits_for_all_bytes_of_bulk_copy() -> None:
    with pytest.raises(EmulatorError, match="lacks 0 of 1 arrivals and 16 bytes"):
        exchanged(0, 32 * 16 + 16)


PEERS = """
#include "ptx.cuh"
extern "C" __global__ void peers(int* found, int offset, bool synchronizes) {
    auto* slot = reinterpret_cast<int*>(ptx::dynamic_shared()) + threadIdx.x;
    const int own = blockIdx.x * blockDim.x + threadIdx.x;
    if (synchronizes) ptx::cluster_sync();
    ptx::store_cluster(ptx::cluster_address(slot, ptx::cluster_ctarank() ^ 1) + offset, own);
    ptx::cluster_sync();
    found[own] = *slot;
}
"""


def stored_by_peers(offset: int = 0, synchronizes: bool = True) -> list[int]:
    """What 2 · 32 threads find after each has stored its number in the other thread block of the cluster."""
    found = torch.zeros(64, dtype=torch.int32)
    emulator.run(
        "peers", {}, grid=2, cluster=2, threads=32, shared_bytes=32 * 4, headers={"peers.cu": PEERS},
        arguments=[found, offset, synchronizes],
    )  # fmt: skip
    return found.tolist()


def test_store_cluster_writes_to_the_other_thread_block() -> None:
    assert stored_by_peers() == [*range(32, 64), *range(32)]


@pytest.mark.parametrize(("offset", "message"), [(128, "store_cluster: 4 bytes at offset"), (2, "not a multiple of 4")])
def test_store_cluster_at_a_wrong_address_is_found(offset: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        stored_by_peers(offset)


def test_store_cluster_to_a_block_that_may_not_have_begun_is_found() -> None:
    with pytest.raises(EmulatorError, match=r"store_cluster to block . before a cluster_sync"):
        stored_by_peers(synchronizes=False)


@pytest.mark.parametrize("kind", ["store", "add"])
def test_a_store_does_not_write_outside_of_the_tensor(kind: str) -> None:
    box = torch.arange(1.0, 2 * 4 * 8 + 1).view(2, 4, 8)
    raw = swizzled(box.view(torch.uint8).view(8, 32), 32).view(-1)
    tensor = torch.full((3, 20, 24), 0.5)
    expected = tensor.clone()
    expected[2, 18:20, :4] = box[0, :2, 4:] + (0.5 if kind == "add" else 0)
    copy(kind, (2, 4, 8), 32, tensor, raw, (2, 18, -4))
    assert torch.equal(tensor, expected)


def test_a_store_does_not_read_unfenced_writes() -> None:
    tensor = torch.zeros(1, 4, 8)
    copy("store", (1, 4, 8), 0, tensor, torch.ones(32), (0, 0, 0), fence=False)
    assert tensor.isnan().all()


def test_a_map_of_another_rank_is_refused() -> None:
    with pytest.raises(EmulatorError, match="a copy in 3 dimensions with a tensor map of 2"):
        copy("load", (4, 8), 0, torch.zeros(4, 8), torch.empty(32), (0, 0, 0))


# ---- wgmma ----

TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
}


def multiply(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, types: tuple[str, str], arithmetic: str
) -> torch.Tensor:
    """c[64, n] + a[64, k] · b[n, k]ᵀ by tiles.cu."""
    out, n = c.clone(), b.shape[0]
    a_bytes, b_bytes = a.view(torch.uint8), b.view(torch.uint8)
    emulator.run(
        "tiles",
        {"n": n},
        grid=1,
        threads=128,
        shared_bytes=(64 + n) * 128 + 8,
        arguments=[
            map_of(a_bytes[None], (1, 64, 128), 128),
            map_of(b_bytes[None], (1, n, 128), 128),
            out,
            a_bytes.shape[1] // 128,
        ],
        headers=SOURCES | {"wgmma.cuh": wgmma.header(n, *types)},
        arithmetic=arithmetic,  # type: ignore[arg-type]
    )
    return out


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("a_type", "b_type", "n"),
    [("e4m3", "e4m3", 256), ("e5m2", "e4m3", 152), ("f16", "f16", 8), ("bf16", "bf16", 8), ("tf32", "tf32", 8)],
)
@pytest.mark.parametrize("arithmetic", ["float32", "hopper"])
def test_small_whole_numbers_are_multiplied_exactly(a_type: str, b_type: str, n: int, arithmetic: str) -> None:
    generator = torch.Generator().manual_seed(n)
    k = 256 // TYPES[a_type].itemsize
    a, b = (torch.randint(-4, 5, (rows, k), generator=generator).float() for rows in (64, n))
    c = torch.randint(-100, 101, (64, n), generator=generator).float()
    got = multiply(a.to(TYPES[a_type]), b.to(TYPES[b_type]), c, (a_type, b_type), arithmetic)
    assert torch.equal(got, c + a @ b.T)


@pytest.mark.parametrize(
    ("a_type", "b_type"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32")]
)
def test_emulated_hopper_accumulates_as_the_tensor_core_model(a_type: str, b_type: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def extreme(rows: int, columns: int) -> torch.Tensor:
        exponents = torch.randint(-12, 6, (rows, columns), generator=generator).float()
        x = torch.randn(rows, columns, generator=generator) * exponents.exp2()
        return x * (torch.rand(rows, columns, generator=generator) < 0.9)

    k = 256 // TYPES[a_type].itemsize
    a, b, c = extreme(64, k).to(TYPES[a_type]), extreme(8, k).to(TYPES[b_type]), extreme(64, 8)
    c[0], c[1, 0], c[1, 1] = 0, 1e-42, -0.0
    a[2, 5], a[3, 0], c[4, 1], c[5, 1] = math.nan, 300, math.inf, 3e38
    expected = tensor_core_matmul(a, b, c, "sm_90")
    assert expected.isnan().any()
    assert expected.isinf().any()
    assert torch.equal(multiply(a, b, c, (a_type, b_type), "hopper").view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("type_", "n"), [("bf16", 64), ("bf16", 192)])
def test_mn_major_tiles_are_multiplied(type_: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randint(-4, 5, (16, columns), generator=generator).to(TYPES[type_]) for columns in (64, n))
    out = torch.full((64, n), math.nan)
    header = wgmma.header(n, type_, type_, name="wgmma_transposed", a_transposed=True, b_transposed=True)
    emulator.run(
        "transposed_tiles",
        {"n": n},
        grid=1,
        threads=128,
        shared_bytes=(64 + n) * 32 + 8,
        arguments=[map_of(a[None], (1, 16, 64), 128), map_of(b[None], (1, 16, 64), 128), out],
        headers=SOURCES | {"wgmma.cuh": header},
    )
    assert torch.equal(out, a.float().T @ b.float())


def test_an_operand_in_registers_is_multiplied() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (16, n), generator=generator).bfloat16() for n in (64, 128))
    out = torch.zeros(64, 128)
    header = wgmma.header(128, "bf16", "bf16", name="wgmma_registers", a_in_registers=True, b_transposed=True)
    emulator.run(
        "fragments",
        {},
        grid=1,
        threads=128,
        shared_bytes=3 * 16 * 128 + 8,
        arguments=[map_of(b[None], (1, 16, 64), 128), swizzled(a.view(torch.uint8), 128), out],
        headers=SOURCES | {"wgmma.cuh": header},
    )
    assert torch.equal(out, a.float().mT @ b.float())


# ---- Warp-level primitives ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arithmetic", ["float32", "hopper"])
def test_a_warp_multiplies_and_another_thread_block_gets_the_result(arithmetic: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (16, 8))
    out = torch.full((16, 8), math.nan)
    emulator.run(
        "products", {}, grid=2, cluster=2, threads=32, shared_bytes=512, headers=SOURCES,
        arguments=[a, b, out, int(dtype == torch.bfloat16)], arithmetic=arithmetic,
    )  # fmt: skip
    rounded = (a.double() @ b.double().mT).float()
    assert torch.equal(out, tensor_core_matmul(a, b, arch="sm_90_mma") if arithmetic == "hopper" else rounded)


def test_lanes_of_a_warp_exchange_values() -> None:
    values = torch.randint(-1000, 1000, (32,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    answers = torch.full((9, 32), -1, dtype=torch.int32)
    matrices = torch.zeros(640, dtype=torch.int16)
    pair = torch.tensor([1.0, 1.00390625, 1.01171875, math.nan, math.inf, -0.0, 1e-45, 3.4e38, *range(56)])
    packed = torch.zeros(32, dtype=torch.int32)
    emulator.run(
        "lanes",
        {},
        grid=1,
        threads=32,
        shared_bytes=1536,
        arguments=[values, answers, matrices, pair, packed],
        headers=SOURCES,
    )
    lane = torch.arange(32)
    ballot = sum(1 << i for i in range(32) if values[i] % 2)
    expected = [
        values[5].expand(32),
        values[lane // 8 * 8 + (lane + 1) % 8],
        values[lane ^ 3],
        torch.where(lane < 4, values, values[(lane - 4) % 32]),
        torch.where(lane > 27, values, values[(lane + 4) % 32]),
        torch.tensor(ballot).int().expand(32),
        values.sum().int().expand(32),
        values.max().expand(32),
        torch.where(lane < 8, values[lane ^ 1], -1),
    ]
    assert torch.equal(answers, torch.stack(expected).int())
    whole = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    assert torch.equal(matrices, torch.cat([whole.flatten(), whole.transpose(1, 2).flatten(), whole[:2].flatten()]))
    rounded = pair.bfloat16().view(torch.int16).view(32, 2).clone()
    rounded[1, 1] = 0x7FFF  # the hardware's NaN
    assert torch.equal(packed.view(torch.int16).view(32, 2), rounded)


def test_every_ptx_function_is_emulated() -> None:
    def normal(text: str) -> str:
        return re.sub(r"\s+", " ", re.sub(r"(?<=\()\s+", "", text))

    real = normal((specialize.FOLDER / "jit" / "ptx.cuh").read_text())
    emulated = normal((Path(emulator.__file__).parent / "device" / "ptx.cuh").read_text())
    signatures = re.findall(r"__forceinline__ (?:[\w]+\*? )+(\w+\([^)]*\)) {", real)
    assert len(signatures) > 30
    assert [signature for signature in signatures if signature not in emulated] == []
