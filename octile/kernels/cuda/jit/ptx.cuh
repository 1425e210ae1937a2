// Hopper's PTX instructions as functions: mbarrier, TMA, wgmma, setmaxnreg, stmatrix, red, fences.
//
// All inline assembly of octile is here, in convert.cuh and in vector_io.cuh; wgmma.py generates the wgmma instruction
// for one width. Kernels are plain C++, and the CPU emulator runs them with other bodies of these functions.
//
// Source: PTX ISA 8.5, sections 9.7.9 (TMA, cp.async.bulk), 9.7.13 (mbarrier, griddepcontrol), 9.7.14 (mma), 9.7.15 (wgmma),
// 9.7.19 (setmaxnreg).
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

// An opaque tensor map (CUtensorMap). A kernel takes it by value, as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

constexpr uint32_t all_lanes = 0xFFFFFFFF;  // the mask of a whole warp

namespace ptx {

// ---- Shared memory ---------------------------------------------------------------------------------------------

// The dynamic shared memory of this thread block, 1024-byte aligned, as swizzled tiles must be.
__device__ __forceinline__ uint8_t* dynamic_shared() {
    extern __shared__ __align__(1024) uint8_t memory[];
    return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Global memory ---------------------------------------------------------------------------------------------

// Reads a number here: the compiler moves an __ldg, or ld.global.nc, behind barriers and TMA loads that follow it.
__device__ __forceinline__ float load_in_order(const float* address) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(address)));
    return value;
}

// ---- Threads and clusters --------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t lane_id() {
    uint32_t index;
    asm("mov.u32 %0, %%laneid;" : "=r"(index));
    return index;
}

// The same value, of which the compiler knows nothing: what depends on it is not computed before a loop and kept.
__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
    return elected;
}

// Rank of this thread block in its cluster.
__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address of the same place in the shared memory of thread block `rank` of the cluster, for `bulk_copy`.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}

// Synchronizes all threads of the cluster. Earlier writes to shared memory are visible to all of them afterwards.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Synchronizes `threads` threads (a multiple of 32) at barrier `id` (1 … 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` without waiting; other threads wait there with named_barrier_sync.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Reduces the registers of a thread to `registers`, so that another warpgroup can have them.
template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Raises the registers of a thread to `registers`; waits until the block has released so many.
template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- mbarrier --------------------------------------------------------------------------------------------------

// A phase completes when `count` threads have arrived and all expected bytes have been written.
struct Mbarrier {
    uint64_t state;

    __device__ __forceinline__ void init(uint32_t count) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count) : "memory");
    }

    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
    }

    // Arrives at the barrier at the same offset in thread block `rank` of the cluster. The arrival releases reads only:
    // `.release.cluster`, which would release writes to the whole cluster, first waits for memory accesses.
    __device__ __forceinline__ void arrive_cluster(uint32_t rank) {
        asm volatile(
            "{\n.reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(this)),
            "r"(rank)
            : "memory");
    }

    // Arrives, and adds `bytes` to the bytes that TMA must write before the phase completes.
    __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                     : "memory");
    }

    // Arrives once all earlier copies by cp_async_16 of this thread have landed; does not wait for them.
    __device__ __forceinline__ void arrive_after_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
    }

    // Waits until the phase of this parity is complete: 0 for the first, 1 for the second, 0 for the third, …
    // Afterwards the writes of TMA and of threads of this block are visible. `.acquire.cluster` is not used because it
    // would invalidate the L1 cache each time.
    // The thread sleeps for up to 10 ms at a time instead of polling, which would take issue slots from other warps.
    __device__ __forceinline__ void wait(uint32_t parity) {
        asm volatile(
            "{\n.reg .pred complete;\n"
            "retry:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1, %2;\n"
            "@!complete bra retry;\n}" ::"r"(shared_address(this)),
            "r"(parity), "r"(10'000'000)
            : "memory");
    }

    // Whether the phase is complete, or completes within the hardware's time limit. Where `predicate` is false the
    // barrier is not read and the result is true. Instructions that do not need the result are issued meanwhile.
    __device__ __forceinline__ bool try_wait(uint32_t parity, bool predicate) {
        uint32_t complete;
        asm volatile(
            "{\n.reg .pred complete, reads;\n"
            "setp.ne.u32 reads, %3, 0;\n"
            "setp.eq.u32 complete, %3, 0;\n"
            "@reads mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
            "selp.b32 %0, 1, 0, complete;\n}"
            : "=r"(complete)
            : "r"(shared_address(this)), "r"(parity), "r"(static_cast<uint32_t>(predicate))
            : "memory");
        return complete;
    }
};

