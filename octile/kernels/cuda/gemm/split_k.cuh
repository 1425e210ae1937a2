// The parts of a sum over K that was cut, added in their order by whichever comes last: the same bits every time.
//
// Every warpgroup works for itself. A part lies in global memory as it lies in registers, so that neighbouring threads
// write neighbouring words whatever the shape. The count of parts goes back to 0, so that a CUDA graph can run again.
#pragma once
#include "promotion.cuh"

// True for the warpgroup that came last: `total` is then the whole sum.
__device__ __forceinline__ bool sum_parts(
    float (&total)[waves][count], float* parts, int* arrived, volatile int* last, const Tile& tile, int warpgroup) {
    constexpr int size = waves * count * 128;
    const int which = tile.index * config::warpgroups + warpgroup, thread = threadIdx.x % 128;
    float* mine = parts + int64_t(which) * config::split_k * size + thread;
#pragma unroll
    for (int i = 0; i < waves * count; ++i) __stcg(mine + tile.split * size + i * 128, total[i / count][i % count]);
    ptx::named_barrier_sync(4 + warpgroup, 128);
    if (thread == 0) {
        __threadfence();  // for all that met at the barrier
        *last = atomicAdd(arrived + which, 1) == config::split_k - 1;
        if (*last) arrived[which] = 0;
        __threadfence();
    }
    ptx::named_barrier_sync(4 + warpgroup, 128);
    if (!*last) return false;
#pragma unroll
    for (int i = 0; i < waves * count; ++i) {  // all are asked for as early as there are registers for them
        float sum = __ldcg(mine + i * 128);
#pragma unroll
        for (int split = 1; split < config::split_k; ++split) sum = __fadd_rn(sum, __ldcg(mine + split * size + i * 128));
        total[i / count][i % count] = sum;
    }
    return true;
}
