// The expert gate for Hopper: logits x[T, D] · w[E, D]ᵀ, choice and weights. An FP32 weight is three BF16 terms.
//
// A thread block takes 64 tokens per warpgroup. TMA loads k-blocks of 64 columns of x and of the weight into pipelines
// of stages. All threads split a k-block of the weight into its P terms while tensor cores multiply the one before. A
// warpgroup multiplies by one wgmma of width P·E, so that x is read from shared memory once for all P terms. Its
// accumulators hold the logits of a token in four neighboring lanes, which choose the experts by shuffles.
//
// NOTES
// - Rows of terms are ordered so that a quarter of the experts, one after the other, is in each of the four lanes:
//   their groups are then those of one lane.
// - There is no producer warp: four warpgroups with 96 accumulators each leave no registers for it. The first thread
//   loads a stage while the next one is multiplied.
// - Experts are chosen by 32-bit keys: 26 bits are the order of the score above 2²⁶ orders below the highest one, and 6
//   the index. A chosen score that is lower, less than 2⁻⁸ of the highest, makes the warp choose again by all bits. The
//   bits of scores order those that are positive, so a highest one that is not makes it choose again, too.
// - x is read once. The L2 cache fetches 128 bytes at a time, a k-block of a row, and evicts them first: twice as many
//   could be evicted before they are used, and lines of normal priority push out what others have written.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "convert.cuh"
#include "stage.cuh"
#include "terms.cuh"

constexpr int threads = 128 * config::warpgroups, tile_m = 64 * config::warpgroups;
constexpr int columns = config::parts * config::experts;
constexpr int own_experts = config::experts / 4;  // of a lane
constexpr bool in_groups = config::topk_group < config::n_group;
constexpr int own_groups = in_groups ? config::n_group / 4 : 1, group_size = own_experts / own_groups;
constexpr int absent = -2147483647 - 1;  // below the order of every score
// Of terms, three, so that no thread waits until one is empty: a warp that splits k-block k has waited until all warps
// have split k-block k − 1, and each of them has waited for its wgmma of k-block k − 3 before.
constexpr int terms_stages = 3;

namespace smem {
constexpr int w_row = config::parts == 1 ? 128 : 256;  // of 64 columns
constexpr int x_tile = tile_m * 128, terms_tile = columns * 128, w_tile = config::experts * w_row;  // of a k-block
constexpr int x = 0, terms = config::stages * x_tile;  // swizzled tiles first: they need 1024-byte alignment
constexpr int w = terms + terms_stages * terms_tile, bias = w + config::w_stages * w_tile;
constexpr int barriers = bias + 4 * config::experts;
constexpr int bytes =
    barriers + (2 * config::stages + config::w_stages + terms_stages) * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "launcher.py computes the same");
constexpr int logits_row = config::experts * 4 + 16;  // of a token, in place of x; bytes
static_assert(tile_m * logits_row <= bias, "the logits fit in");
}  // namespace smem

struct Barriers {
    ptx::Mbarrier full[config::stages], empty[config::stages];  // of x
    ptx::Mbarrier w_full[config::w_stages], terms_full[terms_stages];
};

struct Pipeline {
    uint8_t* shared;
    Barriers& barriers;
    const TensorMap *x_map, *w_map;
    int first_token, k_blocks;

    __device__ __forceinline__ void load_x(int k_block, int stage) {
        ptx::Mbarrier* full = barriers.full + stage;
        full->arrive_expect_tx(smem::x_tile);
        ptx::tma_load_once(shared + smem::x + stage * smem::x_tile, x_map, full, 64 * k_block, first_token, 0);
    }

    __device__ __forceinline__ void load_weight(int k_block, int stage) {
        ptx::Mbarrier* full = barriers.w_full + stage;
        full->arrive_expect_tx(smem::w_tile);
        ptx::tma_load(shared + smem::w + stage * smem::w_tile, w_map, full, 64 * k_block, 0, 0);
    }
};

__device__ __forceinline__ void fence_operands(float (&d)[columns / 2]) {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) ptx::warpgroup_fence_operand(d[i]);
}

