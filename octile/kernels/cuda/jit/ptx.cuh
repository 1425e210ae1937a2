// What CUDA C++ has no words for: mbarriers, the copy engine (TMA), wgmma, register hand-over, stmatrix, fences.
//
// All inline assembly of octile stands here, in numbers.cuh and in vectors.cuh (and in the wgmma instruction that wgmma.py
// writes out for one width).
// Kernels above read as plain C++, and the test emulator runs them on a CPU by giving these functions other bodies.
//
// Source: PTX ISA 8.5, sections 9.7.9 (copies), 9.7.13 (mbarrier), 9.7.15 (wgmma), 9.7.19 (setmaxnreg).
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no C library
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;
#else
#include <stdint.h>
#endif

// A tensor map is opaque and is passed by value, `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

namespace ptx {

// ---- Shared memory ---------------------------------------------------------------------------------------------

// The dynamic shared memory of this block, 1024-byte aligned: swizzled tiles start at such addresses.
__device__ __forceinline__ uint8_t* dynamic_shared() {
    extern __shared__ __align__(1024) uint8_t memory[];
    return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Threads and clusters --------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t lane() {
    uint32_t index;
    asm("mov.u32 %0, %%laneid;" : "=r"(index));
    return index;
}

// Whether this is the one lane that a converged warp chooses.
__device__ __forceinline__ bool elect() {
    uint32_t chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

// Which block of its cluster this is.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster meet; what was written to shared memory before is seen by all after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// `threads` threads (a multiple of 32) meet at barrier `id` (1 … 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Says that this thread has come to barrier `id` and goes on; others wait there with named_barrier_sync.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers move between warpgroups: every warp of one gives some up, every warp of another takes them.
template <int registers>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- mbarrier: a phase ends when `count` threads have arrived and all announced bytes have landed ---------------

struct Barrier {
    uint64_t state;

    __device__ __forceinline__ void init(uint32_t count) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count) : "memory");
    }

    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }

    // Arrives at this barrier's twin in another block of the cluster, and says that this thread has read, not written:
    // to release what it wrote to the whole cluster (`.release.cluster`) would first wait for its memory accesses.
    __device__ __forceinline__ void arrive_at(uint32_t rank) {
        asm volatile(
            "{\n.reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(this)),
            "r"(rank)
            : "memory");
    }

    // Arrives, and lets the phase wait for so many bytes of TMA copies besides.
    __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                     : "memory");
    }

    // Waits until the phase with this parity has ended: 0 for the first, 1 for the second, 0 for the third, …
    // What the copy engine, or a thread of this block, wrote before is seen then; `.acquire.cluster` would throw away the
    // L1 cache each time.
    // The thread sleeps for up to 10 ms at a time, rather than ask again and again and take issue slots from others.
    __device__ __forceinline__ void wait(uint32_t parity) {
        asm volatile(
            "{\n.reg .pred ended;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1, %2;\n"
            "@!ended bra again;\n}" ::"r"(shared_address(this)),
            "r"(parity), "r"(10'000'000)
            : "memory");
    }

    // Whether that phase has ended, or ends soon; without `really` nothing is asked, and true. Instructions that do not
    // need the answer go on meanwhile.
    __device__ __forceinline__ bool ask(uint32_t parity, bool really) {
        uint32_t yes;
        asm volatile(
            "{\n.reg .pred ended, really;\n"
            "setp.ne.u32 really, %3, 0;\n"
            "setp.eq.u32 ended, %3, 0;\n"
            "@really mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
            "selp.b32 %0, 1, 0, ended;\n}"
            : "=r"(yes)
            : "r"(shared_address(this)), "r"(parity), "r"(static_cast<uint32_t>(really))
            : "memory");
        return yes;
    }
};

// Makes freshly initialised barriers visible to the cluster and to the copy engine; then all who use them must meet.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Shared memory written by ordinary stores is seen by the copy engine and by wgmma. Each writing thread calls it.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- The copy engine -------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at (x, y, z) of a tensor into shared memory; what lies outside of it arrives as zeros and counts as bytes.
__device__ __forceinline__ void load_3d(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, to the same offset, each block's own barrier told.
__device__ __forceinline__ void load_3d_multicast(
    void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

// A box of shared memory to (x, y, z) of a tensor; what would lie outside is not written. commit_stores ends a group.
__device__ __forceinline__ void store_3d(const TensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// The same, added to what lies there (float32).
__device__ __forceinline__ void add_3d(const TensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Bytes of shared memory to global memory: a multiple of 16, and both ends at multiples of 16.
__device__ __forceinline__ void store_bytes(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most `groups` groups of this thread's stores still have to read their shared memory.
template <int groups>
__device__ __forceinline__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

// ---- wgmma: a warpgroup's product of tiles in shared memory, into registers ------------------------------------

// A tile of rows of 128 bytes along K, stored with the 128-byte swizzle (what a TMA box with that swizzle writes):
// groups of 8 rows lie 1024 bytes apart. 32 bytes further along K is +2. Source: PTX ISA, "Matrix descriptor".
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
    constexpr uint64_t swizzle_128_bytes = 1ull << 62;
    constexpr uint64_t eight_rows = 1024ull >> 4;
    return swizzle_128_bytes | eight_rows << 32 | 1ull << 16 | ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Before the first wgmma, and whenever ordinary code touched the accumulator registers.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most `groups` committed groups are under way.
template <int groups>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Keeps the compiler from moving what reads or writes an accumulator over a wgmma_wait.
__device__ __forceinline__ void pin(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

// ---- Numbers ---------------------------------------------------------------------------------------------------

// Two float32 as bfloat16, rounded to nearest even; `low` comes first in memory.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Four 8×8 matrices of 16-bit numbers: lane i names row i%8 of matrix i/8, and register r of lane l holds the elements
// (l/4, 2·(l%4) … +1) of matrix r.
__device__ __forceinline__ void store_matrix_4(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void store_matrix_2(void* row, uint32_t r0, uint32_t r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(r0), "r"(r1)
                 : "memory");
}

// The same with each 8×8 matrix turned: registers hold columns, memory gets rows.
__device__ __forceinline__ void store_matrix_4_transposed(
    void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Adds two neighbouring float32 in global memory, 8-byte aligned, without reading them into the SM.
__device__ __forceinline__ void add_global_2(float* address, float x, float y) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void add_global(float* address, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}

}  // namespace ptx
