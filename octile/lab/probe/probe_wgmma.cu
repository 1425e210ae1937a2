// One chain of wgmma instructions a block: d[64, columns] = c + a[64, K] · b[columns, K]ᵀ, nothing else done to the sums.
//
// Constants: columns; steps, the chain's length, up to four, of 32 bytes of K each.
#include "ptx.cuh"
#include "wgmma.cuh"

namespace probe {

constexpr int tile_rows = 64, threads = 128;
constexpr int chunk = 16;      // bytes that the swizzle keeps together
constexpr int tile_row = 128;  // bytes of a row in shared memory
constexpr int row = 32 * config::steps;

// Rows of global memory into a tile with the 128-byte swizzle.
__device__ __forceinline__ void copy(uint8_t* tile, const uint8_t* from, int rows) {
    for (int i = threadIdx.x; i < rows * (row / chunk); i += threads) {
        const int r = i / (row / chunk), place = i % (row / chunk);
        *reinterpret_cast<uint4*>(tile + r * tile_row + (place ^ r % 8) * chunk) =
            *reinterpret_cast<const uint4*>(from + r * row + place * chunk);
    }
}

}  // namespace probe

// Grid: (M / 64) · (N / columns) blocks of 128 threads. a[M, K], b[N, K], c[M, N], d[M, N].
extern "C" __global__ void __launch_bounds__(probe::threads) probe_wgmma(
    const uint8_t* a, const uint8_t* b, const float* c, float* d, int n) {
    constexpr int columns = config::columns;
    uint8_t* a_tile = ptx::dynamic_shared();
    uint8_t* b_tile = a_tile + probe::tile_rows * probe::tile_row;
    const int64_t m0 = int(blockIdx.x) / (n / columns) * probe::tile_rows;
    const int64_t n0 = int(blockIdx.x) % (n / columns) * columns;
    probe::copy(a_tile, a + m0 * probe::row, probe::tile_rows);
    probe::copy(b_tile, b + n0 * probe::row, columns);
    ptx::fence_async_shared();
    __syncthreads();

    // where this thread's accumulators lie: wgmma.py, `header`
    const int64_t first = (m0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * n + n0 + threadIdx.x % 4 * 2;
    float sums[columns / 2];
    for (int i = 0; i < columns / 2; ++i) sums[i] = c[first + i / 4 * 8 + i / 2 % 2 * 8 * int64_t(n) + i % 2];

    ptx::wgmma_fence();
    for (int step = 0; step < config::steps; ++step)
        ptx::wgmma(sums, ptx::tile_descriptor(a_tile) + 2 * step, ptx::tile_descriptor(b_tile) + 2 * step, true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < columns / 2; ++i) ptx::pin(sums[i]);
    for (int i = 0; i < columns / 2; ++i) d[first + i / 4 * 8 + i / 2 % 2 * 8 * int64_t(n) + i % 2] = sums[i];
}
