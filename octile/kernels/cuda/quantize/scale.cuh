// The scale of a block, and the division of its values by the scale, bit for bit as `octile.ops.quantize` specifies.
//
// A division takes a dozen instructions, so there is only one per block. Let r be 1 / scale truncated toward zero. Then
// e = 1 − scale · r, the relative error of r, is computed exactly and is never negative, and
//
//     value / scale = value · r / (1 − e) ≈ value · r + value · (r · (e + e²))
//
// A fused multiply-add sums this without an intermediate rounding: two instructions per value, and zeros keep their
// sign.
//
// NOTES
// - Before it is rounded, the sum has a relative error below 13 · 2⁻⁴⁹. It rounds to the same encoded value as the FP32
//   quotient, unless the scale lies within 13 units in the last place of a number with 8 significant bits: only then
//   can a quotient lie that close to the midpoint of two neighboring values of the format. A test tries all these
//   scales with all such values (tests/kernels/cuda/quantize/test_scale.py). Only scales one to three units below are
//   rounded wrongly.
// - Scales at most four units below such a number, and scales for which r · e would lose bits below 2⁻¹²⁶, therefore
//   take the careful division: r is 1 / scale rounded to nearest, and the sum takes four instructions, as in the Triton
//   kernels (octile/kernels/triton/scaling.py). Source of the method: Brisebarre, Muller and Raina, IEEE Trans.
//   Computers 53(8), 2004.
// - The reciprocal of a power of two is exact and needs no correction.
#pragma once
#include "convert.cuh"

// Element types of inputs and outputs; `launcher.py` has the same values.
enum Dtype { float32, bfloat16, float16, e4m3, e5m2, int8, e5m6 };

// The largest finite value of a format.
template <int format>
__device__ constexpr float max_value() {
    return format == e4m3 ? 448.0f : format == e5m2 ? 57344.0f : format == int8 ? 127.0f : 65024.0f;
}

// Whether x, which must not be negative, is neither Inf nor NaN.
__device__ __forceinline__ bool is_finite(float x) { return x < __uint_as_float(0x7F800000); }

// A scale rounded up to a number without these bits: adding them carries unless they are zeros. NaN stays.
template <uint32_t dropped_bits>
__device__ __forceinline__ float round_up(float scale) {
    const float rounded = __uint_as_float((__float_as_uint(scale) + dropped_bits) & ~dropped_bits);
    return scale == scale ? rounded : scale;
}

// The scale of a block from its amax: amax / max_value, rounded once; 1 for a block of zeros. NaN and Inf stay. The
// reciprocal of max_value is the sum of two FP32 numbers, `inverse` and `correction`.
template <int format, bool power_of_2>
__device__ __forceinline__ float scale_from_amax(float amax) {
    constexpr double exact = 1.0 / max_value<format>();
    constexpr float inverse = exact, correction = exact - inverse;
    const bool small = amax < 0x1p-60f;  // the product with `correction` would lose bits
    const float x = small ? __fmul_rn(amax, 0x1p64f) : amax;
    float scale = __fmaf_rn(x, inverse, __fmul_rn(x, correction));
    scale = is_finite(x) ? scale : x;
    scale = small ? __fmul_rn(scale, 0x1p-64f) : scale;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    if constexpr (power_of_2) scale = round_up<0x7FFFFF>(scale);
    return amax == 0.0f ? 1.0f : scale;
}

// The reciprocal r of a scale as `inverse`, and r · (e + e²) as `correction`. A scale that needs the careful division
// is marked by the sign: then `inverse` is −r and `correction` is e + e².
struct Divisor {
    float inverse, correction;

    __device__ __forceinline__ bool needs_careful_division() const { return __float_as_int(inverse) < 0; }

    template <bool power_of_2>
    __device__ __forceinline__ float divide(float value) const {
        if constexpr (power_of_2) return __fmul_rn(value, inverse);
        return __fmaf_rn(value, inverse, __fmul_rn(value, correction));
    }

    // Divides by any scale, also one that does not need care.
    __device__ __forceinline__ float divide_carefully(float value) const {
        const float r = fabsf(inverse), near = __fmul_rn(value, needs_careful_division() ? r : 1.0f);
        const float sum = __fmaf_rn(value, r, __fmul_rn(near, correction));
        return __uint_as_float(__float_as_uint(sum) | (__float_as_uint(value) & 0x80000000));  // −0 + 0 is +0
    }
};

// The divisor for a scale from 2⁻¹²⁶ to 2¹²⁵, Inf or NaN.
template <bool power_of_2>
__device__ __forceinline__ Divisor make_divisor(float scale) {
    const float guess = ptx::reciprocal(scale);
    const float better = __fmaf_rn(guess, __fmaf_rn(-scale, guess, 1.0f), guess);
    const float nearest = is_finite(scale) ? better : guess;  // 1 / Inf is 0
    if constexpr (power_of_2) return {nearest, 0.0f};

    const float near_error = __fmaf_rn(-scale, nearest, 1.0f);
    const float r = near_error < 0.0f ? __uint_as_float(__float_as_uint(nearest) - 1) : nearest;
    const float error = __fmaf_rn(-scale, r, 1.0f);
    const float correction = __fmul_rn(r, __fmaf_rn(error, error, error));

    const unsigned low_bits = __float_as_uint(scale) & 0xFFFF;  // below the first 8 significant bits
    const bool careful = scale > 0x1p64f || low_bits >= 0x10000 - 4;
    const float careful_correction = __fmaf_rn(near_error, near_error, near_error);
    // x / Inf is 0 and Inf / Inf is NaN; x / NaN is NaN
    return {!is_finite(scale) ? nearest : careful ? -nearest : r,
            !is_finite(scale) ? 0.0f : careful ? careful_correction : correction};
}
