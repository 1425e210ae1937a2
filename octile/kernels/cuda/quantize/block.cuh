// Quantization of a 128×128 block that a thread block of 256 threads holds in registers: along its rows, along its
// columns, or with one scale.
//
// A thread holds 8 rows of 8 columns, and a warp 16 rows of 128 columns: 16 lanes share 8 rows. So the amax of a row is
// reduced within 16 lanes, and the amax of a column across the 8 warps, through shared memory.
//
// NOTES
// - Rounding transposes: a thread rounds 4 rows of one column at once, and the result is a word of the transpose. It
//   writes words of 8 rows to shared memory, from which whole rows of 128 bytes are stored.
// - In shared memory the 16-byte units of a row of the transpose are permuted (swizzled) by an XOR with the row, or all
//   lanes of a warp would write to the same banks. Half of the lanes write at once, 8 bytes each. To reach all banks,
//   the second 8 of them must write the other half of their units; so these hold the other 8 rows (lane layout
//   `crossed`).
// - The transpose stays in shared memory until the kernel calls `store_transposed`, so that the kernel can issue its
//   next loads before.
#pragma once
#include "tile.cuh"

constexpr int side = 128, block_threads = 256, warps = block_threads / 32;  // side: rows and columns of a block

// How a block is scaled and stored; `launcher.py` has the same values.
//   both             1×128 scales, not transposed, and 128×1 scales, stored transposed
//   transposed_only  128×1 scales, stored transposed
//   transposed_block one scale, stored transposed
//   columns          128×1 scales, not transposed
//   block            one scale, not transposed
//   weight           one scale, stored both ways
enum Form { both, transposed_only, columns, block, weight, transposed_block };

__device__ constexpr bool has_transposed(int form) { return form != columns && form != block; }

namespace smem {  // offsets in shared memory, in bytes
constexpr int transposed = 0;
constexpr int maxima = transposed + side * side;     // float [warps][side]: amax of columns; or one per warp
constexpr int divisors = maxima + 4 * warps * side;  // Divisor [8][16] of columns; those of a thread lie 16 apart
constexpr int row_divisors = divisors + 8 * side;    // Divisor [side] of rows
constexpr int row_maxima = row_divisors + 8 * side;  // float [side]: amax of rows
constexpr int careful_flags = row_maxima + 4 * side;  // int [8]: whether any of 32 divisors needs the careful division
constexpr int bytes = careful_flags + 32;
}  // namespace smem

__device__ __forceinline__ unsigned round_up(unsigned n, unsigned unit) { return (n + unit - 1) / unit * unit; }
__device__ __forceinline__ unsigned tiles(unsigned n) { return (n + side - 1) / side; }
__device__ __forceinline__ int64_t mul_wide(unsigned a, unsigned b) { return static_cast<int64_t>(a) * b; }

// Position of a 128×128 block in a matrix [m, k] of a batch, and the rows and columns of the thread in it.
//
// With config::grouped the rows of a matrix are divided into groups, and tile t holds the rows from tiles[t].x to
// tiles[t].y, at most 128 of one group (`octile.ops.groups`). The block is then filled up with zeros, and the transpose
// has 128 columns for each tile.
struct BlockCoord {
    unsigned batch, m_tile, k_tile, m, k;
    unsigned first, end;  // the block's first row, and the end of the rows of its tile or of the matrix
    unsigned columns_t;   // of the transpose

    // The thread's first row in the block, and in the matrix.
    __device__ __forceinline__ static unsigned row_in_block() {
        return threadIdx.x / 32 * 16 + lane_row<crossed>() * 8;
    }
    __device__ __forceinline__ unsigned row() const { return first + row_in_block(); }
    __device__ __forceinline__ unsigned column() const { return k_tile * side + ptx::lane_id() % 16 * 8; }
    // How many of the thread's rows lie in the block; zero or negative if it is out of bounds.
    __device__ __forceinline__ int rows_left() const { return column() < k ? static_cast<int>(end - row()) : 0; }
};

// Calls do_row(i, in_bounds) for each of the thread's 8 rows. Blocks inside the matrix take a path without predicates:
// 8 rows need more predicate registers than a thread has, and then the last loads would wait for the first.
template <class DoRow>
__device__ __forceinline__ void for_each_row(const BlockCoord& at, DoRow do_row) {
    const int left = at.rows_left();
    if (at.first + side <= at.end && (at.k_tile + 1) * side <= at.k) {  // most blocks
#pragma unroll
        for (int i = 0; i < 8; ++i) do_row(i, true);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) do_row(i, i < left);
    }
}

