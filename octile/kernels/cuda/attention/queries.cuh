// The queries of a thread block's 64 heads, as producers copy them to shared memory.
#pragma once
#include "tiles.cuh"

// Producers copy them while the consumers still multiply the weights of the item before.
struct Queries {
    const uint16_t* const q;
    const int n_heads, first_head;
    uint8_t* const to;

    // By `threads` threads, of which this one is `thread`: `count` of the nine tiles, from `first` on.
    template <int threads, int first, int count>
    __device__ __forceinline__ void copy(int row, int thread) const {
        const int own = ptx::opaque(thread), head = own / 8, column = own % 8;
        const uint16_t* const from =
            q + (static_cast<int64_t>(row) * n_heads + first_head + head) * width + first * 64 + column * 8;
#pragma unroll 1
        for (int i = 0; i < heads * 8 / threads; ++i) {
            const bool exists = first_head + head + i * (threads / 8) < n_heads;
            const uint16_t* const of_head = exists ? from + i * (threads / 8) * width : q;
            uint8_t* const of_tile = swizzled(to + first * tile, head + i * (threads / 8), 16 * column);
#pragma unroll
            for (int t = 0; t < count; ++t)
                ptx::cp_async_16(of_tile + t * tile, of_head + 64 * t, exists);
        }
    }
};
