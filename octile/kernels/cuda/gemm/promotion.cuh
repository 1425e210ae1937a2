// Promotion: the accumulator of a k-block, times its scales, is added to FP32 totals on the CUDA cores.
//
// Hopper's FP8 tensor cores hold 13 fraction bits of a running sum, so a long sum loses its small terms. The
// accumulator therefore starts from zero in every k-block. Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.
//
// The order is fixed: scale = a_scale · b_scale, rounded; total = fma(accum, scale, total), rounded once.
#pragma once
#include "pipeline.cuh"

constexpr int num_accum = config::tile_n / 2;  // accumulator registers of a wave: 64 rows
// 1×128 scales of b are read from their stage during promotion, so the stage is released after it
constexpr bool release_after_promotion = b_row_scales && config::cached_b_scales < num_accum / 4;

// The scales of a thread for one wave of a k-block.
struct WaveScales {
    float rows[2];      // of a's rows r and r + 8
    float left, right;  // of 128×128 blocks, before and after the border between two
};

// The 1×128 scales of b for a thread's columns: pairs of neighbors, each 8 columns after the last.
struct ColumnScales {
    const float* scales;  // in shared memory
    float2 cached[config::cached_b_scales > 0 ? config::cached_b_scales : 1];

    // Reads the first pairs into registers.
    __device__ __forceinline__ void cache() {
#pragma unroll
        for (int i = 0; i < config::cached_b_scales; ++i) cached[i] = *reinterpret_cast<const float2*>(scales + 8 * i);
    }

    __device__ __forceinline__ float2 operator[](int pair) const {
        return pair < config::cached_b_scales ? cached[pair] : *reinterpret_cast<const float2*>(scales + 8 * pair);
    }
};

// Products of both operands' scales for one wave: two or four with 128×128 scales; with 1×128 scales of b one per
// element.
struct ScaleProducts {
    // `border`: the first column of the tile that belongs to the second block of columns.
    __device__ __forceinline__ ScaleProducts(const WaveScales& scales, const ColumnScales& columns, int border)
        : scales(scales), columns(columns), border(border) {
        if constexpr (config::b_scales == per_block) {
            for (int i = 0; i < 2; ++i) left[i] = __fmul_rn(scales.rows[i], scales.left);
            if constexpr (two_b_blocks)
                for (int i = 0; i < 2; ++i) right[i] = __fmul_rn(scales.rows[i], scales.right);
        }
    }

    // Those of registers j … j+3: two neighboring columns in row r, and in row r + 8.
    __device__ __forceinline__ void at(int j, float (&four)[4]) const {
        if constexpr (b_row_scales) {
            const float2 b = columns[j / 4];
            four[0] = __fmul_rn(a_row_scales ? scales.rows[0] : scales.left, b.x);
            four[1] = __fmul_rn(a_row_scales ? scales.rows[0] : scales.left, b.y);
            four[2] = a_row_scales ? __fmul_rn(scales.rows[1], b.x) : four[0];
            four[3] = a_row_scales ? __fmul_rn(scales.rows[1], b.y) : four[1];
        } else {
            constexpr int same_side = gcd(config::tile_n, 128);  // so many columns are on one side of any border
            const bool past = two_b_blocks && 2 * j / same_side * same_side >= border;
            for (int i = 0; i < 4; ++i) four[i] = past ? right[i / 2] : left[i / 2];
        }
    }

private:
    const WaveScales& scales;
    const ColumnScales& columns;
    int border;
    float left[2], right[2];
};

// total += accum · scales
__device__ __forceinline__ void promote(
    float (&total)[num_accum], const float (&accum)[num_accum], const ScaleProducts& products) {
#pragma unroll
    for (int j = 0; j < num_accum; j += 4) {
        if constexpr (config::a_scales == per_tensor) {  // the epilogue multiplies by the only scale
            for (int i = 0; i < 4; ++i) total[j + i] = __fadd_rn(total[j + i], accum[j + i]);
        } else {
            float scale[4];
            products.at(j, scale);
            for (int i = 0; i < 4; ++i) total[j + i] = __fmaf_rn(accum[j + i], scale[i], total[j + i]);
        }
    }
}
