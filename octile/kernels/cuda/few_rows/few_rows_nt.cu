// y[rows, n] = quantized x · weightᵀ in bfloat16 for at most 8 rows. x may be normalized first, and rows added to the
// result.
//
// A thread block computes 16 columns of y. See fp8_tile.cuh and fp8_rows.cuh.
#include "fp8_tile.cuh"

namespace smem {
constexpr int rows = 0, sums = (Fp8Rows::bytes + 15) / 16 * 16;
static_assert(sums + WarpSums::bytes == config::shared_bytes, "launcher.py computes the same");
}  // namespace smem

// x: [rows, K] bfloat16 with strides x_row and 1. norm_weight: [K]. weight: [n, K] E4M3, scales: [⌈n/128⌉, ⌈K/128⌉].
// add: [rows, n] bfloat16 with strides add_row and 1. y: [rows, n] bfloat16, contiguous.
extern "C" __global__ void __launch_bounds__(threads, config::blocks)
few_rows_nt(const uint16_t* x, int64_t x_row, const uint8_t* norm_weight, float eps, const uint8_t* weight,
            const float* scales, const uint16_t* add, int64_t add_row, uint16_t* y, int n) {
    uint8_t* shared = ptx::dynamic_shared();
    const int first = blockIdx.x * tile_rows;
    const Lane lane;
    const Fp8Rows x_rows(shared + smem::rows, norm_weight);
    const WarpSums sums{reinterpret_cast<float*>(shared + smem::sums)};
    Fp8Tile tile(lane, weight, scales, first, n);
    ptx::wait_for_previous();
    ptx::launch_dependents();
    x_rows.quantize(x, x_row, eps);
    __syncthreads();
    float d[4];
    tile.multiply(d, x_rows);
    sums.put(d, lane);
    __syncthreads();
    const int row = threadIdx.x / tile_rows, column = first + threadIdx.x % tile_rows;
    if (row >= config::rows || column >= n) return;
    float total = sums.get(row, threadIdx.x % tile_rows);
    if constexpr (config::add) total = from_bf16(to_bf16(total)) + from_bf16(add[row * add_row + column]);
    y[static_cast<int64_t>(row) * n + column] = to_bf16(total);
}
