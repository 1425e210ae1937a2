// Merges the partial results of rows that several thread blocks of mla_decode.cu attend to, in the order of the positions.
//
// A thread block takes one row and head. Rows whose results are final are not touched; rows without positions become zero.
#include "convert.cuh"
#include "split_kv.cuh"

constexpr int channels = 512, at_once = 4;  // partial results that are loaded together

// partial: [slots, H, 512], lse: [slots, H]. starts: [rows + 1], the pages before each row and then
// those of a range. out: [rows, H, 512] bfloat16.
extern "C" __global__ void __launch_bounds__(channels / 4)
mla_merge(const float* partial, const float* lse, const int* lengths, const int* starts, uint16_t* out, int n_heads,
          int length_step, int rows, int n_splits) {
    const int row = blockIdx.x / n_heads, head = blockIdx.x % n_heads;
    int slot, count;
    const int n_pages = Lengths{lengths, length_step}.pages(row);
    if constexpr (config::fixed_splits) {
        const int of_split = (n_pages + n_splits - 1) / n_splits;
        slot = row * n_splits, count = n_pages > 0 ? (n_pages + of_split - 1) / of_split : 0;
    } else {
        const int of_range = starts[rows], start = starts[row];
        const int first = start / of_range, last = (start + n_pages - 1) / of_range;
        slot = 2 * first, count = n_pages > 0 ? last - first + 1 : 0;
    }
    if (count == 1) return;
    const int64_t at = static_cast<int64_t>(slot) * n_heads + head;
    float highest = minus_infinity();
    for (int i = ptx::lane_id(); i < count; i += 32) highest = fmaxf(highest, lse[at + static_cast<int64_t>(i) * n_heads]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(all_lanes, highest, distance));
    float total = count > 0 ? 0.0f : 1.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < count; first += at_once) {
        float4 values[at_once];
        float share[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i >= count) break;
            const int64_t of_split = at + static_cast<int64_t>(first + i) * n_heads;
            values[i] = reinterpret_cast<const float4*>(partial + of_split * channels)[threadIdx.x];
            share[i] = ptx::exp2(lse[of_split] - highest);  // NaN where the split's scores are
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (first + i >= count) break;
            total += share[i];
            sum.x += share[i] * values[i].x;
            sum.y += share[i] * values[i].y;
            sum.z += share[i] * values[i].z;
            sum.w += share[i] * values[i].w;
        }
    }
    const float inverse = __frcp_rn(total);
    const uint2 packed = make_uint2(ptx::pack_bf16(sum.x * inverse, sum.y * inverse),
                                    ptx::pack_bf16(sum.z * inverse, sum.w * inverse));
    const int64_t to = static_cast<int64_t>(row) * n_heads + head;
    reinterpret_cast<uint2*>(out + to * channels)[threadIdx.x] = packed;
}
