// The GEMMs of the gate's gradients for Hopper: dx[T, D] = dy[T, E] · w[E, D], and the gradient of the weight dyᵀ · x.
//
// dy is given as its three BF16 terms, and an FP32 weight is split into its own. A thread block takes 256 columns of
// the tokens of a range, and holds the terms of these columns of the weight in shared memory. TMA loads dy in steps of
// 64 tokens and x in half steps. Two warpgroups compute dx, each of every second step, from six products of
// terms; the third one sums the gradient of the weight of the range, from three products. Their partial results are
// summed by another kernel in a fixed order. So x is read once, and no product of terms leaves the registers.
//
// NOTES
// - The terms of the weight are written to shared memory K-major, as dy is for dx. For the gradient of the weight,
//   whose K are the tokens, dy and x are MN-major.
// - There is no producer warp, since 128 accumulators leave no registers for it: a warpgroup that releases a stage
//   loads it again, that of dy one of those that compute dx.
// - The weight's columns are permuted so that a thread's accumulators of dx are 8 neighboring columns.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "wgmma_transposed.cuh"
#include "stage.cuh"

constexpr int slice = 256, step_m = 64, half_m = step_m / 2, dy_terms = 3, threads = 3 * 128;

namespace smem {
constexpr int w_tile = slice * 128, dy_tile = step_m * 128, x_tile = half_m * 128;  // x_tile: of 64 columns
constexpr int dy_stage = dy_terms * dy_tile, x_stage = slice / 64 * x_tile;
constexpr int w = 0, dy = config::parts * w_tile, x = dy + config::dy_stages * dy_stage;
constexpr int barriers = x + config::x_stages * x_stage;
constexpr int bytes = barriers + 2 * (config::dy_stages + config::x_stages) * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "launcher.py computes the same");
}  // namespace smem

struct Barriers {
    ptx::Mbarrier dy_full[config::dy_stages], dy_empty[config::dy_stages];
    ptx::Mbarrier x_full[config::x_stages], x_empty[config::x_stages];
};

using DyStage = Stage<config::dy_stages>;
using XStage = Stage<config::x_stages>;

struct Loader {
    uint8_t* shared;
    Barriers& barriers;
    const TensorMap *x_map, *dy_map;
    int first_token, first_column, steps;

    __device__ __forceinline__ void load_dy(int step, int stage) {
        ptx::Mbarrier* full = barriers.dy_full + stage;
        full->arrive_expect_tx(smem::dy_stage);
        ptx::tma_load(
            shared + smem::dy + stage * smem::dy_stage, dy_map, full, 0, first_token + step * step_m, 0);
    }

    __device__ __forceinline__ void load_x(int half_step, int stage) {
        ptx::Mbarrier* full = barriers.x_full + stage;
        full->arrive_expect_tx(smem::x_stage);
#pragma unroll
        for (int i = 0; i < slice / 64; ++i)
            ptx::tma_load(shared + smem::x + stage * smem::x_stage + i * smem::x_tile, x_map, full,
                          first_column + 64 * i, first_token + half_step * half_m, 0);
    }
};

__device__ __forceinline__ void fence_operands(float (&d)[slice / 2]) {
#pragma unroll
    for (int i = 0; i < slice / 2; ++i) ptx::warpgroup_fence_operand(d[i]);
}

// The column of the weight in row n of its tile. Register 4j + 2h + i of a thread is of n = 8j + 2·(lane%4) + i.
__device__ __forceinline__ int column_of(int n) { return (n & ~31) + n / 2 % 4 * 8 + n / 8 % 4 * 2 + n % 2; }

__device__ __forceinline__ float number_of(float x) { return x; }
__device__ __forceinline__ float number_of(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }

// Splits the slice of the weight into its terms, [P][256][64].
template <typename Number>
__device__ __forceinline__ void split_weight(
    uint8_t* to, const Number* weight, int64_t row_stride, int first_column, int width) {
    constexpr int vectors = slice * 8;  // of 8 experts
#pragma unroll
    for (int first = 0; first < vectors; first += threads) {
        const int n = (first + threadIdx.x) % slice, vector = (first + threadIdx.x) / slice;
        if (first + threads > vectors && vector >= 8) break;
        const int column = first_column + column_of(n);
        float value[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int expert = 8 * vector + e;
            const bool inside = expert < config::experts && column < width;
            value[e] = inside ? number_of(__ldg(weight + expert * row_stride + column)) : 0.0f;
        }
#pragma unroll
        for (int part = 0; part < config::parts; ++part) {
            uint32_t pairs[4];
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const uint32_t pair = pairs[e / 2] = ptx::pack_bf16(value[e], value[e + 1]);
                value[e] = __fsub_rn(value[e], __uint_as_float(pair << 16));
                value[e + 1] = __fsub_rn(value[e + 1], __uint_as_float(pair & 0xFFFF0000));
            }
            *reinterpret_cast<uint4*>(to + part * smem::w_tile + n * 128 + (vector ^ n % 8) * 16) =
                make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
    ptx::fence_proxy_async();
}

// Computes and stores dx of every second step.
__device__ __forceinline__ void compute_dx(
    Loader& loader, uint16_t* dx, int warpgroup, int tokens, int width) {
    constexpr int products = config::parts == 1 ? 3 : 6;  // the smallest first
    constexpr int of_dy[] = {0, 1, 0, 2, 1, 0}, of_weight[] = {2, 1, 1, 0, 0, 0};
    Barriers& barriers = loader.barriers;
    const uint64_t w = ptx::wgmma_descriptor(loader.shared + smem::w);
    const int lane = ptx::lane_id(), row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    DyStage stage;
    if (warpgroup == 1) stage.advance();
    float d[slice / 2];
#pragma unroll 1
    for (int step = warpgroup; step < loader.steps; step += 2) {
        barriers.dy_full[stage.index].wait(stage.parity);
        const uint64_t dy = ptx::wgmma_descriptor(loader.shared + smem::dy + stage.index * smem::dy_stage);
        fence_operands(d);
        ptx::wgmma_fence();
#pragma unroll
        for (int product = 6 - products; product < 6; ++product)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::wgmma(d, dy + of_dy[product] * (smem::dy_tile >> 4) + 2 * k,
                           w + of_weight[product] * (smem::w_tile >> 4) + 2 * k, product > 6 - products || k > 0);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        fence_operands(d);
        __syncwarp();
        if (lane == 0) barriers.dy_empty[stage.index].arrive();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = loader.first_token + step * step_m + row + 8 * h;
            uint16_t* to = dx + static_cast<int64_t>(token) * width + loader.first_column + lane % 4 * 8;
#pragma unroll
            for (int i = 0; i < slice / 32; ++i) {
                const float* own = d + 16 * i + 2 * h;
                const uint4 eight = make_uint4(ptx::pack_bf16(own[0], own[1]), ptx::pack_bf16(own[4], own[5]),
                                               ptx::pack_bf16(own[8], own[9]), ptx::pack_bf16(own[12], own[13]));
                if (token < tokens && loader.first_column + 32 * i + lane % 4 * 8 < width)
                    *reinterpret_cast<uint4*>(to + 32 * i) = eight;
            }
        }
        if (const int next = step + config::dy_stages; next < loader.steps && threadIdx.x % 128 == 0) {
            barriers.dy_empty[stage.index].wait(stage.parity);
            loader.load_dy(next, stage.index);
        }
        __syncwarp();
        stage.advance();
        stage.advance();
    }
}

// Sums and stores this range's part of the gradient of the weight.
__device__ __forceinline__ void compute_dweight(
    Loader& loader, float* partial, int width) {
    Barriers& barriers = loader.barriers;
    const int lane = ptx::lane_id();
    DyStage dy_stage;
    XStage x_stage;
    int released_dy = 0, released_x = 0;
    uint32_t released_parity = 0;
    float d[slice / 2] = {};
#pragma unroll 1
    for (int half_step = 0; half_step < 2 * loader.steps; ++half_step) {
        const int half = half_step % 2;
        if (half == 0) barriers.dy_full[dy_stage.index].wait(dy_stage.parity);
        barriers.x_full[x_stage.index].wait(x_stage.parity);
        const uint64_t dy = ptx::wgmma_transposed_descriptor(
            loader.shared + smem::dy + dy_stage.index * smem::dy_stage + half * half_m * 128, smem::dy_tile);
        const uint64_t x =
            ptx::wgmma_transposed_descriptor(loader.shared + smem::x + x_stage.index * smem::x_stage, smem::x_tile);
        fence_operands(d);
        ptx::wgmma_fence();
#pragma unroll
        for (int term = dy_terms - 1; term >= 0; --term)  // the smallest products first
#pragma unroll
            for (int k = 0; k < half_m / 16; ++k)
                ptx::wgmma_transposed(d, dy + (term * smem::dy_tile + k * 2048 >> 4), x + (k * 2048 >> 4), true);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();  // of the half step before
        fence_operands(d);
        __syncwarp();
        if (half_step > 0 && lane == 0) {
            barriers.x_empty[released_x].arrive();
            if (half == 0) barriers.dy_empty[released_dy].arrive();
            const int next = half_step - 1 + config::x_stages;
            if (threadIdx.x % 128 == 0 && next < 2 * loader.steps) {
                barriers.x_empty[released_x].wait(released_parity);
                loader.load_x(next, released_x);
            }
        }
        __syncwarp();
        released_x = x_stage.index, released_parity = x_stage.parity, released_dy = dy_stage.index;
        x_stage.advance();
        if (half == 1) dy_stage.advance();
    }
    ptx::wgmma_wait_group<0>();
    fence_operands(d);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int expert = threadIdx.x / 32 % 4 * 16 + 8 * h + lane / 4;
        float* to = partial + static_cast<int64_t>(expert) * width + loader.first_column + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < slice / 8; ++j)
            if (expert < config::experts && loader.first_column + 8 * j < width)
                *reinterpret_cast<float2*>(to + 8 * j) = make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    }
}

// x_map: x [1, T, D]; dy_map: terms of dy [3, T, E]. weight: [E, D]. dx: [T, D]. partials: [R, E, D], of ranges of
// `steps` times 64 tokens. The grid is R times the number of slices.
extern "C" __global__ void __launch_bounds__(threads, 1)
gate_backward(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map, const void* weight,
              uint16_t* dx, float* partials, int64_t weight_stride, int tokens, int width, int steps) {
    uint8_t* shared = ptx::dynamic_shared();
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + smem::barriers);
    const int slices = (width + slice - 1) / slice, range = blockIdx.x / slices;
    const int first_token = range * steps * step_m, all_steps = (tokens + step_m - 1) / step_m;
    Loader loader{shared, barriers, &x_map, &dy_map, first_token, static_cast<int>(blockIdx.x) % slices * slice,
                  min(steps, all_steps - range * steps)};
    const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < config::dy_stages; ++i) barriers.dy_full[i].init(1), barriers.dy_empty[i].init(8);
        for (int i = 0; i < config::x_stages; ++i) barriers.x_full[i].init(1), barriers.x_empty[i].init(4);
        ptx::fence_mbarrier_init();
        for (int i = 0; i < min(config::dy_stages, loader.steps); ++i) loader.load_dy(i, i);
        for (int i = 0; i < min(config::x_stages, 2 * loader.steps); ++i) loader.load_x(i, i);
    }
    if constexpr (config::parts == 1)
        split_weight(
            shared + smem::w, static_cast<const uint16_t*>(weight), weight_stride, loader.first_column, width);
    else split_weight(shared + smem::w, static_cast<const float*>(weight), weight_stride, loader.first_column, width);
    __syncthreads();
    if (warpgroup == 2) {
        float* partial = partials + static_cast<int64_t>(range) * config::experts * width;
        compute_dweight(loader, partial, width);
    } else compute_dx(loader, dx, warpgroup, tokens, width);
}
