// RMSNorm, cast as it is made: y = x · rstd · weight of whole rows, in tiles of 1×128.
//
// A block takes config::rows rows, one after the other, and then its next turn. A thread holds config::units times eight
// columns of a row; 16 threads beside each other hold a tile.
//
// NOTES
// - While a row is summed, cast and stored, the next one is on its way.
// - The weight is loaded for every row, from the L1 cache: in registers there is no room for it.
#include "tile.cuh"

constexpr int units = config::units, norm_warps = config::warps, norm_threads = 32 * norm_warps;
constexpr int room_floats = 32;  // a multiple of four: the compiler reads vectors of 16 bytes there

// The sum over the block. Two calls in turn have rooms of their own, so that one barrier does.
__device__ __forceinline__ float over_block(float x, float* room) {
#pragma unroll
    for (int bit = 16; bit >= 1; bit /= 2) x = __fadd_rn(x, __shfl_xor_sync(whole_warp, x, bit));
    if (ptx::lane_id() == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < norm_warps; ++w) x = __fadd_rn(x, room[w]);
    return x;
}

__device__ __forceinline__ void store_values(uint8_t* y, int64_t index, const Floats& x, bool there) {
    y += bytes<config::dtype>(index);
    if constexpr (config::dtype == float32) {
        const float(&v)[8] = x.value;
        ptx::store_16(y, ptx::bits_of(v[0], v[1], v[2], v[3]), there);
        ptx::store_16(y + 16, ptx::bits_of(v[4], v[5], v[6], v[7]), there);
    } else {
        uint32_t pair[4];
#pragma unroll
        for (int p = 0; p < 4; ++p)
            pair[p] = config::dtype == bfloat16 ? ptx::pack_bf16(x.value[2 * p], x.value[2 * p + 1])
                                                 : ptx::pack_f16(x.value[2 * p], x.value[2 * p + 1]);
        ptx::store_16(y, make_uint4(pair[0], pair[1], pair[2], pair[3]), there);
    }
}

// x: [m, k] numbers, rows x_row apart; weight [k]. y, in x's numbers, where config::store_y. per_number: 1 / k.
extern "C" __global__ void __launch_bounds__(norm_threads, config::blocks)
rms_norm(const uint8_t* x, const uint8_t* weight, uint8_t* data, float* scale, float* rstds, uint8_t* y, float eps,
         float per_number, int64_t x_row, int m, int k) {
    constexpr int number = config::dtype, format = config::format;
    constexpr bool power_of_2 = config::power_of_2;
    float *rooms = reinterpret_cast<float*>(ptx::dynamic_shared()), *room = rooms;
    const int column = threadIdx.x * 8, step = norm_threads * 8;  // of unit u: column + u · step
    const int first = blockIdx.x * config::rows;
    auto after = [&](int i) {
        return i % config::rows < config::rows - 1 ? i + 1 : i + 1 + static_cast<int>(gridDim.x - 1) * config::rows;
    };

    auto load_row = [&](int i, int u, bool there) {
        const int at = column + u * step;
        return load_eight<number>(x + bytes<number>(i * x_row + at), there && at < k);
    };
    auto load_weight = [&](int u) {
        const int at = column + u * step;
        return load_eight<config::weight_dtype>(ptx::forget(weight) + bytes<config::weight_dtype>(at), at < k);
    };
    Eight<number> row[units], next[units];
#pragma unroll
    for (int u = 0; u < units; ++u) next[u] = load_row(first, u, true);
#pragma unroll 1
    for (int i = first, next_row; i < m; i = next_row) {
        float squares = 0.0f;
        next_row = after(i);
#pragma unroll
        for (int u = 0; u < units; ++u) {
            row[u] = next[u];
            next[u] = load_row(next_row, u, next_row < m);
        }
#pragma unroll
        for (int u = 0; u < units; ++u)
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = __fmaf_rn(row[u].at(j), row[u].at(j), squares);
        const float mean = __fmul_rn(over_block(squares, room), per_number);
        room = room == rooms ? rooms + room_floats : rooms;
        const float rstd = ptx::rsqrt(__fadd_rn(mean, eps));
        ptx::store_float(rstds + i, rstd, threadIdx.x == 0);

        auto normalized = [&](const Eight<number>& x, const Eight<config::weight_dtype>& w) {
            Floats product;
#pragma unroll
            for (int j = 0; j < 8; ++j) product.value[j] = __fmul_rn(__fmul_rn(x.at(j), rstd), w.at(j));
            return product;
        };
        Floats value[units];
        float amax[units];
#pragma unroll
        for (int u = 0; u < units; ++u) {
            value[u] = normalized(row[u], load_weight(u));
            amax[u] = value[u].amax();
        }
        const float own_scale = scale_of<format, power_of_2>(over_row<in_halves>(amax, max_abs));
        const int mine = threadIdx.x / 16 * tile_columns + owned<units>() * step;  // the first column of the tile
        float* to = scale + static_cast<int64_t>(mine / tile_columns) * ((m + 3) / 4 * 4) + i;
        ptx::store_float(to, own_scale, first_owner<units>() && mine < k);

        const Divisor own = divisor_of<power_of_2>(own_scale);
        const int64_t index = static_cast<int64_t>(i) * k + column;
        if (!power_of_2 && __any_sync(whole_warp, own.needs_care())) {
#pragma unroll 1
            for (int u = 0; u < units; ++u) {  // found once more: rare, and in few registers
                const bool there = column + u * step < k;
                const Floats again = normalized(load_row(i, u, true), load_weight(u));
                const Divisor divisor = from_owner<units, power_of_2>(own, u);
                float quotient[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) quotient[j] = divisor.divide_carefully(again.at(j));
                ptx::store_8(data + index + u * step, pack_8<format>(quotient), there);
            }
        } else {
#pragma unroll
            for (int u = 0; u < units; ++u) {
                const Divisor divisor = from_owner<units, power_of_2>(own, u);
                float quotient[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) quotient[j] = divisor.template divide<power_of_2>(value[u].at(j));
                ptx::store_8(data + index + u * step, pack_8<format>(quotient), column + u * step < k);
            }
        }
        if constexpr (config::store_y)
#pragma unroll
            for (int u = 0; u < units; ++u) store_values(y, index + u * step, value[u], column + u * step < k);
    }
}
