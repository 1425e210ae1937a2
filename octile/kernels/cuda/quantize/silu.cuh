// The logistic function from the GPU's approximate exponential and reciprocal.
//
// The relative error of silu(g) = g · sigmoid(g) is at most (4 + |g|) · 2⁻²². The reciprocal is taken of (1 + e⁻ᵍ) /
// 16, since the instruction flushes results below 2⁻¹²⁶ to zero.
#pragma once
#include "convert.cuh"

__device__ __forceinline__ float sigmoid(float x) {
    constexpr float log2_e = 1.44269504f;
    const float power = ptx::exp2(__fmul_rn(x, -log2_e));  // e⁻ˣ, or Inf
    return __fmul_rn(ptx::reciprocal(__fmaf_rn(power, 0.0625f, 0.0625f)), 0.0625f);
}
