// Quantizes a matrix in 128×128 blocks, in one of the forms of block.cuh; requantizes one that is quantized in 1×128
// tiles.
//
// NOTES: block.cuh does the work. This kernel loads the block; the loads of all rows of a thread are in flight at once.
#include "block.cuh"

// x: [batches, m, k] with strides x_batch, x_row and 1: elements, or encoded values with x_scale for 1×128, contiguous
// along M. picked: [m], only with config::gather: row i of the result is then row picked[i] of x. row_tiles:
// [tile_count], only with config::grouped. row_bytes_t: from one row of data_t to the next.
extern "C" __global__ void __launch_bounds__(block_threads, config::blocks)
blocks(const uint8_t* x, const float* x_scale, const int* picked, uint8_t* data, float* scale, uint8_t* data_t,
        float* scale_t, int64_t x_batch, int64_t x_row, int64_t scale_batch, int64_t scale_tile, int m, int k,
        int raster_inverse, const uint2* row_tiles, int tile_count, int row_bytes_t) {
    constexpr int dtype = config::dtype;
    constexpr bool is_encoded = dtype >= e4m3;
    const Outputs to{data, data_t, scale, scale_t};
    uint8_t* shared = ptx::dynamic_shared();
    const BlockCoord at =
        block_coord<config::raster_height>(blockIdx.x, m, k, raster_inverse, row_tiles, tile_count);
    const uint8_t* first = x + bytes<dtype>(at.batch * x_batch + at.column());
    [[maybe_unused]] const float* scales = x_scale + at.batch * scale_batch + at.k_tile * scale_tile;

    Vec8<dtype> loaded[8];
    [[maybe_unused]] float factor[8];
    [[maybe_unused]] int row[8];
    if constexpr (config::gather)
        for_each_row(at, [&](int i, bool in_bounds) {
            row[i] = static_cast<int>(ptx::load_4(picked + at.row() + i, in_bounds));
        });
    for_each_row(at, [&](int i, bool in_bounds) {
        const int64_t offset = config::gather ? row[i] * x_row : at.row() * x_row + i * x_row;
        loaded[i] = load_vec8<dtype>(first + bytes<dtype>(offset), in_bounds);
        if constexpr (is_encoded && config::gather) {
            factor[i] = ptx::load_float(scales + row[i], in_bounds);
        } else if constexpr (is_encoded && config::grouped) {
            factor[i] = ptx::load_float(scales + at.row() + i, in_bounds);
        } else if constexpr (is_encoded) {
            if (i % 4) return;
            const uint4 four = ptx::load_16(scales + at.row() + i, in_bounds);
            factor[i] = __uint_as_float(four.x), factor[i + 1] = __uint_as_float(four.y);
            factor[i + 2] = __uint_as_float(four.z), factor[i + 3] = __uint_as_float(four.w);
        }
    });
    if constexpr (is_encoded) {
        // scales past the last row may be NaN
        for_each_row(at, [&](int i, bool in_bounds) { factor[i] = in_bounds ? factor[i] : 0.0f; });
        ScaledVec8<dtype> value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = {loaded[i], factor[i]};
        quantize_block<config::form, config::format, config::power_of_2>(to, at, value, shared);
    } else {
        quantize_block<config::form, config::format, config::power_of_2>(to, at, loaded, shared);
    }
    if constexpr (has_transposed(config::form)) store_transposed(to.data_t, at, row_bytes_t, shared);
}
