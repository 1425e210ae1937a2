// A square of 128×128 numbers that a block of 256 threads holds: cast along its rows, along its columns, or as a whole.
//
// A thread holds eight rows of eight columns, and a warp 16 rows: 16 lanes lie beside each other, the other 16 below. So a
// row's largest magnitude is found within 16 lanes, and a column's across the eight warps, through shared memory.
//
// NOTES
// - Bytes are turned without being turned: a thread rounds four rows of one column at once, and what comes out is a word
//   of the transpose. It writes words of eight rows to shared memory, from where whole rows of 128 bytes are stored.
// - There, the 16-byte units of a row of the transpose change places, by a number that depends on the row: or the lanes of
//   a warp would all write to the same banks. Half of them write at once, eight bytes each. To meet all banks, the second
//   eight of these must write the other half of their units, and so they hold the other eight rows (`crossed`).
// - What is turned stays in shared memory until the kernel calls `store_turned`: what it loads next should be under way
//   before.
#pragma once
#include "tile.cuh"

constexpr int side = 128, square_threads = 256, warps = square_threads / 32;

// What is divided by, and how the result is stored.
//   both         rows by their scales, and columns by theirs, turned
//   transposed_only  columns, turned
//   columns      columns, not turned
//   block        one scale, not turned
//   weight       one scale, both ways
enum Form { both, transposed_only, columns, block, weight };

__device__ constexpr bool turns(int form) { return form == both || form == transposed_only || form == weight; }

namespace place {  // in shared memory
constexpr int turned_bytes = 0;
constexpr int maxima = turned_bytes + side * side;   // float [warps][side], of columns, or one for each warp
constexpr int divisors = maxima + 4 * warps * side;  // Divisor [8][16]: a thread's columns lie 16 apart
constexpr int row_divisors = divisors + 8 * side;    // Divisor [side], of rows
constexpr int row_maxima = row_divisors + 8 * side;  // float [side]
constexpr int care = row_maxima + 4 * side;          // int [8]: whether a divisor of 32 columns, or rows, needs care
constexpr int bytes = care + 32;
}  // namespace place

__device__ __forceinline__ unsigned round_up(unsigned n, unsigned unit) { return (n + unit - 1) / unit * unit; }
__device__ __forceinline__ unsigned tiles(unsigned n) { return (n + side - 1) / side; }
__device__ __forceinline__ int64_t wide(unsigned a, unsigned b) { return static_cast<int64_t>(a) * b; }

// Where the square lies in a matrix [m, k] of a batch, and the thread's rows and columns.
struct Square {
    unsigned batch, m_tile, k_tile, m, k;

    __device__ __forceinline__ unsigned row() const {
        return m_tile * side + threadIdx.x / 32 * 16 + row_of_lane<crossed>() * 8;
    }
    __device__ __forceinline__ unsigned column() const { return k_tile * side + ptx::lane_id() % 16 * 8; }
    // How many of the thread's rows there are in the matrix; below its edge and beside it none, or fewer than none.
    __device__ __forceinline__ int rows() const { return column() < k ? static_cast<int>(m - row()) : 0; }
};

// Calls do_row(i, there) for each of the thread's eight rows. What it loads is under way at once: eight rows that may be
// missing are more predicates than a thread has, and the last would wait for the first.
template <class DoRow>
__device__ __forceinline__ void each_row(const Square& at, DoRow do_row) {
    const int there = at.rows();
    if ((at.m_tile + 1) * side <= at.m && (at.k_tile + 1) * side <= at.k) {  // most squares
#pragma unroll
        for (int i = 0; i < 8; ++i) do_row(i, true);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) do_row(i, i < there);
    }
}

// The square of an index. Those that are taken at the same time lie beside each other both ways, `band_height` of them
// along M: rows of the result are contiguous along K, those of the turned one along M, and neither should be written in
// pieces that lie far apart. band_inverse: that of a band's squares, for `quotient`.
template <unsigned band_height>
__device__ __forceinline__ Square square_of(unsigned index, unsigned m, unsigned k, unsigned band_inverse) {
    const unsigned m_tiles = tiles(m), k_tiles = tiles(k), of_matrix = m_tiles * k_tiles;
    Square at{0, 0, 0, m, k};
    if (index >= of_matrix) {
        at.batch = index / of_matrix;
        index -= at.batch * of_matrix;
    }
    const unsigned band = quotient(index, band_height * k_tiles, band_inverse), first = band * band_height;
    const unsigned in_band = index - first * k_tiles, height = min(m_tiles - first, band_height);
    at.k_tile = height == band_height ? in_band / band_height : in_band / height;
    at.m_tile = first + in_band - at.k_tile * height;
    return at;
}

// Results as `octile.kernels.memory_layout` lays them out; what a form does not make is not touched.
struct Cast {
    uint8_t *data, *data_t;
    float *scale, *scale_t;
};

