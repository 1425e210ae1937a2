// The expert gate for Hopper: logits x[T, D] · w[P·E, D]ᵀ, summed over the P terms of the weight, choice and weights.
//
// A thread block takes 64 tokens per warpgroup. TMA loads k-blocks of 64 columns of x and of all terms into a
// pipeline of stages. A warpgroup multiplies by one wgmma of width P·E, so that x is read from shared memory once for all
// terms. Its accumulators hold the logits of a token in four neighboring lanes, which choose the experts by shuffles.
//
// NOTES
// - Terms are loaded as a tensor of five dimensions, whose order puts a quarter of the experts, one after the other, into
//   each of the four lanes: their groups are then those of one lane, and their logits are stored in vectors.
// - There is no producer warp: four warpgroups with 96 accumulators each leave no registers for it. The first thread loads
//   a stage while the next one is multiplied.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "convert.cuh"

constexpr int tile_m = 64 * config::warpgroups, columns = config::parts * config::experts;
constexpr int own_experts = config::experts / 4;  // of a lane
constexpr bool in_groups = config::topk_group < config::n_group;
constexpr int own_groups = in_groups ? config::n_group / 4 : 1, group_size = own_experts / own_groups;
constexpr int absent = -2147483647 - 1;  // below the order of every score
constexpr uint32_t all_lanes = 0xFFFFFFFF;

namespace smem {
constexpr int x_tile = tile_m * 128, w_tile = columns * 128;  // bytes of a k-block
constexpr int x = 0, w = config::stages * x_tile;             // tiles first: their swizzle needs 1024-byte alignment
constexpr int barriers = w + config::stages * w_tile;
constexpr int bytes = barriers + 2 * config::stages * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "launcher.py computes the same");
}  // namespace smem

struct Barriers {
    ptx::Mbarrier full[config::stages], empty[config::stages];
};

struct Pipeline {
    uint8_t* shared;
    Barriers& barriers;
    const TensorMap *x_map, *w_map;
    int first_token, k_blocks;

    __device__ __forceinline__ void load(int k_block, int stage) {
        ptx::Mbarrier* full = barriers.full + stage;
        full->arrive_expect_tx(smem::x_tile + smem::w_tile);
        ptx::tma_load(shared + smem::x + stage * smem::x_tile, x_map, full, 64 * k_block, first_token, 0);
        ptx::tma_load(shared + smem::w + stage * smem::w_tile, w_map, full, 64 * k_block, 0, 0, 0, 0);
    }
};

__device__ __forceinline__ void fence_operands(float (&d)[columns / 2]) {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) ptx::warpgroup_fence_operand(d[i]);
}

// Multiplies all k-blocks: d[4j + 2h + i] belongs to token 8h + lane/4 of the warp's 16 tokens, and to column
// 8j + 2·(lane%4) + i.
__device__ __forceinline__ void multiply(float (&d)[columns / 2], Pipeline& pipeline, int warpgroup) {
    const bool loads = threadIdx.x == 0;
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int k_block = 0; k_block < pipeline.k_blocks; ++k_block) {
        pipeline.barriers.full[stage].wait(parity);
        const uint8_t* rows = pipeline.shared + smem::x + stage * smem::x_tile + warpgroup * 64 * 128;
        const uint64_t x = ptx::wgmma_descriptor(rows);
        const uint64_t w = ptx::wgmma_descriptor(pipeline.shared + smem::w + stage * smem::w_tile);
        fence_operands(d);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma(d, x + 2 * k, w + 2 * k, true);
        ptx::wgmma_commit_group();
        if (const int next = k_block - 1 + config::stages; loads && k_block > 0 && next < pipeline.k_blocks) {
            const int released = stage == 0 ? config::stages - 1 : stage - 1;
            pipeline.barriers.empty[released].wait(stage == 0 ? parity ^ 1 : parity);
            pipeline.load(next, released);
        }
        __syncwarp();
        ptx::wgmma_wait_group<0>();
        fence_operands(d);
        if (ptx::lane_id() == 0) pipeline.barriers.empty[stage].arrive();
        if (++stage == config::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

__device__ __forceinline__ float exponential(float x) { return ptx::exp2(__fmul_rn(x, 1.44269504f)); }

__device__ __forceinline__ float logistic(float x) { return __frcp_rn(__fadd_rn(1.0f, exponential(-x))); }

// An integer that orders scores; NaN is the highest, and −0 equals 0.
__device__ __forceinline__ int order_of(float score) {
    const int bits = __float_as_int(__fadd_rn(score, 0.0f));
    return score != score ? 0x7FFFFFFF : bits ^ (bits >> 31 & 0x7FFFFFFF);
}

__device__ __forceinline__ float score_of(int order) { return __int_as_float(order ^ (order >> 31 & 0x7FFFFFFF)); }

// The highest order of four lanes, of equal ones that of the lowest index, and a value that belongs to it.
template <typename Value>
__device__ __forceinline__ void highest_of_four_lanes(int& order, int& index, Value& value) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const int other = __shfl_xor_sync(all_lanes, order, bit);
        const int other_index = __shfl_xor_sync(all_lanes, index, bit);
        const Value other_value = __shfl_xor_sync(all_lanes, value, bit);
        const bool higher = other > order || (other == order && other_index < index);
        order = higher ? other : order;
        index = higher ? other_index : index;
        value = higher ? other_value : value;
    }
}

