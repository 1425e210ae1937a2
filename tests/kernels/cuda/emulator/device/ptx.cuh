// Stands in for octile/kernels/cuda/include/ptx.cuh: the same names, with bodies that run in the emulator's core.
#pragma once
#include "cuda.h"

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

namespace emulator {
enum Format { e4m3, e5m2, f16, bf16, tf32 };  // of wgmma

struct Rows {
    uint32_t registers[4];
    int count;
    bool transposed;
};
void cluster_sync();
void set_registers(int registers, bool give);
void init(uint64_t& barrier, uint32_t count);
void arrive(uint64_t& barrier, uint32_t rank, uint32_t bytes);
void wait(uint64_t& barrier, uint32_t parity);
bool ask(uint64_t& barrier, uint32_t parity);
void fence_barrier_init();
void fence_async_shared();
void load(void* to, const TensorMap* map, uint64_t& barrier, const int* place, int dimensions, uint32_t blocks);
void store(const TensorMap* map, const void* from, const int* place, int dimensions, bool add);
void store_bytes(void* to, const void* from, uint32_t bytes);
void commit_stores();
void wait_stores_read(int groups);
void wgmma_fence();
void wgmma(float* d, int count, uint64_t a, uint64_t b, bool accumulate, int a_format, int b_format);
void wgmma_commit();
void wgmma_wait(int groups);
void store_matrix(void* row, const Rows& rows);
}  // namespace emulator

namespace ptx {

inline uint8_t* dynamic_shared() { return emulator::self->shared; }
inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline uint32_t lane() { return threadIdx.x % 32; }
inline bool elect() {  // not the first lane, on which nobody should rely
    __syncwarp();
    return lane() == 31;
}
inline uint32_t cluster_rank() { return emulator::self->rank; }
inline void cluster_sync() { emulator::cluster_sync(); }
inline void named_barrier_sync(uint32_t id, uint32_t threads) { emulator::named_barrier(id, threads, true); }
inline void named_barrier_arrive(uint32_t id, uint32_t threads) { emulator::named_barrier(id, threads, false); }

template <int registers>
void give_registers() {
    emulator::set_registers(registers, true);
}
template <int registers>
void take_registers() {
    emulator::set_registers(registers, false);
}

struct Barrier {
    uint64_t state;

    void init(uint32_t count) { emulator::init(state, count); }
    void arrive() { emulator::arrive(state, cluster_rank(), 0); }
    void arrive_at(uint32_t rank) { emulator::arrive(state, rank, 0); }
    void arrive_and_expect(uint32_t bytes) { emulator::arrive(state, cluster_rank(), bytes); }
    bool ask(uint32_t parity, bool really) { return !really || emulator::ask(state, parity); }
    void wait(uint32_t parity) { emulator::wait(state, parity); }
};

inline void fence_barrier_init() { emulator::fence_barrier_init(); }
inline void fence_async_shared() { emulator::fence_async_shared(); }

inline void prefetch_map(const TensorMap* map) {}
inline void load_3d(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::load(to, map, barrier->state, place, 3, 1u << cluster_rank());
}
inline void load_3d_multicast(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z, uint16_t blocks) {
    const int place[] = {x, y, z};
    emulator::load(to, map, barrier->state, place, 3, blocks);
}
inline void store_3d(const TensorMap* map, const void* from, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::store(map, from, place, 3, false);
}
inline void add_3d(const TensorMap* map, const void* from, int x, int y, int z) {
    const int place[] = {x, y, z};
    emulator::store(map, from, place, 3, true);
}
inline void store_bytes(void* to, const void* from, uint32_t bytes) { emulator::store_bytes(to, from, bytes); }
inline void commit_stores() { emulator::commit_stores(); }
template <int groups>
void wait_stores_read() {
    emulator::wait_stores_read(groups);
}

inline uint64_t tile_descriptor(const void* tile) {
    return 1ull << 62 | (1024ull >> 4) << 32 | 1ull << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}
inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int groups>
void wgmma_wait() {
    emulator::wgmma_wait(groups);
}
inline void pin(float& value) {}

inline uint32_t pack_bf16(float low, float high) {
    auto round = [](float x) -> uint32_t {
        if (x != x) return 0x7FFF;
        const uint32_t bits = __float_as_uint(x);
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    };
    return round(high) << 16 | round(low);
}

inline void store_matrix_4(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    emulator::store_matrix(row, {{r0, r1, r2, r3}, 4, false});
}
inline void store_matrix_2(void* row, uint32_t r0, uint32_t r1) { emulator::store_matrix(row, {{r0, r1}, 2, false}); }
inline void store_matrix_4_transposed(void* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    emulator::store_matrix(row, {{r0, r1, r2, r3}, 4, true});
}

inline void add_global_2(float* address, float x, float y) {
    if (reinterpret_cast<uintptr_t>(address) % 8) emulator::fail("add_global_2: the address is not 8-byte aligned");
    address[0] += x;
    address[1] += y;
}
inline void add_global(float* address, float x) { *address += x; }

}  // namespace ptx
