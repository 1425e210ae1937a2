// SwiGLU with its result quantized in tiles of 1×128, and optionally with its inputs quantized to be saved for
// backward.
//
// NOTES
// - Other warps hide the latency of the loads: 32 warps per SM with two rows per thread are faster than 16 warps with
//   four. Prefetching into shared memory gained nothing on top of that.
#include "silu.cuh"
#include "tile_quantize.cuh"

constexpr int dtype = config::dtype, threads = 32 * config::warps;

// h = silu(gate) · up · weight for a vector of 8.
template <class Values>
__device__ __forceinline__ FloatVec8 swiglu_of(const Values& gate, const Values& up, float weight) {
    FloatVec8 h;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float g = gate.at(j);
        h.value[j] = __fmul_rn(__fmul_rn(g, sigmoid(g)), up.at(j));
        if constexpr (config::weighted) h.value[j] = __fmul_rn(h.value[j], weight);
    }
    return h;
}

// gate, up: [m, k]. weight: [m] with stride weight_step, only with config::weighted. end: thread blocks whose rows all
// lie from there on write nothing, only with config::has_end. saved, saved_scale: gate and up quantized, [2, m, k] and
// their scales, only with config::save_inputs.
extern "C" __global__ void __launch_bounds__(threads, config::blocks)
swiglu(const uint8_t* gate, const uint8_t* up, const float* weight, const int* end, uint8_t* data, float* scale,
       uint8_t* saved, float* saved_scale, int64_t gate_row, int64_t up_row, int64_t weight_step, int m, int k,
       int tile_inverse) {
    const unsigned k_tiles = (k + tile_columns - 1) / tile_columns, block = quotient(blockIdx.x, k_tiles, tile_inverse);
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    if constexpr (config::has_end)
        if (static_cast<int>(block * block_rows) >= *end) return;
    TileCoord at;
    at.tile = blockIdx.x - block * k_tiles, at.batch = 0;
    at.row = block * block_rows + threadIdx.x / 32 * warp_rows + ptx::lane_id() / 16;
    at.column = at.tile * tile_columns + ptx::lane_id() % 16 * 8;
    at.m = m, at.k = k;
    const int left = at.rows_left();
    gate += bytes<dtype>(at.row * gate_row + at.column), up += bytes<dtype>(at.row * up_row + at.column);
    auto load = [&](const uint8_t* from, int64_t step, int i) {
        return load_vec8<dtype>(from + bytes<dtype>(2 * i * step), 2 * i < left);
    };
    auto weight_of = [&](int i) {
        return config::weighted ? ptx::load_float(weight + (at.row + 2 * i) * weight_step, 2 * i < left) : 1.0f;
    };
    Vec8<dtype> g[rows], u[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) g[i] = load(gate, gate_row, i);
#pragma unroll
    for (int i = 0; i < rows; ++i) u[i] = load(up, up_row, i);
    if constexpr (config::save_inputs) {
        TileCoord saved_at = at;
        quantize_tile<config::saved_format, config::saved_power_of_2>(
            saved, saved_scale, saved_at, g, [&](int i) { return to_floats(load(gate, gate_row, i)); });
        saved_at.batch = 1;
        quantize_tile<config::saved_format, config::saved_power_of_2>(
            saved, saved_scale, saved_at, u, [&](int i) { return to_floats(load(up, up_row, i)); });
    }
    FloatVec8 h[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) h[i] = swiglu_of(g[i], u[i], weight_of(i));
    quantize_tile<config::format, config::power_of_2>(data, scale, at, h, [&](int i) {
        return swiglu_of(load(gate, gate_row, i), load(up, up_row, i), weight_of(i));
    });
}
