// Quantizes a matrix in tiles of 1×128, or with one given scale.
//
// NOTES
// - A thread issues all its loads, 16 bytes each, before it uses the first: with config::rows = 8 and 16-bit elements,
//   128 bytes per thread are in flight.
#include "tile_quantize.cuh"

// x: [batches, m, k] with strides x_batch, x_row and 1. data: [batches, m, k], contiguous. scale: [batches, k / 128,
// m], rows padded to a multiple of 4; unused with config::scale_given, where `given` is the one scale.
extern "C" __global__ void __launch_bounds__(32 * config::warps, config::blocks)
tiles(const uint8_t* x, uint8_t* data, float* scale, const float* given, int64_t x_batch, int64_t x_row, int m, int k,
      int tile_inverse) {
    constexpr int dtype = config::dtype;
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    const unsigned k_tiles = (k + tile_columns - 1) / tile_columns, m_blocks = (m + block_rows - 1) / block_rows;
    unsigned block = quotient(blockIdx.x, k_tiles, tile_inverse);  // consecutive thread blocks are neighbors along K
    TileCoord at;
    at.tile = blockIdx.x - block * k_tiles, at.batch = 0;
    if (block >= m_blocks) {
        at.batch = block / m_blocks;
        block -= at.batch * m_blocks;
    }
    at.row = block * block_rows + threadIdx.x / 32 * warp_rows + ptx::lane_id() / 16;
    at.column = at.tile * tile_columns + ptx::lane_id() % 16 * 8;
    at.m = m, at.k = k;
    const int left = at.rows_left();

    x += bytes<dtype>(at.batch * x_batch + at.row * x_row + at.column);
    auto load = [&](int i) { return load_vec8<dtype>(x + bytes<dtype>(2 * i * x_row), 2 * i < left); };
    auto recompute = [&](int i) { return to_floats(load(i)); };
    Vec8<dtype> own[rows];
    const uint8_t* from = x;
#pragma unroll
    for (int i = 0; i < rows; ++i, from += bytes<dtype>(2 * x_row)) own[i] = load_vec8<dtype>(from, 2 * i < left);
    if constexpr (config::scale_given)
        quantize_tile_with_scale<config::format>(ptx::load_float(given, true), data, at, own, recompute);
    else
        quantize_tile<config::format, config::power_of_2>(data, scale, at, own, recompute);
}
