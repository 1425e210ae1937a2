// Merge of the partial results of one row and head, in the order of the positions.
#pragma once
#include "convert.cuh"
#include "warps.cuh"

constexpr int channels = 512, at_once = 4;  // partial results that are loaded together

// How two partial results, each with the log of its sum of weights, are merged: their factors, and the log of both sums.
struct Shares {
    float first, second, lse;

    __device__ __forceinline__ Shares(float first_lse, float second_lse) : first(1.0f), second(0.0f), lse(first_lse) {
        if (second_lse == minus_infinity()) return;
        if (first_lse == minus_infinity()) {
            first = 0.0f, second = 1.0f, lse = second_lse;
            return;
        }
        const float highest = fmaxf(first_lse, second_lse);  // NaN stays in the differences
        const float of_first = ptx::exp2(first_lse - highest), of_second = ptx::exp2(second_lse - highest);
        const float sum = __fadd_rn(of_first, of_second), inverse = __frcp_rn(sum);
        first = __fmul_rn(of_first, inverse), second = __fmul_rn(of_second, inverse);
        lse = __fadd_rn(highest, log2f(sum));
    }
    __device__ __forceinline__ float merge(float a, float b) const { return fmaf(second, b, __fmul_rn(first, a)); }
};

// A thread block of channels / 4 threads merges `count` partial results [512], each with the log of its sum of weights,
// `step` of them apart, into out [512] bfloat16. A partial result whose share is zero may hold anything. Without partial
// results, or with logs of −∞ only, out becomes zero.
__device__ __forceinline__ void merge_splits(const float* partial, const float* lse, int count, int step, uint16_t* out) {
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
}

// The same for partial results of parts, of which the first one has the `done` first ones: it is merged with one after the
// other. Returns the log of the sum of all weights.
__device__ __forceinline__ float merge_parts(
    const float* partial, const float* lse, int done, int count, int step, uint16_t* out) {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float sum = minus_infinity();
    if (count > 0) {
        value = reinterpret_cast<const float4*>(partial)[threadIdx.x];
        sum = lse[0];
    }
    for (int first = done; first < count; first += at_once) {
        float4 values[at_once];
        float sums[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i >= count) break;
            const int64_t of_part = static_cast<int64_t>(first + i) * step;
            values[i] = reinterpret_cast<const float4*>(partial + of_part * channels)[threadIdx.x];
            sums[i] = lse[of_part];
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i >= count) break;
            const Shares shares(sum, sums[i]);
            value.x = shares.merge(value.x, values[i].x);
            value.y = shares.merge(value.y, values[i].y);
            value.z = shares.merge(value.z, values[i].z);
            value.w = shares.merge(value.w, values[i].w);
            sum = shares.lse;
        }
    }
    reinterpret_cast<uint2*>(out)[threadIdx.x] =
        make_uint2(ptx::pack_bf16(value.x, value.y), ptx::pack_bf16(value.z, value.w));
    return sum;
}