// The 128×128 block that a thread block takes. Consecutive thread blocks take `raster_height` blocks along M, then the
// next column of these. So blocks that run at the same time are neighbors along M and K: the result is contiguous along
// K and its transpose along M, and neighbors complete the cache lines of both. raster_inverse: the `inverse` that
// `quotient` takes for raster_height · ⌈k / 128⌉. row_tiles: [tile_count], only with config::grouped.
template <unsigned raster_height>
__device__ __forceinline__ BlockCoord block_coord(
    unsigned index, unsigned m, unsigned k, unsigned raster_inverse, const uint2* row_tiles, unsigned tile_count) {
    const unsigned columns_t = config::grouped ? tile_count * side : m;
    const unsigned m_tiles = tiles(columns_t), k_tiles = tiles(k), blocks_per_matrix = m_tiles * k_tiles;
    BlockCoord at{0, 0, 0, m, k, 0, m, columns_t};
    if (!config::grouped && index >= blocks_per_matrix) {  // groups are those of one matrix
        at.batch = index / blocks_per_matrix;
        index -= at.batch * blocks_per_matrix;
    }
    const unsigned band = quotient(index, raster_height * k_tiles, raster_inverse), first = band * raster_height;
    const unsigned in_band = index - first * k_tiles, height = min(m_tiles - first, raster_height);
    at.k_tile = height == raster_height ? in_band / raster_height : in_band / height;
    at.m_tile = first + in_band - at.k_tile * height;
    at.first = at.m_tile * side;
    if constexpr (config::grouped) {
        const uint2 rows = ptx::load_8(row_tiles + at.m_tile, true);
        at.first = rows.x, at.end = rows.y;
    }
    return at;
}

// Results in the layout of `octile.kernels.memory_layout`; those that a form does not have are not accessed.
struct Outputs {
    uint8_t *data, *data_t;
    float *scale, *scale_t;
};

// The swizzled offset in shared memory of a vector of 8 rows, from row 8 · vector on, of the first column of a group of
// 8 columns. The other columns follow, `side` bytes apart.
__device__ __forceinline__ unsigned transposed_offset(unsigned group, unsigned vector) {
    return group * 8 * side + (vector / 2 ^ group % 8) * 16 + vector % 2 * 8;
}

// Stores the transposed data from shared memory: 16 bytes per lane, 8 lanes per row. Rows are stored up to a multiple of
// 16 bytes, their padding; row_bytes, from one row to the next, is more in a part of a larger matrix.
__device__ __forceinline__ void store_transposed(
    uint8_t* data_t, const BlockCoord& at, unsigned row_bytes, const uint8_t* shared) {
    const unsigned lane = ptx::lane_id(), warp = threadIdx.x / 32, unit = lane % 8;
    const unsigned m = at.m_tile * side + 16 * unit;
    unsigned column = at.k_tile * side + warp * 16 + lane / 8;
    uint8_t* to = data_t + (mul_wide(at.batch, at.k) + column) * row_bytes + m;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i, column += 4, to += 4 * row_bytes) {
        const uint8_t* from = shared + transposed_offset(2 * warp + i / 2, 2 * unit) + (lane / 8 + i % 2 * 4) * side;
        ptx::store_16(to, *reinterpret_cast<const uint4*>(from), column < at.k && m < at.columns_t);
    }
}