// Makes initialized mbarriers visible to the cluster and to TMA. All threads that use them must synchronize afterwards.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes a thread's ordinary stores to shared memory visible to TMA and wgmma. Every thread that wrote calls it.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- TMA -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at (x, y, z) of a tensor to shared memory. Elements outside of the tensor become zero, and count.
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, Mbarrier* barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// tma_load of what is read once: the L2 cache evicts it before other lines.
__device__ __forceinline__ void tma_load_once(void* to, const TensorMap* map, Mbarrier* barrier, int x, int y, int z) {
    asm volatile(
        "{\n.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], policy;\n}" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// tma_load to every thread block of the cluster whose bit is set in `blocks`: to the same offset and its own barrier.
__device__ __forceinline__ void tma_load_multicast(
    void* to, const TensorMap* map, Mbarrier* barrier, int x, int y, int z, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

// Stores a box of shared memory at (x, y, z) of a tensor. Elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// tma_store that adds to the tensor (float32).
__device__ __forceinline__ void tma_reduce_add(const TensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Stores contiguous bytes of shared memory: a multiple of 16, from and to addresses that are multiples of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

// Loads contiguous bytes to shared memory: a multiple of 16, from and to addresses that are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, Mbarrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Loads a box of a tensor to the L2 cache.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Loads contiguous bytes to the L2 cache: a multiple of 16, from an address that is a multiple of 16.
__device__ __forceinline__ void bulk_prefetch(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Loads the 128 bytes around an address to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Copies contiguous bytes of shared memory, a multiple of 16, to a `cluster_address`, and adds them to the bytes that the
// mbarrier at another `cluster_address` of the same thread block has received. Both places are multiples of 16, and what is
// copied was written before fence_proxy_async. A wait for that phase makes the bytes visible, to wgmma as well.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(shared_address(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies 16 bytes to shared memory, or writes zeros there. `Mbarrier::arrive_after_copies` reports that they have landed.
// They are ordinary stores: who reads them by wgmma calls fence_proxy_async after it has waited.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, bool reads) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(reads ? 16 : 0)
                 : "memory");
}

// Copies 16 bytes to shared memory in the group that cp_async_commit_group ends.
__device__ __forceinline__ void cp_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Copies 4 bytes to shared memory in the group that cp_async_commit_group ends.
__device__ __forceinline__ void cp_async_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Makes a group of this thread's copies since the last group; it may be empty.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `groups` of the last groups of this thread have not arrived.
template <int groups>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Stores 4 bytes at a `cluster_address`. cluster_sync makes them visible.
__device__ __forceinline__ void store_cluster(uint32_t to, uint32_t value) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Makes a group of this thread's stores since the last group.
__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `groups` groups of this thread's stores have not yet read their shared memory.
template <int groups>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

// ---- wgmma -----------------------------------------------------------------------------------------------------

// Matrix descriptor of a tile with rows of 128, 64 or 32 bytes along K and the swizzle of as many bytes, as a TMA load
// writes it, with groups of 8 rows one after the other. Adding 2 moves 32 bytes along K. Source: PTX ISA, "Matrix
// descriptor".
template <int row_bytes = 128>
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile) {
    static_assert(row_bytes == 128 || row_bytes == 64 || row_bytes == 32);
    constexpr uint64_t swizzle = row_bytes == 128 ? 1ull << 62 : row_bytes == 64 ? 2ull << 62 : 3ull << 62;
    constexpr uint64_t eight_rows = 8ull * row_bytes >> 4;
    return swizzle | eight_rows << 32 | 1ull << 16 | ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Matrix descriptor of an MN-major tile with rows of 64 16-bit elements along M or N and the 128-byte swizzle: groups
// of 8 rows, along K, are 1024 bytes apart, and the next 64 elements of a row `distance` bytes. Adding 128 moves 16
// rows.
__device__ __forceinline__ uint64_t wgmma_transposed_descriptor(const void* tile, uint32_t distance) {
    constexpr uint64_t swizzle_128_bytes = 1ull << 62;
    constexpr uint64_t eight_rows = 1024ull >> 4;
    return swizzle_128_bytes | eight_rows << 32 | uint64_t(distance >> 4) << 16 |
           ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Orders accesses of accumulator registers before wgmma: needed before the first one, and after other code used them.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `groups` committed groups are in flight.
template <int groups>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Keeps the compiler from moving accesses of an accumulator register over wgmma_wait_group.
__device__ __forceinline__ void warpgroup_fence_operand(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

// ---- Programmatic dependent launch ----------------------------------------------------------------------------------

// Lets the next kernel of the stream start, if it is launched so, once all thread blocks have called this or ended. That
// kernel sees what this one writes after its own wait_for_previous only. If this is called after wait_for_previous, the next
// kernel may read before its wait what all earlier kernels have written; if it is called before, these may still run.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the previous kernel of the stream has ended and what it wrote is visible; and, if that one has called this,
// too, all earlier ones. What it writes must not be read before, not even by a prefetch to registers, and nothing that it
// reads may be written.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// At the start of a kernel that is launched so and reads nothing before its wait.
__device__ __forceinline__ void wait_and_launch_dependents() {
    wait_for_previous();
    launch_dependents();
}

// Loads 16 bytes that no kernel writes, and that no other thread block reads, before what follows needs them; ptxas may
// move it past a barrier (`load_in_order`).
__device__ __forceinline__ uint4 load_weight_16(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// load_weight_16 of 8 bytes.
__device__ __forceinline__ uint2 load_weight_8(const void* from) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}

// ---- mma of a warp ---------------------------------------------------------------------------------------------------

// d[16, 8] += a[16, 16] · b[16, 8] in FP32. Lane l holds, with g = l / 4 and t = l % 4, the pairs along K
// a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b: (2t, g), (2t + 8, g); and
// d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void mma_f16(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// mma_f16 of bfloat16.
__device__ __forceinline__ void mma_bf16(
    float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- Conversion, stmatrix, red ---------------------------------------------------------------------------------

// Converts two float32 to bfloat16, rounded to nearest even; `low` comes first in memory.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Stores four 8×8 matrices of 16-bit elements: lane i gives the address of row i%8 of matrix i/8, and register r of
// lane l holds the elements (l/4, 2·(l%4)) and (l/4, 2·(l%4) + 1) of matrix r.
__device__ __forceinline__ void stmatrix_x4(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x2(void* row, uint32_t r0, uint32_t r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(r0), "r"(r1)
                 : "memory");
}

// stmatrix_x4 of transposed matrices: registers hold columns of what becomes rows in memory.
__device__ __forceinline__ void stmatrix_x4_trans(
    void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Loads four 8×8 matrices of 16-bit elements, which registers hold as for stmatrix_x4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ldmatrix_x4 of transposed matrices: register r of lane l holds the elements (2·(l%4), l/4) and (2·(l%4) + 1, l/4).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Adds to two neighboring float32 in global memory, 8-byte aligned, in the L2 cache.
__device__ __forceinline__ void red_add_v2(float* address, float x, float y) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}

// Adds to a float32 in global memory, in the L2 cache.
__device__ __forceinline__ void red_add(float* address, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}

}  // namespace ptx
