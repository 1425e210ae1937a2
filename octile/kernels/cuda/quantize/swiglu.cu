// SwiGLU's result in tiles of 1×128, and where wanted its inputs besides.
//
// NOTES
// - What waits for memory is hidden by other warps: 32 of them on a multiprocessor, with two rows a thread, are faster than
//   16 with four. Copies ahead into shared memory gained nothing beside that.
#include "silu.cuh"
#include "tile_quantize.cuh"

constexpr int number = config::dtype, threads = 32 * config::warps;

template <class Values>
__device__ __forceinline__ Floats result_of(const Values& gate, const Values& up, float weight) {
    Floats h;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float g = gate.at(j);
        h.value[j] = __fmul_rn(__fmul_rn(g, sigmoid(g)), up.at(j));
        if constexpr (config::weighted) h.value[j] = __fmul_rn(h.value[j], weight);
    }
    return h;
}

// gate, up: [m, k] numbers. weight: of the rows, where config::weighted. kept, kept_scale: gate and up in tiles, one matrix
// above the other, where config::save_inputs.
extern "C" __global__ void __launch_bounds__(threads, config::blocks)
swiglu(const uint8_t* gate, const uint8_t* up, const float* weight, uint8_t* data, float* scale, uint8_t* kept,
       float* kept_scale, int64_t gate_row, int64_t up_row, int64_t weight_step, int m, int k, int tile_inverse) {
    const unsigned k_tiles = (k + tile_columns - 1) / tile_columns, block = quotient(blockIdx.x, k_tiles, tile_inverse);
    Place at;
    at.tile = blockIdx.x - block * k_tiles, at.batch = 0;
    at.row = block * block_rows + threadIdx.x / 32 * warp_rows + ptx::lane_id() / 16;
    at.column = at.tile * tile_columns + ptx::lane_id() % 16 * 8;
    at.m = m, at.k = k;
    const int there = at.there();
    gate += bytes<number>(at.row * gate_row + at.column), up += bytes<number>(at.row * up_row + at.column);
    auto one = [&](const uint8_t* from, int64_t step, int i) {
        return load_eight<number>(from + bytes<number>(2 * i * step), 2 * i < there);
    };
    auto weight_of = [&](int i) {
        return config::weighted ? ptx::load_float(weight + (at.row + 2 * i) * weight_step, 2 * i < there) : 1.0f;
    };
    Eight<number> own[rows], other[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) own[i] = one(gate, gate_row, i);
#pragma unroll
    for (int i = 0; i < rows; ++i) other[i] = one(up, up_row, i);
    if constexpr (config::save_inputs) {
        Place above = at;
        cast<config::saved_format, config::saved_power_of_2>(
            kept, kept_scale, above, own, [&](int i) { return decoded(one(gate, gate_row, i)); });
        above.batch = 1;
        cast<config::saved_format, config::saved_power_of_2>(
            kept, kept_scale, above, other, [&](int i) { return decoded(one(up, up_row, i)); });
    }
    Floats h[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) h[i] = result_of(own[i], other[i], weight_of(i));
    cast<config::format, config::power_of_2>(data, scale, at, h, [&](int i) {
        return result_of(one(gate, gate_row, i), one(up, up_row, i), weight_of(i));
    });
}