// Computes the scales of all columns from the amax of each warp, stores them, and writes their divisors to shared
// memory. With with_rows, the other half of the threads does the same for all rows.
template <int format, bool power_of_2, bool with_rows>
__device__ __forceinline__ void compute_divisors(const Outputs& to, const BlockCoord& at, uint8_t* shared) {
    const unsigned own = threadIdx.x % side;
    const bool of_row = threadIdx.x >= side;
    if (of_row && !with_rows) return;
    float amax, *scale_to;
    bool in_bounds;
    Divisor* divisor_to;
    if (of_row) {
        amax = reinterpret_cast<const float*>(shared + smem::row_maxima)[own];
        const unsigned row = at.first + own;
        scale_to = to.scale + (mul_wide(at.batch, tiles(at.k)) + at.k_tile) * round_up(at.m, 4) + row;
        in_bounds = row < at.end;
        divisor_to = reinterpret_cast<Divisor*>(shared + smem::row_divisors) + own;
    } else {
        const float* maxima = reinterpret_cast<const float*>(shared + smem::maxima) + own;
        amax = maxima[0];
#pragma unroll
        for (int w = 1; w < warps; ++w) amax = max_abs(amax, maxima[w * side]);
        const unsigned column = at.k_tile * side + own;
        scale_to = to.scale_t + (mul_wide(at.batch, tiles(at.columns_t)) + at.m_tile) * round_up(at.k, 4) + column;
        in_bounds = column < at.k;
        divisor_to = reinterpret_cast<Divisor*>(shared + smem::divisors) + own % 8 * 16 + own / 8;
    }
    const float scale = scale_from_amax<format, power_of_2>(amax);
    ptx::store_float(scale_to, scale, in_bounds);
    const Divisor divisor = make_divisor<power_of_2>(scale);
    *divisor_to = divisor;
    if constexpr (!power_of_2)
        reinterpret_cast<int*>(shared + smem::careful_flags)[threadIdx.x / 32] =
            __any_sync(all_lanes, divisor.needs_careful_division());
}

// The divisors of a thread: those of its rows and columns, in shared memory, or one for the whole block.
struct Divisors {
    Divisor of_all;
    const Divisor *of_rows, *of_columns;

    template <int form>
    __device__ __forceinline__ Divisor row(int i) const {
        return form == both ? of_rows[i] : of_all;
    }
    __device__ __forceinline__ Divisor column(int j) const { return of_columns[16 * j]; }
};

// The amax of each of 8 columns.
template <class Values>
__device__ __forceinline__ Values column_amax(const Values (&x)[8]) {
    Values amax = x[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) amax.update_amax(x[i]);
    return amax;
}

template <int dtype>
__device__ __forceinline__ FloatVec8 column_amax(const ScaledVec8<dtype> (&x)[8]) {
    FloatVec8 amax;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        amax.value[j] = x[0].at(j);
#pragma unroll
        for (int i = 1; i < 8; ++i) amax.value[j] = max_abs(amax.value[j], x[i].at(j));
    }
    return amax;
}

enum Division { by_power_of_2, fast, careful };

template <int division>
__device__ __forceinline__ float divide(float value, const Divisor& by) {
    if constexpr (division == careful) return by.divide_carefully(value);
    return by.template divide<division == by_power_of_2>(value);
}

// Divides, rounds and stores the thread's rows of data.
template <int form, int format, int division, class Values>
__device__ __forceinline__ void store_rows(
    const Outputs& to, const BlockCoord& at, const Values (&x)[8], const Divisors& by) {
    uint8_t* data = to.data + (mul_wide(at.batch, at.m) + at.row()) * at.k + at.column();
    const int left = at.rows_left();
#pragma unroll
    for (int i = 0; i < 8; ++i, data += at.k) {
        const Divisor of_row = by.row<form>(i);
        float quotient[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            quotient[j] = divide<division>(x[i].at(j), form == columns ? by.column(j) : of_row);
        ptx::store_8(data, pack_8<format>(quotient), i < left);
    }
}

// Divides and rounds the thread's columns and writes them to shared memory, as words of the transpose.
template <int form, int format, int division, class Values>
__device__ __forceinline__ void transpose_columns(const Values (&x)[8], const Divisors& by, uint8_t* transposed) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const Divisor divisor = form == transposed_block ? by.of_all : by.column(j);
        float quotient[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) quotient[i] = divide<division>(x[i].at(j), divisor);
        *reinterpret_cast<uint2*>(transposed + j * side) = pack_8<format>(quotient);
    }
}