// Splits a k-block of the weight, [E, 64], into its terms, [P·E, 64] BF16, as TMA would load them for wgmma.
__device__ __forceinline__ void split(const uint8_t* weight, uint8_t* terms) {
    constexpr int vectors = 16 * config::experts;  // of four columns
#pragma unroll
    for (int first = 0; first < vectors; first += threads) {
        const int expert = (first + threadIdx.x) / 16, vector = threadIdx.x % 16;
        if (vectors % threads && expert >= config::experts) break;
        const uint8_t* from = weight + expert * smem::w_row + vector * smem::w_row / 16;
        const int row = expert % own_experts / 2 * 8 + expert / own_experts * 2 + expert % own_experts % 2;
        uint8_t* to = terms + row * 128 + (vector / 2 ^ row % 8) * 16 + vector % 2 * 8;
        if constexpr (config::parts == 1) {
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        } else {
            float4 value = *reinterpret_cast<const float4*>(from);
#pragma unroll
            for (int term = 0; term < config::parts; ++term) {
                const uint32_t low = next_term(value.x, value.y), high = next_term(value.z, value.w);
                *reinterpret_cast<uint2*>(to + term * config::experts * 128) = make_uint2(low, high);
            }
        }
    }
}

__device__ __forceinline__ void split(Pipeline& pipeline, const Stage<config::w_stages>& from, int to) {
    Barriers& barriers = pipeline.barriers;
    barriers.w_full[from.index].wait(from.parity);
    split(pipeline.shared + smem::w + from.index * smem::w_tile,
          pipeline.shared + smem::terms + to * smem::terms_tile);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::lane_id() == 0) barriers.terms_full[to].arrive();
}

// Multiplies all k-blocks: d[4j + 2h + i] belongs to token 8h + lane/4 of the warp's 16 tokens, and to column
// 8j + 2·(lane%4) + i.
__device__ __forceinline__ void multiply(float (&d)[columns / 2], Pipeline& pipeline, int warpgroup) {
    const bool loads = threadIdx.x == 0;
    Barriers& barriers = pipeline.barriers;
    Stage<config::stages> x_stage, released;
    Stage<config::w_stages> w_stage;
    Stage<terms_stages> terms;
    split(pipeline, w_stage, 0);
#pragma unroll 1
    for (int k_block = 0; k_block < pipeline.k_blocks; ++k_block) {
        barriers.terms_full[terms.index].wait(terms.parity);
        if (const int next = k_block + config::w_stages; loads && next < pipeline.k_blocks)
            pipeline.load_weight(next, w_stage.index);  // in place of the one that is split now
        __syncwarp();
        barriers.full[x_stage.index].wait(x_stage.parity);
        const uint8_t* rows = pipeline.shared + smem::x + x_stage.index * smem::x_tile + warpgroup * 64 * 128;
        const uint64_t x = ptx::wgmma_descriptor(rows);
        const uint64_t w = ptx::wgmma_descriptor(pipeline.shared + smem::terms + terms.index * smem::terms_tile);
        fence_operands(d);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma(d, x + 2 * k, w + 2 * k, true);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();  // of the k-block before
        fence_operands(d);
        if (k_block > 0) {
            if (ptx::lane_id() == 0) barriers.empty[released.index].arrive();
            if (const int next = k_block - 1 + config::stages; loads && next < pipeline.k_blocks) {
                barriers.empty[released.index].wait(released.parity);
                pipeline.load_x(next, released.index);
            }
            released.advance();
        }
        __syncwarp();
        x_stage.advance();
        w_stage.advance();
        terms.advance();
        if (k_block + 1 < pipeline.k_blocks) split(pipeline, w_stage, terms.index);
    }
    ptx::wgmma_wait_group<0>();
    fence_operands(d);
}

__device__ __forceinline__ float exponential(float x) { return ptx::exp2(__fmul_rn(x, 1.44269504f)); }

__device__ __forceinline__ float logistic(float x) { return ptx::reciprocal(__fadd_rn(1.0f, exponential(-x))); }

// An integer that orders scores; NaN is the highest. No score is −0, since affinities are not.
__device__ __forceinline__ int order_of(float score) {
    const int bits = __float_as_int(score);
    return score != score ? 0x7FFFFFFF : bits ^ (bits >> 31 & 0x7FFFFFFF);
}

__device__ __forceinline__ float score_of(int order) { return __int_as_float(order ^ (order >> 31 & 0x7FFFFFFF)); }

// Gives the experts outside of the best groups the score −∞.
__device__ __forceinline__ void limit_to_groups(int (&order)[own_experts], int lane) {
    int of_group[own_groups], better[own_groups] = {};  // groups
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
    }
#pragma unroll
    for (int bit = 0; bit < 4; ++bit)
#pragma unroll
        for (int g = 0; g < own_groups; ++g) {
            const int other = __shfl_xor_sync(all_lanes, of_group[g], bit), index = (lane ^ bit) * own_groups + g;
#pragma unroll
            for (int own = 0; own < own_groups; ++own)
                better[own] += other > of_group[own] || (other == of_group[own] && index < lane * own_groups + own);
        }
