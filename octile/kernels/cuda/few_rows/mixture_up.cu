// The gate and up projections of the experts that a few rows have chosen, and of the shared experts, and SwiGLU.
//
// A unit of work is 8 gate rows and the 8 up rows of the same columns of h; a warp streams them for all rows at once.
// First come the units of the shared experts, whose loads do not depend on the choice, then those of the experts that at
// least one row has chosen: each weight is read once.
#include "routes.cuh"
#include "silu.cuh"
#include "weight_rows.cuh"

constexpr int up_warps = config::warps, up_threads = 32 * up_warps, columns_k = config::columns, chosen = config::chosen;
constexpr int k_blocks = columns_k / k_block, row_stride = columns_k + 64;  // without bank conflicts
constexpr int hidden = config::intermediate, shared_hidden = config::shared_intermediate;
constexpr int expert_units = hidden / 8, shared_units = shared_hidden / 8;
constexpr int h_columns = chosen * hidden + shared_hidden;

struct alignas(16) UpShared {  // rows of x follow, then the routes
    uint8_t stages[up_warps][config::depth * stage_bytes];
    float scales[max_rows][k_blocks];
};
static_assert(sizeof(UpShared) == config::struct_bytes);  // mixture.py computes the same

__device__ __forceinline__ float rounded(float x) {
    return __uint_as_float(ptx::pack_bf16(x, 0.0f) << 16);
}

// x: [rows, k], x_scale: [rows, k/128], contiguous along rows, padded to 4. w: [experts, 2 · intermediate, k], with the
// scales of 128×128 blocks; shared_w: [2 · shared_intermediate, k]. h: [rows, chosen · intermediate +
// shared_intermediate].
extern "C" __global__ void __launch_bounds__(up_threads, 1)
mixture_up(const uint8_t* x, const float* x_scale, const Routes* of_rows, const uint8_t* w, const float* w_scale,
           const uint8_t* shared_w, const float* shared_scale, float* h, int rows, int max_count) {
    UpShared& shared = *reinterpret_cast<UpShared*>(ptx::dynamic_shared());
    uint8_t* x_rows = ptx::dynamic_shared() + sizeof(UpShared);
    Routes& routes = *reinterpret_cast<Routes*>(x_rows + rows * row_stride);
    const int warp = threadIdx.x / 32, lane = ptx::lane_id(), column = lane / 4;
    const int first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * up_warps;
    WeightStream<k_blocks, config::depth> stream{shared.stages[warp], first, stride};
    // The gate rows of an expert's weight [2 · n, k] are followed by its up rows.
    auto rows_of_unit = [&](const uint8_t* data, const float* scale, int unit, int n) {
        const int gate = unit * 8, up = n + unit * 8;
        return rows_of_lane(data + int64_t(gate) * columns_k, data + int64_t(up) * columns_k,
                            scale + gate / k_block * k_blocks, scale + up / k_block * k_blocks, columns_k);
    };
    auto rows_of = [&](int unit) {
        if (unit < shared_units) return rows_of_unit(shared_w, shared_scale, unit, shared_hidden);
        const int expert = routes.route[(unit - shared_units) / expert_units].expert;
        return rows_of_unit(w + int64_t(expert) * 2 * hidden * columns_k,
                            w_scale + expert * (2 * hidden / k_block * k_blocks), (unit - shared_units) % expert_units,
                            hidden);
    };
    if (lane == 0 && first < shared_units) {
        ptx::bulk_prefetch(shared_w + int64_t(first) * 8 * columns_k, 8 * columns_k);
        ptx::bulk_prefetch(shared_w + int64_t(shared_hidden + first * 8) * columns_k, 8 * columns_k);
    }
    stream.begin(rows_of, shared_units);

    ptx::wait_for_previous();
    ptx::launch_dependents();  // not before: mixture_down.cu reads what mixture_gate.cu has written
    read_routes(routes, of_rows, max_count);
    for (int i = threadIdx.x; i < rows * (columns_k / 16); i += up_threads) {
        const int row = i / (columns_k / 16), at = i % (columns_k / 16) * 16;
        *reinterpret_cast<uint4*>(x_rows + row * row_stride + at) =
            __ldcg(reinterpret_cast<const uint4*>(x + row * columns_k + at));
    }
    for (int i = threadIdx.x; i < max_rows * k_blocks; i += up_threads)
        shared.scales[i % max_rows][i / max_rows] =
            i % max_rows < rows ? __ldcg(x_scale + i / max_rows * ((rows + 3) / 4 * 4) + i % max_rows) : 0.0f;
    __syncthreads();

    const int row0 = lane % 4 * 2, units = shared_units + routes.count * expert_units;
    const RowsOfX of_x{x_rows + column * row_stride, shared.scales[row0], shared.scales[row0 + 1], column < rows};
    for (int unit = first; unit < units; unit += stride) {
        const Products sum = stream.multiply(of_x, rows_of, units);
        const bool is_shared = unit < shared_units;
        const Route& route = routes.route[is_shared ? 0 : (unit - shared_units) / expert_units];
        const int own = is_shared ? unit : (unit - shared_units) % expert_units;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row0 + i, slot = is_shared ? chosen : route.slot[row];
            if (row >= rows || slot == not_chosen) continue;
            const float g = rounded(sum.value[i]), u = rounded(sum.value[2 + i]);
            float value = __fmul_rn(__fmul_rn(g, sigmoid(g)), u);
            if (!is_shared) value = __fmul_rn(value, route.weight[row]);
            h[int64_t(row) * h_columns + slot * hidden + own * 8 + column] = value;
        }
    }
}
