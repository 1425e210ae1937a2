// Quantization of tiles of 128 values in FP32, each by a warp: four values a lane.
#pragma once
#include "tile.cuh"

// Quantizes the tiles first, first + step, … before `end`, `at_once` of which are in flight. store(tile, four, scale):
// what becomes of a lane's four values, and of the tile's scale, which all lanes have.
template <int at_once, class Store>
__device__ __forceinline__ void quantize_tiles(const float* values, int first, int step, int end, Store store) {
    constexpr bool power_of_2 = config::power_of_2;
    for (int begin = first; begin < end; begin += at_once * step) {
        float4 v[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int tile = begin + i * step;
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (tile < end)
                v[i] = __ldcg(reinterpret_cast<const float4*>(values + tile * tile_columns) + ptx::lane_id());
        }
        float amax[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i)
            amax[i] = ptx::max_abs(ptx::max_abs(v[i].x, v[i].y), ptx::max_abs(v[i].z, v[i].w));
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2)
#pragma unroll
            for (int i = 0; i < at_once; ++i)
                amax[i] = ptx::max_abs(amax[i], __shfl_xor_sync(all_lanes, amax[i], bit));
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int tile = begin + i * step;
            if (tile >= end) break;
            const float own = scale_from_amax<e4m3, power_of_2>(amax[i]);
            const Divisor by = make_divisor<power_of_2>(own);
            float quotient[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
            if (!power_of_2 && by.needs_careful_division()) {  // the same in all lanes
#pragma unroll
                for (float& value : quotient) value = by.divide_carefully(value);
            } else {
#pragma unroll
                for (float& value : quotient) value = by.template divide<power_of_2>(value);
            }
            store(tile, ptx::pack_e4m3(quotient[0], quotient[1], quotient[2], quotient[3]), own);
        }
    }
}
