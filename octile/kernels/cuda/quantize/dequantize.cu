// Codes back to numbers, times their scales: 8 and 12 bits, one scale for 1×128, 128×1, 128×128 or the whole matrix.
//
// NOTES
// - A warp takes 2 · config::rows rows of a tile of 128 columns, every second one each half of it, and a lane eight columns,
//   so that both what is read and what is written are whole lines of memory.
#include "tile.cuh"

constexpr int rows = config::rows, warp_rows = 2 * rows, block_rows = config::warps * warp_rows;
static_assert(128 % block_rows == 0, "a block lies in one row of blocks of 128 rows");

__device__ __forceinline__ void store_eight(uint8_t* to, const float (&x)[8], bool there) {
    if constexpr (config::dtype == float32) {
        ptx::store_16(to, ptx::bits_of(x[0], x[1], x[2], x[3]), there);
        ptx::store_16(to + 16, ptx::bits_of(x[4], x[5], x[6], x[7]), there);
    } else {
        uint32_t pair[4];
#pragma unroll
        for (int p = 0; p < 4; ++p)
            pair[p] = config::dtype == bfloat16 ? ptx::pack_bf16(x[2 * p], x[2 * p + 1])
                                                 : ptx::pack_f16(x[2 * p], x[2 * p + 1]);
        ptx::store_16(to, make_uint4(pair[0], pair[1], pair[2], pair[3]), there);
    }
}

// data: [batches, m, k] codes, contiguous; out likewise. config::scale_rows and scale_columns: the rows and columns that
// share a scale, 0 for all; where that is one column, the scales of columns are contiguous.
extern "C" __global__ void __launch_bounds__(32 * config::warps, config::blocks)
dequantize(const uint8_t* data, const float* scale, uint8_t* out, int64_t scale_batch, int64_t scale_row,
           int64_t scale_column, int m, int k) {
    constexpr int format = config::format, number = config::dtype;
    const unsigned k_tiles = (k + tile_columns - 1) / tile_columns, m_blocks = (m + block_rows - 1) / block_rows;
    unsigned block = blockIdx.x / k_tiles;
    const int tile = blockIdx.x - block * k_tiles;
    int64_t batch = 0;
    if (block >= m_blocks) {
        batch = block / m_blocks;
        block -= batch * m_blocks;
    }
    const int row = block * block_rows + threadIdx.x / 32 * warp_rows + ptx::lane_id() / 16;
    const int column = tile * tile_columns + ptx::lane_id() % 16 * 8, there = column < k ? m - row : 0;
    int64_t index = (batch * m + row) * k + column;
    const uint8_t* from = data + bytes<format>(index);

    Eight<format> codes[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i, from += bytes<format>(2 * k)) codes[i] = load_eight<format>(from, 2 * i < there);

    const float* scales = scale + batch * scale_batch;
    if constexpr (config::scale_rows == 1) scales += row * scale_row;
    if constexpr (config::scale_rows == 128) scales += row / 128 * scale_row;
    if constexpr (config::scale_columns == 1) scales += column;
    if constexpr (config::scale_columns == 128) scales += tile * scale_column;
    float factor[8];
    if constexpr (config::scale_columns == 1) {
        const Floats eight{load_eight<float32>(reinterpret_cast<const uint8_t*>(scales), there > 0)};
#pragma unroll
        for (int j = 0; j < 8; ++j) factor[j] = eight.value[j];
    } else if constexpr (config::scale_rows != 1) {
        factor[0] = ptx::load_float(scales, there > 0);
    }
    uint8_t* to = out + bytes<number>(index);
#pragma unroll
    for (int i = 0; i < rows; ++i, to += bytes<number>(2 * k)) {
        if constexpr (config::scale_rows == 1) {
            factor[0] = ptx::load_float(scales, 2 * i < there);
            scales += 2 * scale_row;
        }
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            value[j] = __fmul_rn(codes[i].at(j), factor[config::scale_columns == 1 ? j : 0]);
        store_eight(to, value, 2 * i < there);
    }
}
