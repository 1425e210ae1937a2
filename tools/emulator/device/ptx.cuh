// Emulated octile/kernels/cuda/jit/ptx.cuh: the same functions, with bodies that call the emulator's core.
#pragma once
#include "cuda.h"

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

constexpr uint32_t all_lanes = 0xFFFFFFFF;  // the mask of a whole warp

namespace emulator {
enum Format { e4m3, e5m2, f16, bf16, tf32 };  // of wgmma

struct Rows {
    uint32_t registers[4];
    int count;
    bool transposed;
};
// What a lane brings to mma_f16 or mma_bf16, and where its part of the result is.
struct Fragments {
    uint32_t a[4], b[2];
    float* d;
};
void mma(const Fragments& of_lane, bool bfloat16);
void store_cluster(uint32_t to, uint32_t value);
void cluster_sync();
void wait_for_previous();
void setmaxnreg(int registers, bool decrease);
void mbarrier_init(uint64_t& barrier, uint32_t count);
void mbarrier_arrive(uint64_t& barrier, uint32_t rank, uint32_t bytes);
void mbarrier_wait(uint64_t& barrier, uint32_t parity);
bool mbarrier_try_wait(uint64_t& barrier, uint32_t parity);
void fence_mbarrier_init();
void fence_proxy_async();
void tma_load(void* to, const TensorMap* map, uint64_t& barrier, const int* place, int dimensions, uint32_t blocks);
void tma_store(const TensorMap* map, const void* from, const int* place, int dimensions, bool add);
void tma_prefetch(const TensorMap* map, const int* place, int dimensions);
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t& barrier);
void bulk_prefetch(const void* from, uint32_t bytes);
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void bulk_store(void* to, const void* from, uint32_t bytes);
void cp_async_16(void* to, const void* from, bool reads);
void arrive_after_copies(uint64_t& barrier);
void copy_async(void* to, const void* from, uint32_t bytes);
void copy_async_commit();
void copy_async_wait(int groups);
void bulk_commit_group();
void bulk_wait_group_read(int groups);
void wgmma_fence();
// Operand a is a descriptor, or four registers of each thread.
void wgmma(float* d, int count, uint64_t a, uint64_t b, bool accumulate, int a_format, int b_format,
           const uint32_t* a_registers = nullptr, bool a_transposed = false, bool b_transposed = false);
void wgmma_commit_group();
void wgmma_wait_group(int groups);
void stmatrix(void* row, const Rows& rows);
void ldmatrix(uint32_t (&registers)[4], const void* row, bool transposed);
}  // namespace emulator

namespace ptx {

inline uint8_t* dynamic_shared() { return emulator::self->shared; }
inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline uint32_t lane_id() { return threadIdx.x % 32; }
inline float load_in_order(const float* address) { return __ldg(address); }
inline int opaque(int value) { return value; }
inline bool elect_one() {  // not lane 0: a kernel must not rely on it
    __syncwarp();
    return lane_id() == 31;
}
inline uint32_t cluster_ctarank() { return emulator::self->rank; }
inline uint32_t cluster_address(const void* pointer, uint32_t rank) { return rank << 24 | shared_address(pointer); }
inline void cluster_sync() { emulator::cluster_sync(); }
inline void named_barrier_sync(uint32_t id, uint32_t threads) { emulator::named_barrier(id, threads, true); }
inline void named_barrier_arrive(uint32_t id, uint32_t threads) { emulator::named_barrier(id, threads, false); }

template <int registers>
void setmaxnreg_dec() {
    emulator::setmaxnreg(registers, true);
}
template <int registers>
void setmaxnreg_inc() {
    emulator::setmaxnreg(registers, false);
}

struct Mbarrier {
    uint64_t state;

