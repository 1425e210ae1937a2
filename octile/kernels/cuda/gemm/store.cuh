// Stores of the epilogue: a warpgroup's totals are rounded and stored in, or added to, the result C in global memory.
//
//   tma      store boxes of 64 rows through shared memory, swizzled against bank conflicts. TMA stores them, or adds
//            them (FP32 only; BF16 is added in shared memory, accumulate.cuh). Elements outside of the tensor are not
//            stored. A box that has rows of another group is stored by threads: with a bulk copy for each row, GEMMs of
//            experts with some 768 rows took up to 12% longer.
//   pairs    two neighboring elements at a time, where TMA cannot store
//   single   one element at a time, any strides
//
// The accumulate epilogue has one writer per element, so that the result does not depend on an order. Where C is not
// loaded (accumulate.cuh), the L2 cache adds, and flushes FP32 numbers below 2⁻¹²⁶ to zero (PTX ISA, "red").
#pragma once
#include "promotion.cuh"

struct Output {
    const TensorMap* map;
    void* data;
    int64_t group, row, column;  // strides in elements
};

__device__ __forceinline__ uint16_t bf16(float x) { return static_cast<uint16_t>(ptx::pack_bf16(x, 0.0f)); }
__device__ __forceinline__ float from_bf16(uint32_t x) { return __uint_as_float(x << 16); }

// Adds x and y to two BF16 numbers; each sum is rounded once, or with config::adds_rounded x and y are rounded before.
__device__ __forceinline__ uint32_t add_to_bf16(uint32_t c, float x, float y) {
    if constexpr (config::adds_rounded) {
        const uint32_t rounded = ptx::pack_bf16(x, y);
        x = from_bf16(rounded & 0xFFFF), y = from_bf16(rounded >> 16);
    }
    return ptx::pack_bf16(__fadd_rn(x, from_bf16(c & 0xFFFF)), __fadd_rn(y, from_bf16(c >> 16)));
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

__device__ __forceinline__ void store_single(void* data, int64_t at, float x) {
    if constexpr (config::out_float) {
        float* to = static_cast<float*>(data) + at;
        if constexpr (config::accumulate) ptx::red_add(to, x);
        else *to = x;
    } else {
        uint16_t* to = static_cast<uint16_t*>(data) + at;
        *to = config::accumulate ? static_cast<uint16_t>(add_to_bf16(*to, x, 0.0f)) : bf16(x);
    }
}

// Stores a wave from registers; `m` is its first row.
__device__ __forceinline__ void store_from_registers(
    const float (&total)[num_accum], const Output& out, const Tile& tile, int m, int columns) {
    const int row = m + threadIdx.x % 128 / 32 * 16 + ptx::lane_id() / 4, column = tile.n + 2 * (ptx::lane_id() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = row + i * 8;
        if (r < tile.m_begin || r >= tile.m_end) continue;
        const int64_t base = output_group(tile) * out.group + r * out.row;
#pragma unroll
        for (int j = 0; j < num_accum / 4; ++j) {
            const int c = column + 8 * j;
            const float x = total[4 * j + i * 2], y = total[4 * j + i * 2 + 1];
            if constexpr (config::store == pairs) {
                if (c < columns) store_pair(out.data, base + c, x, y);
            } else {
                if (c < columns) store_single(out.data, base + c * out.column, x);
                if (c + 1 < columns) store_single(out.data, base + (c + 1) * out.column, y);
            }
        }
    }
}

// The offset at which the swizzle of rows of `row_bytes` puts a byte of a store box: bits 4 … 6, as many as a row has,
// are XORed with bits 7 … 9.
template <int row_bytes>
__device__ __forceinline__ int swizzled(int at) {
    return at ^ ((at >> 7 & (row_bytes / 16 - 1)) << 4);
}

// Adds two neighboring elements to C in shared memory.
__device__ __forceinline__ void add_pair(uint8_t* to, float x, float y) {
    if constexpr (config::out_float) {
        float2* pair = reinterpret_cast<float2*>(to);
        const float2 c = *pair;
        *pair = make_float2(__fadd_rn(c.x, x), __fadd_rn(c.y, y));
    } else {
        uint32_t* pair = reinterpret_cast<uint32_t*>(to);
        *pair = add_to_bf16(*pair, x, y);
    }
}

// Where two accumulators and all of b's scales are in registers, none are left for stmatrix: BF16 results are written to
// shared memory in pairs of neighbors then, as FP32 ones are. Both ways have no bank conflicts.
constexpr bool stages_pairs =
    config::out_float || config::load_c || (b_row_scales && waves == 2 && config::accumulators == 2);

// Writes the columns of a store box, from column 8·`first` on, to shared memory, rounded to BF16 or as FP32; or adds
// them to C, where it was loaded there. Offsets that differ only in bits which the swizzle does not read differ in the
// same bits when swizzled. So one offset stays in a register, and an XOR gives the others.
__device__ __forceinline__ void stage_box(const float (&total)[num_accum], int first, uint8_t* box) {
    constexpr int row_bytes = config::transposed ? 128 : store_columns * out_bytes;
    const int warp_row = threadIdx.x % 128 / 32 * 16, lane = ptx::lane_id();
    // lanes 0 … 7 address the rows of the first 8×8 matrix, the next 8 the rows below, the others 8 columns further on
    const int matrix_row = lane % 8 + lane / 8 % 2 * 8, matrix = lane / 16;
    if constexpr (stages_pairs) {
        const int at = swizzled<row_bytes>((warp_row + lane / 4) * row_bytes + lane % 4 * 2 * out_bytes);
#pragma unroll
        for (int j = 0; j < store_columns / 8; ++j) {
            const float* x = &total[4 * (first + j)];
            uint8_t* to = box + (at ^ j * 8 * out_bytes);
            if constexpr (config::load_c) {
                add_pair(to, x[0], x[1]);
                add_pair(to + 8 * row_bytes, x[2], x[3]);
            } else if constexpr (config::out_float) {
                *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
                *reinterpret_cast<float2*>(to + 8 * row_bytes) = make_float2(x[2], x[3]);
            } else {
                *reinterpret_cast<uint32_t*>(to) = ptx::pack_bf16(x[0], x[1]);
                *reinterpret_cast<uint32_t*>(to + 8 * row_bytes) = ptx::pack_bf16(x[2], x[3]);
            }
        }
    } else if constexpr (config::transposed) {
        const int at = (lane % 8 + 8 * matrix) * 128 + (warp_row + lane / 8 % 2 * 8) * 2;
        uint8_t* to = box + swizzled<row_bytes>(at);
#pragma unroll
        for (int j = 0; j < store_columns / 8; j += 2) {
            const float* x = &total[4 * (first + j)];
            ptx::stmatrix_x4_trans(to + j * 8 * 128, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]),
                                   ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
        }
    } else {
        const int at = swizzled<row_bytes>((warp_row + matrix_row) * row_bytes + matrix * 16);
#pragma unroll
        for (int j = 0; j < store_columns / 8; j += 2) {
            const float* x = &total[4 * (first + j)];
            uint8_t* to = box + (at ^ j * 16);
            if (j + 1 < store_columns / 8)
                ptx::stmatrix_x4(to, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]),
                                 ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
            else
                ptx::stmatrix_x2(to, ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]));
        }
    }
}

