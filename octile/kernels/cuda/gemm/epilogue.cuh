// A warpgroup's sums to global memory.
//
//   tma      whole pieces of 64 rows through shared memory, swizzled against bank conflicts: the copy engine stores
//            them, or adds them (FP32 alone; to BF16 is added in shared memory), and leaves out what lies outside of
//            the tensor. It would also store rows of the next group: of a piece that is not whole they are stored one
//            by one, and it is not swizzled.
//   pairs    two neighbouring numbers at once, where the copy engine cannot store
//   single   any strides
//
// Adding to what is there has one writer an element, so that the result does not depend on who comes first. Where it is
// not fetched (additions.cuh), it is added to in the L2 cache, which takes FP32 numbers below 2⁻¹²⁶ for zero (PTX ISA,
// "red").
#pragma once
#include "promotion.cuh"

struct Out {
    const TensorMap* map;
    void* data;
    int64_t group, row, column;  // strides in elements
};

// z of a tensor that has one matrix a group, or has not.
__device__ __forceinline__ int out_group(const Tile& tile) {
    return config::schedule == masked || config::schedule == along_k ? tile.group : 0;
}

__device__ __forceinline__ uint16_t bf16(float x) { return static_cast<uint16_t>(ptx::pack_bf16(x, 0.0f)); }
__device__ __forceinline__ float from_bf16(uint32_t x) { return __uint_as_float(x << 16); }

// Two BF16 numbers, plus x and y, each sum rounded once.
__device__ __forceinline__ uint32_t add_to_bf16(uint32_t before, float x, float y) {
    return ptx::pack_bf16(__fadd_rn(x, from_bf16(before & 0xFFFF)), __fadd_rn(y, from_bf16(before >> 16)));
}

__device__ __forceinline__ void store_pair(void* data, int64_t at, float x, float y) {
    if constexpr (config::out_float) {
        float* to = static_cast<float*>(data) + at;
        if constexpr (config::accumulate) ptx::red_add_v2(to, x, y);
        else *reinterpret_cast<float2*>(to) = make_float2(x, y);
    } else {
        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(data) + at);
        *to = config::accumulate ? add_to_bf16(*to, x, y) : ptx::pack_bf16(x, y);
    }
}

__device__ __forceinline__ void store_one(void* data, int64_t at, float x) {
    if constexpr (config::out_float) {
        float* to = static_cast<float*>(data) + at;
        if constexpr (config::accumulate) ptx::red_add(to, x);
        else *to = x;
    } else {
        uint16_t* to = static_cast<uint16_t*>(data) + at;
        *to = bf16(config::accumulate ? __fadd_rn(x, from_bf16(*to)) : x);
    }
}

// Sums of 64 rows, from registers; `m` is the first of these rows.
__device__ __forceinline__ void store_directly(
    const float (&total)[count], const Out& out, const Tile& tile, int m, int columns) {
    const int row = m + threadIdx.x % 128 / 32 * 16 + ptx::lane_id() / 4, column = tile.n + 2 * (ptx::lane_id() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = row + i * 8;
        if (r < tile.m_begin || r >= tile.m_end) continue;
        const int64_t base = out_group(tile) * out.group + r * out.row;
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
            const int c = column + 8 * j;
            const float x = total[4 * j + i * 2], y = total[4 * j + i * 2 + 1];
            if constexpr (config::store == pairs) {
                if (c < columns) store_pair(out.data, base + c, x, y);
            } else {
                if (c < columns) store_one(out.data, base + c * out.column, x);
                if (c + 1 < columns) store_one(out.data, base + (c + 1) * out.column, y);
            }
        }
    }
}

// Where the swizzle of rows of `row_bytes` puts a byte, in a piece as the copy engine reads it: bits 4 … 6 of the
// offset, as many as a row has, are changed by bits 7 … 9.
template <int row_bytes>
__device__ __forceinline__ int swizzled(int at) {
    return at ^ ((at >> 7 & (row_bytes / 16 - 1)) << 4);
}

__device__ __forceinline__ void add_pair(uint8_t* to, float x, float y) {
    if constexpr (config::out_float) {
        float2* pair = reinterpret_cast<float2*>(to);
        const float2 before = *pair;
        *pair = make_float2(__fadd_rn(before.x, x), __fadd_rn(before.y, y));
    } else {
        uint32_t* pair = reinterpret_cast<uint32_t*>(to);
        *pair = add_to_bf16(*pair, x, y);
    }
}