// Gives the experts outside of the best groups the score −∞.
__device__ __forceinline__ void limit_to_groups(int (&order)[own_experts], int lane) {
    int of_group[own_groups];
    bool outside[own_groups];
#pragma unroll
    for (int g = 0; g < own_groups; ++g) {
        int first = absent, second = absent;
#pragma unroll
        for (int i = 0; i < group_size; ++i) {
            const int own = order[g * group_size + i];
            second = max(second, min(first, own));
            first = max(first, own);
        }
        const float total = score_of(first);
        of_group[g] = order_of(config::best == 2 ? __fadd_rn(total, score_of(second)) : total);
        outside[g] = true;
    }
#pragma unroll
    for (int k = 0; k < config::topk_group; ++k) {
        int highest = of_group[0], group = lane * own_groups, unused = 0;
#pragma unroll
        for (int g = 1; g < own_groups; ++g) {
            const bool higher = of_group[g] > highest;
            highest = higher ? of_group[g] : highest;
            group = higher ? lane * own_groups + g : group;
        }
        highest_of_four_lanes(highest, group, unused);
#pragma unroll
        for (int g = 0; g < own_groups; ++g) {
            const bool chosen = lane * own_groups + g == group;
            of_group[g] = chosen ? absent : of_group[g];
            outside[g] = outside[g] && !chosen;
        }
    }
#pragma unroll
    for (int i = 0; i < own_experts; ++i)
        order[i] = outside[i / group_size] ? order_of(__int_as_float(0xFF800000)) : order[i];
}

// Chooses the experts of a token by the logits that four lanes hold, and stores its results.
__device__ __forceinline__ void choose(
    const float (&logit)[own_experts], const float* bias, float* logits, float* weights, int64_t* experts, int64_t token,
    bool in_bounds, float factor, float eps) {
    const int lane = ptx::lane_id() % 4, first_expert = lane * own_experts;
    float* own_logits = logits + token * config::experts + first_expert;
    if (in_bounds)
#pragma unroll
        for (int i = 0; i < own_experts; i += 2)
            *reinterpret_cast<float2*>(own_logits + i) = make_float2(logit[i], logit[i + 1]);

    int order[own_experts];
    float shift = 0.0f, total = 1.0f;
    if constexpr (config::softmax) {
        shift = logit[0], total = 0.0f;
#pragma unroll
        for (int i = 1; i < own_experts; ++i) shift = fmaxf(shift, logit[i]);
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) shift = fmaxf(shift, __shfl_xor_sync(all_lanes, shift, bit));
#pragma unroll
        for (int i = 0; i < own_experts; ++i) total = __fadd_rn(total, exponential(__fadd_rn(logit[i], -shift)));
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) total = __fadd_rn(total, __shfl_xor_sync(all_lanes, total, bit));
    }
    auto affinity = [&](float x) {
        return config::softmax ? __fdiv_rn(exponential(__fadd_rn(x, -shift)), total) : logistic(x);
    };
#pragma unroll
    for (int i = 0; i < own_experts; ++i) {
        float score = affinity(logit[i]);
        if constexpr (config::biased) score = __fadd_rn(score, __ldg(bias + first_expert + i));
        order[i] = order_of(score);
    }
    if constexpr (in_groups) limit_to_groups(order, lane);

    float weight[config::chosen], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < config::chosen; ++k) {
        int highest = order[0], expert = first_expert;
        float of_highest = logit[0];
#pragma unroll
        for (int i = 1; i < own_experts; ++i) {
            const bool higher = order[i] > highest;  // of equal ones the first
            highest = higher ? order[i] : highest;
            expert = higher ? first_expert + i : expert;
            of_highest = higher ? logit[i] : of_highest;
        }
        highest_of_four_lanes(highest, expert, of_highest);
        const int taken = expert - first_expert;
#pragma unroll
        for (int i = 0; i < own_experts; ++i) order[i] = i == taken ? absent : order[i];
        weight[k] = affinity(of_highest);
        sum = __fadd_rn(sum, weight[k]);
        if (in_bounds && lane == k % 4) experts[token * config::chosen + k] = expert;
    }
#pragma unroll
    for (int k = 0; k < config::chosen; ++k) {
        if constexpr (config::normalize) weight[k] = __fdiv_rn(weight[k], __fadd_rn(sum, eps));
        if (in_bounds && lane == k % 4) weights[token * config::chosen + k] = __fmul_rn(weight[k], factor);
    }
}

// x_map: x [1, T, D]; w_map: [P, E/8, 4, 2, D]. bias: [E], only with config::biased. logits: [T, E]; weights, experts:
// [T, K].
extern "C" __global__ void __launch_bounds__(128 * config::warpgroups, config::blocks)
gate(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* bias, float* logits,
     float* weights, int64_t* experts, float factor, float eps, int tokens, int width) {
    uint8_t* shared = ptx::dynamic_shared();
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0), warpgroup = warp / 4;
    Pipeline pipeline{shared, barriers, &x_map, &w_map, static_cast<int>(blockIdx.x) * tile_m, (width + 63) / 64};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < config::stages; ++stage) {
            barriers.full[stage].init(1);
            barriers.empty[stage].init(4 * config::warpgroups);
        }
        ptx::fence_mbarrier_init();
        for (int stage = 0; stage < min(config::stages, pipeline.k_blocks); ++stage) pipeline.load(stage, stage);
    }
    __syncthreads();

    float d[columns / 2] = {};
    multiply(d, pipeline, warpgroup);
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // of 8 tokens of this warp
        float logit[own_experts];
#pragma unroll
        for (int i = 0; i < own_experts; ++i) {
            const int at = i / 2 * 4 + 2 * h + i % 2;
            logit[i] = d[at];
            if constexpr (config::parts == 3)  // the smallest products first
                logit[i] = __fadd_rn(d[at], __fadd_rn(d[at + config::experts / 2], d[at + config::experts]));
        }
        const int token = pipeline.first_token + 16 * warp + 8 * h + ptx::lane_id() / 4;
        choose(logit, bias, logits, weights, experts, token, token < tokens, factor, eps);
    }
}
