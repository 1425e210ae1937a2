// The gate and up projections of the experts that a few rows have chosen, and of the shared experts, and SwiGLU.
//
// A unit of work is 8 gate rows and the 8 up rows of the same columns of h, for all rows of x; a warp takes one unit
// after the other. First come the units of the shared experts, whose loads do not depend on the choice, then those of
// the experts that at least one row has chosen: each weight is read once.
//
// If row_invariant, there is one row, and the products have the bits of octile's GEMM: the four warps of a warpgroup
// multiply the same k-block of their units together.
#include "bf16.cuh"
#include "routes.cuh"
#include "silu.cuh"
#include "weight_rows.cuh"

constexpr int warps = config::warps, threads = 32 * warps, columns = config::columns, chosen = config::chosen;
constexpr int k_blocks = columns / k_block;
constexpr int row_stride = config::row_invariant ? RowOfX::bytes(k_blocks) : columns + 64;  // without bank conflicts
constexpr int hidden = config::intermediate, shared_hidden = config::shared_intermediate;
constexpr int expert_units = hidden / 8, shared_units = shared_hidden / 8;
constexpr int h_columns = chosen * hidden + shared_hidden;

struct alignas(16) UpShared {  // rows of x come before it, the routes after it
    uint8_t stages[warps][config::depth * stage_bytes];
    float scales[max_rows][k_blocks];
};
static_assert(sizeof(UpShared) == config::struct_bytes);  // mixture.py computes the same

// x: [rows, columns], x_scale: [rows, columns/128], contiguous along rows, padded to 4. w: [experts, 2 · intermediate,
// columns], the gate's rows first, with the scales of 128×128 blocks; shared_w: [2 · shared_intermediate, columns]. h:
// [rows, chosen · intermediate + shared_intermediate].
extern "C" __global__ void __launch_bounds__(threads, 1)
mixture_up(const uint8_t* x, const float* x_scale, const Routes* chosen_routes, const uint8_t* w, const float* w_scale,
           const uint8_t* shared_w, const float* shared_scale, float* h, int rows, int max_count) {
    uint8_t* x_rows = ptx::dynamic_shared();
    UpShared& shared = *reinterpret_cast<UpShared*>(x_rows + rows * row_stride);
    Routes& routes = *reinterpret_cast<Routes*>(x_rows + rows * row_stride + sizeof(UpShared));
    const int warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int group = lane / 4, row0 = lane % 4 * 2;  // as in `Lane`: results are of the rows row0 and row0 + 1 of x
    const int first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * warps;

    int next_unit = first, next_block = 0;
    int units = shared_units;  // those of the chosen experts follow when the routes are here
    WeightRows unit_rows{};
    auto rows_of = [&](const uint8_t* weight, const float* scales, int unit, int n) {
        const int gate = unit * 8, up = n + unit * 8;
        return rows_of_lane(weight + int64_t(gate) * columns, weight + int64_t(up) * columns,
                            scales + gate / k_block * k_blocks, scales + up / k_block * k_blocks, columns);
    };
    auto next = [&](WeightRows& block) {  // the k-blocks in the order in which the warp multiplies them
        if (next_unit >= units) return false;
        if (next_block == 0) {
            const int unit = next_unit - shared_units;
            if (unit < 0) {
                unit_rows = rows_of(shared_w, shared_scale, next_unit, shared_hidden);
            } else {
                const int expert = routes.route[unit / expert_units].expert;
                unit_rows = rows_of(w + int64_t(expert) * 2 * hidden * columns,
                                    w_scale + expert * (2 * hidden / k_block * k_blocks), unit % expert_units, hidden);
            }
        }
        block = unit_rows.at(next_block);
        if (++next_block == k_blocks) next_block = 0, next_unit += stride;
        return true;
    };
    WeightPipeline<config::depth> pipeline{shared.stages[warp]};
    if (lane == 0 && first < shared_units) {
        ptx::bulk_prefetch(shared_w + int64_t(first) * 8 * columns, 8 * columns);
        ptx::bulk_prefetch(shared_w + int64_t(shared_hidden + first * 8) * columns, 8 * columns);
    }
    pipeline.begin(next);

    ptx::wait_for_previous();
    ptx::launch_dependents();  // not before: mixture_down.cu reads what mixture_gate.cu has written
    read_routes(routes, chosen_routes, max_count);
    for (int i = threadIdx.x; i < rows * (columns / 16); i += threads) {
        const int row = i / (columns / 16), at = i % (columns / 16) * 16;
        const uint4 values = __ldcg(reinterpret_cast<const uint4*>(x + row * columns + at));
        if constexpr (config::row_invariant)
            RowOfX{x_rows}.store_16(at, values);
        else
            *reinterpret_cast<uint4*>(x_rows + row * row_stride + at) = values;
    }
    if constexpr (config::row_invariant) ptx::fence_proxy_async();
    for (int i = threadIdx.x; i < max_rows * k_blocks; i += threads)
        shared.scales[i % max_rows][i / max_rows] =
            i % max_rows < rows ? __ldcg(x_scale + i / max_rows * ((rows + 3) / 4 * 4) + i % max_rows) : 0.0f;
    __syncthreads();
    units = shared_units + routes.count * expert_units;
    pipeline.fill(next);

    // Stores what results of a unit are, g and u of a row of x.
    auto store = [&](int unit, int row, float g, float u) {
        const bool is_shared = unit < shared_units;
        const Route& route = routes.route[is_shared ? 0 : (unit - shared_units) / expert_units];
        const int own = is_shared ? unit : (unit - shared_units) % expert_units;
        const int slot = is_shared ? chosen : route.slot[row];
        if (row >= rows || slot == not_chosen) return;
        g = from_bf16(to_bf16(g)), u = from_bf16(to_bf16(u));
        float value = __fmul_rn(__fmul_rn(g, sigmoid(g)), u);
        if (!is_shared) value = __fmul_rn(value, route.weight[row]);
        h[int64_t(row) * h_columns + slot * hidden + own * 8 + group] = value;
    };
    if constexpr (config::row_invariant) {
        const RowOfX of_x{x_rows};
        for (int of_first = blockIdx.x + gridDim.x * (warp / 4 * 4); of_first < units; of_first += stride) {
            const int unit = of_first + gridDim.x * (warp % 4);
            const bool has_unit = unit < units;
            float sum[2] = {};
#pragma unroll 1
            for (int block = 0; block < k_blocks; block += group_blocks)
#pragma unroll
                for (int column = 0; column < group_blocks; column += blocks_at_once) {
                    if (block + column >= k_blocks) break;
                    RowFragments a[blocks_at_once] = {};
                    float scale[blocks_at_once][2] = {}, d[blocks_at_once][4];
                    uint64_t operands[blocks_at_once];
#pragma unroll
                    for (int n = 0; n < blocks_at_once; ++n) {
                        operands[n] = of_x.operand(block);
                        if (has_unit && block + column + n < k_blocks)
                            pipeline.take(a[n], scale[n], shared.scales[0][block + column + n], next);
                    }
                    multiply_k_blocks(d, a, operands);
#pragma unroll
                    for (int n = 0; n < blocks_at_once; ++n)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const float product =
                                __shfl_sync(all_lanes, d[n][2 * half + (column + n) % 2], lane & ~3 | (column + n) / 2);
                            if (block + column + n < k_blocks)
                                sum[half] = __fmaf_rn(product, scale[n][half], sum[half]);
                        }
                }
            if (has_unit && lane % 4 == 0) store(unit, 0, sum[0], sum[1]);
        }
    } else {
        const RowsOfX of_x{x_rows + group * row_stride, shared.scales[row0], shared.scales[row0 + 1], group < rows};
        for (int unit = first; unit < units; unit += stride) {
            float sum[4] = {};
#pragma unroll 2
            for (int block = 0; block < k_blocks; ++block) pipeline.multiply(sum, of_x, block, next);
#pragma unroll
            for (int i = 0; i < 2; ++i) store(unit, row0 + i, sum[i], sum[2 + i]);
        }
    }
}
