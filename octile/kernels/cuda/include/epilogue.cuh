// A warpgroup's sums to global memory.
//
//   tma      BF16, whole pieces of 64 rows through shared memory, swizzled against bank conflicts: the copy engine
//            stores them, and leaves out what lies outside of the tensor. It would also store rows of the next group:
//            a group's last piece is copied from there by the threads, 16 bytes each.
//   pairs    two neighbouring numbers at once: FP32, where four threads fill a whole sector of 32 bytes anyway, and
//            BF16 that the copy engine cannot take
//   single   any strides
//
// Adding to what is there has one writer an element, so that the result does not depend on who comes first. What adds in
// the L2 cache takes FP32 numbers below 2⁻¹²⁶ for zero (PTX ISA, "red").
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

__device__ __forceinline__ void store_pair(void* data, int64_t at, float x, float y) {
    if constexpr (config::out_float) {
        float* to = static_cast<float*>(data) + at;
        if constexpr (config::accumulate) ptx::add_global_2(to, x, y);
        else *reinterpret_cast<float2*>(to) = make_float2(x, y);
    } else {
        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(data) + at);
        if constexpr (config::accumulate) {
            const uint32_t old = *to;
            x = __fadd_rn(x, from_bf16(old & 0xFFFF));
            y = __fadd_rn(y, from_bf16(old >> 16));
        }
        *to = ptx::pack_bf16(x, y);
    }
}

__device__ __forceinline__ void store_one(void* data, int64_t at, float x) {
    if constexpr (config::out_float) {
        float* to = static_cast<float*>(data) + at;
        if constexpr (config::accumulate) ptx::add_global(to, x);
        else *to = x;
    } else {
        uint16_t* to = static_cast<uint16_t*>(data) + at;
        *to = bf16(config::accumulate ? __fadd_rn(x, from_bf16(*to)) : x);
    }
}

// From registers. `m`: the first row of this warpgroup.
__device__ __forceinline__ void store_directly(
    const float (&total)[waves][count], const Out& out, const Tile& tile, int m, int columns) {
    const int row = m + threadIdx.x % 128 / 32 * 16 + ptx::lane() / 4, column = tile.n + 2 * (ptx::lane() % 4);
#pragma unroll
    for (int i = 0; i < 2 * waves; ++i) {
        const int r = row + i / 2 * 64 + i % 2 * 8;
        if (r < tile.m_begin || r >= tile.m_end) continue;
        const int64_t base = out_group(tile) * out.group + r * out.row;
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
            const int c = column + 8 * j;
            const float x = total[i / 2][4 * j + i % 2 * 2], y = total[i / 2][4 * j + i % 2 * 2 + 1];
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

// Piece `i` of the warpgroup's sums to shared memory, rounded.
template <int i>
__device__ __forceinline__ void stage_piece(const float (&total)[waves][count], uint8_t* piece) {
    constexpr int wave = i * piece_columns / config::tile_n, first = i * piece_columns % config::tile_n / 8;
    const int warp_row = threadIdx.x % 128 / 32 * 16, lane = ptx::lane();
#pragma unroll
    for (int j = 0; j < piece_columns / 8; j += 2) {
        const float* x = &total[wave][4 * (first + j)];
        // lanes 0 … 7 name the rows of the first 8×8 matrix, then 8 rows below it, then both 8 columns further on
        const int matrix_row = lane % 8 + lane / 8 % 2 * 8, matrix_column = 8 * (j + lane / 16);
        if constexpr (config::transposed) {
            const int row = lane % 8 + matrix_column, byte = (warp_row + lane / 8 % 2 * 8) * 2;
            ptx::store_matrix_4_transposed(piece + swizzled<128>(row * 128 + byte), ptx::pack_bf16(x[0], x[1]),
                                           ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]),
                                           ptx::pack_bf16(x[6], x[7]));
        } else {
            constexpr int row_bytes = piece_columns * 2;
            uint8_t* to = piece + swizzled<row_bytes>((warp_row + matrix_row) * row_bytes + matrix_column * 2);
            if (j + 1 < piece_columns / 8)
                ptx::store_matrix_4(to, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]),
                                    ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
            else
                ptx::store_matrix_2(to, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]));
        }
    }
}

// Rows `first` to `end` of a piece from shared memory; its row 0 and column 0 go to (m, n).
__device__ __forceinline__ void copy_rows(
    const uint8_t* piece, const Out& out, int first, int end, int m, int n, int columns) {
    constexpr int vectors = piece_columns / 8;
    for (int i = first * vectors + threadIdx.x % 128; i < end * vectors; i += 128) {
        const int row = i / vectors, column = i % vectors * 8;
        if (n + column >= columns) continue;
        uint16_t* to = static_cast<uint16_t*>(out.data) + (m + row) * out.row + n + column;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(
            piece + swizzled<piece_columns * 2>((row * piece_columns + column) * 2));
    }
}

template <int first, int i = 0>
__device__ __forceinline__ void stage_pieces(const float (&total)[waves][count], uint8_t* staging) {
    if constexpr (i < config::staged_pieces && first + i < pieces) {
        stage_piece<first + i>(total, staging + i * piece_bytes);
        stage_pieces<first, i + 1>(total, staging);
    }
}

// Through shared memory, as many pieces at a time as have room there. The stores are waited for before the room is used
// again: in a persistent grid the next tile's products run meanwhile.
template <int first = 0>
__device__ __forceinline__ void store_staged(
    const float (&total)[waves][count], uint8_t* staging, const Out& out, const Tile& tile, int m, int columns,
    int warpgroup) {
    const bool leader = threadIdx.x % 128 == 0;
    if (leader) ptx::wait_stores_read<0>();
    ptx::named_barrier_sync(4 + warpgroup, 128);
    stage_pieces<first>(total, staging);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(4 + warpgroup, 128);

#pragma unroll
    for (int i = first; i < first + config::staged_pieces && i < pieces; ++i) {
        const int row = m + i * piece_columns / config::tile_n * 64, n = tile.n + i * piece_columns % config::tile_n;
        const uint8_t* piece = staging + (i - first) * piece_bytes;
        const int first_row = max(tile.m_begin - row, 0), end_row = min(tile.m_end - row, 64);
        if (first_row >= end_row || n >= columns) continue;
        if (config::schedule == grouped && end_row - first_row < 64)
            copy_rows(piece, out, first_row, end_row, row, n, columns);
        else if (leader && config::transposed) ptx::store_3d(out.map, piece, row, n, out_group(tile));
        else if (leader) ptx::store_3d(out.map, piece, n, row, out_group(tile));
    }
    if (leader) ptx::commit_stores();
    if constexpr (first + config::staged_pieces < pieces)
        store_staged<first + config::staged_pieces>(total, staging, out, tile, m, columns, warpgroup);
}
