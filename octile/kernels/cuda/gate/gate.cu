// The expert gate for Hopper: logits x[T, D] · w[P·E, D]ᵀ, summed over the P terms of the weight, choice and weights.
//
// A thread block takes 64 tokens per warpgroup. TMA loads k-blocks of 64 columns of x and of all terms into a
// pipeline of stages. A warpgroup multiplies by one wgmma of width P·E, so that x is read from shared memory once for all
// terms. Its accumulators hold the logits of a token in four neighboring lanes, which choose the experts by shuffles.
//
// NOTES
// - Few experts are read as FP32 and split into terms once, into tiles of all k-blocks that stay in shared memory, while
//   the first k-blocks of x are loaded. The terms of more experts are loaded with x.
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
constexpr bool keeps_weight = config::k_blocks > 0;  // all its tiles in shared memory
constexpr int absent = -2147483647 - 1;  // below the order of every score
constexpr uint32_t all_lanes = 0xFFFFFFFF;
constexpr int together = config::experts <= 32 ? 2 : 1;  // tokens that a thread chooses for at a time, if registers suffice

namespace smem {
constexpr int x_tile = tile_m * 128, w_tile = columns * 128;  // bytes of a k-block
constexpr int x = 0, w = config::stages * x_tile;             // tiles first: their swizzle needs 1024-byte alignment
constexpr int barriers = w + (config::k_blocks > 0 ? config::k_blocks : config::stages) * w_tile;
constexpr int bytes = barriers + 2 * config::stages * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "launcher.py computes the same");
}  // namespace smem

struct Barriers {
    ptx::Mbarrier full[config::stages], empty[config::stages];
};

// Rounds two values to BF16, a pair, and leaves the rests.
__device__ __forceinline__ uint32_t take_term(float& low, float& high) {
    const uint32_t pair = ptx::pack_bf16(low, high);
    low = __fadd_rn(low, -__uint_as_float(pair << 16));
    high = __fadd_rn(high, -__uint_as_float(pair & 0xFFFF0000));
    return pair;
}

struct Pipeline {
    uint8_t* shared;
    Barriers& barriers;
    const TensorMap *x_map, *w_map;
    int first_token, k_blocks, first_k_block;

    __device__ __forceinline__ void load(int k_block, int stage) {
        ptx::Mbarrier* full = barriers.full + stage;
        full->arrive_expect_tx(smem::x_tile + (keeps_weight ? 0 : smem::w_tile));
        const int k = 64 * rotated(k_block);
        ptx::tma_load(shared + smem::x + stage * smem::x_tile, x_map, full, k, first_token, 0);
        if constexpr (!keeps_weight)
            ptx::tma_load(shared + smem::w + stage * smem::w_tile, w_map, full, k, 0, 0, 0, 0);
    }

    // The tile of the weight that belongs to a k-block in a stage.
    __device__ __forceinline__ const uint8_t* weight(int k_block, int stage) const {
        return shared + smem::w + (keeps_weight ? rotated(k_block) : stage) * smem::w_tile;
    }

    __device__ __forceinline__ int rotated(int k_block) const {
        k_block += first_k_block;
        return k_block < k_blocks ? k_block : k_block - k_blocks;
    }
};

// Splits the weight [E, width], FP32, into terms in swizzled tiles of all k-blocks. Columns after the width are zero.
__device__ __forceinline__ void split_weight(uint8_t* tiles, const float* weight, int64_t row_stride, int width) {
    constexpr int vectors = 16 * (keeps_weight ? config::k_blocks : 1);  // of 4 columns of an expert
    for (int i = threadIdx.x; i < config::experts * vectors; i += 128 * config::warpgroups) {
        const int expert = i / vectors, k = i % vectors * 4;
        float4 value{};
        if (k < width) value = __ldg(reinterpret_cast<const float4*>(weight + expert * row_stride + k));
        const int own = expert % own_experts, column = own / 2 * 8 + expert / own_experts * 2 + own % 2;
#pragma unroll
        for (int part = 0; part < config::parts; ++part) {
            const int n = part * config::experts + column;
            uint2 pairs;
            pairs.x = take_term(value.x, value.y);
            pairs.y = take_term(value.z, value.w);
            const int at = n * 128 + ((k % 64 / 8 ^ n % 8) * 16 | k % 8 * 2);
            *reinterpret_cast<uint2*>(tiles + k / 64 * smem::w_tile + at) = pairs;
        }
    }
    ptx::fence_proxy_async();
}

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
        const uint64_t w = ptx::wgmma_descriptor(pipeline.weight(k_block, stage));
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

// Takes the higher of own and another order; of equal ones that of the lower index. `value` belongs to the index.
__device__ __forceinline__ void take_higher(
    int& order, int& index, float& value, int other, int other_index, float other_value) {
    const bool higher = other > order || (other == order && other_index < index);
    order = higher ? other : order;
    index = higher ? other_index : index;
    value = higher ? other_value : value;
}

// The highest order of four lanes, of equal ones that of the lowest index, and a value that belongs to it, of each token.
__device__ __forceinline__ void highest_of_four_lanes(int (&order)[together], int (&index)[together], float (&value)[together]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int h = 0; h < together; ++h)
            take_higher(
                order[h], index[h], value[h], __shfl_xor_sync(all_lanes, order[h], bit),
                __shfl_xor_sync(all_lanes, index[h], bit), __shfl_xor_sync(all_lanes, value[h], bit));
}

template <typename Combine>
__device__ __forceinline__ void over_four_lanes(float (&value)[together], Combine combine) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int h = 0; h < together; ++h) value[h] = combine(value[h], __shfl_xor_sync(all_lanes, value[h], bit));
}

// Gives the experts outside of the best groups the score −∞.
__device__ __forceinline__ void limit_to_groups(int (&order)[together][own_experts], int lane) {
    int of_group[together][own_groups];
    bool outside[together][own_groups];
#pragma unroll
    for (int h = 0; h < together; ++h)
#pragma unroll
        for (int g = 0; g < own_groups; ++g) {
            int first = absent, second = absent;
#pragma unroll
            for (int i = 0; i < group_size; ++i) {
                const int own = order[h][g * group_size + i];
                second = max(second, min(first, own));
                first = max(first, own);
            }
            const float total = score_of(first);
            of_group[h][g] = order_of(config::best == 2 ? __fadd_rn(total, score_of(second)) : total);
            outside[h][g] = true;
        }
#pragma unroll
    for (int k = 0; k < config::topk_group; ++k) {
        int highest[together], group[together];
        float unused[together] = {};
#pragma unroll
        for (int h = 0; h < together; ++h) {
            highest[h] = absent, group[h] = config::n_group;
#pragma unroll
            for (int g = 0; g < own_groups; ++g)
                take_higher(highest[h], group[h], unused[h], of_group[h][g], lane * own_groups + g, 0.0f);
        }
        highest_of_four_lanes(highest, group, unused);
#pragma unroll
        for (int h = 0; h < together; ++h)
#pragma unroll
            for (int g = 0; g < own_groups; ++g) {
                const bool chosen = lane * own_groups + g == group[h];
                of_group[h][g] = chosen ? absent : of_group[h][g];
                outside[h][g] = outside[h][g] && !chosen;
            }
    }
#pragma unroll
    for (int h = 0; h < together; ++h)
#pragma unroll
        for (int i = 0; i < own_experts; ++i)
            order[h][i] = outside[h][i / group_size] ? order_of(__int_as_float(0xFF800000)) : order[h][i];
}

struct Outputs {
    float *logits, *weights;
    int64_t* experts;
};

