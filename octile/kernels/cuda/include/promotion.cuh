// The sums of 128 products that the tensor cores give, times their scales, added in FP32 outside of them.
//
// Hopper's FP8 tensor cores keep 13 fraction bits of a running sum, so that a long sum loses its small terms. Each step
// starts from zero. Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.
//
// In exactly this order: scale = a_scale · b_scale, rounded; total = fma(sum, scale, total), rounded once.
#pragma once
#include "memory.cuh"

constexpr int count = config::tile_n / 2;  // accumulator registers of 64 rows
constexpr bool two_blocks = config::b_scales == per_block && 128 % config::tile_n != 0;  // of columns in a tile

constexpr int most = count * 7 / 8 / 4 * 4;  // of them, see product.cu

// What a thread needs to scale its part of one step.
struct Factors {
    float rows[2];         // scales of a's rows r and r + 8
    const float* columns;  // those of b's rows, in shared memory, from the thread's first on
    float left, right;     // those of blocks, before and after the border between two
};

// The products of scales for 64 rows of a step: with blocks there are two or four, with rows of b one for each number.
struct Products {
    // `border`: the first column of the tile that belongs to the second block of columns.
    __device__ __forceinline__ Products(const Factors& f, int border) : f(f), border(border) {
        if constexpr (config::b_scales == per_block) {
            for (int i = 0; i < 2; ++i) left[i] = __fmul_rn(f.rows[i], f.left);
            if constexpr (two_blocks)
                for (int i = 0; i < 2; ++i) right[i] = __fmul_rn(f.rows[i], f.right);
        }
    }

    // Those of registers j … j+3: two neighbouring columns in row r, and in row r + 8.
    __device__ __forceinline__ void at(int j, float (&four)[4]) const {
        if constexpr (b_rows) {
            const float2 b = *reinterpret_cast<const float2*>(f.columns + 2 * j);
            four[0] = __fmul_rn(a_rows ? f.rows[0] : f.left, b.x);
            four[1] = __fmul_rn(a_rows ? f.rows[0] : f.left, b.y);
            four[2] = a_rows ? __fmul_rn(f.rows[1], b.x) : four[0];
            four[3] = a_rows ? __fmul_rn(f.rows[1], b.y) : four[1];
        } else {
            constexpr int same = greatest_divisor(config::tile_n, 128);  // so many columns lie on one side of any border
            const bool past = two_blocks && 2 * j / same * same >= border;
            for (int i = 0; i < 4; ++i) four[i] = past ? right[i / 2] : left[i / 2];
        }
    }

private:
    const Factors f;
    int border;
    float left[2], right[2];
};

// total += sum · scales, of registers first … end−1.
template <int first, int end>
__device__ __forceinline__ void promote(float (&total)[count], const float (&sum)[count], const Products& products) {
#pragma unroll
    for (int j = first; j < end; j += 4) {
        if constexpr (config::a_scales == per_tensor) {  // one scale for all is multiplied in at the end
            for (int i = 0; i < 4; ++i) total[j + i] = __fadd_rn(total[j + i], sum[j + i]);
        } else {
            float scale[4];
            products.at(j, scale);
            for (int i = 0; i < 4; ++i) total[j + i] = __fmaf_rn(sum[j + i], scale[i], total[j + i]);
        }
    }
}
