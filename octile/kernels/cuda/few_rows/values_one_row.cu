// Merges the parts of one row's attention in the order of the positions, and multiplies the result by W_UV.
//
// mla_one_row.cu computes the parts. Bits are those of mla_merge.cu, whose function merges here, and of a chain over all
// channels (bf16_tile.cuh). A thread block merges a head's channels and computes 16 of its values, for which one warp
// requests the weight before attention has ended.
#include "bf16_tile.cuh"
#include "merge_splits.cuh"

constexpr int page_rows = 64, tiles = config::values / tile_rows;
static_assert(config::values % tile_rows == 0);

// partial: [parts, H, 512], lse: [parts, H]. w_v: [H, values, 512] bfloat16. out: [H · values] bfloat16.
extern "C" __global__ void __launch_bounds__(channels / 4)
values_one_row(const float* partial, const float* lse, const int* lengths, const uint16_t* w_v, uint16_t* out, int n_heads) {
    uint16_t* merged = reinterpret_cast<uint16_t*>(ptx::dynamic_shared());
    const Lane lane;
    const int head = blockIdx.x / tiles;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * tile_rows;  // value
    const bool multiplies = threadIdx.x < 32;
    Bf16Tile<channels / 16> tile;
    if (multiplies) tile.load(lane, w_v + (first + lane.group) * channels, channels);
    const int n_pages = (max(*lengths, 0) + page_rows - 1) / page_rows;
    const int count = (n_pages + config::part_pages - 1) / config::part_pages;
    ptx::wait_for_previous();
    ptx::launch_dependents();  // not before: the next step's kernels read what earlier ones have written
    partial += static_cast<int64_t>(head) * channels;
    if (count == 1) {
        const float4 value = reinterpret_cast<const float4*>(partial)[threadIdx.x];
        reinterpret_cast<uint2*>(merged)[threadIdx.x] =
            make_uint2(ptx::pack_bf16(value.x, value.y), ptx::pack_bf16(value.z, value.w));
    } else {
        merge_splits(partial, lse + head, count, n_heads, merged);
    }
    __syncthreads();
    if (!multiplies) return;
    float d[4] = {};
    tile.multiply(d, lane, merged);
    if (lane.member == 0) out[first + lane.group] = to_bf16(d[0]), out[first + lane.group + 8] = to_bf16(d[2]);
}