#pragma unroll
    for (int i = 0; i < own_experts; ++i)
        order[i] = better[i / group_size] >= config::topk_group ? order_of(__int_as_float(0xFF800000)) : order[i];
}

struct Softmax {
    float shift = 0.0f, total = 1.0f;

    __device__ __forceinline__ void include(const float (&logit)[own_experts]) {
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
};

__device__ __forceinline__ float affinity(float logit, const Softmax& softmax) {
    if constexpr (config::softmax) return __fdiv_rn(exponential(__fadd_rn(logit, -softmax.shift)), softmax.total);
    else return logistic(logit);
}

// Finds the orders of the scores of a lane's experts, without `exact` and groups those of positive scores alone; negative
// ones come before them. Returns NaN if a score is NaN.
template <bool exact>
__device__ __forceinline__ float find_orders(
    int (&order)[own_experts], const float (&logit)[own_experts], const Softmax& softmax, const float* bias) {
    const int lane = ptx::lane_id() % 4;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < own_experts; ++i) {
        float score = affinity(logit[i], softmax);
        if constexpr (config::biased) score = __fadd_rn(score, bias[lane * own_experts + i]);
        sum = __fadd_rn(sum, score);
        order[i] = exact || in_groups ? order_of(score) : __float_as_int(score);
    }
    if constexpr (in_groups) limit_to_groups(order, lane);
    return sum;
}

// Chooses the experts of a token by all bits of their scores.
__device__ __forceinline__ void choose_exactly(
    int (&chosen)[config::chosen], const float* row, const Softmax& softmax, const float* bias) {
    const int first_expert = ptx::lane_id() % 4 * own_experts;
    float logit[own_experts];
    int order[own_experts];
#pragma unroll
    for (int i = 0; i < own_experts; ++i) logit[i] = row[first_expert + i];
    find_orders<true>(order, logit, softmax, bias);
#pragma unroll
    for (int k = 0; k < config::chosen; ++k) {
        int highest = order[0], expert = first_expert;
#pragma unroll
        for (int i = 1; i < own_experts; ++i) {
            const bool higher = order[i] > highest;  // of equal ones the first
            highest = higher ? order[i] : highest;
            expert = higher ? first_expert + i : expert;
        }
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
            const int other = __shfl_xor_sync(all_lanes, highest, bit);
            const int other_expert = __shfl_xor_sync(all_lanes, expert, bit);
            const bool higher = other > highest || (other == highest && other_expert < expert);
            highest = higher ? other : highest;
            expert = higher ? other_expert : expert;
        }
#pragma unroll
        for (int i = 0; i < own_experts; ++i) order[i] = first_expert + i == expert ? absent : order[i];
        chosen[k] = expert;
    }
}

// Chooses the experts of two tokens, 8 rows apart, by the logits that four lanes hold; stores them and their weights.
__device__ __forceinline__ void choose(
    const float (&logit)[2][own_experts], const uint8_t* rows, const float* bias, float* weights, int64_t* experts,
    int first_token, int tokens, float factor, float eps) {
    constexpr uint32_t index_bits = 6, index_mask = (1 << index_bits) - 1;
    constexpr int orders = 1 << 32 - index_bits;
    static_assert(config::experts <= 1 << index_bits);
    const int lane = ptx::lane_id() % 4;
    Softmax softmax[2];
    uint32_t key[2][own_experts], lowest[2], highest[2];  // keys wrap around: distances from the lowest one count
    int chosen[2][config::chosen];
    bool again = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if constexpr (config::softmax) softmax[h].include(logit[h]);
        int order[own_experts], first = absent + orders;
        const float sum = find_orders<false>(order, logit[h], softmax[h], bias);
        again = again || sum != sum;
#pragma unroll
        for (int i = 0; i < own_experts; ++i) first = max(first, order[i]);
        first = max(first, __shfl_xor_sync(all_lanes, first, 1));
        first = max(first, __shfl_xor_sync(all_lanes, first, 2));
        const int least = first - (orders - 1);
        again = again || (!in_groups && least < 0);
        const uint32_t last = index_mask - lane * own_experts;
        lowest[h] = highest[h] = uint32_t(least) << index_bits;
#pragma unroll
        for (int i = 0; i < own_experts; ++i) key[h][i] = (uint32_t(max(order[i], least)) << index_bits) + (last - i);
    }
