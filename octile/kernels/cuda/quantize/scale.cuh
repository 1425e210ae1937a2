// A block's scale, and its values divided by it: bit for bit what `octile.ops.quantize` specifies.
//
// A division takes a dozen instructions, so there is one a block. With r = 1 / scale, cut off toward zero, 1 − scale · r
// is r's relative error e, exactly and never negative, and
//
//     value / scale = value · r / (1 − e) ≈ value · r + value · (r · (e + e²))
//
// where a fused multiply-add sums without a rounding in between: two instructions a value, and zeros keep their sign.
//
// NOTES
// - The sum is off by less than 13 · 2⁻⁴⁹ of itself before it is rounded. Such a sum decides between two codes as the
//   FP32 quotient does, unless the scale lies within 13 units in the last place of a number with 8 significant bits:
//   there a value can come that close to where FP32 rounds to the middle between two codes. Of these scales all were
//   tried, with all such values (`tests/kernels/cuda/test_scale.py`): wrong are some that lie one to three units below.
// - So for a scale four units below or closer, and for one whose r · e would lose bits below 2⁻¹²⁶, r is the nearest
//   number, and the sum takes four instructions: it is the portable kernels' (octile/kernels/triton/scaling.py).
//   Source of the method: Brisebarre, Muller and Raina, IEEE Trans. Computers 53(8), 2004.
// - A power of two needs none of that: its reciprocal is exact.
#pragma once
#include "convert.cuh"

enum Dtype { float32, bfloat16, float16, e4m3, e5m2, int8, e5m6 };

template <int format>
__device__ constexpr float largest() {
    return format == e4m3 ? 448.0f : format == e5m2 ? 57344.0f : format == int8 ? 127.0f : 65024.0f;
}

// Of a number that is not negative.
__device__ __forceinline__ bool is_finite(float x) { return x < __uint_as_float(0x7F800000); }

// From the largest magnitude of a block, rounded once; NaN stays. 1 / the format's largest number is in two FP32 numbers.
template <int format, bool power_of_2>
__device__ __forceinline__ float scale_of(float amax) {
    constexpr double exact = 1.0 / largest<format>();
    constexpr float inverse = exact, rest = exact - inverse;
    const bool small = amax < 0x1p-60f;  // the product with `rest` would lose bits
    const float number = small ? __fmul_rn(amax, 0x1p64f) : amax;
    float scale = __fmaf_rn(number, inverse, __fmul_rn(number, rest));
    scale = is_finite(number) ? scale : number;
    scale = small ? __fmul_rn(scale, 0x1p-64f) : scale;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    if constexpr (power_of_2) {
        // an all-ones mantissa carries into the exponent unless the number is a power of two already
        const float rounded_up = __uint_as_float((__float_as_uint(scale) + 0x7FFFFF) & 0x7F800000);
        scale = scale == scale ? rounded_up : scale;
    }
    return amax == 0.0f ? 1.0f : scale;
}

// What values are divided by: r, and r · (e + e²); where care is needed −r, and e + e².
struct Divisor {
    float inverse, rest;

    __device__ __forceinline__ bool needs_care() const { return __float_as_int(inverse) < 0; }

    template <bool power_of_2>
    __device__ __forceinline__ float divide(float value) const {
        if constexpr (power_of_2) return __fmul_rn(value, inverse);
        return __fmaf_rn(value, inverse, __fmul_rn(value, rest));
    }

    // By any divisor.
    __device__ __forceinline__ float divide_carefully(float value) const {
        const float r = fabsf(inverse), near = __fmul_rn(value, needs_care() ? r : 1.0f);
        const float sum = __fmaf_rn(value, r, __fmul_rn(near, rest));
        return __uint_as_float(__float_as_uint(sum) | (__float_as_uint(value) & 0x80000000));  // −0 became +0
    }
};

// Of a scale from 2⁻¹²⁶ to 2¹²⁵, Inf or NaN.
template <bool power_of_2>
__device__ __forceinline__ Divisor divisor_of(float scale) {
    const float guess = ptx::reciprocal(scale);
    const float better = __fmaf_rn(guess, __fmaf_rn(-scale, guess, 1.0f), guess);
    const float nearest = is_finite(scale) ? better : guess;  // 0 of Inf
    if constexpr (power_of_2) return {nearest, 0.0f};

    const float near_error = __fmaf_rn(-scale, nearest, 1.0f);
    const float r = near_error < 0.0f ? __uint_as_float(__float_as_uint(nearest) - 1) : nearest;
    const float error = __fmaf_rn(-scale, r, 1.0f);
    const float rest = __fmul_rn(r, __fmaf_rn(error, error, error));

    const unsigned beside = __float_as_uint(scale) & 0xFFFF;  // above a number with 8 significant bits
    const bool care = scale > 0x1p64f || beside >= 0x10000 - 4;
    const float careful_rest = __fmaf_rn(near_error, near_error, near_error);
    // x / Inf is 0, but NaN of Inf; x / NaN is NaN
    return {!is_finite(scale) ? nearest : care ? -nearest : r, !is_finite(scale) ? 0.0f : care ? careful_rest : rest};
}
