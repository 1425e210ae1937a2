// The sum of a row's squares in the order in which rms_norm.cu adds them, for kernels whose results have its bits.
//
// There a thread holds config::norm_units vectors of 8 columns, and config::norm_warps warps have a row. Here the first
// warps of a thread block take these parts, with vectors that they load again.
#pragma once
#include "vec8.cuh"

// All threads call it. x: a row of config::k columns, bfloat16. buffer: norm_warps numbers in shared memory.
__device__ __forceinline__ float sum_of_squares(const uint16_t* x, int k, float* buffer) {
    constexpr int units = config::norm_units, norm_warps = config::norm_warps, step = 256 * norm_warps;
    const int warp = threadIdx.x / 32, column = 8 * threadIdx.x;
    if (warp < norm_warps) {
        Bf16Vec8 of_row[units];
#pragma unroll
        for (int u = 0; u < units; ++u) {
            uint4 bits = make_uint4(0, 0, 0, 0);
            if (column + u * step < k) bits = __ldcg(reinterpret_cast<const uint4*>(x + column + u * step));
            of_row[u] = {bits.x, bits.y, bits.z, bits.w};
        }
        float squares = 0.0f;
#pragma unroll
        for (int u = 0; u < units; ++u)
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = __fmaf_rn(of_row[u].at(j), of_row[u].at(j), squares);
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2)
            squares = __fadd_rn(squares, __shfl_xor_sync(all_lanes, squares, bit));
        if (ptx::lane_id() == 0) buffer[warp] = squares;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < norm_warps; ++w) sum = __fadd_rn(sum, buffer[w]);
    return sum;
}
