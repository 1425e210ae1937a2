// Work on tiles of 128 columns: 16 lanes hold a vector of 8 each, for several rows at once.
#pragma once
#include "vec8.cuh"

constexpr int tile_columns = 128;

__device__ constexpr int log2(int n) { return n < 2 ? 0 : 1 + log2(n / 2); }

// n / d for n < 2³¹. `inverse` is ⌊min(2³¹ / d, 2³¹ − 1)⌋, which the host computes: a division here takes 20
// instructions.
__device__ __forceinline__ unsigned quotient(unsigned n, unsigned d, unsigned inverse) {
    const unsigned q = static_cast<uint64_t>(n) * inverse >> 31;  // may be one too small
    return n - q * d >= d ? q + 1 : q;
}

// Which 16 lanes of a warp share a row.
//   in_halves  lanes 0 … 15 one row, lanes 16 … 31 the other
//   crossed    lanes 0 … 7 and 24 … 31 one row, lanes 8 … 23 the other
enum LaneLayout { in_halves, crossed };

// Which of the two rows of its warp a lane belongs to.
template <int lanes>
__device__ __forceinline__ unsigned lane_row() {
    const unsigned half = ptx::lane_id() / 16;
    return lanes == crossed ? half ^ ptx::lane_id() / 8 % 2 : half;
}

// Reduces each of `count` values (1 … 16, a power of two) over the 16 lanes of a row. A lane returns the result of
// value `owned_index<count>()`. The number of values that a lane still holds halves at each step, so that the reduction
// takes as many shuffles as there are values.
template <int lanes, int count, class Operation>
__device__ __forceinline__ float reduce_rows(float (&x)[count], Operation operation) {
    int bit = 8;
#pragma unroll
    for (int half = count / 2; half >= 1; half /= 2, bit /= 2) {
        const bool upper = ptx::lane_id() & bit;
        const int other_lane = lanes == crossed && bit == 8 ? 24 : bit;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float mine = ptx::select(upper, x[i + half], x[i]), other = ptx::select(upper, x[i], x[i + half]);
            x[i] = operation(mine, __shfl_xor_sync(all_lanes, other, other_lane));
        }
    }
#pragma unroll
    for (; bit >= 1; bit /= 2) x[0] = operation(x[0], __shfl_xor_sync(all_lanes, x[0], bit));
    return x[0];
}

// Which of the reduced values this lane holds.
template <int count>
__device__ __forceinline__ unsigned owned_index() {
    return ptx::lane_id() % 16 >> (4 - log2(count));
}

// Whether this lane is the first in its row that holds its reduced value.
template <int count>
__device__ __forceinline__ bool is_first_owner() {
    return ptx::lane_id() % (16 / count) == 0;
}

// Broadcasts the divisor of value `i` from the lane of this row that holds it; needs the lane layout `in_halves`.
template <int count, bool power_of_2>
__device__ __forceinline__ Divisor divisor_from_owner(const Divisor& owned_index, int i) {
    const unsigned lane = i << (4 - log2(count)) | ptx::lane_id() / 16 * 16;
    const float inverse = __shfl_sync(all_lanes, owned_index.inverse, lane);
    return {inverse, power_of_2 ? 0.0f : __shfl_sync(all_lanes, owned_index.correction, lane)};
}

__device__ __forceinline__ float max_abs(float a, float b) { return ptx::max_abs(a, b); }

// ---- Rounding to 8 and 12 bits ----------------------------------------------------------------------------------

// Rounds 4 values to an 8-bit format.
template <int format>
__device__ __forceinline__ uint32_t pack_4(float a, float b, float c, float d) {
    if constexpr (format == e4m3) return ptx::pack_e4m3(a, b, c, d);
    if constexpr (format == e5m2) return ptx::pack_e5m2(a, b, c, d);
    return __byte_perm(__byte_perm(ptx::to_s8(a), ptx::to_s8(b), 0x40),
                       __byte_perm(ptx::to_s8(c), ptx::to_s8(d), 0x40), 0x5410);
}

// Rounds 8 values to an 8-bit format.
template <int format>
__device__ __forceinline__ uint2 pack_8(const float (&x)[8]) {
    return make_uint2(pack_4<format>(x[0], x[1], x[2], x[3]), pack_4<format>(x[4], x[5], x[6], x[7]));
}

// Rounds |x| to the values of E5M6, ties to even. Adding and subtracting 2¹⁷ to 2¹⁸ times the power of two of |x|
// leaves 7 significant bits. Below 2⁻¹⁴, where E5M6 is subnormal, adding and subtracting 12 leaves multiples of 2⁻²⁰.
// The added number must be an even multiple of the spacing, as 2¹⁷ · |x| is if x has at most 16 significant bits
// (is_16_bit).
template <bool is_16_bit>
__device__ __forceinline__ float round_e5m6(float x) {
    const float large = is_16_bit ? __fmul_rn(fabsf(x), 0x1p17f)
                                 : __uint_as_float((__float_as_uint(x) & 0x7F800000) + (17 << 23 | 0x00400000));
    const float shift = fmaxf(large, 12.0f);
    return __fsub_rn(__fadd_rn(fabsf(x), shift), shift);
}

// Rounds 8 quotients, with the signs of `values`, to E5M6 and packs them into three words, the first in the lowest
// bits.
template <bool is_16_bit, class Values>
__device__ __forceinline__ void pack_e5m6(const float (&x)[8], const Values& values, uint32_t (&word)[3]) {
    uint32_t pair[4];  // 24 bits
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const float low = round_e5m6<is_16_bit>(x[2 * p]), high = round_e5m6<is_16_bit>(x[2 * p + 1]);
        const uint32_t halves = ptx::pack_f16(low, high) | values.signs(p);  // E5M6 is the upper 12 bits of each
        pair[p] = (__byte_perm(halves, 0, 0x4324) & ~0xFFFu) | ((halves >> 4) & 0xFFF);
    }
    word[0] = __byte_perm(pair[0], pair[1], 0x4210);
    word[1] = __byte_perm(pair[1], pair[2], 0x5421);
    word[2] = __byte_perm(pair[2], pair[3], 0x6542);
}
