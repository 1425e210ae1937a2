// The sums of 128 products that the tensor cores give, times their scales, added in FP32 outside of them.
//
// Hopper's FP8 tensor cores keep 13 fraction bits of a running sum, so that a long sum loses its small terms. Each step
// starts from zero. Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.
//
// In exactly this order: scale = a_scale · b_scale, rounded; total = fma(sum, scale, total), rounded once.
#pragma once
#include "memory.cuh"

constexpr int count = config::tile_n / 2;  // accumulator registers of 64 rows
constexpr bool one_is_block = config::a_scales == per_block || config::b_scales == per_block;
constexpr bool two_blocks = config::b_scales == per_block && 128 % config::tile_n != 0;  // of columns in a tile

// The scales of one row of 128×128 blocks. Lane i reads the one of step i, and the next 32 are on their way: no product
// waits for them.
class BlockScales {
public:
    __device__ __forceinline__ BlockScales(const float* row, int64_t stride, int steps)
        : row(row), stride(stride), steps(steps), now(0), next(read(0)) {}

    __device__ __forceinline__ float at(int step) {
        if (step % 32 == 0) {
            now = next;
            next = read(step + 32);
        }
        return __shfl_sync(~0u, now, step % 32);
    }

private:
    __device__ __forceinline__ float read(int step) const {
        step += ptx::lane();
        return step < steps ? __ldg(row + step * stride) : 0.0f;
    }

    const float* row;
    int64_t stride;
    int steps;
    float now, next;
};

// What a thread needs to scale its part of one step.
struct Factors {
    int stage;             // that the step is read from
    float rows[2];         // scales of a's rows r and r + 8
    const float* columns;  // those of b's rows, in shared memory, from the thread's first on
    float left, right;     // those of blocks, before and after the border between two
};

// total += sum · scales. `border`: the first column of the tile that belongs to the second block of columns.
__device__ __forceinline__ void promote(
    float (&total)[count], const float (&sum)[count], const Factors& f, int border) {
    if constexpr (b_rows) {
#pragma unroll
        for (int j = 0; j < count; j += 4) {
            const float2 b = *reinterpret_cast<const float2*>(f.columns + 2 * j);
            const float a = a_rows ? f.rows[0] : f.left;
            const float x = __fmul_rn(a, b.x), y = __fmul_rn(a, b.y);
            const float z = a_rows ? __fmul_rn(f.rows[1], b.x) : x, w = a_rows ? __fmul_rn(f.rows[1], b.y) : y;
            total[j] = __fmaf_rn(sum[j], x, total[j]);
            total[j + 1] = __fmaf_rn(sum[j + 1], y, total[j + 1]);
            total[j + 2] = __fmaf_rn(sum[j + 2], z, total[j + 2]);
            total[j + 3] = __fmaf_rn(sum[j + 3], w, total[j + 3]);
        }
    } else if constexpr (config::b_scales == per_block) {
        const float left[2] = {__fmul_rn(f.rows[0], f.left), __fmul_rn(f.rows[1], f.left)};
        const float right[2] = {__fmul_rn(f.rows[0], f.right), __fmul_rn(f.rows[1], f.right)};
        constexpr int same = greatest_divisor(config::tile_n, 128);  // so many columns lie on one side of any border
#pragma unroll
        for (int first = 0; first < config::tile_n; first += same) {
            const bool past = two_blocks && first >= border;
            const float upper = past ? right[0] : left[0], lower = past ? right[1] : left[1];
#pragma unroll
            for (int j = first / 2; j < (first + same) / 2; j += 4) {
                total[j] = __fmaf_rn(sum[j], upper, total[j]);
                total[j + 1] = __fmaf_rn(sum[j + 1], upper, total[j + 1]);
                total[j + 2] = __fmaf_rn(sum[j + 2], lower, total[j + 2]);
                total[j + 3] = __fmaf_rn(sum[j + 3], lower, total[j + 3]);
            }
        }
    } else {  // one scale for all is multiplied in at the end
#pragma unroll
        for (int j = 0; j < count; ++j) total[j] = __fadd_rn(total[j], sum[j]);
    }
}
