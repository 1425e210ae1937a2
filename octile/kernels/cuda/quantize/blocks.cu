// Casts of squares of 128×128: along the rows and the columns, turned, or with one scale; of a matrix or of codes.
//
// NOTES: those of square.cuh, which casts; here a square is only loaded, all of its rows under way at once.
#include "block.cuh"

// x: [batches, m, k] numbers, or codes with a scale for 1×128, where the scales of rows are contiguous. Where
// config::gather, row i of the result is row picked[i] of the matrix.
extern "C" __global__ void __launch_bounds__(square_threads, config::blocks)
blocks(const uint8_t* x, const float* x_scale, const int* picked, uint8_t* data, float* scale, uint8_t* data_t,
        float* scale_t, int64_t x_batch, int64_t x_row, int64_t scale_batch, int64_t scale_tile, int m, int k,
        int band_inverse) {
    constexpr int number = config::dtype;
    constexpr bool codes = number >= e4m3;
    const Cast to{data, data_t, scale, scale_t};
    uint8_t* shared = ptx::dynamic_shared();
    const Square at = square_of<config::raster_height>(blockIdx.x, m, k, band_inverse);
    const uint8_t* first = x + bytes<number>(at.batch * x_batch + at.column());
    [[maybe_unused]] const float* scales = x_scale + at.batch * scale_batch + at.k_tile * scale_tile;

    Eight<number> loaded[8];
    [[maybe_unused]] float factor[8];
    [[maybe_unused]] int row[8];
    if constexpr (config::gather)
        each_row(at, [&](int i, bool there) { row[i] = static_cast<int>(ptx::load_4(picked + at.row() + i, there)); });
    each_row(at, [&](int i, bool there) {
        const int64_t before = config::gather ? row[i] * x_row : at.row() * x_row + i * x_row;
        loaded[i] = load_eight<number>(first + bytes<number>(before), there);
        if constexpr (codes && config::gather) {
            factor[i] = ptx::load_float(scales + row[i], there);
        } else if constexpr (codes) {
            if (i % 4) return;
            const uint4 four = ptx::load_16(scales + at.row() + i, there);
            factor[i] = __uint_as_float(four.x), factor[i + 1] = __uint_as_float(four.y);
            factor[i + 2] = __uint_as_float(four.z), factor[i + 3] = __uint_as_float(four.w);
        }
    });
    if constexpr (codes) {
        each_row(at, [&](int i, bool there) { factor[i] = there ? factor[i] : 0.0f; });  // behind the rows may be NaN
        Scaled<number> value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = {loaded[i], factor[i]};
        cast_square<config::form, config::format, config::power_of_2>(to, at, value, shared);
    } else {
        cast_square<config::form, config::format, config::power_of_2>(to, at, loaded, shared);
    }
    if constexpr (turns(config::form)) store_turned(to.data_t, at, shared);
}
