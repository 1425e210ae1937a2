// The expert gate for Hopper: logits x[T, D] · w[E, D]ᵀ, choice and weights. An FP32 weight is the sum of three BF16 terms.
//
// A thread block takes 64 tokens per warpgroup. TMA loads k-blocks of 64 columns of x and of the weight into pipelines of
// stages. All threads split a k-block of the weight into its P terms while tensor cores multiply the one before. A
// warpgroup multiplies by one wgmma of width P·E, so that x is read from shared memory once for all P terms. Its
// accumulators hold the logits of a token in four neighboring lanes, which choose the experts by shuffles.
//
// NOTES
// - Rows of terms are ordered so that a quarter of the experts, one after the other, is in each of the four lanes: their
//   groups are then those of one lane.
// - There is no producer warp: four warpgroups with 96 accumulators each leave no registers for it. The first thread loads
//   a stage while the next one is multiplied.
// - Experts are chosen by 32-bit keys of 26 bits of the score and the index. Where two of these scores are equal, the
//   warp chooses again by all bits.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "convert.cuh"

constexpr int threads = 128 * config::warpgroups, tile_m = 64 * config::warpgroups;
constexpr int columns = config::parts * config::experts;
constexpr int own_experts = config::experts / 4;  // of a lane
constexpr bool in_groups = config::topk_group < config::n_group;
constexpr int own_groups = in_groups ? config::n_group / 4 : 1, group_size = own_experts / own_groups;
constexpr int absent = -2147483647 - 1;  // below the order of every score
constexpr uint32_t all_lanes = 0xFFFFFFFF;

namespace smem {
constexpr int w_row = config::parts == 1 ? 128 : 256;  // of 64 columns
constexpr int x_tile = tile_m * 128, terms_tile = columns * 128, w_tile = config::experts * w_row;  // bytes of a k-block
constexpr int x = 0, terms = config::stages * x_tile;  // swizzled tiles first: they need 1024-byte alignment
constexpr int w = terms + 2 * terms_tile, barriers = w + 2 * w_tile;
constexpr int bytes = barriers + (2 * config::stages + 6) * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "launcher.py computes the same");
constexpr int logits_row = config::experts * 4 + 16;  // of a token, in place of x; bytes
static_assert(tile_m * logits_row <= barriers, "the logits fit in");
}  // namespace smem

struct Barriers {
    ptx::Mbarrier full[config::stages], empty[config::stages];  // of x
    ptx::Mbarrier w_full[2], terms_full[2], terms_empty[2];     // no thread waits until a stage of the weight is empty
};

struct Pipeline {
    uint8_t* shared;
    Barriers& barriers;
    const TensorMap *x_map, *w_map;
    int first_token, k_blocks;

    __device__ __forceinline__ void load_x(int k_block, int stage) {
        ptx::Mbarrier* full = barriers.full + stage;
        full->arrive_expect_tx(smem::x_tile);
        ptx::tma_load(shared + smem::x + stage * smem::x_tile, x_map, full, 64 * k_block, first_token, 0);
    }

    __device__ __forceinline__ void load_weight(int k_block) {
        ptx::Mbarrier* full = barriers.w_full + k_block % 2;
        full->arrive_expect_tx(smem::w_tile);
        ptx::tma_load(shared + smem::w + k_block % 2 * smem::w_tile, w_map, full, 64 * k_block, 0, 0);
    }
};

__device__ __forceinline__ void fence_operands(float (&d)[columns / 2]) {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) ptx::warpgroup_fence_operand(d[i]);
}

// Rounds two numbers to BF16, and subtracts what they became.
__device__ __forceinline__ uint32_t next_term(float& low, float& high) {
    const uint32_t pair = ptx::pack_bf16(low, high);
    low = __fsub_rn(low, __uint_as_float(pair << 16));
    high = __fsub_rn(high, __uint_as_float(pair & 0xFFFF0000));
    return pair;
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

__device__ __forceinline__ void split(Pipeline& pipeline, int k_block) {
    Barriers& barriers = pipeline.barriers;
    const int stage = k_block % 2;
    const uint32_t parity = k_block / 2 % 2;
    barriers.w_full[stage].wait(parity);
    if (k_block >= 2) barriers.terms_empty[stage].wait(parity ^ 1);
    split(pipeline.shared + smem::w + stage * smem::w_tile, pipeline.shared + smem::terms + stage * smem::terms_tile);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::lane_id() == 0) barriers.terms_full[stage].arrive();
}

// Multiplies all k-blocks: d[4j + 2h + i] belongs to token 8h + lane/4 of the warp's 16 tokens, and to column
// 8j + 2·(lane%4) + i.
__device__ __forceinline__ void multiply(float (&d)[columns / 2], Pipeline& pipeline, int warpgroup) {
    const bool loads = threadIdx.x == 0;
    Barriers& barriers = pipeline.barriers;
    int stage = 0;
    uint32_t parity = 0;
    split(pipeline, 0);
#pragma unroll 1
    for (int k_block = 0; k_block < pipeline.k_blocks; ++k_block) {
        barriers.terms_full[k_block % 2].wait(k_block / 2 % 2);
        if (loads && k_block + 2 < pipeline.k_blocks) pipeline.load_weight(k_block + 2);  // in place of this one
        __syncwarp();
        barriers.full[stage].wait(parity);
        const uint8_t* rows = pipeline.shared + smem::x + stage * smem::x_tile + warpgroup * 64 * 128;
        const uint64_t x = ptx::wgmma_descriptor(rows);
        const uint64_t w = ptx::wgmma_descriptor(pipeline.shared + smem::terms + k_block % 2 * smem::terms_tile);
        fence_operands(d);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma(d, x + 2 * k, w + 2 * k, true);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();  // of the k-block before
        fence_operands(d);
        const int released = stage == 0 ? config::stages - 1 : stage - 1;
        if (k_block > 0 && ptx::lane_id() == 0) {
            barriers.empty[released].arrive();
            barriers.terms_empty[(k_block - 1) % 2].arrive();
        }
        if (const int next = k_block - 1 + config::stages; loads && k_block > 0 && next < pipeline.k_blocks) {
            barriers.empty[released].wait(stage == 0 ? parity ^ 1 : parity);
            pipeline.load_x(next, released);
        }
        __syncwarp();
        if (k_block + 1 < pipeline.k_blocks) split(pipeline, k_block + 1);
        if (++stage == config::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    ptx::wgmma_wait_group<0>();
    fence_operands(d);
}

__device__ __forceinline__ float exponential(float x) { return ptx::exp2(__fmul_rn(x, 1.44269504f)); }

__device__ __forceinline__ float logistic(float x) { return ptx::reciprocal(__fadd_rn(1.0f, exponential(-x))); }

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

// The orders of the scores of a lane's experts.
__device__ __forceinline__ void find_orders(
    int (&order)[own_experts], const float (&logit)[own_experts], const Softmax& softmax, const float* bias) {
    const int lane = ptx::lane_id() % 4;
#pragma unroll
    for (int i = 0; i < own_experts; ++i) {
        float score = affinity(logit[i], softmax);
        if constexpr (config::biased) score = __fadd_rn(score, __ldg(bias + lane * own_experts + i));
        order[i] = order_of(score);
    }
    if constexpr (in_groups) limit_to_groups(order, lane);
}

// Chooses the experts of a token by all bits of their scores.
__device__ __forceinline__ void choose_exactly(
    int (&chosen)[config::chosen], const float* row, const Softmax& softmax, const float* bias) {
    const int first_expert = ptx::lane_id() % 4 * own_experts;
    float logit[own_experts];
    int order[own_experts];
#pragma unroll
    for (int i = 0; i < own_experts; ++i) logit[i] = row[first_expert + i];
    find_orders(order, logit, softmax, bias);
#pragma unroll
    for (int k = 0; k < config::chosen; ++k) {
        int highest = order[0], expert = first_expert, unused = 0;
#pragma unroll
        for (int i = 1; i < own_experts; ++i) {
            const bool higher = order[i] > highest;  // of equal ones the first
            highest = higher ? order[i] : highest;
            expert = higher ? first_expert + i : expert;
        }
        highest_of_four_lanes(highest, expert, unused);
#pragma unroll
        for (int i = 0; i < own_experts; ++i) order[i] = first_expert + i == expert ? absent : order[i];
        chosen[k] = expert;
    }
}

__device__ __forceinline__ uint32_t highest_of_four_lanes(uint32_t key) {
    key = max(key, __shfl_xor_sync(all_lanes, key, 1));
    return max(key, __shfl_xor_sync(all_lanes, key, 2));
}

// Chooses the experts of two tokens, 8 rows apart, by the logits that four lanes hold, and stores them with their weights.
__device__ __forceinline__ void choose(
    const float (&logit)[2][own_experts], const uint8_t* rows, const float* bias, float* weights, int64_t* experts,
    int first_token, int tokens, float factor, float eps) {
    constexpr uint32_t index_bits = 63;
    constexpr int rounds = config::chosen < config::experts ? config::chosen + 1 : config::chosen;
    const int lane = ptx::lane_id() % 4;
    Softmax softmax[2];
    int chosen[2][config::chosen];
    bool equal = false;  // scores of the 26 bits of which a key consists
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if constexpr (config::softmax) softmax[h].include(logit[h]);
        int order[own_experts];
        find_orders(order, logit[h], softmax[h], bias);
        uint32_t key[own_experts], highest = 0;
        const uint32_t last = 0x80000000 + index_bits - lane * own_experts;
#pragma unroll
        for (int i = 0; i < own_experts; ++i) {
            key[i] = (order[i] & ~index_bits) + last - i;
            highest = max(highest, key[i]);
        }
        highest = highest_of_four_lanes(highest);
        chosen[h][0] = index_bits - (highest & index_bits);
#pragma unroll
        for (int k = 1; k < rounds; ++k) {
            uint32_t next = 0;  // lower keys, less the highest, wrap around to the highest numbers
#pragma unroll
            for (int i = 0; i < own_experts; ++i) next = max(next, key[i] - highest);
            next = highest_of_four_lanes(next) + highest;
            equal = equal || (next ^ highest) <= index_bits;
            highest = next;
            if (k < config::chosen) chosen[h][k] = index_bits - (highest & index_bits);
        }
    }
    if (__any_sync(all_lanes, equal))
#pragma unroll
        for (int h = 0; h < 2; ++h)
            choose_exactly(
                chosen[h], reinterpret_cast<const float*>(rows + 8 * h * smem::logits_row), softmax[h], bias);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float* row = reinterpret_cast<const float*>(rows + 8 * h * smem::logits_row);
        float weight[config::chosen], sum = 0.0f;
#pragma unroll
        for (int k = 0; k < config::chosen; ++k) {
            weight[k] = affinity(row[chosen[h][k]], softmax[h]);
            sum = __fadd_rn(sum, weight[k]);
        }
        const float scale = __fadd_rn(sum, eps);
        const int64_t token = first_token + 8 * h;
        if (token < tokens)
#pragma unroll
            for (int k = 0; k < config::chosen; ++k) {
                if (lane != k % 4) continue;
                if constexpr (config::normalize) weight[k] = __fdiv_rn(weight[k], scale);
                experts[token * config::chosen + k] = chosen[h][k];
                weights[token * config::chosen + k] = __fmul_rn(weight[k], factor);
            }
    }
}

// x_map: x [1, T, D]; w_map: the weight [1, E, D], FP32 if it has three terms, BF16 if it has one. bias: [E],
// only with config::biased. logits: [T, E]; weights, experts: [T, K].
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
        for (int stage = 0; stage < 2; ++stage) {
            barriers.w_full[stage].init(1);
            barriers.terms_full[stage].init(4 * config::warpgroups);
            barriers.terms_empty[stage].init(4 * config::warpgroups);
        }
        ptx::fence_mbarrier_init();
        for (int k_block = 0; k_block < min(2, pipeline.k_blocks); ++k_block) pipeline.load_weight(k_block);
        for (int stage = 0; stage < min(config::stages, pipeline.k_blocks); ++stage) pipeline.load_x(stage, stage);
    }
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
    choose(logit, rows, bias, weights, experts, token, tokens, factor, eps);
    ptx::bulk_wait_group_read<0>();
}
