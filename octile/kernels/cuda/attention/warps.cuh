// What the kernels of latent attention use: the threads that multiply, the maximum of no scores.
#pragma once
#include "ptx.cuh"

constexpr int consumer_threads = 256;  // two warpgroups; a third one has the producer

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

template <int n>
__device__ __forceinline__ void fence_operands(float (&d)[n]) {
#pragma unroll
    for (int r = 0; r < n; ++r) ptx::warpgroup_fence_operand(d[r]);
}
