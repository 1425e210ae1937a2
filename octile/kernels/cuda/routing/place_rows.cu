// The counting sort of entries by expert: the row of an entry is the first row of its expert, plus the number of entries
// of the same expert before it: in earlier blocks, in earlier warps of its block, in its warp.
//
// A warp takes 32 · config::rounds consecutive entries. Lanes with the same expert find each other by match.any. Where one
// block has all entries (config::alone), its own counts are the load of the experts, and it sorts weights, too.
#include "experts.cuh"

constexpr int experts = config::experts, parts = threads > experts ? threads / experts : 1;

// The sum of a value over this thread and those before it.
__device__ __forceinline__ int inclusive_sum(int value, int* of_warps) {
    const int lane = ptx::lane_id(), warp = threadIdx.x / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, value, distance);
        if (lane >= distance) value += before;
    }
    if (lane == 31) of_warps[warp] = value;
    __syncthreads();
    for (int w = 0; w < warp; ++w) value += of_warps[w];
    return value;
}

// entries: [count]. load: [E] with a stride. of_blocks: [blocks, E], the counts of `count_experts`. place: the row of each
// entry; order: the entry of each row; ends: [E], the end of each expert's rows. Rows are clamped: nothing may be written
// outside of the results, whatever `load` is. Alone, load and of_blocks are not read; weight: [count], of entries;
// row_weight: of rows.
extern "C" __global__ void __launch_bounds__(threads)
place_rows(const Entry* entries, const void* load, const int* of_blocks, const float* weight, int* place, int* order,
           int* ends, float* row_weight, int64_t load_stride, int count) {
    int* shared = reinterpret_cast<int*>(ptx::dynamic_shared());
    int *starts = shared, *of_warps = shared + experts, *counts = of_warps + 32;  // counts: [warps, E]
    const int lane = ptx::lane_id(), warp = threadIdx.x / 32, block = blockIdx.x;
    const int first = block * block_entries + warp * 32 * config::rounds + lane;
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    int expert[config::rounds];
#pragma unroll
    for (int r = 0; r < config::rounds; ++r) expert[r] = load_expert(entries, first + 32 * r, count);
    float own_weight[config::rounds];  // loaded with the experts, so that the block waits for memory once
    if constexpr (config::alone)
#pragma unroll
        for (int r = 0; r < config::rounds; ++r)
            own_weight[r] = first + 32 * r < count ? __ldcg(weight + first + 32 * r) : 0.0f;
    for (int i = threadIdx.x; i < config::warps * experts; i += threads) counts[i] = 0;

    int row[config::rounds];  // the entries of the same expert before each in its warp
    auto count_in_warp = [&] {
#pragma unroll
        for (int r = 0; r < config::rounds; ++r) {
            const uint32_t same = __match_any_sync(all_lanes, expert[r]);
            int* own = counts + warp * experts + max(expert[r], 0);
            row[r] = *own + __popc(same & ((1u << lane) - 1));
            __syncwarp();
            if (expert[r] >= 0 && (same >> lane) == 1) *own += __popc(same);  // the last of them
            __syncwarp();
        }
        __syncthreads();
    };
    auto load_of = [&](int e) {
        int sum = 0;
        if constexpr (config::alone) {
            for (int w = 0; w < config::warps; ++w) sum += counts[w * experts + e];
        } else {
            sum = static_cast<int>(
                config::wide_load ? static_cast<const int64_t*>(load)[e * load_stride]
                                  : static_cast<const int*>(load)[e * load_stride]);
        }
        return sum;
    };
    if constexpr (config::alone) {
        __syncthreads();  // the counts are zero
        count_in_warp();
    }

    // the first row of each expert, and the entries of earlier blocks
    int previous = 0;
    for (int base = 0; base < experts; base += threads) {
        const int e = base + threadIdx.x;
        const int own = e < experts ? load_of(e) : 0;
        const int end = previous + inclusive_sum(own, of_warps);
        if (e < experts) {
            starts[e] = end - own;
            if (block == 0) ends[e] = end;
        }
        __syncthreads();  // of_warps may be written again
        for (int w = 0; w < config::warps; ++w) previous += of_warps[w];
        __syncthreads();
    }
    for (int base = 0; base < experts && !config::alone; base += threads) {
        const int e = base + threadIdx.x % (experts < threads ? experts : threads), part = threadIdx.x / experts;
        int before = 0;
        if (e < experts && part < parts) {
#pragma unroll 16
            for (int b = part; b < block; b += parts) before += of_blocks[static_cast<int64_t>(b) * experts + e];
            atomicAdd(starts + e, before);
        }
    }

    if constexpr (!config::alone) count_in_warp();
    for (int e = threadIdx.x; e < experts; e += threads) {
        int start = starts[e];
#pragma unroll 8
        for (int w = 0; w < config::warps; ++w) {
            const int own = counts[w * experts + e];
            counts[w * experts + e] = start;
            start += own;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::rounds; ++r) {
        if (expert[r] < 0) continue;
        const int at = min(max(row[r] + counts[warp * experts + expert[r]], 0), count - 1);
        place[first + 32 * r] = at;
        order[at] = first + 32 * r;
        if constexpr (config::alone) row_weight[at] = own_weight[r];
    }
}
