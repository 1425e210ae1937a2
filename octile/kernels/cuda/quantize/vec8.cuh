// Vectors of 8 consecutive elements of a row in the registers of a thread, one type per element type.
//
//     at(j)               element j in FP32
//     signs(p)            the sign bits of elements 2p and 2p + 1, where two 16-bit floats have them
//     amax()              the largest magnitude
//     update_amax(other)  replaces each element by the one of larger magnitude, with an unspecified sign
//
// 16-bit elements stay packed as they were loaded, which takes half the registers, and are compared in pairs. NaN wins
// every comparison.
#pragma once
#include "scale.cuh"
#include "vector_io.cuh"

constexpr uint32_t both_signs = 0x80008000;

struct FloatVec8 {
    static constexpr bool is_16_bit = false;
    float value[8];

    __device__ __forceinline__ float at(int j) const { return value[j]; }
    __device__ __forceinline__ uint32_t signs(int p) const {
        return __byte_perm(__float_as_uint(value[2 * p]), __float_as_uint(value[2 * p + 1]), 0x7632) & both_signs;
    }
    __device__ __forceinline__ float amax() const {
        const float a = ptx::max_abs(ptx::max_abs(value[0], value[1]), ptx::max_abs(value[2], value[3]));
        return ptx::max_abs(a, ptx::max_abs(ptx::max_abs(value[4], value[5]), ptx::max_abs(value[6], value[7])));
    }
    __device__ __forceinline__ void update_amax(const FloatVec8& other) {
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = ptx::max_abs(value[j], other.value[j]);
    }
};

struct Bf16Vec8 {
    static constexpr bool is_16_bit = true;  // so an element has at most 11 significant bits
    uint32_t pair[4];

    __device__ __forceinline__ float at(int j) const {
        return __uint_as_float(j % 2 ? pair[j / 2] & 0xFFFF0000 : pair[j / 2] << 16);
    }
    __device__ __forceinline__ uint32_t signs(int p) const { return pair[p] & both_signs; }
    __device__ __forceinline__ float amax() const {
        const uint32_t a =
            ptx::max_abs_bf16x2(ptx::max_abs_bf16x2(pair[0], pair[1]), ptx::max_abs_bf16x2(pair[2], pair[3]));
        return ptx::max_abs(__uint_as_float(a & 0xFFFF0000), __uint_as_float(a << 16));
    }
    __device__ __forceinline__ void update_amax(const Bf16Vec8& other) {
#pragma unroll
        for (int p = 0; p < 4; ++p) pair[p] = ptx::max_abs_bf16x2(pair[p], other.pair[p]);
    }
};

struct HalfVec8 {
    static constexpr bool is_16_bit = true;
    uint32_t pair[4];

    __device__ __forceinline__ float at(int j) const {
        return j % 2 ? ptx::high_f16(pair[j / 2]) : ptx::low_f16(pair[j / 2]);
    }
    __device__ __forceinline__ uint32_t signs(int p) const { return pair[p] & both_signs; }
    __device__ __forceinline__ float amax() const {
        const uint32_t a =
            ptx::max_abs_f16x2(ptx::max_abs_f16x2(pair[0], pair[1]), ptx::max_abs_f16x2(pair[2], pair[3]));
        return ptx::max_abs(ptx::high_f16(a), ptx::low_f16(a));
    }
    __device__ __forceinline__ void update_amax(const HalfVec8& other) {
#pragma unroll
        for (int p = 0; p < 4; ++p) pair[p] = ptx::max_abs_f16x2(pair[p], other.pair[p]);
    }
};

// Encoded values of 8 bits, or of 12 bits (E5M6): two in three bytes.
template <int format>
struct EncodedVec8 {
    uint32_t word[format == e5m6 ? 3 : 2];

    __device__ __forceinline__ float at(int j) const {
        if constexpr (format == int8) {
            return static_cast<signed char>(word[j / 4] >> j % 4 * 8);
        } else if constexpr (format == e5m6) {  // E5M6 is the upper 12 bits of FP16
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

template <int dtype>
struct Vec8;
template <>
struct Vec8<float32> : FloatVec8 {};
template <>
struct Vec8<bfloat16> : Bf16Vec8 {};
template <>
struct Vec8<float16> : HalfVec8 {};
template <>
struct Vec8<e4m3> : EncodedVec8<e4m3> {};
template <>
struct Vec8<e5m2> : EncodedVec8<e5m2> {};
template <>
struct Vec8<int8> : EncodedVec8<int8> {};
template <>
struct Vec8<e5m6> : EncodedVec8<e5m6> {};

// The offset in bytes of the element of an index, which must be even for E5M6.
template <int dtype>
__device__ __forceinline__ int64_t bytes(int64_t index) {
    return dtype == float32 ? 4 * index : dtype < e4m3 ? 2 * index : dtype == e5m6 ? index / 2 * 3 : index;
}

// Encoded values with their scale. Dequantizes at each use, which takes a quarter of the registers of FP32 values.
template <int dtype>
struct ScaledVec8 {
    static constexpr bool is_16_bit = false;
    Vec8<dtype> data;
    float scale;

    __device__ __forceinline__ float at(int j) const { return __fmul_rn(data.at(j), scale); }
};

// Returns the vector and hides its origin from the compiler, which then recomputes what depends on it instead of
// holding it in registers.
template <class Values>
__device__ __forceinline__ Values opaque(Values x) {
    if constexpr (requires { x.value; }) {
        for (float& value : x.value) value = __uint_as_float(ptx::opaque(__float_as_uint(value)));
    } else if constexpr (requires { x.pair; }) {
        for (uint32_t& pair : x.pair) pair = ptx::opaque(pair);
    } else {
        for (uint32_t& word : x.data.word) word = ptx::opaque(word);
    }
    return x;
}

// Loads 8 elements; returns zeros out of bounds. The address must be a multiple of 16 bytes, for 8-bit elements of 8,
// and for E5M6 of 4.
template <int dtype>
__device__ __forceinline__ Vec8<dtype> load_vec8(const uint8_t* from, bool in_bounds) {
    union {
        Vec8<dtype> elements;
        uint4 vector[2];
        uint2 half;
        uint32_t word[3];
    } u;
    if constexpr (dtype == e5m6) {
#pragma unroll
        for (int i = 0; i < 3; ++i) u.word[i] = ptx::load_4(from + 4 * i, in_bounds);
    } else if constexpr (dtype >= e4m3) {
        u.half = ptx::load_8(from, in_bounds);
    } else {
        u.vector[0] = ptx::load_16(from, in_bounds);
        if constexpr (dtype == float32) u.vector[1] = ptx::load_16(from + 16, in_bounds);
    }
    return u.elements;
}

// Rounds 8 values to FP32, BF16 or FP16 and stores them; the address must be a multiple of 16 bytes.
template <int dtype>
__device__ __forceinline__ void store_vec8(uint8_t* to, const float (&x)[8], bool in_bounds) {
    if constexpr (dtype == float32) {
        ptx::store_16(to, ptx::bits_of(x[0], x[1], x[2], x[3]), in_bounds);
        ptx::store_16(to + 16, ptx::bits_of(x[4], x[5], x[6], x[7]), in_bounds);
    } else {
        uint32_t pair[4];
#pragma unroll
        for (int p = 0; p < 4; ++p)
            pair[p] =
                dtype == bfloat16 ? ptx::pack_bf16(x[2 * p], x[2 * p + 1]) : ptx::pack_f16(x[2 * p], x[2 * p + 1]);
        ptx::store_16(to, make_uint4(pair[0], pair[1], pair[2], pair[3]), in_bounds);
    }
}
