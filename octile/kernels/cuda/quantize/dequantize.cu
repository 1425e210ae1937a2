// Dequantizes a matrix of 8-bit or E5M6 values with one scale for 1×128, 128×1, 128×128 or the whole matrix.
//
// NOTES
// - A warp takes 2 · config::rows rows of 128 columns: each half of it takes every second row, and each lane a vector
//   of 8 columns. So both loads and stores are of whole cache lines.
#include "tile.cuh"

constexpr int rows = config::rows, warp_rows = 2 * rows, block_rows = config::warps * warp_rows;
static_assert(128 % block_rows == 0, "a thread block must lie within 128 rows that share a scale");

// data: [batches, m, k] encoded values, contiguous. out: [batches, m, k] of config::dtype, contiguous.
// config::scale_rows, config::scale_columns: how many rows and columns share a scale, 0 for all. With one column per
// scale, scale_column must be 1.
extern "C" __global__ void __launch_bounds__(32 * config::warps, config::blocks)
dequantize(const uint8_t* data, const float* scale, uint8_t* out, int64_t scale_batch, int64_t scale_row,
           int64_t scale_column, int m, int k) {
    constexpr int format = config::format, dtype = config::dtype;
    const unsigned k_tiles = (k + tile_columns - 1) / tile_columns, m_blocks = (m + block_rows - 1) / block_rows;
    unsigned block = blockIdx.x / k_tiles;
    const int tile = blockIdx.x - block * k_tiles;
    int64_t batch = 0;
    if (block >= m_blocks) {
        batch = block / m_blocks;
        block -= batch * m_blocks;
    }
    const int row = block * block_rows + threadIdx.x / 32 * warp_rows + ptx::lane_id() / 16;
    const int column = tile * tile_columns + ptx::lane_id() % 16 * 8, left = column < k ? m - row : 0;
    int64_t index = (batch * m + row) * k + column;
    const uint8_t* from = data + bytes<format>(index);

    Vec8<format> encoded[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i, from += bytes<format>(2 * k)) encoded[i] = load_vec8<format>(from, 2 * i < left);

    const float* scales = scale + batch * scale_batch;
    if constexpr (config::scale_rows == 1) scales += row * scale_row;
    if constexpr (config::scale_rows == 128) scales += row / 128 * scale_row;
    if constexpr (config::scale_columns == 1) scales += column;
    if constexpr (config::scale_columns == 128) scales += tile * scale_column;
    float factor[8];
    if constexpr (config::scale_columns == 1) {
        const FloatVec8 of_columns{load_vec8<float32>(reinterpret_cast<const uint8_t*>(scales), left > 0)};
#pragma unroll
        for (int j = 0; j < 8; ++j) factor[j] = of_columns.value[j];
    } else if constexpr (config::scale_rows != 1) {
        factor[0] = ptx::load_float(scales, left > 0);
    }
    uint8_t* to = out + bytes<dtype>(index);
#pragma unroll
    for (int i = 0; i < rows; ++i, to += bytes<dtype>(2 * k)) {
        if constexpr (config::scale_rows == 1) {
            factor[0] = ptx::load_float(scales, 2 * i < left);
            scales += 2 * scale_row;
        }
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            value[j] = __fmul_rn(encoded[i].at(j), factor[config::scale_columns == 1 ? j : 0]);
        store_vec8<dtype>(to, value, 2 * i < left);
    }
}