// Where in shared memory eight rows, 8 · piece …, of the first column of a group of eight lie; the next columns follow.
__device__ __forceinline__ unsigned turned_place(unsigned group, unsigned piece) {
    return group * 8 * side + (piece / 2 ^ group % 8) * 16 + piece % 2 * 8;
}

// The turned codes from shared memory to memory: 16 bytes a lane, eight lanes a row. Rows are stored up to their padding.
__device__ __forceinline__ void store_turned(uint8_t* data_t, const Square& at, const uint8_t* shared) {
    const unsigned lane = ptx::lane_id(), warp = threadIdx.x / 32, unit = lane % 8;
    const unsigned row_bytes = round_up(at.m, 16), m = at.m_tile * side + 16 * unit;
    unsigned column = at.k_tile * side + warp * 16 + lane / 8;
    uint8_t* to = data_t + (wide(at.batch, at.k) + column) * row_bytes + m;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i, column += 4, to += 4 * row_bytes) {
        const uint8_t* from = shared + turned_place(2 * warp + i / 2, 2 * unit) + (lane / 8 + i % 2 * 4) * side;
        ptx::store_16(to, *reinterpret_cast<const uint4*>(from), column < at.k && m < row_bytes);
    }
}

// The divisors of all columns into shared memory, from what each warp found of them, and where with_rows those of all rows,
// by the threads that have no column; and the scales to memory.
template <int format, bool power_of_2, bool with_rows>
__device__ __forceinline__ void find_divisors(const Cast& to, const Square& at, uint8_t* shared) {
    const unsigned own = threadIdx.x % side;
    const bool of_row = threadIdx.x >= side;
    if (of_row && !with_rows) return;
    float amax, *scale_to;
    bool there;
    Divisor* divisor_to;
    if (of_row) {
        amax = reinterpret_cast<const float*>(shared + place::row_maxima)[own];
        const unsigned row = at.m_tile * side + own;
        scale_to = to.scale + (wide(at.batch, tiles(at.k)) + at.k_tile) * round_up(at.m, 4) + row;
        there = row < at.m;
        divisor_to = reinterpret_cast<Divisor*>(shared + place::row_divisors) + own;
    } else {
        const float* maxima = reinterpret_cast<const float*>(shared + place::maxima) + own;
        amax = maxima[0];
#pragma unroll
        for (int w = 1; w < warps; ++w) amax = max_abs(amax, maxima[w * side]);
        const unsigned column = at.k_tile * side + own;
        scale_to = to.scale_t + (wide(at.batch, tiles(at.m)) + at.m_tile) * round_up(at.k, 4) + column;
        there = column < at.k;
        divisor_to = reinterpret_cast<Divisor*>(shared + place::divisors) + own % 8 * 16 + own / 8;
    }
    const float scale = scale_of<format, power_of_2>(amax);
    ptx::store_float(scale_to, scale, there);
    const Divisor divisor = divisor_of<power_of_2>(scale);
    *divisor_to = divisor;
    if constexpr (!power_of_2)
        reinterpret_cast<int*>(shared + place::care)[threadIdx.x / 32] = __any_sync(whole_warp, divisor.needs_care());
}

// What the thread divides by: its rows and its columns, in shared memory, or one for all.
struct Divisors {
    Divisor of_all;
    const Divisor *of_rows, *of_columns;

    template <int form>
    __device__ __forceinline__ Divisor row(int i) const {
        return form == both ? of_rows[i] : of_all;
    }
    __device__ __forceinline__ Divisor column(int j) const { return of_columns[16 * j]; }
};

// The largest magnitude of each of eight columns.
template <class Values>
__device__ __forceinline__ Values largest_of(const Values (&x)[8]) {
    Values most = x[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) most.raise(x[i]);
    return most;
}

template <int number>
__device__ __forceinline__ Floats largest_of(const Scaled<number> (&x)[8]) {
    Floats most;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        most.value[j] = x[0].at(j);
#pragma unroll
        for (int i = 1; i < 8; ++i) most.value[j] = max_abs(most.value[j], x[i].at(j));
    }
    return most;
}

enum Division { by_power_of_2, fast, careful };  // how a number is divided

template <int division>
__device__ __forceinline__ float divided(float value, const Divisor& by) {
    if constexpr (division == careful) return by.divide_carefully(value);
    return by.template divide<division == by_power_of_2>(value);
}

// Divides and rounds rows, by what the form divides these, and stores them.
template <int form, int format, int division, class Values>
__device__ __forceinline__ void store_rows(const Cast& to, const Square& at, const Values (&x)[8], const Divisors& by) {
    uint8_t* data = to.data + (wide(at.batch, at.m) + at.row()) * at.k + at.column();
    const int there = at.rows();
#pragma unroll
    for (int i = 0; i < 8; ++i, data += at.k) {
        const Divisor of_row = by.row<form>(i);
        float quotient[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) quotient[j] = divided<division>(x[i].at(j), form == columns ? by.column(j) : of_row);
        ptx::store_8(data, pack_8<format>(quotient), i < there);
    }
}

