// Eight neighbours of a row, as a thread holds them: 16 bytes of 16-bit numbers, or what came of narrower ones.
//
// Each kind has at(j), a value in FP32; signs(p), the signs of two neighbours as those of 16-bit numbers; amax(), the
// largest magnitude; and raise(), which makes each the larger one of two, of any sign. 16-bit numbers stay as they were
// loaded, which takes half the registers, and are compared in pairs. NaN wins every comparison.
#pragma once
#include "scale.cuh"
#include "vector_io.cuh"

constexpr uint32_t both_signs = 0x80008000;

struct Floats {
    static constexpr bool are_short = false;
    float value[8];

    __device__ __forceinline__ float at(int j) const { return value[j]; }
    __device__ __forceinline__ uint32_t signs(int p) const {
        return __byte_perm(__float_as_uint(value[2 * p]), __float_as_uint(value[2 * p + 1]), 0x7632) & both_signs;
    }
    __device__ __forceinline__ float amax() const {
        const float a = ptx::max_abs(ptx::max_abs(value[0], value[1]), ptx::max_abs(value[2], value[3]));
        return ptx::max_abs(a, ptx::max_abs(ptx::max_abs(value[4], value[5]), ptx::max_abs(value[6], value[7])));
    }
    __device__ __forceinline__ void raise(const Floats& other) {
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = ptx::max_abs(value[j], other.value[j]);
    }
};

struct Bfloats {
    static constexpr bool are_short = true;  // at most 11 significant bits
    uint32_t pair[4];

    __device__ __forceinline__ float at(int j) const {
        return __uint_as_float(j % 2 ? pair[j / 2] & 0xFFFF0000 : pair[j / 2] << 16);
    }
    __device__ __forceinline__ uint32_t signs(int p) const { return pair[p] & both_signs; }
    __device__ __forceinline__ float amax() const {
        const uint32_t a = ptx::max_abs_bf16x2(ptx::max_abs_bf16x2(pair[0], pair[1]), ptx::max_abs_bf16x2(pair[2], pair[3]));
        return ptx::max_abs(__uint_as_float(a & 0xFFFF0000), __uint_as_float(a << 16));
    }
    __device__ __forceinline__ void raise(const Bfloats& other) {
#pragma unroll
        for (int p = 0; p < 4; ++p) pair[p] = ptx::max_abs_bf16x2(pair[p], other.pair[p]);
    }
};

struct Halves {
    static constexpr bool are_short = true;
    uint32_t pair[4];

    __device__ __forceinline__ float at(int j) const {
        return j % 2 ? ptx::high_f16(pair[j / 2]) : ptx::low_f16(pair[j / 2]);
    }
    __device__ __forceinline__ uint32_t signs(int p) const { return pair[p] & both_signs; }
    __device__ __forceinline__ float amax() const {
        const uint32_t a = ptx::max_abs_f16x2(ptx::max_abs_f16x2(pair[0], pair[1]), ptx::max_abs_f16x2(pair[2], pair[3]));
        return ptx::max_abs(ptx::high_f16(a), ptx::low_f16(a));
    }
    __device__ __forceinline__ void raise(const Halves& other) {
#pragma unroll
        for (int p = 0; p < 4; ++p) pair[p] = ptx::max_abs_f16x2(pair[p], other.pair[p]);
    }
};

// Codes of one byte, or of 12 bits: pairs in three bytes.
template <int format>
struct Codes {
    uint32_t word[format == e5m6 ? 3 : 2];

    __device__ __forceinline__ float at(int j) const {
        if constexpr (format == int8) {
            return static_cast<signed char>(word[j / 4] >> j % 4 * 8);
        } else if constexpr (format == e5m6) {  // the upper 12 bits of a 16-bit float
            const int first = 12 * j / 32, shift = 12 * j % 32;
            uint32_t bits = word[first] >> shift;
            if (shift > 20) bits |= word[first + 1] << (32 - shift);
            return ptx::low_f16(bits << 4);
        } else {
            const bool upper = j % 4 / 2;
            const uint32_t four = word[j / 4];
            const uint32_t pair = format == e4m3 ? ptx::e4m3_to_f16(four, upper) : ptx::e5m2_to_f16(four, upper);
            return j % 2 ? ptx::high_f16(pair) : ptx::low_f16(pair);
        }
    }
};

template <int number>
struct Eight;
template <>
struct Eight<float32> : Floats {};
template <>
struct Eight<bfloat16> : Bfloats {};
template <>
struct Eight<float16> : Halves {};
template <>
struct Eight<e4m3> : Codes<e4m3> {};
template <>
struct Eight<e5m2> : Codes<e5m2> {};
template <>
struct Eight<int8> : Codes<int8> {};
template <>
struct Eight<e5m6> : Codes<e5m6> {};

// How many bytes lie before the number of an index; of those of 12 bits it is even.
template <int number>
__device__ __forceinline__ int64_t bytes(int64_t index) {
    return number == float32 ? 4 * index : number < e4m3 ? 2 * index : number == e5m6 ? index / 2 * 3 : index;
}

// Codes times their scale, found anew at each use: in a quarter of the registers that the values take.
template <int number>
struct Scaled {
    static constexpr bool are_short = false;
    Eight<number> codes;
    float scale;

    __device__ __forceinline__ float at(int j) const { return __fmul_rn(codes.at(j), scale); }
};

// The same numbers, of which the compiler keeps nothing that it found of them before.
template <class Values>
__device__ __forceinline__ Values found_anew(Values x) {
    if constexpr (requires { x.value; }) {
        for (float& value : x.value) value = __uint_as_float(ptx::forget(__float_as_uint(value)));
    } else if constexpr (requires { x.pair; }) {
        for (uint32_t& pair : x.pair) pair = ptx::forget(pair);
    } else {
        for (uint32_t& word : x.codes.word) word = ptx::forget(word);
    }
    return x;
}

// From the address of the first, which must be a multiple of 16 bytes, of 8 for codes of 8 bits, of 4 for those of 12;
// zeros where there is nothing to load.
template <int number>
__device__ __forceinline__ Eight<number> load_eight(const uint8_t* from, bool there) {
    union {
        Eight<number> eight;
        uint4 vector[2];
        uint2 half;
        uint32_t word[3];
    } u;
    if constexpr (number == e5m6) {
#pragma unroll
        for (int i = 0; i < 3; ++i) u.word[i] = ptx::load_4(from + 4 * i, there);
    } else if constexpr (number >= e4m3) {
        u.half = ptx::load_8(from, there);
    } else {
        u.vector[0] = ptx::load_16(from, there);
        if constexpr (number == float32) u.vector[1] = ptx::load_16(from + 16, there);
    }
    return u.eight;
}
