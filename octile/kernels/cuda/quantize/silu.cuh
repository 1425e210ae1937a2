// The logistic function, by the GPU's own exponential and reciprocal.
//
// silu(g) = g · sigmoid(g) is within (4 + |g|) · 2⁻²² of its value, relatively. The reciprocal is that of (1 + e⁻ᵍ) / 16:
// of a larger number it would fall below 2⁻¹²⁶, which the instruction does not keep.
#pragma once
#include "convert.cuh"

__device__ __forceinline__ float sigmoid(float x) {
    constexpr float log2_e = 1.44269504f;
    const float power = ptx::exp2(__fmul_rn(x, -log2_e));  // Inf where e⁻ˣ is
    return __fmul_rn(ptx::reciprocal(__fmaf_rn(power, 0.0625f, 0.0625f)), 0.0625f);
}
