// RMSNorm, y = x · rstd · weight, with its result quantized in tiles of 1×128, in high precision, or both.
//
// A thread block takes config::rows consecutive rows, one after the other, and then those that lie a whole grid
// further. A thread holds config::units vectors of 8 columns of a row; 16 consecutive threads hold a tile.
//
// NOTES
// - The loads of the next row are in flight while a row is summed, quantized and stored.
// - The weight is loaded again for every row, from the L1 cache: it does not fit into registers. A block that has one row
//   loads it before the previous kernel has ended (config::early_weight), which must not write it: it comes from memory.
#include "tile.cuh"

constexpr int units = config::units, norm_warps = config::warps, norm_threads = 32 * norm_warps;
constexpr int buffer_floats = 32;  // a multiple of 4: the compiler loads vectors of 16 bytes

// The sum of x over the thread block. Consecutive calls must alternate between two buffers, so that one barrier
// suffices.
__device__ __forceinline__ float sum_over_threads(float x, float* buffer) {
#pragma unroll
    for (int bit = 16; bit >= 1; bit /= 2) x = __fadd_rn(x, __shfl_xor_sync(all_lanes, x, bit));
    if (ptx::lane_id() == 0) buffer[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < norm_warps; ++w) x = __fadd_rn(x, buffer[w]);
    return x;
}

// Loads a vector, and not through the read-only cache: the compiler moves such a load neither before nor behind the wait
// for the previous kernel. Zeros out of bounds.
template <int dtype>
__device__ __forceinline__ Vec8<dtype> load_in_order(const uint8_t* from, bool in_bounds) {
    uint4 parts[sizeof(Vec8<dtype>) / sizeof(uint4)];
#pragma unroll
    for (int i = 0; i < sizeof(parts) / sizeof(uint4); ++i)
        parts[i] = in_bounds ? __ldcg(reinterpret_cast<const uint4*>(from) + i) : make_uint4(0, 0, 0, 0);
    Vec8<dtype> loaded;
    memcpy(&loaded, parts, sizeof(parts));
    return loaded;
}

// x: [m, k] with strides x_row and 1. weight: [k]. rstds: [m]. y: [m, k] of x's dtype, only with config::store_y; data and
// scale only with config::quantizes. inverse_k: 1 / k.
extern "C" __global__ void __launch_bounds__(norm_threads, config::blocks)
rms_norm(const uint8_t* x, const uint8_t* weight, uint8_t* data, float* scale, float* rstds, uint8_t* y, float eps,
         float inverse_k, int64_t x_row, int m, int k) {
    constexpr int dtype = config::dtype, format = config::format;
    constexpr bool power_of_2 = config::power_of_2;
    float *buffers = reinterpret_cast<float*>(ptx::dynamic_shared()), *buffer = buffers;
    const int column = threadIdx.x * 8, step = norm_threads * 8;  // vector u begins at column + u · step
    const int first = blockIdx.x * config::rows;
    auto row_after = [&](int i) {
        return i % config::rows < config::rows - 1 ? i + 1 : i + 1 + static_cast<int>(gridDim.x - 1) * config::rows;
    };

    auto load_row = [&](int i, int u, bool in_bounds) {
        const int at = column + u * step;
        const uint8_t* from = x + bytes<dtype>(i * x_row + at);
        if constexpr (config::early_weight) return load_in_order<dtype>(from, in_bounds && at < k);
        return load_vec8<dtype>(from, in_bounds && at < k);
    };
    auto load_weight = [&](int u) {
        const int at = column + u * step;
        return load_vec8<config::weight_dtype>(ptx::opaque(weight) + bytes<config::weight_dtype>(at), at < k);
    };
    Vec8<config::weight_dtype> early[units];
    if constexpr (config::early_weight)
#pragma unroll
        for (int u = 0; u < units; ++u) {
            const int at = column + u * step;
            early[u] = load_in_order<config::weight_dtype>(weight + bytes<config::weight_dtype>(at), at < k);
        }
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    Vec8<dtype> row[units], next[units];
#pragma unroll
    for (int u = 0; u < units; ++u) next[u] = load_row(first, u, true);
#pragma unroll 1
    for (int i = first, next_row; i < m; i = next_row) {
        float squares = 0.0f;
        next_row = row_after(i);
#pragma unroll
        for (int u = 0; u < units; ++u) {
            row[u] = next[u];
            next[u] = load_row(next_row, u, next_row < m);
        }
#pragma unroll
        for (int u = 0; u < units; ++u)
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = __fmaf_rn(row[u].at(j), row[u].at(j), squares);
        const float mean = __fmul_rn(sum_over_threads(squares, buffer), inverse_k);
        buffer = buffer == buffers ? buffers + buffer_floats : buffers;
        const float rstd = ptx::rsqrt(__fadd_rn(mean, eps));
        ptx::store_float(rstds + i, rstd, threadIdx.x == 0);

        auto normalized = [&](const Vec8<dtype>& x, const Vec8<config::weight_dtype>& w) {
            FloatVec8 y;
#pragma unroll
            for (int j = 0; j < 8; ++j) y.value[j] = __fmul_rn(__fmul_rn(x.at(j), rstd), w.at(j));
            return y;
        };
        FloatVec8 value[units];
        float amax[units];
#pragma unroll
        for (int u = 0; u < units; ++u) {
            value[u] = normalized(row[u], config::early_weight ? early[u] : load_weight(u));
            amax[u] = value[u].amax();
        }
        const int64_t index = static_cast<int64_t>(i) * k + column;
        if constexpr (config::quantizes) {
            const float own_scale = scale_from_amax<format, power_of_2>(reduce_rows<in_halves>(amax, max_abs));
            const int tile_column = threadIdx.x / 16 * tile_columns + owned_index<units>() * step;  // of the scale
            float* to = scale + static_cast<int64_t>(tile_column / tile_columns) * ((m + 3) / 4 * 4) + i;
            ptx::store_float(to, own_scale, is_first_owner<units>() && tile_column < k);

            const Divisor own = make_divisor<power_of_2>(own_scale);
            if (!power_of_2 && __any_sync(all_lanes, own.needs_careful_division())) {
#pragma unroll 1
                for (int u = 0; u < units; ++u) {  // rare: recomputes the values, in few registers
                    const bool in_bounds = column + u * step < k;
                    const FloatVec8 y_again = normalized(load_row(i, u, true), load_weight(u));
                    const Divisor divisor = divisor_from_owner<units, power_of_2>(own, u);
                    float quotient[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) quotient[j] = divisor.divide_carefully(y_again.at(j));
                    ptx::store_8(data + index + u * step, pack_8<format>(quotient), in_bounds);
                }
            } else {
#pragma unroll
                for (int u = 0; u < units; ++u) {
                    const Divisor divisor = divisor_from_owner<units, power_of_2>(own, u);
                    float quotient[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) quotient[j] = divisor.template divide<power_of_2>(value[u].at(j));
                    ptx::store_8(data + index + u * step, pack_8<format>(quotient), column + u * step < k);
                }
            }
        }
        if constexpr (config::store_y)
#pragma unroll
            for (int u = 0; u < units; ++u)
                store_vec8<dtype>(y + bytes<dtype>(index + u * step), value[u].value, column + u * step < k);
    }
}