// Divides by the scale of the block and rounds once; stores the rows of data and writes the transpose to shared memory.
template <int format, int division, class Values>
__device__ __forceinline__ void store_rows_and_transposed(
    const Outputs& to, const BlockCoord& at, const Values (&x)[8], const Divisor& by, uint8_t* transposed) {
    uint8_t* data = to.data + (mul_wide(at.batch, at.m) + at.row()) * at.k + at.column();
    const int left = at.rows_left();
    uint32_t words[8][2];  // of the transpose
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float quotient[4][8];
#pragma unroll
        for (int r = 0; r < 4; ++r, data += at.k) {
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[r][j] = divide<division>(x[4 * half + r].at(j), by);
            ptx::store_8(data, pack_8<format>(quotient[r]), 4 * half + r < left);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
            words[j][half] = pack_4<format>(quotient[0][j], quotient[1][j], quotient[2][j], quotient[3][j]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(transposed + j * side) = make_uint2(words[j][0], words[j][1]);
}

// Divides, rounds and stores the block as the form says.
template <int form, int format, int division, class Values>
__device__ __forceinline__ void store_block(
    const Outputs& to, const BlockCoord& at, const Values (&x)[8], const Divisors& by, uint8_t* transposed) {
    if constexpr (form == weight) {
        store_rows_and_transposed<format, division>(to, at, x, by.of_all, transposed);
    } else {
        if constexpr (form != transposed_only && form != transposed_block)
            store_rows<form, format, division>(to, at, x, by);
        if constexpr (has_transposed(form)) {
            Values value[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] = opaque(x[i]);
            transpose_columns<form, format, division>(value, by, transposed);
        }
    }
}

// Quantizes the block and stores data and scales; transposed data stays in shared memory until `store_transposed`. All
// threads must call it; a kernel may call it several times.
template <int form, int format, bool power_of_2, class Values>
__device__ __forceinline__ void quantize_block(
    const Outputs& to, const BlockCoord& at, const Values (&x)[8], uint8_t* shared) {
    constexpr bool by_column = form == both || form == transposed_only || form == columns;
    const unsigned lane = ptx::lane_id(), warp = threadIdx.x / 32;
    float* maxima = reinterpret_cast<float*>(shared + smem::maxima);
    Divisors by;

    if constexpr (by_column) {
        const auto column_max = column_amax(x);
        float amax[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float mine = column_max.at(j);
            amax[j] = max_abs(mine, __shfl_xor_sync(all_lanes, mine, 16));
        }
        if (lane < 16) {
            float4* row = reinterpret_cast<float4*>(maxima + warp * side + 8 * lane);
            row[0] = make_float4(amax[0], amax[1], amax[2], amax[3]);
            row[1] = make_float4(amax[4], amax[5], amax[6], amax[7]);
        }
    }
    if constexpr (form == both) {
        float amax[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) amax[i] = x[i].amax();
        const float own = reduce_rows<crossed>(amax, max_abs);
        if (is_first_owner<8>())
            reinterpret_cast<float*>(shared + smem::row_maxima)[at.row_in_block() + owned_index<8>()] = own;
    } else if constexpr (!by_column) {
        float amax = column_amax(x).amax();
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2) amax = max_abs(amax, __shfl_xor_sync(all_lanes, amax, bit));
        if (lane == 0) maxima[warp] = amax;
    }
    __syncthreads();
    if constexpr (by_column) {
        compute_divisors<format, power_of_2, form == both>(to, at, shared);
        __syncthreads();
        by.of_rows = reinterpret_cast<const Divisor*>(shared + smem::row_divisors) + at.row_in_block();
        by.of_columns = reinterpret_cast<const Divisor*>(shared + smem::divisors) + lane % 16;
    } else {
        float amax = maxima[0];
#pragma unroll
        for (int w = 1; w < warps; ++w) amax = max_abs(amax, maxima[w]);
        const float scale = scale_from_amax<format, power_of_2>(amax);
        const int64_t row = mul_wide(at.batch, tiles(at.m)) + at.m_tile;
        ptx::store_float(to.scale + row * tiles(at.k) + at.k_tile, scale, threadIdx.x == 0);
        by.of_all = make_divisor<power_of_2>(scale);
    }

    bool needs_care = false;
    if constexpr (!power_of_2 && !by_column) needs_care = by.of_all.needs_careful_division();
    if constexpr (!power_of_2 && by_column)
#pragma unroll
        for (int i = 0; i < (form == both ? 2 : 1); ++i) {
            const int4 flags = reinterpret_cast<const int4*>(shared + smem::careful_flags)[i];
            needs_care |= (flags.x | flags.y | flags.z | flags.w) != 0;
        }
    uint8_t* transposed = shared + transposed_offset(lane % 16, warp * 2 + lane_row<crossed>());
    if (!power_of_2 && __any_sync(all_lanes, needs_care))
        store_block<form, format, careful>(to, at, x, by, transposed);
    else
        store_block<form, format, power_of_2 ? by_power_of_2 : fast>(to, at, x, by, transposed);
    if constexpr (has_transposed(form)) __syncthreads();
}
