// Probe of wgmma: each thread block runs a chain of instructions, d[64, columns] = c + a[64, K] · b[columns, K]ᵀ.
//
// Constants: `columns`; `steps`, the length of the chain, up to four instructions of 32 bytes of K; `half`,
// accumulators in FP16 instead of FP32.
#include "ptx.cuh"
#include "wgmma.cuh"

namespace probe {

constexpr int tile_rows = 64, threads = 128;
constexpr int chunk = 16;      // bytes that the swizzle moves together
constexpr int tile_row = 128;  // bytes of a row in shared memory
constexpr int row = 32 * config::steps;

// Two neighboring accumulators are two words, or one word in FP16; see `header` in wgmma.py.
template <bool half> struct Accumulators { using Word = float; };
template <> struct Accumulators<true> { using Word = uint32_t; };
using Word = Accumulators<config::half>::Word;
constexpr int pair = config::half ? 1 : 2;
constexpr int words = config::columns / 4 * pair;  // of a thread

// Offset of a thread's word from its first one, in a matrix with rows of `row_words` words.
__device__ __forceinline__ int64_t offset_of(int word, int row_words) {
    return word / (2 * pair) * 4 * pair + word / pair % 2 * 8 * int64_t(row_words) + word % pair;
}

using ptx::warpgroup_fence_operand;
__device__ __forceinline__ void warpgroup_fence_operand(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// Copies rows of global memory to a tile with the 128-byte swizzle.
__device__ __forceinline__ void copy(uint8_t* tile, const uint8_t* from, int rows) {
    for (int i = threadIdx.x; i < rows * (row / chunk); i += threads) {
        const int r = i / (row / chunk), column = i % (row / chunk);
        *reinterpret_cast<uint4*>(tile + r * tile_row + (column ^ r % 8) * chunk) =
            *reinterpret_cast<const uint4*>(from + r * row + column * chunk);
    }
}

}  // namespace probe

// Grid: (M / 64) · (N / columns) blocks of 128 threads. a[M, K], b[N, K], c[M, N], d[M, N].
extern "C" __global__ void __launch_bounds__(probe::threads) probe_wgmma(
    const uint8_t* a, const uint8_t* b, const probe::Word* c, probe::Word* d, int n) {
    constexpr int columns = config::columns;
    uint8_t* a_tile = ptx::dynamic_shared();
    uint8_t* b_tile = a_tile + probe::tile_rows * probe::tile_row;
    const int64_t m0 = int(blockIdx.x) / (n / columns) * probe::tile_rows;
    const int64_t n0 = int(blockIdx.x) % (n / columns) * columns;
    probe::copy(a_tile, a + m0 * probe::row, probe::tile_rows);
    probe::copy(b_tile, b + n0 * probe::row, columns);
    ptx::fence_proxy_async();
    __syncthreads();

    const int row_words = n / 2 * probe::pair;
    const int64_t row = m0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t first = row * row_words + (n0 / 2 + threadIdx.x % 4) * probe::pair;
    probe::Word accum[probe::words];
    for (int i = 0; i < probe::words; ++i) accum[i] = c[first + probe::offset_of(i, row_words)];

    ptx::wgmma_fence();
    for (int step = 0; step < config::steps; ++step)
        ptx::wgmma(accum, ptx::wgmma_descriptor(a_tile) + 2 * step, ptx::wgmma_descriptor(b_tile) + 2 * step, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    for (int i = 0; i < probe::words; ++i) probe::warpgroup_fence_operand(accum[i]);
    for (int i = 0; i < probe::words; ++i) d[first + probe::offset_of(i, row_words)] = accum[i];
}
