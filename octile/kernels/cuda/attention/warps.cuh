// What all attention kernels of this folder use: the mask of a warp's lanes, and the maximum of no scores.
#pragma once
#include "ptx.cuh"

constexpr uint32_t all_lanes = 0xFFFFFFFF;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }
