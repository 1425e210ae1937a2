// The down projections of the experts that a few rows have chosen, and of the shared experts, summed and added to x.
//
// A thread block computes 16 columns of all rows. Its warps divide the k-blocks of all experts among them, of the
// shared experts first, and their results are added in a fixed order. The blocks of a cluster divide the 1×128 tiles of
// h among them, quantize them, and store them in the shared memory of all; a warp has several tiles in flight.
// mixture_up.cu cannot quantize h: its warps hold 8 columns each.
//
// NOTES
// - Prefetches of the weights to the L2 cache make it slower.
#include "bf16.cuh"
#include "quantized_tiles.cuh"
#include "routes.cuh"
#include "weight_rows.cuh"

constexpr int warps = config::warps, threads = 32 * warps, columns = config::columns, chosen = config::chosen;
constexpr int hidden = config::intermediate, shared_hidden = config::shared_intermediate;
constexpr int expert_blocks = hidden / k_block, shared_blocks = shared_hidden / k_block;
constexpr int h_columns = chosen * hidden + shared_hidden, h_tiles = h_columns / k_block;
constexpr int row_stride = h_columns + 64;  // without bank conflicts
constexpr int tiles_at_once = 6, quantizing_warps = warps * config::cluster;

struct alignas(16) DownShared {  // rows of h follow, then the routes
    uint8_t stages[warps][config::depth * stage_bytes];
    float scales[max_rows][h_tiles], partial[warps][tile_rows][max_rows];
};
static_assert(sizeof(DownShared) == config::struct_bytes);  // mixture.py computes the same

// Consecutive k-blocks of one expert or of the shared experts, which a warp multiplies.
struct Span {
    int route;       // of the expert; −1: the shared experts
    int block, end;  // the first k-block, and that after the last
};

// x: [rows, columns] bfloat16, to which the result is added. h: [rows, h_columns]. w: [experts, columns, intermediate];
// shared_w: [columns, shared_intermediate], with the scales of 128×128 blocks.
extern "C" __global__ void __launch_bounds__(threads, 1)
mixture_down(uint8_t* x, const float* h, const Routes* chosen_routes, const uint8_t* w, const float* w_scale,
             const uint8_t* shared_w, const float* shared_scale, int rows, int max_count) {
    DownShared& shared = *reinterpret_cast<DownShared*>(ptx::dynamic_shared());
    uint8_t* h_rows = ptx::dynamic_shared() + sizeof(DownShared);
    Routes& routes = *reinterpret_cast<Routes*>(h_rows + rows * row_stride);
    const int warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int group = lane / 4, row0 = lane % 4 * 2;  // as in `Lane`: results are of the rows row0 and row0 + 1 of x
    const int first_n = blockIdx.x * tile_rows;
    ptx::launch_dependents();
    // The routes are visible: the kernel before lets this one begin after it has waited for them.
    read_routes(routes, chosen_routes, max_count);
    __syncthreads();
    const int items = shared_blocks + routes.count * expert_blocks;  // k-blocks
    const int first = warp * items / warps, end = (warp + 1) * items / warps;

    auto span_at = [&](int item) -> Span {
        if (item < shared_blocks) return {-1, item, min(end, shared_blocks)};
        const int route = (item - shared_blocks) / expert_blocks, begin = shared_blocks + route * expert_blocks;
        return {route, item - begin, min(end - begin, expert_blocks)};
    };
    int next_item = first;
    Span next_span = {0, 0, 0};
    WeightRows next_rows{};
    auto next = [&](WeightRows& block) {  // the k-blocks in the order in which the warp multiplies them
        if (next_item >= end) return false;
        if (next_span.block == next_span.end) {
            next_span = span_at(next_item);
            if (next_span.route < 0) {
                const uint8_t* from = shared_w + int64_t(first_n) * shared_hidden;
                const float* scale = shared_scale + first_n / k_block * shared_blocks;
                next_rows = rows_of_lane(from, from + 8 * shared_hidden, scale, scale, shared_hidden);
            } else {
                const int expert = routes.route[next_span.route].expert;
                const uint8_t* from = w + (int64_t(expert) * columns + first_n) * hidden;
                const float* scale = w_scale + (expert * (columns / k_block) + first_n / k_block) * expert_blocks;
                next_rows = rows_of_lane(from, from + 8 * hidden, scale, scale, hidden);
            }
        }
        block = next_rows.at(next_span.block++);
        ++next_item;
        return true;
    };
    WeightPipeline<config::depth> pipeline{shared.stages[warp]};
    pipeline.fill(next);

    ptx::cluster_sync();  // all blocks have begun, so they can be written to
    ptx::wait_for_previous();
    auto store = [&](int tile, uint32_t four, float scale) {
        const int row = tile / h_tiles, of_row = tile % h_tiles;
        const uint8_t* to = h_rows + row * row_stride + of_row * k_block + lane * 4;
#pragma unroll
        for (int block = 0; block < config::cluster; ++block) {
            ptx::store_cluster(ptx::cluster_address(to, block), four);
            if (lane == block)
                ptx::store_cluster(ptx::cluster_address(&shared.scales[row][of_row], block), __float_as_uint(scale));
        }
    };
    const int first_tile = warp * config::cluster + ptx::cluster_ctarank();
    quantize_tiles<tiles_at_once>(h, first_tile, quantizing_warps, rows * h_tiles, store);
    ptx::cluster_sync();

    float total[4] = {};
    for (int item = first; item < end;) {
        const Span span = span_at(item);
        const Route& route = routes.route[span.route < 0 ? 0 : span.route];
        auto has = [&](int row) { return row < rows && (span.route < 0 || route.slot[row] != not_chosen); };
        auto tile_of = [&](int row) {
            return has(row) ? (span.route < 0 ? chosen : route.slot[row]) * expert_blocks : 0;
        };
        const RowsOfX of_h{h_rows + group * row_stride + tile_of(group) * k_block, shared.scales[row0] + tile_of(row0),
                           shared.scales[row0 + 1] + tile_of(row0 + 1), has(group)};
        float sum[4] = {};
#pragma unroll 2
        for (int block = span.block; block < span.end; ++block) pipeline.multiply(sum, of_h, block, next);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (has(row0 + i % 2)) total[i] = __fadd_rn(total[i], sum[i]);
        item += span.end - span.block;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.partial[warp][group + i / 2 * 8][row0 + i % 2] = total[i];
    __syncthreads();
    for (int i = threadIdx.x; i < tile_rows * rows; i += threads) {
        const int n = i % tile_rows, row = i / tile_rows;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < warps; ++part) sum = __fadd_rn(sum, shared.partial[part][n][row]);
        uint16_t* to = reinterpret_cast<uint16_t*>(x) + int64_t(row) * columns + first_n + n;
        *to = to_bf16(__fadd_rn(from_bf16(__ldcg(to)), sum));
    }
}
