// Merges the splits of few rows' attention in the order of the positions, and multiplies the result by W_UV.
//
// A cluster of 8 thread blocks takes one head. Each merges 64 of the 512 channels for all rows and writes them, rounded
// to BF16, to the shared memory of all. Then it multiplies all channels by its part of the head's weight, 16 rows at a
// time; the weight was requested before attention has ended.
#include "bf16_tile.cuh"
#include "warps.cuh"

constexpr int keys = 32;  // positions of a chunk, by which mla_few_rows.cu divides rows
constexpr int latent = 512, cluster = 8, own_channels = latent / cluster, values = config::values;
constexpr int tiles = values / tile_rows / cluster;  // of a thread block
constexpr int groups = threads / 16;                 // of 16 threads, which merge 64 channels of some splits of a row
constexpr int groups_of_row = config::rows == 1 ? 16 : config::rows == 2 ? 8 : config::rows <= 4 ? 4 : 2;
constexpr int splits = config::splits, lanes = (splits + 31) / 32;  // of a row; and those whose share a lane computes
constexpr int pitch = 2 * latent + 16;               // bytes of a merged row
static_assert(values % (tile_rows * cluster) == 0);

namespace smem {
constexpr int merged = 0;                                  // [rows][512] bfloat16
constexpr int parts = merged + max_rows * pitch;           // float [groups][64]
constexpr int totals = parts + groups * own_channels * 4;  // float [8]
constexpr int sums = totals + max_rows * 4;
static_assert(sums + WarpSums::bytes == config::shared_bytes, "attention.py computes the same");
}  // namespace smem

// partial: [rows, n_splits, H, 512], lse: [rows, n_splits, H], of n_splits ≤ splits of which the first ones have
// positions, as in mla_few_rows.cu. w_v: [H, values, 512] bfloat16. out: [rows, H · values] bfloat16.
extern "C" __global__ void __launch_bounds__(threads, 2)
merge_values(const float* partial, const float* lse, const int* lengths, int length_step, const uint16_t* w_v,
             uint16_t* out, int n_heads, int n_splits) {
    uint8_t* shared = ptx::dynamic_shared();
    const Lane lane;
    const int warp = threadIdx.x / 32, head = blockIdx.x / cluster, rank = ptx::cluster_ctarank();
    constexpr int columns = latent / warps;  // of a warp
    Bf16Tile<columns / 16> tile[tiles];
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
        const int first = (rank * tiles + i) * tile_rows;
        const int64_t row = static_cast<int64_t>(head) * values + first + lane.group;
        tile[i].load(lane, w_v + row * latent + columns * warp, latent);
    }
    const int group = threadIdx.x / 16, row = group / groups_of_row, part = group % groups_of_row;  // row: of the warp
    const int length = lengths[min(row, config::rows - 1) * length_step], chunks = (length + keys - 1) / keys;
    const int of_split = (chunks + n_splits - 1) / n_splits;                // chunks of a split
    const int count = chunks > 0 ? (chunks + of_split - 1) / of_split : 0;  // splits that have positions
    ptx::cluster_sync();  // all blocks have begun: their memory may be written
    ptx::wait_for_previous();
    ptx::launch_dependents();
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < config::rows) {
        const int64_t first = static_cast<int64_t>(row) * n_splits * n_heads + head;
        float of_lane[lanes], highest = minus_infinity(), total = 0.0f;
#pragma unroll
        for (int j = 0; j < lanes; ++j) {
            const int own = 32 * j + ptx::lane_id();
            of_lane[j] = own < count ? lse[first + static_cast<int64_t>(own) * n_heads] : minus_infinity();
        }
        const float4* from =
            reinterpret_cast<const float4*>(partial + first * latent + rank * own_channels) + threadIdx.x % 16;
        float4 values_of[splits / groups_of_row];
#pragma unroll
        for (int i = 0; i < splits / groups_of_row; ++i) {
            const int s = i * groups_of_row + part;
            if (s < count) values_of[i] = from[static_cast<int64_t>(s) * n_heads * (latent / 4)];
        }
#pragma unroll
        for (int j = 0; j < lanes; ++j) highest = fmaxf(highest, of_lane[j]);  // NaN does not win: its share is NaN
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(all_lanes, highest, distance));
#pragma unroll
        for (int j = 0; j < lanes; ++j) {
            of_lane[j] = 32 * j + static_cast<int>(ptx::lane_id()) < count
                ? ptx::exp2(of_lane[j] - (highest == minus_infinity() ? 0.0f : highest))
                : 0.0f;
            total += of_lane[j];
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(all_lanes, total, distance);
#pragma unroll
        for (int i = 0; i < splits / groups_of_row; ++i) {
            const int s = i * groups_of_row + part;
            const float share = __shfl_sync(all_lanes, of_lane[i * groups_of_row / 32], s % 32);
            if (s >= count || share == 0.0f) continue;
            const float4& v = values_of[i];
            sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
        }
        if (part == 0 && threadIdx.x % 16 == 0)
            reinterpret_cast<float*>(shared + smem::totals)[row] = count > 0 ? total : 1.0f;
    }
    reinterpret_cast<float4*>(shared + smem::parts)[threadIdx.x] = sum;
    __syncthreads();
    if (warp < config::rows) {
        const int pair = ptx::lane_id();
        const float inverse = __frcp_rn(reinterpret_cast<const float*>(shared + smem::totals)[warp]);
        float2 merged = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < groups_of_row; ++i) {
            const float2 v = reinterpret_cast<const float2*>(
                shared + smem::parts)[(warp * groups_of_row + i) * (own_channels / 2) + pair];
            merged.x += v.x, merged.y += v.y;
        }
        const uint8_t* to = shared + smem::merged + warp * pitch + 2 * (rank * own_channels + 2 * pair);
        const uint32_t rounded = ptx::pack_bf16(merged.x * inverse, merged.y * inverse);
#pragma unroll
        for (int block = 0; block < cluster; ++block) ptx::store_cluster(ptx::cluster_address(to, block), rounded);
    }
    ptx::cluster_sync();
    const uint8_t* of_row = shared + smem::merged + min(lane.group, config::rows - 1) * pitch + 2 * columns * warp;
    const WarpSums sums{reinterpret_cast<float*>(shared + smem::sums)};
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
        float d[4] = {};
        tile[i].multiply(d, lane, reinterpret_cast<const uint16_t*>(of_row));
        if (i > 0) __syncthreads();
        sums.put(d, lane);
        __syncthreads();
        const int row_of_x = threadIdx.x / tile_rows, value = threadIdx.x % tile_rows;
        if (row_of_x < config::rows)
            out[(static_cast<int64_t>(row_of_x) * n_heads + head) * values + (rank * tiles + i) * tile_rows + value] =
                to_bf16(sums.get(row_of_x, value));
    }
}
