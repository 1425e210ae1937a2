// The product of a k-block, 128 columns, of 16 rows of an FP8 weight with up to 8 rows of x; see fragments.cuh.
//
// E4M3 becomes FP16 exactly, whose products tensor cores sum in FP32: each half of the k-block separately, for a
// shorter chain of instructions. The sum of both is multiplied by the scales and added to the total.
#pragma once
#include "convert.cuh"
#include "fragments.cuh"

// d += a · b of four columns of each lane: a word of E4M3 of each of its two rows of the weight, and two words of FP16
// of its row of x.
__device__ __forceinline__ void multiply_word(float (&d)[4], uint32_t top, uint32_t bottom, uint32_t x0, uint32_t x1) {
    using ptx::e4m3_to_f16;
    ptx::mma_f16(d, e4m3_to_f16(top, false), e4m3_to_f16(bottom, false), e4m3_to_f16(top, true),
                 e4m3_to_f16(bottom, true), x0, x1);
}

// total += (half[0] + half[1]) times the scales of the lane's two rows of the weight and two rows of x.
__device__ __forceinline__ void add_scaled(
    float (&total)[4], const float (&half)[2][4], float top_scale, float bottom_scale, float2 x_scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float sum = __fadd_rn(half[0][i], half[1][i]);
        const float scale = __fmul_rn(i < 2 ? top_scale : bottom_scale, i % 2 ? x_scales.y : x_scales.x);
        total[i] = __fmaf_rn(sum, scale, total[i]);
    }
}
