// Conversion between BF16 and FP32 in the kernels of few rows.
#pragma once
#include "convert.cuh"

__device__ __forceinline__ float from_bf16(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
__device__ __forceinline__ uint16_t to_bf16(float x) { return static_cast<uint16_t>(ptx::pack_bf16(x, 0.0f)); }
