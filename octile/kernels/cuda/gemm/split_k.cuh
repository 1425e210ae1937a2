// Split-K: the last thread block to finish a tile adds the partials of all splits, in their order, so that the result
// does not depend on which one is last.
//
// Each warpgroup reduces its own part of a tile. Partials are stored in the order of registers, so neighboring threads
// write neighboring words whatever the shape. The arrival counters return to 0, so that a CUDA graph can run again.
#pragma once
#include "promotion.cuh"

// Stores this split's partials. True for the warpgroup that arrived last: `total` then is the sum of all splits.
__device__ __forceinline__ bool reduce_splits(
    float (&total)[waves][num_accum], float* partials, int* arrivals, volatile int* last, const Tile& tile,
    int warpgroup) {
    constexpr int size = waves * num_accum * 128;
    const int which = tile.index * config::warpgroups + warpgroup, thread = threadIdx.x % 128;
    float* own = partials + int64_t(which) * config::split_k * size + thread;
#pragma unroll
    for (int i = 0; i < waves * num_accum; ++i)
        __stcg(own + tile.split * size + i * 128, total[i / num_accum][i % num_accum]);
    ptx::named_barrier_sync(4 + warpgroup, 128);
    if (thread == 0) {
        __threadfence();  // for all threads of the barrier
        *last = atomicAdd(arrivals + which, 1) == config::split_k - 1;
        if (*last) arrivals[which] = 0;
        __threadfence();
    }
    ptx::named_barrier_sync(4 + warpgroup, 128);
    if (!*last) return false;
#pragma unroll
    for (int i = 0; i < waves * num_accum; ++i) {  // loads are issued as early as there are registers for them
        float sum = __ldcg(own + i * 128);
#pragma unroll
        for (int split = 1; split < config::split_k; ++split)
            sum = __fadd_rn(sum, __ldcg(own + split * size + i * 128));
        total[i / num_accum][i % num_accum] = sum;
    }
    return true;
}