// The same with columns, into shared memory: words of the transpose.
template <int format, int division, class Values>
__device__ __forceinline__ void turn_columns(const Values (&x)[8], const Divisors& by, uint8_t* turned) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const Divisor divisor = by.column(j);
        float quotient[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) quotient[i] = divided<division>(x[i].at(j), divisor);
        *reinterpret_cast<uint2*>(turned + j * side) = pack_8<format>(quotient);
    }
}

// Divides by one number, and stores what comes of it both ways.
template <int format, int division, class Values>
__device__ __forceinline__ void store_both_ways(
    const Cast& to, const Square& at, const Values (&x)[8], const Divisor& by, uint8_t* turned) {
    uint8_t* data = to.data + (wide(at.batch, at.m) + at.row()) * at.k + at.column();
    const int there = at.rows();
    uint32_t words[8][2];  // of columns
#pragma unroll
    for (int four = 0; four < 2; ++four) {
        float quotient[4][8];
#pragma unroll
        for (int r = 0; r < 4; ++r, data += at.k) {
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[r][j] = divided<division>(x[4 * four + r].at(j), by);
            ptx::store_8(data, pack_8<format>(quotient[r]), 4 * four + r < there);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
            words[j][four] = pack_4<format>(quotient[0][j], quotient[1][j], quotient[2][j], quotient[3][j]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(turned + j * side) = make_uint2(words[j][0], words[j][1]);
}

template <int form, int format, int division, class Values>
__device__ __forceinline__ void store_square(
    const Cast& to, const Square& at, const Values (&x)[8], const Divisors& by, uint8_t* turned) {
    if constexpr (form == weight) {
        store_both_ways<format, division>(to, at, x, by.of_all, turned);
    } else {
        if constexpr (form != transposed_only) store_rows<form, format, division>(to, at, x, by);
        if constexpr (form == both || form == transposed_only) {
            Values value[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] = found_anew(x[i]);
            turn_columns<format, division>(value, by, turned);
        }
    }
}

// Casts what the block holds; what is turned waits for `store_turned`. Every thread calls it, as often as is wanted.
template <int form, int format, bool power_of_2, class Values>
__device__ __forceinline__ void cast_square(const Cast& to, const Square& at, const Values (&x)[8], uint8_t* shared) {
    constexpr bool by_column = form == both || form == transposed_only || form == columns;
    const unsigned lane = ptx::lane_id(), warp = threadIdx.x / 32;
    float* maxima = reinterpret_cast<float*>(shared + place::maxima);
    Divisors by;

    if constexpr (by_column) {
        const auto most = largest_of(x);
        float amax[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float mine = most.at(j);
            amax[j] = max_abs(mine, __shfl_xor_sync(whole_warp, mine, 16));
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
        const float own = over_row<crossed>(amax, max_abs);
        if (first_owner<8>())
            reinterpret_cast<float*>(shared + place::row_maxima)[at.row() % side + owned<8>()] = own;
    } else if constexpr (!by_column) {
        float amax = largest_of(x).amax();
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2) amax = max_abs(amax, __shfl_xor_sync(whole_warp, amax, bit));
        if (lane == 0) maxima[warp] = amax;
    }
    __syncthreads();
    if constexpr (by_column) {
        find_divisors<format, power_of_2, form == both>(to, at, shared);
        __syncthreads();
        by.of_rows = reinterpret_cast<const Divisor*>(shared + place::row_divisors) + at.row() % side;
        by.of_columns = reinterpret_cast<const Divisor*>(shared + place::divisors) + lane % 16;
    } else {
        float amax = maxima[0];
#pragma unroll
        for (int w = 1; w < warps; ++w) amax = max_abs(amax, maxima[w]);
        const float scale = scale_of<format, power_of_2>(amax);
        const int64_t row = wide(at.batch, tiles(at.m)) + at.m_tile;
        ptx::store_float(to.scale + row * tiles(at.k) + at.k_tile, scale, threadIdx.x == 0);
        by.of_all = divisor_of<power_of_2>(scale);
    }

    bool care = false;
    if constexpr (!power_of_2 && !by_column) care = by.of_all.needs_care();
    if constexpr (!power_of_2 && by_column)
#pragma unroll
        for (int i = 0; i < (form == both ? 2 : 1); ++i) {
            const int4 flags = reinterpret_cast<const int4*>(shared + place::care)[i];
            care |= (flags.x | flags.y | flags.z | flags.w) != 0;
        }
    uint8_t* turned = shared + turned_place(lane % 16, warp * 2 + row_of_lane<crossed>());
    if (!power_of_2 && __any_sync(whole_warp, care))
        store_square<form, format, careful>(to, at, x, by, turned);
    else
        store_square<form, format, power_of_2 ? by_power_of_2 : fast>(to, at, x, by, turned);
    if constexpr (turns(form)) __syncthreads();
}