// Stores the rows of a store box from first_row to end_row, 16 bytes at a time; `to` is its first element in the
// result, whose columns end after `columns`. Rows of a result that TMA could store begin and end at 16 bytes.
__device__ __forceinline__ void store_rows(
    const uint8_t* box, void* to, int64_t out_row, int first_row, int end_row, int columns) {
    constexpr int row_bytes = store_columns * out_bytes, vectors = row_bytes / 16;
#pragma unroll
    for (int i = threadIdx.x % 128; i < 64 * vectors; i += 128) {
        const int row = i / vectors, byte = i % vectors * 16;
        if (first_row <= row && row < end_row && byte < columns * out_bytes)
            *reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + row * out_row * out_bytes + byte) =
                *reinterpret_cast<const uint4*>(box + swizzled<row_bytes>(row * row_bytes + byte));
    }
}

// Stores a wave by TMA, as many store boxes at a time as there are buffers. Where there are buffers for two waves, one
// is written while TMA still reads the other; with an odd number of waves a tile would begin with the buffer in use.
__device__ __forceinline__ void store_with_tma(
    const float (&total)[num_accum], int wave, uint8_t* staging, const Output& out, const Tile& tile, int m,
    int columns, int warpgroup) {
    constexpr int boxes = store_boxes / waves, at_once = boxes < config::staged_boxes ? boxes : config::staged_boxes;
    constexpr bool two = config::staged_boxes >= 2 * boxes && waves % 2 == 0;
    const int first_row = max(tile.m_begin - m, 0), end_row = min(tile.m_end - m, 64);
    const bool whole = config::schedule != grouped || end_row - first_row == 64;
    const bool stores = !whole || threadIdx.x % 128 == 0;
    uint8_t* buffer = staging + (two ? wave % 2 * boxes * store_box_bytes : 0);
#pragma unroll
    for (int first = 0; first < boxes; first += at_once) {
        ptx::bulk_wait_group_read<two>();
        ptx::named_barrier_sync(4 + warpgroup, 128);
#pragma unroll
        for (int i = 0; i < at_once && first + i < boxes; ++i)
            stage_box(total, (first + i) * store_columns / 8, buffer + i * store_box_bytes);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(4 + warpgroup, 128);

#pragma unroll
        for (int i = 0; i < at_once && first + i < boxes; ++i) {
            const int n = tile.n + (first + i) * store_columns;
            const uint8_t* box = buffer + i * store_box_bytes;
            if (!stores || n >= columns || m >= tile.m_end) continue;
            if (!whole) {
                uint8_t* to = static_cast<uint8_t*>(out.data) + (m * out.row + n) * out_bytes;
                store_rows(box, to, out.row, first_row, end_row, columns - n);
            } else if constexpr (config::transposed) ptx::tma_store(out.map, box, m, n, output_group(tile));
            else if constexpr (config::accumulate) ptx::tma_reduce_add(out.map, box, n, m, output_group(tile));
            else ptx::tma_store(out.map, box, n, m, output_group(tile));
        }
        ptx::bulk_commit_group();
    }
}

// Stores zeros in `rows` rows of a tile from row m on, 16 bytes at a time: the result of an empty sum, where TMA could
// store.
__device__ __forceinline__ void store_zeros(const Output& out, const Tile& tile, int m, int rows, int columns) {
    constexpr int per_vector = 16 / out_bytes, vectors = config::tile_n / per_vector;
    uint8_t* data = static_cast<uint8_t*>(out.data) + output_group(tile) * out.group * out_bytes;
    for (int i = threadIdx.x % 128; i < rows * vectors; i += 128) {
        const int row = m + i / vectors, column = tile.n + i % vectors * per_vector;
        if (tile.m_begin <= row && row < tile.m_end && column < columns)
            *reinterpret_cast<uint4*>(data + (row * out.row + column) * out_bytes) = make_uint4(0, 0, 0, 0);
    }
}