// Chooses the experts of tokens, 8 apart, by the logits that four lanes hold, and stores their results. Several tokens take
// turns in each step, since a step waits for the one before.
__device__ __forceinline__ void choose(
    const float (&logit)[together][own_experts], const float* bias, const Outputs& out, int first_token, int tokens,
    float factor, float eps) {
    const int lane = ptx::lane_id() % 4, first_expert = lane * own_experts;
    int64_t token[together];
    bool in_bounds[together];
#pragma unroll
    for (int h = 0; h < together; ++h) {
        token[h] = first_token + 8 * h;
        in_bounds[h] = token[h] < tokens;
    }
#pragma unroll
    for (int h = 0; h < together; ++h)
        if (in_bounds[h])
#pragma unroll
            for (int i = 0; i < own_experts; i += 2)
                *reinterpret_cast<float2*>(out.logits + token[h] * config::experts + first_expert + i) =
                    make_float2(logit[h][i], logit[h][i + 1]);

    float shift[together] = {}, total[together] = {};
    if constexpr (config::softmax) {
#pragma unroll
        for (int h = 0; h < together; ++h) {
            shift[h] = logit[h][0];
#pragma unroll
            for (int i = 1; i < own_experts; ++i) shift[h] = fmaxf(shift[h], logit[h][i]);
        }
        over_four_lanes(shift, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int h = 0; h < together; ++h)
#pragma unroll
            for (int i = 0; i < own_experts; ++i)
                total[h] = __fadd_rn(total[h], exponential(__fadd_rn(logit[h][i], -shift[h])));
        over_four_lanes(total, [](float a, float b) { return __fadd_rn(a, b); });
    }
    auto affinity = [&](float x, int h) {
        return config::softmax ? __fdiv_rn(exponential(__fadd_rn(x, -shift[h])), total[h]) : logistic(x);
    };
    int order[together][own_experts];
#pragma unroll
    for (int i = 0; i < own_experts; ++i) {
        const float own_bias = config::biased ? __ldg(bias + first_expert + i) : 0.0f;
#pragma unroll
        for (int h = 0; h < together; ++h) order[h][i] = order_of(__fadd_rn(affinity(logit[h][i], h), own_bias));
    }
    if constexpr (in_groups) limit_to_groups(order, lane);

    float weight[config::chosen][together], sum[together] = {};
#pragma unroll
    for (int k = 0; k < config::chosen; ++k) {
        int highest[together], expert[together];
#pragma unroll
        for (int h = 0; h < together; ++h) {
            highest[h] = order[h][0], expert[h] = first_expert, weight[k][h] = logit[h][0];
#pragma unroll
            for (int i = 1; i < own_experts; ++i) {
                const bool higher = order[h][i] > highest[h];  // of equal ones the first
                highest[h] = higher ? order[h][i] : highest[h];
                expert[h] = higher ? first_expert + i : expert[h];
                weight[k][h] = higher ? logit[h][i] : weight[k][h];
            }
        }
        highest_of_four_lanes(highest, expert, weight[k]);
#pragma unroll
        for (int h = 0; h < together; ++h) {
#pragma unroll
            for (int i = 0; i < own_experts; ++i)
                order[h][i] = first_expert + i == expert[h] ? absent : order[h][i];
            if (in_bounds[h] && lane == k % 4) out.experts[token[h] * config::chosen + k] = expert[h];
        }
    }
#pragma unroll
    for (int k = 0; k < config::chosen; ++k)
#pragma unroll
        for (int h = 0; h < together; ++h) {
            weight[k][h] = affinity(weight[k][h], h);
            sum[h] = __fadd_rn(sum[h], weight[k][h]);
        }
#pragma unroll
    for (int k = 0; k < config::chosen; ++k)
#pragma unroll
        for (int h = 0; h < together; ++h) {
            if constexpr (config::normalize) weight[k][h] = __fdiv_rn(weight[k][h], __fadd_rn(sum[h], eps));
            if (in_bounds[h] && lane == k % 4)
                out.weights[token[h] * config::chosen + k] = __fmul_rn(weight[k][h], factor);
        }
}

// x_map: x [1, T, D]; w_map: [P, E/8, 4, 2, D], or weight: [E, D] with a stride of rows, if it is kept. bias: [E], only with config::biased. logits: [T, E]; weights, experts:
// [T, K].
extern "C" __global__ void __launch_bounds__(128 * config::warpgroups, config::blocks)
gate(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* weight,
     int64_t weight_stride, const float* bias, float* logits, float* weights, int64_t* experts, float factor, float eps,
     int tokens, int width) {
    uint8_t* shared = ptx::dynamic_shared();
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0), warpgroup = warp / 4;
    Pipeline pipeline{shared, barriers, &x_map, &w_map, static_cast<int>(blockIdx.x) * tile_m, (width + 63) / 64, 0};
    if constexpr (config::rotate > 0) pipeline.first_k_block = blockIdx.x * config::rotate % pipeline.k_blocks;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < config::stages; ++stage) {
            barriers.full[stage].init(1);
            barriers.empty[stage].init(4 * config::warpgroups);
        }
        ptx::fence_mbarrier_init();
        for (int stage = 0; stage < min(config::stages, pipeline.k_blocks); ++stage) pipeline.load(stage, stage);
    }
    if constexpr (keeps_weight) split_weight(shared + smem::w, weight, weight_stride, width);
    __syncthreads();

    float d[columns / 2] = {};
    multiply(d, pipeline, warpgroup);
#pragma unroll
    for (int half = 0; half < 2; half += together) {
        float logit[together][own_experts];
#pragma unroll
        for (int h = 0; h < together; ++h)
#pragma unroll
            for (int i = 0; i < own_experts; ++i) {
                const int at = i / 2 * 4 + 2 * (half + h) + i % 2;
                logit[h][i] = d[at];
                if constexpr (config::parts == 3)  // the smallest products first
                    logit[h][i] = __fadd_rn(d[at], __fadd_rn(d[at + config::experts / 2], d[at + config::experts]));
            }
        const int token = pipeline.first_token + 16 * warp + 8 * half + ptx::lane_id() / 4;
        choose(logit, bias, Outputs{logits, weights, experts}, token, tokens, factor, eps);
    }
}
