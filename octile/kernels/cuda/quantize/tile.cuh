// Tiles of 128 columns: 16 lanes hold eight neighbours each, of several rows at once.
#pragma once
#include "vec8.cuh"

constexpr int tile_columns = 128;
constexpr uint32_t whole_warp = 0xFFFFFFFF;

__device__ constexpr int log2(int n) { return n < 2 ? 0 : 1 + log2(n / 2); }

// n / d, from min(2³¹ / d, 2³¹ − 1) rounded down; n is less than 2³¹. The host divides, since here it takes 20 instructions.
__device__ __forceinline__ unsigned quotient(unsigned n, unsigned d, unsigned inverse) {
    const unsigned q = static_cast<uint64_t>(n) * inverse >> 31;  // may be one too small
    return n - q * d >= d ? q + 1 : q;
}

// How the 16 lanes of a row lie in a warp: in one half of it; or crossed, eight in each half, so that one row has lanes
// 0 … 7 and 24 … 31 and the other 8 … 23.
enum Lanes { in_halves, crossed };

template <int lanes>
__device__ __forceinline__ unsigned row_of_lane() {
    const unsigned half = ptx::lane_id() / 16;
    return lanes == crossed ? half ^ ptx::lane_id() / 8 % 2 : half;
}

// The largest, or the sum, of each of `count` numbers (1 … 16, a power of two) over the 16 lanes of a row: a lane is left
// with that of the number `owned<count>()`. Lanes halve what they still compare at each step, so it takes as many
// exchanges as there are numbers.
template <int lanes, int count, class Operation>
__device__ __forceinline__ float over_row(float (&x)[count], Operation operation) {
    int bit = 8;
#pragma unroll
    for (int half = count / 2; half >= 1; half /= 2, bit /= 2) {
        const bool upper = ptx::lane_id() & bit;
        const int other_lane = lanes == crossed && bit == 8 ? 24 : bit;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float mine = ptx::select(upper, x[i + half], x[i]), other = ptx::select(upper, x[i], x[i + half]);
            x[i] = operation(mine, __shfl_xor_sync(whole_warp, other, other_lane));
        }
    }
#pragma unroll
    for (; bit >= 1; bit /= 2) x[0] = operation(x[0], __shfl_xor_sync(whole_warp, x[0], bit));
    return x[0];
}

template <int count>
__device__ __forceinline__ unsigned owned() {
    return ptx::lane_id() % 16 >> (4 - log2(count));
}

// Of the lanes that own a number, one for each row.
template <int count>
__device__ __forceinline__ bool first_owner() {
    return ptx::lane_id() % (16 / count) == 0;
}

// The divisor of number `i` from the lane of this row that owns it; the lanes of a row lie in one half of the warp.
template <int count, bool power_of_2>
__device__ __forceinline__ Divisor from_owner(const Divisor& owned, int i) {
    const unsigned lane = i << (4 - log2(count)) | ptx::lane_id() / 16 * 16;
    const float inverse = __shfl_sync(whole_warp, owned.inverse, lane);
    return {inverse, power_of_2 ? 0.0f : __shfl_sync(whole_warp, owned.rest, lane)};
}

__device__ __forceinline__ float max_abs(float a, float b) { return ptx::max_abs(a, b); }

// ---- Rounding to codes -----------------------------------------------------------------------------------------

template <int format>
__device__ __forceinline__ uint32_t pack_4(float a, float b, float c, float d) {
    if constexpr (format == e4m3) return ptx::pack_e4m3(a, b, c, d);
    if constexpr (format == e5m2) return ptx::pack_e5m2(a, b, c, d);
    return __byte_perm(__byte_perm(ptx::to_s8(a), ptx::to_s8(b), 0x40),
                       __byte_perm(ptx::to_s8(c), ptx::to_s8(d), 0x40), 0x5410);
}

template <int format>
__device__ __forceinline__ uint2 pack_8(const float (&x)[8]) {
    return make_uint2(pack_4<format>(x[0], x[1], x[2], x[3]), pack_4<format>(x[4], x[5], x[6], x[7]));
}

// A magnitude to E5M6, as a number. Adding 2^17 to 2^18 times its power of two and taking it away again leaves 7
// significant bits, ties to even; below 2⁻¹⁴, where E5M6's smallest steps begin, adding 12 leaves multiples of 2⁻²⁰.
// What is added must be an even multiple of the step: 2^17 times a `is_short` number, of at most 16 significant bits, is.
template <bool is_short>
__device__ __forceinline__ float round_e5m6(float x) {
    const float large = is_short ? __fmul_rn(fabsf(x), 0x1p17f)
                                 : __uint_as_float((__float_as_uint(x) & 0x7F800000) + (17 << 23 | 0x00400000));
    const float shift = fmaxf(large, 12.0f);
    return __fsub_rn(__fadd_rn(fabsf(x), shift), shift);
}

// Eight quotients, with the signs of `values`, as codes of 12 bits in three words: a stream from the low bits up.
template <bool is_short, class Values>
__device__ __forceinline__ void pack_e5m6(const float (&x)[8], const Values& values, uint32_t (&word)[3]) {
    uint32_t pair[4];  // 24 bits
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const float low = round_e5m6<is_short>(x[2 * p]), high = round_e5m6<is_short>(x[2 * p + 1]);
        const uint32_t halves = ptx::pack_f16(low, high) | values.signs(p);  // a code is the upper 12 bits of each
        pair[p] = (__byte_perm(halves, 0, 0x4324) & ~0xFFFu) | ((halves >> 4) & 0xFFF);
    }
    word[0] = __byte_perm(pair[0], pair[1], 0x4210);
    word[1] = __byte_perm(pair[1], pair[2], 0x5421);
    word[2] = __byte_perm(pair[2], pair[3], 0x6542);
}
