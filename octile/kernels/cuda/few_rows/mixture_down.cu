// The down projections of the experts that a few rows have chosen, and of the shared experts, summed and added to x.
//
// A thread block computes 16 columns of all rows, over all experts: its warps take turns with the experts, and first with
// parts of the shared experts' k that are as long as an expert's. What the warps have computed is added in a fixed order.
// Every block quantizes h in tiles of 1×128, of which a warp has several in flight: no kernel before knows a whole tile.
//
// NOTES
// - Prefetches of the weights to the L2 cache make it slower.
#include "routes.cuh"
#include "tile.cuh"
#include "weight_rows.cuh"

constexpr int down_warps = config::warps, down_threads = 32 * down_warps, columns_n = config::columns;
constexpr int hidden = config::intermediate, shared_hidden = config::shared_intermediate, k_blocks = hidden / k_block;
constexpr int shared_blocks = shared_hidden / k_block, shared_parts = shared_hidden / hidden, chosen = config::chosen;
constexpr int h_columns = chosen * hidden + shared_hidden, h_tiles = h_columns / k_block;
constexpr int row_stride = h_columns + 64;  // without bank conflicts
constexpr int tiles_at_once = 6;
static_assert(shared_hidden % hidden == 0 && hidden % k_block == 0);

struct alignas(16) DownShared {  // rows of h follow, then the routes
    uint8_t stages[down_warps][config::depth * stage_bytes];
    float scales[max_rows][h_tiles], partial[down_warps][16][max_rows];
};
static_assert(sizeof(DownShared) == config::struct_bytes);  // mixture.py computes the same

// x: [rows, columns] bfloat16, to which the result is added. h: [rows, h_columns]. w: [experts, columns, intermediate];
// shared_w: [columns, shared_intermediate], with the scales of 128×128 blocks.
extern "C" __global__ void __launch_bounds__(down_threads, 1)
mixture_down(uint8_t* x, const float* h, const Routes* of_rows, const uint8_t* w, const float* w_scale,
             const uint8_t* shared_w, const float* shared_scale, int rows, int max_count) {
    DownShared& shared = *reinterpret_cast<DownShared*>(ptx::dynamic_shared());
    uint8_t* h_rows = ptx::dynamic_shared() + sizeof(DownShared);
    Routes& routes = *reinterpret_cast<Routes*>(h_rows + rows * row_stride);
    const int warp = threadIdx.x / 32, lane = ptx::lane_id(), column = lane / 4, first_n = blockIdx.x * 16;
    ptx::launch_dependents();
    WeightStream<k_blocks, config::depth> stream{shared.stages[warp], warp, down_warps};
    auto rows_of = [&](int unit) {
        if (unit < shared_parts) {
            const uint8_t* data = shared_w + int64_t(first_n) * shared_hidden + unit * hidden;
            const float* scale = shared_scale + first_n / k_block * shared_blocks + unit * k_blocks;
            return rows_of_lane(data, data + 8 * shared_hidden, scale, scale, shared_hidden);
        }
        const int expert = routes.route[unit - shared_parts].expert;
        const uint8_t* data = w + (int64_t(expert) * columns_n + first_n) * hidden;
        const float* scale = w_scale + (expert * (columns_n / k_block) + first_n / k_block) * k_blocks;
        return rows_of_lane(data, data + 8 * hidden, scale, scale, hidden);
    };
    stream.begin(rows_of, shared_parts);

    // The routes are visible: the kernel before lets this one begin after it has waited for them.
    read_routes(routes, of_rows, max_count);
    __syncthreads();
    const int units = shared_parts + routes.count;
    stream.begin(rows_of, units);

    ptx::wait_for_previous();
    for (int first = warp; first < rows * h_tiles; first += tiles_at_once * down_warps) {
        float4 v[tiles_at_once];
#pragma unroll
        for (int i = 0; i < tiles_at_once; ++i) {
            const int tile = first + i * down_warps;
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (tile < rows * h_tiles) v[i] = __ldcg(reinterpret_cast<const float4*>(h + tile * 128) + lane);
        }
        float amax[tiles_at_once];
#pragma unroll
        for (int i = 0; i < tiles_at_once; ++i)
            amax[i] = ptx::max_abs(ptx::max_abs(v[i].x, v[i].y), ptx::max_abs(v[i].z, v[i].w));
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2)
#pragma unroll
            for (int i = 0; i < tiles_at_once; ++i)
                amax[i] = ptx::max_abs(amax[i], __shfl_xor_sync(full_warp, amax[i], bit));
#pragma unroll
        for (int i = 0; i < tiles_at_once; ++i) {
            const int tile = first + i * down_warps, row = tile / h_tiles, of_row = tile % h_tiles;
            if (tile >= rows * h_tiles) break;
            const float own = scale_from_amax<e4m3, config::power_of_2>(amax[i]);
            const Divisor by = make_divisor<config::power_of_2>(own);
            auto divide = [&](float value) {
                return config::power_of_2 ? by.template divide<true>(value) : by.divide_carefully(value);
            };
            *reinterpret_cast<uint32_t*>(h_rows + row * row_stride + of_row * 128 + lane * 4) =
                ptx::pack_e4m3(divide(v[i].x), divide(v[i].y), divide(v[i].z), divide(v[i].w));
            if (lane == 0) shared.scales[row][of_row] = own;
        }
    }
    __syncthreads();

    Products total{};
    const int row0 = lane % 4 * 2, row1 = row0 + 1;
    for (int unit = warp; unit < units; unit += down_warps) {
        const bool is_shared = unit < shared_parts;
        const Route& route = routes.route[is_shared ? 0 : unit - shared_parts];
        auto has = [&](int row) { return row < rows && (is_shared || route.slot[row] != not_chosen); };
        auto first_of = [&](int row) {  // column of h
            if (!has(row)) return 0;
            return is_shared ? chosen * hidden + unit * hidden : route.slot[row] * hidden;
        };
        const RowsOfX of_h{h_rows + column * row_stride + first_of(column), shared.scales[row0] + first_of(row0) / k_block,
                           shared.scales[row1] + first_of(row1) / k_block, has(column)};
        const Products sum = stream.multiply(of_h, rows_of, units);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (has(row0 + i % 2)) total.value[i] = __fadd_rn(total.value[i], sum.value[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.partial[warp][column + i / 2 * 8][row0 + i % 2] = total.value[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * rows; i += down_threads) {
        const int n = i % 16, row = i / 16;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < down_warps; ++part) sum = __fadd_rn(sum, shared.partial[part][n][row]);
        uint16_t* to = reinterpret_cast<uint16_t*>(x) + int64_t(row) * columns_n + first_n + n;
        const float old = __uint_as_float(uint32_t(__ldcg(to)) << 16);
        *to = static_cast<uint16_t>(ptx::pack_bf16(__fadd_rn(old, sum), 0.0f));
    }
}
