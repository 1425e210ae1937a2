// Casts in tiles of 1×128: of a matrix, with scales that are found or one that is given.
//
// NOTES
// - All of a thread's loads, 16 bytes each, are under way before the first is used: with config::rows = 8 that is 128
//   bytes of 16-bit numbers a thread.
#include "tile_quantize.cuh"

// x: [batches, m, k] numbers, rows x_row apart. given: one scale.
extern "C" __global__ void __launch_bounds__(32 * config::warps, config::blocks)
tiles(const uint8_t* x, uint8_t* data, float* scale, const float* given, int64_t x_batch, int64_t x_row, int m, int k,
      int tile_inverse) {
    constexpr int number = config::dtype;
    const unsigned k_tiles = (k + tile_columns - 1) / tile_columns, m_blocks = (m + block_rows - 1) / block_rows;
    unsigned block = quotient(blockIdx.x, k_tiles, tile_inverse);  // blocks beside each other along K run together
    Place at;
    at.tile = blockIdx.x - block * k_tiles, at.batch = 0;
    if (block >= m_blocks) {
        at.batch = block / m_blocks;
        block -= at.batch * m_blocks;
    }
    at.row = block * block_rows + threadIdx.x / 32 * warp_rows + ptx::lane_id() / 16;
    at.column = at.tile * tile_columns + ptx::lane_id() % 16 * 8;
    at.m = m, at.k = k;
    const int there = at.there();

    x += bytes<number>(at.batch * x_batch + at.row * x_row + at.column);
    auto one = [&](int i) { return load_eight<number>(x + bytes<number>(2 * i * x_row), 2 * i < there); };
    auto again = [&](int i) { return decoded(one(i)); };
    Eight<number> own[rows];
    const uint8_t* from = x;
#pragma unroll
    for (int i = 0; i < rows; ++i, from += bytes<number>(2 * x_row)) own[i] = load_eight<number>(from, 2 * i < there);
    if constexpr (config::scale_given)
        cast_by<config::format>(ptx::load_float(given, true), data, at, own, again);
    else
        cast<config::format, config::power_of_2>(data, scale, at, own, again);
}
