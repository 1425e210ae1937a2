// A cast in tiles of 1×128 of what a warp holds: 2 · config::rows rows of a tile, every second one each half of it, and a
// lane eight columns.
//
// NOTES
// - A row's scale is found by one of its 16 lanes, and the others are sent what they divide by. So a scale costs a
//   thread as much as one of its loads' numbers, not as much as all of them.
// - Codes of 12 bits are brought into order in shared memory, within a warp: eight are 12 bytes, and what is stored
//   should be 16.
#pragma once
#include "tile.cuh"

constexpr int rows = config::rows;  // of a thread
constexpr int warp_rows = 2 * rows, block_rows = config::warps * warp_rows;
constexpr int packed_row = tile_columns * 3 / 2;  // bytes of a tile's row in codes of 12 bits

// Which tile, and the thread's first row and columns.
struct Place {
    int64_t batch;
    int tile, row, column, m, k;

    // How many rows, of which every second one is the thread's, there are from its first row on; negative: none.
    __device__ __forceinline__ int there() const { return column < k ? m - row : 0; }
};

// Where a warp's codes of 12 bits wait to be stored.
__device__ __forceinline__ uint8_t* packing_room() {
    return ptx::dynamic_shared() + threadIdx.x / 32 * (warp_rows * packed_row);
}

// Stores them, all rows of the warp: 24 lanes take 16 bytes each of two rows, which lie one behind the other.
__device__ __forceinline__ void store_packed(uint8_t* data, const Place& at) {
    constexpr int pieces = packed_row / 16;
    const int lane = ptx::lane_id(), first = at.row - lane / 16 + lane / pieces, byte = lane % pieces * 16;
    const int there = lane < 2 * pieces && byte < bytes<e5m6>(at.k - at.tile * tile_columns) ? at.m - first : 0;
    const uint8_t* from = packing_room() + 16 * min(lane, 2 * pieces - 1);
    uint8_t* to = data + bytes<e5m6>((at.batch * at.m + first) * at.k + at.tile * tile_columns) + byte;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < warp_rows; i += 2, from += 2 * packed_row, to += bytes<e5m6>(2 * at.k))
        ptx::store_16(to, *reinterpret_cast<const uint4*>(from), i < there);
    __syncwarp();
}

// Rounds quotients and stores them; those of 12 bits to where they wait.
template <int format, bool is_short, class Values>
__device__ __forceinline__ void store_row(
    uint8_t* to, const float (&quotient)[8], const Values& values, int i, bool there) {
    if constexpr (format == e5m6) {
        uint32_t word[3];
        pack_e5m6<is_short>(quotient, values, word);
        uint32_t* room = reinterpret_cast<uint32_t*>(packing_room() + 2 * i * packed_row) + 3 * ptx::lane_id();
#pragma unroll
        for (int w = 0; w < 3; ++w) room[w] = word[w];
    } else {
        ptx::store_8(to, pack_8<format>(quotient), there);
    }
}

// Divides, rounds and stores. divisor_of(i): that of the thread's row i.
template <int format, bool power_of_2, class Values, class Divisors>
__device__ __forceinline__ void store_codes(
    uint8_t* data, const Place& at, const Values (&x)[rows], Divisors divisor_of) {
    const int there = at.there();
    uint8_t* to = data + (at.batch * at.m + at.row) * at.k + at.column;
#pragma unroll
    for (int i = 0; i < rows; ++i, to += 2 * at.k) {
        const Divisor divisor = divisor_of(i);
        float quotient[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) quotient[j] = divisor.template divide<power_of_2>(x[i].at(j));
        store_row<format, power_of_2 && Values::are_short>(to, quotient, x[i], i, 2 * i < there);
    }
    if constexpr (format == e5m6) store_packed(data, at);
}

// The same row by row, each found once more, in little code and few registers; divide(x, i) as care demands.
template <int format, class Again, class Divide>
__device__ __forceinline__ void store_codes_carefully(uint8_t* data, const Place& at, Again again, Divide divide) {
    const int there = at.there();
    uint8_t* to = data + (at.batch * at.m + at.row) * at.k + at.column;
#pragma unroll 1
    for (int i = 0; i < rows; ++i, to += 2 * at.k) {
        const Floats x = again(i);
        float quotient[8];
        divide(quotient, x, i);
        store_row<format, false>(to, quotient, x, i, 2 * i < there);
    }
    if constexpr (format == e5m6) store_packed(data, at);
}

// Finds the scales of a thread's rows, stores them contiguous along M, and the codes. again(i): row i, found once more.
template <int format, bool power_of_2, class Values, class Again>
__device__ __forceinline__ void cast(
    uint8_t* data, float* scales, const Place& at, const Values (&x)[rows], Again again) {
    float amax[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) amax[i] = x[i].amax();
    const float scale = scale_of<format, power_of_2>(over_row<in_halves>(amax, max_abs));
    const int row = at.row + 2 * owned<rows>(), tiles = (at.k + tile_columns - 1) / tile_columns;
    float* to = scales + (at.batch * tiles + at.tile) * ((at.m + 3) / 4 * 4) + row;
    ptx::store_float(to, scale, first_owner<rows>() && row < at.m);

    const Divisor own = divisor_of<power_of_2>(scale);
    auto of_row = [&](int i) { return from_owner<rows, power_of_2>(own, i); };
    if (!power_of_2 && __any_sync(whole_warp, own.needs_care()))
        store_codes_carefully<format>(data, at, again, [&](float(&quotient)[8], const Floats& values, int i) {
            const Divisor divisor = of_row(i);
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[j] = divisor.divide_carefully(values.at(j));
        });
    else
        store_codes<format, power_of_2>(data, at, x, of_row);
}

// By a scale that may suit other numbers than these. 1 / scale and its error are exact enough within 2^±60; what is too
// large becomes the largest code. A rest that is not zero keeps Inf, since Inf · 0 is NaN.
template <int format, class Values, class Again>
__device__ __forceinline__ void cast_by(
    float scale, uint8_t* data, const Place& at, const Values (&x)[rows], Again again) {
    Divisor divisor = divisor_of<false>(scale);
    if (scale >= 0x1p-60f && scale <= 0x1p60f && !divisor.needs_care()) {
        if (divisor.rest == 0.0f) divisor.rest = __fmul_rn(divisor.inverse, 0x1p-60f);
        store_codes<format, false>(data, at, x, [&](int) { return divisor; });
    } else {
        store_codes_carefully<format>(data, at, again, [&](float(&quotient)[8], const Floats& values, int) {
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[j] = __fdiv_rn(values.at(j), scale);
        });
    }
}

template <class Values>
__device__ __forceinline__ Floats decoded(const Values& x) {
    Floats value;
#pragma unroll
    for (int j = 0; j < 8; ++j) value.value[j] = x.at(j);
    return value;
}

