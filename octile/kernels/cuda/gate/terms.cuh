// FP32 numbers as sums of three BF16 terms, which tensor cores multiply exactly (`octile.ops.gate`).
#pragma once
#include "ptx.cuh"

// Rounds two numbers to BF16, and subtracts what they became.
__device__ __forceinline__ uint32_t next_term(float& low, float& high) {
    const uint32_t pair = ptx::pack_bf16(low, high);
    low = __fsub_rn(low, __uint_as_float(pair << 16));
    high = __fsub_rn(high, __uint_as_float(pair & 0xFFFF0000));
    return pair;
}
