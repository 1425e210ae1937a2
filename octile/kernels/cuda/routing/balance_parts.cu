// The balance of experts within sequences, first part: how many tokens of a part of a sequence have each expert among the
// K of their highest logits, and the summed shares of the experts in the tokens' affinities.
//
// A token's logits are held by as many lanes as it has 16 experts. The K-th highest logit is found by K maxima of what lies
// below the one before; equal logits, which are rare, need a search with indices. A thread adds up what it finds in
// registers, and the threads of a block are summed at the end, in a fixed order.
#include "ptx.cuh"
#include "convert.cuh"

constexpr int threads = 32 * config::warps, experts = config::experts;
constexpr int lanes = experts / 16, tokens_of_warp = 32 / lanes;  // lanes of a token
constexpr int absent = -2147483647 - 1;                           // below the order of every logit

// An integer that orders logits; NaN is the highest, and −0 equals 0.
__device__ __forceinline__ int order_of(float logit) {
    const int bits = __float_as_int(__fadd_rn(logit, 0.0f));
    return logit != logit ? 0x7FFFFFFF : bits ^ (bits >> 31 & 0x7FFFFFFF);
}

__device__ __forceinline__ float exponential(float x) { return ptx::exp2(__fmul_rn(x, 1.44269504f)); }

template <typename Value, typename Combine>
__device__ __forceinline__ Value over_lanes(Value value, Combine combine) {
#pragma unroll
    for (int bit = 1; bit < lanes; bit *= 2) value = combine(value, __shfl_xor_sync(all_lanes, value, bit));
    return value;
}

// The expert of a lane's value i: lanes hold vectors of 4 in turn.
__device__ __forceinline__ int expert_of(int lane, int i) { return (i / 4 * lanes + lane) * 4 + i % 4; }

// Adds 1 for each of a token's K highest logits; of equal ones those of lower indices count.
__device__ __forceinline__ void count_highest(const float (&logit)[16], int (&count)[16], int lane, bool in_bounds) {
    auto larger = [](int a, int b) { return max(a, b); };
    int order[16], highest = absent;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        order[i] = order_of(logit[i]);
        highest = max(highest, order[i]);
    }
    highest = over_lanes(highest, larger);
#pragma unroll
    for (int k = 1; k < config::chosen; ++k) {
        int next = absent;
#pragma unroll
        for (int i = 0; i < 16; ++i) next = max(next, order[i] < highest ? order[i] : absent);
        highest = over_lanes(next, larger);
    }
    int chosen = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) chosen += order[i] >= highest;
    chosen = over_lanes(chosen, [](int a, int b) { return a + b; });
    if (!__any_sync(all_lanes, chosen > config::chosen)) {
#pragma unroll
        for (int i = 0; i < 16; ++i) count[i] += in_bounds && order[i] >= highest;
        return;
    }
#pragma unroll 1
    for (int k = 0; k < config::chosen; ++k) {
        int best = absent, expert = experts;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const bool higher = order[i] > best;
            best = higher ? order[i] : best;
            expert = higher ? expert_of(lane, i) : expert;
        }
#pragma unroll
        for (int bit = 1; bit < lanes; bit *= 2) {
            const int other = __shfl_xor_sync(all_lanes, best, bit);
            const int other_expert = __shfl_xor_sync(all_lanes, expert, bit);
            const bool higher = other > best || (other == best && other_expert < expert);
            best = higher ? other : best;
            expert = higher ? other_expert : expert;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const bool taken = expert_of(lane, i) == expert;
            count[i] += in_bounds && taken;
            order[i] = taken ? absent : order[i];
        }
    }
}

// Adds the shares of the experts in a token's affinities. A sigmoid is exp(min(x, 0)) / (1 + exp(−|x|)). If those of all
// experts are small, the largest one becomes 1 in the exponent: then no sum is 0.
__device__ __forceinline__ void add_shares(const float (&logit)[16], float (&share)[16], bool in_bounds) {
    float affinity[16], highest = __int_as_float(0xFF800000);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        affinity[i] = config::softmax ? logit[i] : logit[i] < 0.0f ? logit[i] : 0.0f;
        highest = fmaxf(highest, affinity[i]);
    }
    highest = over_lanes(highest, [](float a, float b) { return fmaxf(a, b); });
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        affinity[i] = exponential(__fadd_rn(affinity[i], -highest));
        if constexpr (!config::softmax)
            affinity[i] = __fmul_rn(affinity[i], ptx::reciprocal(__fadd_rn(1.0f, exponential(-fabsf(logit[i])))));
        total = __fadd_rn(total, affinity[i]);
    }
    total = over_lanes(total, [](float a, float b) { return __fadd_rn(a, b); });
    const float inverse = in_bounds ? ptx::reciprocal(total) : 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) share[i] = __fadd_rn(share[i], __fmul_rn(affinity[i], inverse));
}

// logits: [T, E] with strides `row` and 1. counts, shares: [blocks, E]. ended: is set to 0. length: of a sequence; parts:
// thread blocks of a sequence.
extern "C" __global__ void __launch_bounds__(threads, config::blocks)
balance_parts(const float* logits, int* counts, float* shares, int* ended, int64_t row, int length, int parts) {
    const int lane = ptx::lane_id() % lanes, warp = threadIdx.x / 32;
    const int sequence = blockIdx.x / parts, part = blockIdx.x % parts;
    if (blockIdx.x == 0 && threadIdx.x == 0) *ended = 0;
    int count[16] = {};
    float share[16] = {};
    const int own = warp * tokens_of_warp + ptx::lane_id() / lanes, step = config::warps * tokens_of_warp;
#pragma unroll 1
    for (int first = part * step; first < length; first += parts * step) {  // the same for all threads of a block
        const bool in_bounds = first + own < length;
        const float* at = logits + (static_cast<int64_t>(sequence) * length + (in_bounds ? first + own : first)) * row;
        float logit[16];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 v = __ldg(reinterpret_cast<const float4*>(at) + j * lanes + lane);
            logit[4 * j] = v.x, logit[4 * j + 1] = v.y, logit[4 * j + 2] = v.z, logit[4 * j + 3] = v.w;
        }
        count_highest(logit, count, lane, in_bounds);
        add_shares(logit, share, in_bounds);
    }

    int* counts_of_warps = reinterpret_cast<int*>(ptx::dynamic_shared());  // [warps, E]
    float* shares_of_warps = reinterpret_cast<float*>(counts_of_warps + config::warps * experts);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
        for (int bit = lanes; bit < 32; bit *= 2) {
            count[i] += __shfl_xor_sync(all_lanes, count[i], bit);
            share[i] = __fadd_rn(share[i], __shfl_xor_sync(all_lanes, share[i], bit));
        }
        if (ptx::lane_id() < lanes) {
            counts_of_warps[warp * experts + expert_of(lane, i)] = count[i];
            shares_of_warps[warp * experts + expert_of(lane, i)] = share[i];
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += threads) {
        int sum = 0;
        float of_shares = 0.0f;
#pragma unroll
        for (int w = 0; w < config::warps; ++w) {
            sum += counts_of_warps[w * experts + e];
            of_shares = __fadd_rn(of_shares, shares_of_warps[w * experts + e]);
        }
        counts[static_cast<int64_t>(blockIdx.x) * experts + e] = sum;
        shares[static_cast<int64_t>(blockIdx.x) * experts + e] = of_shares;
    }
}
