// What the kernels of latent attention use: the threads that multiply, the maximum of no scores.
#pragma once
#include "ptx.cuh"

constexpr int consumer_threads = 256;  // two warpgroups; a third one has the producer

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }
