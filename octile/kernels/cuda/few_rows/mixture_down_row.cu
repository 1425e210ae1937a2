// The down projections of the experts that one row has chosen, and of the shared experts, summed and added to x, with the
// bits of octile's GEMM and of `octile.ops.permute.unpermute`.
//
// A thread block computes 16 columns. It quantizes h, whose tiles are the k-blocks of all experts, in the order of the
// row's choices, the shared experts last. Its warps multiply them 8 at a time, one each; the products of an expert's
// k-blocks are then added in their order, and the results of the experts in that of the choices.
#include "bf16.cuh"
#include "quantized_tiles.cuh"
#include "routes.cuh"
#include "weight_rows.cuh"

constexpr int warps = group_blocks, threads = 32 * warps, columns = config::columns, chosen = config::chosen;
constexpr int hidden = config::intermediate, shared_hidden = config::shared_intermediate;
constexpr int expert_tiles = hidden / k_block, shared_tiles = shared_hidden / k_block;
constexpr int tiles = chosen * expert_tiles + shared_tiles, rounds = (tiles + warps - 1) / warps;
constexpr int num_results = chosen + (shared_hidden > 0);  // of experts
constexpr int tiles_at_once = 6;

struct alignas(16) DownShared {
    uint8_t h[RowOfX::bytes(tiles)];
    uint8_t stages[warps][config::depth * stage_bytes];
    float scales[tiles], products[tiles][tile_rows], product_scales[tiles], results[num_results][tile_rows];
    int expert[chosen];
};
static_assert(sizeof(DownShared) == config::struct_bytes);  // mixture.py computes the same

// Arguments as of mixture_down, for one row.
extern "C" __global__ void __launch_bounds__(threads, 1)
mixture_down_row(uint8_t* x, const float* h, const Routes* routes, const uint8_t* w, const float* w_scale,
                 const uint8_t* shared_w, const float* shared_scale, int rows, int count) {
    DownShared& shared = *reinterpret_cast<DownShared*>(ptx::dynamic_shared());
    const int warp = threadIdx.x / 32, lane = ptx::lane_id(), first_n = blockIdx.x * tile_rows;
    ptx::launch_dependents();
    // The routes are visible: the kernel before lets this one begin after it has waited for them.
    if (threadIdx.x < chosen) {
        const Route& route = routes->route[threadIdx.x];
        shared.expert[__ldcg(&route.slot[0])] = __ldcg(&route.expert);
    }
    __syncthreads();

    int next_tile = warp;
    auto next = [&](WeightRows& block) {  // the tiles in the order in which the warp multiplies them
        if (next_tile >= tiles) return false;
        const int slot = next_tile / expert_tiles;
        if (slot >= chosen) {
            const uint8_t* from = shared_w + int64_t(first_n) * shared_hidden;
            const float* scale = shared_scale + first_n / k_block * shared_tiles;
            block = rows_of_lane(from, from + 8 * shared_hidden, scale, scale, shared_hidden)
                        .at(next_tile - chosen * expert_tiles);
        } else {
            const int expert = shared.expert[slot];
            const uint8_t* from = w + (int64_t(expert) * columns + first_n) * hidden;
            const float* scale = w_scale + (expert * (columns / k_block) + first_n / k_block) * expert_tiles;
            block = rows_of_lane(from, from + 8 * hidden, scale, scale, hidden).at(next_tile % expert_tiles);
        }
        next_tile += warps;
        return true;
    };
    WeightPipeline<config::depth> pipeline{shared.stages[warp]};
    pipeline.fill(next);

    ptx::wait_for_previous();
    const RowOfX of_h{shared.h};
    auto store = [&](int tile, uint32_t four, float scale) {
        of_h.store_4(tile * k_block + 4 * lane, four);
        if (lane == 0) shared.scales[tile] = scale;
    };
    quantize_tiles<tiles_at_once>(h, warp, warps, tiles, store);
    ptx::fence_proxy_async();
    __syncthreads();

    const Lane own;
    const BlockProducts products{shared.products[0], shared.product_scales};
#pragma unroll 1
    for (int round = 0; round < rounds; round += blocks_at_once) {
        RowFragments a[blocks_at_once] = {};
        float scale[blocks_at_once][2], d[blocks_at_once][4];
        uint64_t operands[blocks_at_once];
#pragma unroll
        for (int n = 0; n < blocks_at_once; ++n) {
            const int tile = (round + n) * warps + warp;
            operands[n] = of_h.operand(min(round + n, rounds - 1) * warps);
            if (tile < tiles) pipeline.take(a[n], scale[n], shared.scales[tile], next);
        }
        multiply_k_blocks(d, a, operands);
#pragma unroll
        for (int n = 0; n < blocks_at_once; ++n) {
            const int tile = (round + n) * warps + warp;
            if (tile < tiles) products.put(d[n], own, warp, tile, scale[n][0]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_results * tile_rows; i += threads) {
        const int first = i / tile_rows * expert_tiles, end = i / tile_rows < chosen ? first + expert_tiles : tiles;
        shared.results[i / tile_rows][i % tile_rows] = from_bf16(to_bf16(products.sum(i % tile_rows, first, end)));
    }
    __syncthreads();
    if (threadIdx.x >= tile_rows) return;
    float sum = num_results > chosen ? shared.results[num_results - 1][threadIdx.x] : 0.0f;
#pragma unroll
    for (int k = 0; k < chosen; ++k) sum = __fadd_rn(sum, shared.results[k][threadIdx.x]);
    uint16_t* to = reinterpret_cast<uint16_t*>(x) + first_n + threadIdx.x;
    *to = to_bf16(__fadd_rn(from_bf16(__ldcg(to)), from_bf16(to_bf16(sum))));
}
