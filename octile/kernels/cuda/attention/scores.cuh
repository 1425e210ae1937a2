// Products of 64 rows and 64 keys, over the channels of a part.
#pragma once
#include "tiles.cuh"
#include "wgmma.cuh"

// Begins to add them to s, or to overwrite it. a, b: descriptors of the rows' and the keys' first tiles.
__device__ __forceinline__ void multiply_part(float (&s)[32], uint64_t a, uint64_t b, Part part, bool accumulate) {
    const int first = 4 * part, count = part == rotary_part ? 1 : 4;
    ptx::wgmma_fence();
#pragma unroll
    for (int t = first; t < first + count; ++t)
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::wgmma(s, a + t * (tile / 16) + 2 * k, b + t * (tile / 16) + 2 * k, accumulate || t > first || k > 0);
}
