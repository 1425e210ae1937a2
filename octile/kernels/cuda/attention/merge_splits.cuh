// Merge of the partial results of one row and head, in the order of the positions.
#pragma once
#include "convert.cuh"
#include "warps.cuh"

constexpr int channels = 512, at_once = 4;  // partial results that are loaded together

// A thread block of channels / 4 threads merges `count` partial results [512], each with the log of its sum of weights,
// `step` of them apart, into out [512] bfloat16. A partial result whose share is zero may hold anything. Without partial
// results, or with logs of −∞ only, out becomes zero. Returns the log of the sum of all weights.
__device__ __forceinline__ float merge_splits(const float* partial, const float* lse, int count, int step, uint16_t* out) {
    float highest = minus_infinity();
    for (int i = ptx::lane_id(); i < count; i += 32) highest = fmaxf(highest, lse[static_cast<int64_t>(i) * step]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(all_lanes, highest, distance));
    const bool is_empty = highest == minus_infinity();  // no partial results, or none with any weight
    const float base = is_empty ? 0.0f : highest;
    float total = is_empty ? 1.0f : 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < count; first += at_once) {
        float4 values[at_once];
        float share[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i >= count) break;
            const int64_t of_split = static_cast<int64_t>(first + i) * step;
            values[i] = reinterpret_cast<const float4*>(partial + of_split * channels)[threadIdx.x];
            share[i] = ptx::exp2(lse[of_split] - base);  // NaN where the split's scores are
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i >= count) break;
            if (share[i] == 0.0f) continue;
            total += share[i];
            sum.x = fmaf(share[i], values[i].x, sum.x);
            sum.y = fmaf(share[i], values[i].y, sum.y);
            sum.z = fmaf(share[i], values[i].z, sum.z);
            sum.w = fmaf(share[i], values[i].w, sum.w);
        }
    }
    const float inverse = __frcp_rn(total);
    reinterpret_cast<uint2*>(out)[threadIdx.x] = make_uint2(ptx::pack_bf16(sum.x * inverse, sum.y * inverse),
                                                            ptx::pack_bf16(sum.z * inverse, sum.w * inverse));
    return is_empty ? minus_infinity() : base + log2f(total);
}
