// The sums of 128 products that the tensor cores give, times their scales, added in FP32 outside of them.
//
// Hopper's FP8 tensor cores keep 13 fraction bits of a running sum, so that a long sum loses its small terms. Each step
// starts from zero. Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.
//
// In exactly this order: scale = a_scale · b_scale, rounded; total = fma(sum, scale, total), rounded once.
#pragma once
#include "pipeline.cuh"

constexpr int count = config::tile_n / 2;  // accumulator registers of 64 rows
constexpr bool reads_late = b_rows && config::cached_b_scales < count / 4;  // scales in a stage, after its products

// What a thread needs to scale its part of one step.
struct Factors {
    float rows[2];      // scales of a's rows r and r + 8
    float left, right;  // those of blocks, before and after the border between two
};

// The scales of b's rows that belong to a thread's columns: pairs of neighbours, each 8 columns after the last.
struct Columns {
    const float* scales;  // in shared memory
    float2 held[config::cached_b_scales > 0 ? config::cached_b_scales : 1];

    // Reads the first ones into registers.
    __device__ __forceinline__ void hold() {
#pragma unroll
        for (int i = 0; i < config::cached_b_scales; ++i) held[i] = *reinterpret_cast<const float2*>(scales + 8 * i);
    }

    __device__ __forceinline__ float2 operator[](int pair) const {
        return pair < config::cached_b_scales ? held[pair] : *reinterpret_cast<const float2*>(scales + 8 * pair);
    }
};

// The products of scales for 64 rows of a step: with blocks there are two or four, with rows of b one for each number.
struct Products {
    // `border`: the first column of the tile that belongs to the second block of columns.
    __device__ __forceinline__ Products(const Factors& f, const Columns& columns, int border)
        : f(f), columns(columns), border(border) {
        if constexpr (config::b_scales == per_block) {
            for (int i = 0; i < 2; ++i) left[i] = __fmul_rn(f.rows[i], f.left);
            if constexpr (two_blocks)
                for (int i = 0; i < 2; ++i) right[i] = __fmul_rn(f.rows[i], f.right);
        }
    }

    // Those of registers j … j+3: two neighbouring columns in row r, and in row r + 8.
    __device__ __forceinline__ void at(int j, float (&four)[4]) const {
        if constexpr (b_rows) {
            const float2 b = columns[j / 4];
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
    const Factors& f;
    const Columns& columns;
    int border;
    float left[2], right[2];
};

// total += sum · scales
__device__ __forceinline__ void promote(float (&total)[count], const float (&sum)[count], const Products& products) {
#pragma unroll
    for (int j = 0; j < count; j += 4) {
        if constexpr (config::a_scales == per_tensor) {  // one scale for all is multiplied in at the end
            for (int i = 0; i < 4; ++i) total[j + i] = __fadd_rn(total[j + i], sum[j + i]);
        } else {
            float scale[4];
            products.at(j, scale);
            for (int i = 0; i < 4; ++i) total[j + i] = __fmaf_rn(sum[j + i], scale[i], total[j + i]);
        }
    }
}
