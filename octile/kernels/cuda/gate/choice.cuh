// The choice of a row's experts by its logits, as `octile.ops.gate.route` specifies it.
//
// A warp chooses for a row: lane l holds the experts l, l + 32, …. Scores are compared as integers that order them, in
// which NaN is the highest; of equal ones the expert with the lower number comes first.
#pragma once
#include "convert.cuh"
#include "warps.cuh"

constexpr int experts = config::experts, chosen = config::chosen, groups = config::groups;
constexpr int per_lane = (experts + 31) / 32, group_size = experts / groups;
constexpr int absent = -2147483647 - 1;  // below the order of every score
static_assert(chosen <= 32 && chosen <= experts);

// One of a row's choices: lane k holds the k-th.
struct Chosen {
    int expert;
    float weight;
};

// An integer that orders scores.
__device__ __forceinline__ int order_of(float score) {
    const int bits = __float_as_int(__fadd_rn(score, 0.0f));  // −0 becomes 0
    return score != score ? 0x7FFFFFFF : bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ __forceinline__ float score_of(int order) {
    return __int_as_float(order < 0 ? order ^ 0x7FFFFFFF : order);
}

__device__ __forceinline__ float sigmoid_of(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

// Returns the lowest expert among those of the highest order, and that order; the same in all lanes.
__device__ __forceinline__ int highest(const int (&order)[per_lane], int first, int end, int& best) {
    const int lane = ptx::lane_id();
    int own = absent;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        const int e = lane + 32 * i;
        if (e >= first && e < end) own = max(own, order[i]);
    }
    best = __reduce_max_sync(all_lanes, own);
    unsigned lowest = 0xFFFFFFFF;
#pragma unroll
    for (int i = per_lane - 1; i >= 0; --i) {
        const int e = lane + 32 * i;
        if (e >= first && e < end && order[i] == best) lowest = e;
    }
    return static_cast<int>(__reduce_min_sync(all_lanes, lowest));
}

// Computes the choice of one row. logit_of(e): its logit of expert e. bias: [experts], or any address if there is none.
template <class Logit>
__device__ __forceinline__ Chosen choose(Logit logit_of, const float* bias, float factor, float eps) {
    const int lane = ptx::lane_id();
    float logit[per_lane];
    int order[per_lane];
    float shift = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        const int e = lane + 32 * i;
        logit[i] = e < experts ? logit_of(e) : 0.0f;
        if (e < experts) shift = fmaxf(shift, logit[i]);
    }
    if constexpr (config::softmax) {
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2) shift = fmaxf(shift, __shfl_xor_sync(all_lanes, shift, bit));
#pragma unroll
        for (int i = 0; i < per_lane; ++i)
            if (lane + 32 * i < experts) total = __fadd_rn(total, expf(__fadd_rn(logit[i], -shift)));
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2) total = __fadd_rn(total, __shfl_xor_sync(all_lanes, total, bit));
    }
    auto affinity = [&](float x) {
        return config::softmax ? __fdiv_rn(expf(__fadd_rn(x, -shift)), total) : sigmoid_of(x);
    };
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        const int e = lane + 32 * i;
        float score = affinity(logit[i]);
        if constexpr (config::biased) score = __fadd_rn(score, e < experts ? bias[e] : 0.0f);
        order[i] = e < experts ? order_of(score) : absent;
    }
    if constexpr (config::top_groups < groups) {
        int of_group = absent;  // in lane g, of group g: of its highest score, or of the sum of its highest two
        for (int g = 0; g < groups; ++g) {
            int best, second;
            const int first = highest(order, g * group_size, (g + 1) * group_size, best);
            float sum = score_of(best);
            if constexpr (config::best == 2) {
                int others[per_lane];
#pragma unroll
                for (int i = 0; i < per_lane; ++i) others[i] = lane + 32 * i == first ? absent : order[i];
                highest(others, g * group_size, (g + 1) * group_size, second);
                sum = __fadd_rn(sum, score_of(second));
            }
            if (lane == g) of_group = order_of(sum);
        }
        bool inside[per_lane] = {};
        for (int n = 0; n < config::top_groups; ++n) {
            const int best = __reduce_max_sync(all_lanes, of_group);
            const int group = __reduce_min_sync(all_lanes, of_group == best ? unsigned(lane) : 0xFFFFFFFFu);
            if (lane == group) of_group = absent;
#pragma unroll
            for (int i = 0; i < per_lane; ++i) inside[i] |= (lane + 32 * i) / group_size == group;
        }
#pragma unroll
        for (int i = 0; i < per_lane; ++i)
            if (!inside[i]) order[i] = absent;
    }
    int own = 0;  // lane k holds the expert of slot k, and its logit
    float own_logit = 0.0f;
#pragma unroll
    for (int k = 0; k < chosen; ++k) {
        int best;
        const int e = highest(order, 0, experts, best);
        float of_best = 0.0f;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            if (e == lane + 32 * i) of_best = logit[i], order[i] = absent;
        }
        of_best = __shfl_sync(all_lanes, of_best, e % 32);
        if (lane == k) own = e, own_logit = of_best;
    }
    float weight = lane < chosen ? affinity(own_logit) : 0.0f;
    if constexpr (config::normalize) {
        float sum = weight;
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, bit));
        weight = __fdiv_rn(weight, __fadd_rn(sum, eps));
    }
    return {own, __fmul_rn(weight, factor)};
}
