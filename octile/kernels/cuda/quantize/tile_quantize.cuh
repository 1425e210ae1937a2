// Quantization in tiles of 1×128. A warp holds 2 · config::rows rows of 128 columns: each half of it takes every second
// row, and each lane a vector of 8 columns.
//
// NOTES
// - One of the 16 lanes of a row computes the scale of the row and sends the divisor to the others. So a thread
//   computes one scale, not one for each of its rows.
// - E5M6 is reordered in shared memory, within a warp: a vector of 8 is 12 bytes, and stores should be of 16 bytes.
#pragma once
#include "tile.cuh"

constexpr int rows = config::rows;  // per thread
constexpr int warp_rows = 2 * rows, block_rows = config::warps * warp_rows;
constexpr int packed_row_bytes = tile_columns * 3 / 2;  // bytes of a row of a tile in E5M6

// Position of a tile in x [batches, m, k]; `row` and `column` are the first of the thread.
struct TileCoord {
    int64_t batch;
    int tile, row, column, m, k;

    // The number of rows from the thread's first row to the end of the matrix; zero or negative if out of bounds. The
    // thread takes every second one of them.
    __device__ __forceinline__ int rows_left() const { return column < k ? m - row : 0; }
};

// The buffer in shared memory in which a warp reorders E5M6.
__device__ __forceinline__ uint8_t* packing_buffer() {
    return ptx::dynamic_shared() + threadIdx.x / 32 * (warp_rows * packed_row_bytes);
}

// Stores all rows of the warp from the packing buffer: 24 lanes store 16 bytes each of two consecutive rows.
__device__ __forceinline__ void store_e5m6_rows(uint8_t* data, const TileCoord& at) {
    constexpr int vectors = packed_row_bytes / 16;
    const int lane = ptx::lane_id(), first = at.row - lane / 16 + lane / vectors, byte = lane % vectors * 16;
    const int left = lane < 2 * vectors && byte < bytes<e5m6>(at.k - at.tile * tile_columns) ? at.m - first : 0;
    const uint8_t* from = packing_buffer() + 16 * min(lane, 2 * vectors - 1);
    uint8_t* to = data + bytes<e5m6>((at.batch * at.m + first) * at.k + at.tile * tile_columns) + byte;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < warp_rows; i += 2, from += 2 * packed_row_bytes, to += bytes<e5m6>(2 * at.k))
        ptx::store_16(to, *reinterpret_cast<const uint4*>(from), i < left);
    __syncwarp();
}

// Rounds and stores a vector of quotients: to global memory, or for E5M6 to the packing buffer.
template <int format, bool is_16_bit, class Values>
__device__ __forceinline__ void store_row(
    uint8_t* to, const float (&quotient)[8], const Values& values, int i, bool in_bounds) {
    if constexpr (format == e5m6) {
        uint32_t word[3];
        pack_e5m6<is_16_bit>(quotient, values, word);
        uint8_t* row = packing_buffer() + 2 * i * packed_row_bytes;
        uint32_t* buffer = reinterpret_cast<uint32_t*>(row) + 3 * ptx::lane_id();
#pragma unroll
        for (int w = 0; w < 3; ++w) buffer[w] = word[w];
    } else {
        ptx::store_8(to, pack_8<format>(quotient), in_bounds);
    }
}

// Divides, rounds and stores the rows of a thread; divisor_of(i) is the divisor of its row i.
template <int format, bool power_of_2, class Values, class DivisorOf>
__device__ __forceinline__ void store_encoded(
    uint8_t* data, const TileCoord& at, const Values (&x)[rows], DivisorOf divisor_of) {
    const int left = at.rows_left();
    uint8_t* to = data + (at.batch * at.m + at.row) * at.k + at.column;
#pragma unroll
    for (int i = 0; i < rows; ++i, to += 2 * at.k) {
        const Divisor divisor = divisor_of(i);
        float quotient[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) quotient[j] = divisor.template divide<power_of_2>(x[i].at(j));
        store_row<format, power_of_2 && Values::is_16_bit>(to, quotient, x[i], i, 2 * i < left);
    }
    if constexpr (format == e5m6) store_e5m6_rows(data, at);
}

// As `store_encoded`, for the rare rows that need the careful division: recomputes each row with recompute(i), which
// takes little code and few registers, and divides it with divide(quotient, values, i).
template <int format, class Recompute, class Divide>
__device__ __forceinline__ void store_encoded_carefully(
    uint8_t* data, const TileCoord& at, Recompute recompute, Divide divide) {
    const int left = at.rows_left();
    uint8_t* to = data + (at.batch * at.m + at.row) * at.k + at.column;
#pragma unroll 1
    for (int i = 0; i < rows; ++i, to += 2 * at.k) {
        const FloatVec8 x = recompute(i);
        float quotient[8];
        divide(quotient, x, i);
        store_row<format, false>(to, quotient, x, i, 2 * i < left);
    }
    if constexpr (format == e5m6) store_e5m6_rows(data, at);
}

// Quantizes the rows of a thread and stores their scales, contiguous along M, and data. recompute(i) returns row i
// again.
template <int format, bool power_of_2, class Values, class Recompute>
__device__ __forceinline__ void quantize_tile(
    uint8_t* data, float* scales, const TileCoord& at, const Values (&x)[rows], Recompute recompute) {
    float amax[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) amax[i] = x[i].amax();
    const float scale = scale_from_amax<format, power_of_2>(reduce_rows<in_halves>(amax, max_abs));
    const int row = at.row + 2 * owned_index<rows>(), tiles = (at.k + tile_columns - 1) / tile_columns;
    float* to = scales + (at.batch * tiles + at.tile) * ((at.m + 3) / 4 * 4) + row;
    ptx::store_float(to, scale, is_first_owner<rows>() && row < at.m);

    const Divisor own = make_divisor<power_of_2>(scale);
    auto of_row = [&](int i) { return divisor_from_owner<rows, power_of_2>(own, i); };
    if (!power_of_2 && __any_sync(all_lanes, own.needs_careful_division()))
        store_encoded_carefully<format>(data, at, recompute, [&](float(&quotient)[8], const FloatVec8& values, int i) {
            const Divisor divisor = of_row(i);
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[j] = divisor.divide_carefully(values.at(j));
        });
    else
        store_encoded<format, power_of_2>(data, at, x, of_row);
}

// Quantizes the rows of a thread with a given scale, which need not fit them: values that are too large saturate.
// Within 2⁻⁶⁰ … 2⁶⁰ the reciprocal and its error are exact enough. The correction must not be zero, since Inf · 0 is
// NaN.
template <int format, class Values, class Recompute>
__device__ __forceinline__ void quantize_tile_with_scale(
    float scale, uint8_t* data, const TileCoord& at, const Values (&x)[rows], Recompute recompute) {
    Divisor divisor = make_divisor<false>(scale);
    if (scale >= 0x1p-60f && scale <= 0x1p60f && !divisor.needs_careful_division()) {
        if (divisor.correction == 0.0f) divisor.correction = __fmul_rn(divisor.inverse, 0x1p-60f);
        store_encoded<format, false>(data, at, x, [&](int) { return divisor; });
    } else {
        store_encoded_carefully<format>(data, at, recompute, [&](float(&quotient)[8], const FloatVec8& values, int) {
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[j] = __fdiv_rn(values.at(j), scale);
        });
    }
}

// A vector of 8 in FP32.
template <class Values>
__device__ __forceinline__ FloatVec8 to_floats(const Values& x) {
    FloatVec8 value;
#pragma unroll
    for (int j = 0; j < 8; ++j) value.value[j] = x.at(j);
    return value;
}
