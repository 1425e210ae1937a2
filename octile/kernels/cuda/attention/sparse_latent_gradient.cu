// Adds the gradients of a key by each query that chose it, as sparse_mla_backward.cu stored them, in the order of the queries.
//
// A thread block has one key: it lists the queries that chose it, and four groups of 72 threads, 8 channels each, add every
// fourth of their gradients. Then the four groups' accumulators are added in their order, so results are the same each time.
#include "ptx.cuh"

constexpr int width = 576, vectors = width / 8, groups = 4, at_once = 4;
constexpr int threads = groups * vectors, warps = threads / 32, absent = 65535;

// partial: [rows, K, blocks of heads, 576] bfloat16. entries: [T, rows] uint16, the entry of a query's list that is this key,
// or `absent`. gradient: [T, 576] float32, added to.
extern "C" __global__ void __launch_bounds__(threads)
sparse_latent_gradient(const uint16_t* partial, const uint16_t* entries, float* gradient, int rows, int k, int head_blocks) {
    uint8_t* shared = ptx::dynamic_shared();
    float* sums = reinterpret_cast<float*>(shared);  // [groups − 1][576], where the list was
    int2* chosen = reinterpret_cast<int2*>(shared);
    int* warp_counts = reinterpret_cast<int*>(shared + config::shared_bytes) - warps;
    const int thread = threadIdx.x, warp = thread / 32, lane = ptx::lane_id();
    const uint16_t* own = entries + static_cast<int64_t>(blockIdx.x) * rows;
    int count = 0;
    for (int first = 0; first < rows; first += threads) {
        const int query = first + thread;
        const int entry = query < rows ? own[query] : absent;
        const uint32_t found = __ballot_sync(all_lanes, entry != absent);
        if (lane == 0) warp_counts[warp] = __popc(found);
        __syncthreads();
        int before = count + __popc(found & ((1u << lane) - 1));
        for (int w = 0; w < warps; ++w) {
            before += w < warp ? warp_counts[w] : 0;
            count += warp_counts[w];
        }
        if (entry != absent) chosen[before] = make_int2(query, entry);
        __syncthreads();
    }
    if (count == 0) return;
    const int group = thread / vectors, vector = thread % vectors;
    float sum[8] = {};
    for (int first = group; first < count * head_blocks; first += groups * at_once) {
        uint4 values[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int n = first + groups * i;
            values[i] = make_uint4(0, 0, 0, 0);
            if (n >= count * head_blocks) continue;
            const int2 at = chosen[n / head_blocks];
            const int64_t row = (static_cast<int64_t>(at.x) * k + at.y) * head_blocks + n % head_blocks;
            values[i] = __ldcs(reinterpret_cast<const uint4*>(partial + row * width) + vector);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const uint32_t pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sum[2 * j] += __uint_as_float(pairs[j] << 16);
                sum[2 * j + 1] += __uint_as_float(pairs[j] & 0xFFFF0000);
            }
        }
    }
    __syncthreads();  // the list is no longer read
    // Vector v has the channels 8j + 2·(v%4) + i of the 32 from 32·(v/4): [2j + i].
    const int channel = vector / 4 * 32 + vector % 4 * 2;
    if (group > 0)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            *reinterpret_cast<float2*>(sums + (group - 1) * width + channel + 8 * j) = make_float2(sum[2 * j], sum[2 * j + 1]);
    __syncthreads();
    if (group > 0) return;
    float* to = gradient + static_cast<int64_t>(blockIdx.x) * width + channel;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 total = *reinterpret_cast<float2*>(to + 8 * j);
        total.x += sum[2 * j], total.y += sum[2 * j + 1];
#pragma unroll
        for (int g = 0; g < groups - 1; ++g) {
            const float2 other = *reinterpret_cast<const float2*>(sums + g * width + channel + 8 * j);
            total.x += other.x, total.y += other.y;
        }
        *reinterpret_cast<float2*>(to + 8 * j) = total;
    }
}
