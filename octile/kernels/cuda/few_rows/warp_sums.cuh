// A tile of 16 rows of a weight times few rows of x: accumulators of a thread block's warps, each over its part of K.
//
// A warp requests all its part of the weight at once, before it waits for the previous kernel: the thread blocks of a
// launch are together what keeps the memory busy.
#pragma once
#include "bf16.cuh"
#include "fragments.cuh"

constexpr int warps = 8, threads = 32 * warps;

// The accumulators of all warps in shared memory, [warps][8 rows of x][16 rows of the weight, padded for the banks].
struct WarpSums {
    static constexpr int pitch = 20, bytes = warps * max_rows * pitch * 4;
    float* const sums;

    __device__ __forceinline__ void put(const float (&d)[4], const Lane& lane) const {
        float* to = sums + (threadIdx.x / 32 * max_rows + 2 * lane.member) * pitch + lane.group;
        to[0] = d[0], to[pitch] = d[1], to[8] = d[2], to[pitch + 8] = d[3];
    }

    // Adds the accumulators of one result, those of the first warp first.
    __device__ __forceinline__ float get(int row_of_x, int row_of_weight) const {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < warps; ++w) total += sums[(w * max_rows + row_of_x) * pitch + row_of_weight];
        return total;
    }
};