// As many columns of 64 rows' sums as a piece has, from the 8·`first`th on, to shared memory; BF16 is rounded. What is
// fetched lies there already, and is added to.
// Of two offsets that differ in bits which the swizzle does not look at, so do the swizzled ones: one is kept, and the
// others are one exclusive or away.
__device__ __forceinline__ void stage_piece(const float (&total)[count], int first, uint8_t* piece, bool swizzle) {
    constexpr int row_bytes = config::transposed ? 128 : store_columns * out_bytes;
    const int warp_row = threadIdx.x % 128 / 32 * 16, lane = ptx::lane_id();
    // lanes 0 … 7 name the rows of the first 8×8 matrix, then 8 rows below it, then both 8 columns further on
    const int matrix_row = lane % 8 + lane / 8 % 2 * 8, matrix = lane / 16;
    if constexpr (config::out_float || config::load_c) {
        const int plain = (warp_row + lane / 4) * row_bytes + lane % 4 * 2 * out_bytes;
        const int at = swizzle ? swizzled<row_bytes>(plain) : plain;
#pragma unroll
        for (int j = 0; j < store_columns / 8; ++j) {
            const float* x = &total[4 * (first + j)];
            uint8_t* to = piece + (at ^ j * 8 * out_bytes);
            if constexpr (config::load_c) {
                add_pair(to, x[0], x[1]);
                add_pair(to + 8 * row_bytes, x[2], x[3]);
            } else {
                *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
                *reinterpret_cast<float2*>(to + 8 * row_bytes) = make_float2(x[2], x[3]);
            }
        }
    } else if constexpr (config::transposed) {
        const int at = (lane % 8 + 8 * matrix) * 128 + (warp_row + lane / 8 % 2 * 8) * 2;
        uint8_t* to = piece + swizzled<row_bytes>(at);
#pragma unroll
        for (int j = 0; j < store_columns / 8; j += 2) {
            const float* x = &total[4 * (first + j)];
            ptx::stmatrix_x4_trans(to + j * 8 * 128, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]),
                                           ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
        }
    } else {
        const int plain = (warp_row + matrix_row) * row_bytes + matrix * 16;
        const int at = swizzle ? swizzled<row_bytes>(plain) : plain;
#pragma unroll
        for (int j = 0; j < store_columns / 8; j += 2) {
            const float* x = &total[4 * (first + j)];
            uint8_t* to = piece + (at ^ j * 16);
            if (j + 1 < store_columns / 8)
                ptx::stmatrix_x4(to, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]),
                                    ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
            else
                ptx::stmatrix_x2(to, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]));
        }
    }
}

// Sums of 64 rows through shared memory, as many pieces at a time as have room there. Where two waves have room, one is
// staged while the copy engine still reads the other; an odd number of them would not take turns from tile to tile.
__device__ __forceinline__ void store_staged(
    const float (&total)[count], int wave, uint8_t* staging, const Out& out, const Tile& tile, int m, int columns,
    int warpgroup) {
    constexpr int of_wave = pieces / waves, at_once = of_wave < config::staged_boxes ? of_wave : config::staged_boxes;
    constexpr bool two = config::staged_boxes >= 2 * of_wave && waves % 2 == 0;
    const int thread = threadIdx.x % 128, first_row = max(tile.m_begin - m, 0), end_row = min(tile.m_end - m, 64);
    const bool whole = config::schedule != grouped || end_row - first_row == 64;
    const bool stores = whole ? thread == 0 : first_row <= thread && thread < end_row;
    uint8_t* room = staging + (two ? wave % 2 * of_wave * store_box_bytes : 0);
#pragma unroll
    for (int first = 0; first < of_wave; first += at_once) {
        ptx::bulk_wait_group_read<two>();
        ptx::named_barrier_sync(4 + warpgroup, 128);
#pragma unroll
        for (int i = 0; i < at_once && first + i < of_wave; ++i)
            stage_piece(total, (first + i) * store_columns / 8, room + i * store_box_bytes, whole);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(4 + warpgroup, 128);

#pragma unroll
        for (int i = 0; i < at_once && first + i < of_wave; ++i) {
            const int n = tile.n + (first + i) * store_columns;
            const uint8_t* piece = room + i * store_box_bytes;
            if (!stores || n >= columns || m >= tile.m_end) continue;
            if (!whole) {
                constexpr int row_bytes = store_columns * out_bytes;
                uint8_t* row = static_cast<uint8_t*>(out.data) + ((m + thread) * out.row + n) * out_bytes;
                ptx::bulk_store(row, piece + thread * row_bytes, min(row_bytes, round_up((columns - n) * out_bytes, 16)));
            } else if constexpr (config::transposed) ptx::tma_store(out.map, piece, m, n, out_group(tile));
            else if constexpr (config::accumulate) ptx::tma_reduce_add(out.map, piece, n, m, out_group(tile));
            else ptx::tma_store(out.map, piece, n, m, out_group(tile));
        }
        ptx::bulk_commit_group();
    }
}

// Zeros to `rows` rows of a tile from m on, 16 bytes each: the result of an empty sum, where the copy engine could store.
__device__ __forceinline__ void store_zeros(const Out& out, const Tile& tile, int m, int rows, int columns) {
    constexpr int of_16_bytes = 16 / out_bytes, vectors = config::tile_n / of_16_bytes;
    uint8_t* data = static_cast<uint8_t*>(out.data) + out_group(tile) * out.group * out_bytes;
    for (int i = threadIdx.x % 128; i < rows * vectors; i += 128) {
        const int row = m + i / vectors, column = tile.n + i % vectors * of_16_bytes;
        if (tile.m_begin <= row && row < tile.m_end && column < columns)
            *reinterpret_cast<uint4*>(data + (row * out.row + column) * out_bytes) = make_uint4(0, 0, 0, 0);
    }
}
