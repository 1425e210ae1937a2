// Emulated octile/kernels/cuda/quantize/convert.cuh: the same functions. What the GPU approximates is exact here, or
// rounded once.
#pragma once
#include <ptx.cuh>

namespace emulator {

inline double power_of_2(int exponent) { return octile_bits<double>(static_cast<uint64_t>(exponent + 1023) << 52); }
// The exponent of a positive number, as a fraction in [1/2, 1) times a power of two.
inline int exponent_of(double x) { return static_cast<int>(octile_bits<uint64_t>(x) >> 52) - 1022; }

// The magnitude's code in a format of an exponent and `mantissa` bits, ties to even; NaN becomes `nan`.
inline uint32_t encode(float x, int mantissa, int bias, float most, uint32_t nan) {
    if (x != x) return nan;
    const double exact = fabs(static_cast<double>(x)), magnitude = exact < most ? exact : most;
    if (magnitude == 0) return 0;
    const int exponent = exponent_of(magnitude), least = 2 - bias;
    const int last = (exponent > least ? exponent : least) - 1 - mantissa;  // the last bit's
    const double steps = magnitude * power_of_2(-last) + 0x1p52 - 0x1p52;  // rounds to an integer
    const double nearest = steps * power_of_2(last), rounded = nearest < most ? nearest : most;
    if (rounded == 0) return 0;
    const int rounded_exponent = exponent_of(rounded);
    if (rounded_exponent < least) return static_cast<uint32_t>(rounded * power_of_2(bias - 1 + mantissa));
    const double significand = rounded * power_of_2(1 + mantissa - rounded_exponent);
    return static_cast<uint32_t>(significand) - (1u << mantissa) + (rounded_exponent - 1 + bias << mantissa);
}

inline uint32_t sign_of(float x, int bit) { return (__float_as_uint(x) >> 31) << bit; }
inline uint32_t to_e4m3(float x) { return encode(x, 3, 7, 448.0f, 0x7F) | (x == x ? sign_of(x, 7) : 0); }
inline uint32_t to_e5m2(float x) { return encode(x, 2, 15, 57344.0f, 0x7F) | (x == x ? sign_of(x, 7) : 0); }
inline uint32_t to_f16(float x) {
    if (fabsf(x) >= 65520.0f) return 0x7C00 | sign_of(x, 15);
    return encode(x, 10, 15, 65504.0f, 0x7FFF) | (x == x ? sign_of(x, 15) : 0);
}

// A code's number; all ones in the exponent mean Inf and NaN, or with `finite` only an all-ones magnitude NaN.
inline float decode(uint32_t code, int exponent_bits, int mantissa, int bias, bool finite) {
    const uint32_t magnitude = code & (1u << (exponent_bits + mantissa)) - 1, top = (1u << exponent_bits) - 1;
    const uint32_t exponent = magnitude >> mantissa, fraction = magnitude & (1u << mantissa) - 1;
    const float sign = code >> (exponent_bits + mantissa) & 1 ? -1.0f : 1.0f;
    if (finite ? magnitude == (top << mantissa | (1u << mantissa) - 1) : exponent == top && fraction) return NAN;
    if (!finite && exponent == top) return sign * INFINITY;
    const double whole = exponent ? fraction + (1u << mantissa) : fraction;
    return sign * static_cast<float>(whole * power_of_2(static_cast<int>(exponent ? exponent : 1) - bias - mantissa));
}
inline float from_f16(uint32_t code) { return decode(code & 0xFFFF, 5, 10, 15, false); }

// The larger of two magnitudes in 15 bits, where all above `infinity` are NaN.
inline uint32_t larger_short(uint32_t a, uint32_t b, uint32_t infinity) {
    const uint32_t sign = (a ^ b) & 0x8000;
    a &= 0x7FFF, b &= 0x7FFF;
    return a > infinity || b > infinity ? 0x7FFF : (a < b ? b : a) | sign;
}
inline uint32_t larger_pair(uint32_t a, uint32_t b, uint32_t infinity) {
    return larger_short(a & 0xFFFF, b & 0xFFFF, infinity) | larger_short(a >> 16, b >> 16, infinity) << 16;
}

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

}  // namespace emulator

namespace ptx {

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
    using emulator::to_e4m3;
    return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}
inline uint32_t pack_e5m2(float a, float b, float c, float d) {
    using emulator::to_e5m2;
    return to_e5m2(a) | to_e5m2(b) << 8 | to_e5m2(c) << 16 | to_e5m2(d) << 24;
}
inline uint32_t to_s8(float x) {
    return x != x ? 0 : static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(nearbyintf(x), -128.0f), 127.0f)));
}
inline uint32_t pack_f16(float low, float high) { return emulator::to_f16(low) | emulator::to_f16(high) << 16; }

inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
    auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000); };
    return pack_bf16(fmaf(low(a), low(b), low(c)), fmaf(high(a), high(b), high(c)));
}

inline uint32_t e4m3_to_f16(uint32_t four, bool upper) {
    const uint32_t two = upper ? four >> 16 : four;
    return pack_f16(emulator::decode(two & 0xFF, 4, 3, 7, true), emulator::decode(two >> 8 & 0xFF, 4, 3, 7, true));
}
inline uint32_t e5m2_to_f16(uint32_t four, bool upper) {
    const uint32_t two = upper ? four >> 16 : four;
    return (two & 0xFF) << 8 | (two & 0xFF00) << 16;
}
inline float low_f16(uint32_t pair) { return emulator::from_f16(pair); }
inline float high_f16(uint32_t pair) { return emulator::from_f16(pair >> 16); }

inline float max_abs(float a, float b) { return a != a || b != b ? NAN : fmaxf(fabsf(a), fabsf(b)); }
inline uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) { return emulator::larger_pair(a, b, 0x7F80); }
inline uint32_t max_abs_f16x2(uint32_t a, uint32_t b) { return emulator::larger_pair(a, b, 0x7C00); }
inline float select(bool first, float a, float b) { return first ? a : b; }

inline float exp2(float x) { return emulator::flushed(exp2f(x)); }
inline float reciprocal(float x) { return emulator::flushed(1.0f / emulator::flushed(x)); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }

}  // namespace ptx