    void init(uint32_t count) { emulator::mbarrier_init(state, count); }
    void arrive() { emulator::mbarrier_arrive(state, cluster_ctarank(), 0); }
    void arrive_cluster(uint32_t rank) { emulator::mbarrier_arrive(state, rank, 0); }
    void arrive_expect_tx(uint32_t bytes) { emulator::mbarrier_arrive(state, cluster_ctarank(), bytes); }
    void arrive_after_copies() { emulator::arrive_after_copies(state); }
    bool try_wait(uint32_t parity, bool predicate) { return !predicate || emulator::mbarrier_try_wait(state, parity); }
    void wait(uint32_t parity) { emulator::mbarrier_wait(state, parity); }
};

inline void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
inline void fence_proxy_async() { emulator::fence_proxy_async(); }

inline void prefetch_tensormap(const TensorMap* map) {}
inline void tma_load(void* to, const TensorMap* map, Mbarrier* barrier, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::tma_load(to, map, barrier->state, place, 3, 1u << cluster_ctarank());
}
inline void tma_load_once(void* to, const TensorMap* map, Mbarrier* barrier, int x, int y, int z) {
    tma_load(to, map, barrier, x, y, z);
}
inline void tma_load_multicast(
    void* to, const TensorMap* map, Mbarrier* barrier, int x, int y, int z, uint16_t blocks) {
    const int place[] = {x, y, z};
    emulator::tma_load(to, map, barrier->state, place, 3, blocks);
}
inline void tma_store(const TensorMap* map, const void* from, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::tma_store(map, from, place, 3, false);
}
inline void tma_reduce_add(const TensorMap* map, const void* from, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::tma_store(map, from, place, 3, true);
}
inline void tma_prefetch(const TensorMap* map, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::tma_prefetch(map, place, 3);
}
inline void bulk_load(void* to, const void* from, uint32_t bytes, Mbarrier* barrier) {
    emulator::bulk_load(to, from, bytes, barrier->state);
}
inline void bulk_store(void* to, const void* from, uint32_t bytes) { emulator::bulk_store(to, from, bytes); }
inline void bulk_prefetch(const void* from, uint32_t bytes) { emulator::bulk_prefetch(from, bytes); }
inline void prefetch_line(const void* from) { emulator::bulk_prefetch(from, 16); }
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    emulator::bulk_copy(to, from, bytes, barrier);
}
inline void cp_async_16(void* to, const void* from, bool reads) { emulator::cp_async_16(to, from, reads); }
inline void store_cluster(uint32_t to, uint32_t value) { emulator::store_cluster(to, value); }
inline void cp_async_16(void* to, const void* from) { emulator::copy_async(to, from, 16); }
inline void cp_async_4(void* to, const void* from) { emulator::copy_async(to, from, 4); }
inline void cp_async_commit_group() { emulator::copy_async_commit(); }
template <int groups>
void cp_async_wait_group() {
    emulator::copy_async_wait(groups);
}
inline void bulk_commit_group() { emulator::bulk_commit_group(); }
template <int groups>
void bulk_wait_group_read() {
    emulator::bulk_wait_group_read(groups);
}

template <int row_bytes = 128>
uint64_t wgmma_descriptor(const void* tile) {
    const uint64_t swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
    return swizzle << 62 | (8ull * row_bytes >> 4) << 32 | 1ull << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}
inline uint64_t wgmma_transposed_descriptor(const void* tile, uint32_t distance) {
    return 1ull << 62 | (1024ull >> 4) << 32 | uint64_t(distance >> 4) << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}
inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit_group() { emulator::wgmma_commit_group(); }
template <int groups>
void wgmma_wait_group() {
    emulator::wgmma_wait_group(groups);
}
inline void warpgroup_fence_operand(float& value) {}

inline void launch_dependents() {}
inline void wait_for_previous() { emulator::wait_for_previous(); }
inline void wait_and_launch_dependents() { wait_for_previous(); }
inline uint4 load_weight_16(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("load_weight_16: the address is not 16-byte aligned");
    return *static_cast<const uint4*>(from);
}
inline uint2 load_weight_8(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 8) emulator::fail("load_weight_8: the address is not 8-byte aligned");
    return *static_cast<const uint2*>(from);
}

inline void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    emulator::mma({{a0, a1, a2, a3}, {b0, b1}, d}, false);
}
inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    emulator::mma({{a0, a1, a2, a3}, {b0, b1}, d}, true);
}

inline uint32_t pack_bf16(float low, float high) {
    auto round = [](float x) -> uint32_t {
        if (x != x) return 0x7FFF;
        const uint32_t bits = __float_as_uint(x);
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    };
    return round(high) << 16 | round(low);
}

inline void stmatrix_x4(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    emulator::stmatrix(row, {{r0, r1, r2, r3}, 4, false});
}
inline void stmatrix_x2(void* row, uint32_t r0, uint32_t r1) { emulator::stmatrix(row, {{r0, r1}, 2, false}); }
inline void stmatrix_x4_trans(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    emulator::stmatrix(row, {{r0, r1, r2, r3}, 4, true});
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { emulator::ldmatrix(r, row, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { emulator::ldmatrix(r, row, true); }

inline void red_add_v2(float* address, float x, float y) {
    if (reinterpret_cast<uintptr_t>(address) % 8) emulator::fail("red_add_v2: the address is not 8-byte aligned");
    address[0] += x;
    address[1] += y;
}
inline void red_add(float* address, float x) { *address += x; }

}  // namespace ptx