#pragma unroll
    for (int k = 0; k < config::chosen; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t next = 0;  // lower keys, less the highest, wrap around to the highest numbers
#pragma unroll
            for (int i = 0; i < own_experts; ++i) next = max(next, key[h][i] - highest[h]);
            next = max(next, __shfl_xor_sync(all_lanes, next, 1));
            next = max(next, __shfl_xor_sync(all_lanes, next, 2));
            highest[h] += next;
            chosen[h][k] = index_mask - (highest[h] & index_mask);
        }
    again = again || highest[0] - lowest[0] <= index_mask || highest[1] - lowest[1] <= index_mask;
    if (__any_sync(all_lanes, again))
#pragma unroll
        for (int h = 0; h < 2; ++h)
            choose_exactly(
                chosen[h], reinterpret_cast<const float*>(rows + 8 * h * smem::logits_row), softmax[h], bias);

#pragma unroll
    for (int h = 0; h < 2; ++h) {  // a lane computes the weight of every fourth
        const float* row = reinterpret_cast<const float*>(rows + 8 * h * smem::logits_row);
        constexpr int most = (config::chosen + 3) / 4;
        int own[most];
        float weight[most], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < most; ++i) {
            own[i] = chosen[h][4 * i];
#pragma unroll
            for (int k = 4 * i + 1; k < min(4 * i + 4, config::chosen); ++k)
                own[i] = lane == k % 4 ? chosen[h][k] : own[i];
            weight[i] = 4 * i + lane < config::chosen ? affinity(row[own[i]], softmax[h]) : 0.0f;
            sum = __fadd_rn(sum, weight[i]);
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, 1));
        sum = __fadd_rn(__fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, 2)), eps);
        const int64_t token = first_token + 8 * h;
#pragma unroll
        for (int i = 0; i < most; ++i) {
            if constexpr (config::normalize) weight[i] = __fdiv_rn(weight[i], sum);
            if (token >= tokens || 4 * i + lane >= config::chosen) continue;
            experts[token * config::chosen + 4 * i + lane] = own[i];
            weights[token * config::chosen + 4 * i + lane] = __fmul_rn(weight[i], factor);
        }
    }
}

// x_map: x [1, T, D]; w_map: the weight [1, E, D], FP32 if it has three terms, BF16 if it has one. bias: [E], only with
// config::biased. logits: [T, E]; weights, experts: [T, K].
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
        for (int stage = 0; stage < config::w_stages; ++stage) barriers.w_full[stage].init(1);
        for (int stage = 0; stage < terms_stages; ++stage) barriers.terms_full[stage].init(4 * config::warpgroups);
        ptx::fence_mbarrier_init();
        for (int stage = 0; stage < min(config::w_stages, pipeline.k_blocks); ++stage)
            pipeline.load_weight(stage, stage);
        for (int stage = 0; stage < min(config::stages, pipeline.k_blocks); ++stage) pipeline.load_x(stage, stage);
    }
    float* own_bias = reinterpret_cast<float*>(shared + smem::bias);  // the choice does not wait for global memory
    if constexpr (config::biased)
        if (threadIdx.x < config::experts) own_bias[threadIdx.x] = __ldg(bias + threadIdx.x);
    __syncthreads();

    float d[columns / 2] = {};
    multiply(d, pipeline, warpgroup);
    __syncthreads();  // the logits come in place of x and the weight

    float logit[2][own_experts];
    uint8_t* rows = shared + (16 * warp + ptx::lane_id() / 4) * smem::logits_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // of 8 tokens of this warp
#pragma unroll
        for (int i = 0; i < own_experts; ++i) {
            const int at = i / 2 * 4 + 2 * h + i % 2;
            logit[h][i] = d[at];
            if constexpr (config::parts == 3)  // the smallest products first
                logit[h][i] = __fadd_rn(d[at], __fadd_rn(d[at + config::experts / 2], d[at + config::experts]));
        }
        float* own = reinterpret_cast<float*>(rows + 8 * h * smem::logits_row) + ptx::lane_id() % 4 * own_experts;
#pragma unroll
        for (int i = 0; i < own_experts; i += 2)
            *reinterpret_cast<float2*>(own + i) = make_float2(logit[h][i], logit[h][i + 1]);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    const int own_row = 16 * warp + ptx::lane_id();
    if (ptx::lane_id() < 16 && pipeline.first_token + own_row < tokens) {
        float* to = logits + static_cast<int64_t>(pipeline.first_token + own_row) * config::experts;
        ptx::bulk_store(to, shared + own_row * smem::logits_row, 4 * config::experts);
        ptx::bulk_commit_group();
    }
    const int token = pipeline.first_token + 16 * warp + ptx::lane_id() / 4;
    choose(logit, rows, own_bias, weights, experts, token, tokens, factor, eps);
    ptx::bulk_wait_group_read<0>();
}
