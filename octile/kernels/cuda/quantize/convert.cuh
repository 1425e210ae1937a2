// Wrappers of PTX instructions that convert and compare numbers; ptx.cuh has the others.
//
// Source: PTX ISA 8.5, the instructions cvt, max, ex2, rcp and rsqrt.
#pragma once
#include "ptx.cuh"

namespace ptx {

// ---- FP32 to 8 and 16 bits; `a` comes first in memory ------------------------------------------------------------

// Four values to E4M3: rounds to nearest even and saturates; NaN stays NaN.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint32_t four;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(four)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

// Four values to E5M2, as `pack_e4m3`.
__device__ __forceinline__ uint32_t pack_e5m2(float a, float b, float c, float d) {
    uint32_t four;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(four)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

// The nearest integer in the low byte: ties to even, saturates to −128 … 127; NaN becomes 0.
__device__ __forceinline__ uint32_t to_s8(float x) {
    uint32_t integer;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(integer) : "f"(x));
    return integer;
}

// Two values to FP16, rounded to nearest even.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a · b + c of two bfloat16 values, rounded once.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
}

// ---- 8 and 16 bits to FP32, exactly -----------------------------------------------------------------------------

// The two E4M3 values in the lower or the upper half of a word, as two FP16 values.
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t four, bool upper) {
    uint32_t pair;
    if (upper) {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
            : "=r"(pair)
            : "r"(four));
    } else {
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
            : "=r"(pair)
            : "r"(four));
    }
    return pair;
}

// The two E5M2 values in the lower or the upper half of a word, as two FP16 values: E5M2 is the upper byte of FP16.
__device__ __forceinline__ uint32_t e5m2_to_f16(uint32_t four, bool upper) {
    return __byte_perm(four, 0, upper ? 0x3424 : 0x1404);
}

__device__ __forceinline__ float low_f16(uint32_t pair) {
    float x;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(x) : "r"(pair));
    return x;
}

__device__ __forceinline__ float high_f16(uint32_t pair) {
    float x;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(x) : "r"(pair));
    return x;
}

// ---- max(|a|, |b|); NaN if either is NaN ------------------------------------------------------------------------

__device__ __forceinline__ float max_abs(float a, float b) {
    float x;
    asm("{\n.reg .f32 p, q;\nabs.f32 p, %1;\nabs.f32 q, %2;\nmax.NaN.f32 %0, p, q;\n}" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// For each of two 16-bit values; the sign of the result is unspecified.
__device__ __forceinline__ uint32_t max_abs_bf16x2(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

__device__ __forceinline__ uint32_t max_abs_f16x2(uint32_t a, uint32_t b) {
    uint32_t pair;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// `first` ? a : b, as one instruction. The compiler would branch instead, and the lanes would diverge before shuffles.
__device__ __forceinline__ float select(bool first, float a, float b) {
    float x;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}"
        : "=f"(x)
        : "f"(a), "f"(b), "r"(static_cast<int>(first)));
    return x;
}

// ---- Approximations with a relative error of at most 2⁻²² --------------------------------------------------------

// Flushes results below 2⁻¹²⁶ to zero.
__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Flushes results below 2⁻¹²⁶ to zero.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rsqrt(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ptx
