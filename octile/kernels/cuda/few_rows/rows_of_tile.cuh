// A lane's two rows in a tile of 16 rows of an FP8 weight in 128×128 blocks, of which each warp has every 8th k-block.
#pragma once
#include "fp8_rows.cuh"

struct RowsOfTile {
    static constexpr int blocks = (k_blocks + warps - 1) / warps;  // k-blocks of a warp: warp, warp + 8, …
    static constexpr int depth = blocks < config::depth ? blocks : config::depth;  // loaded ahead
    const Lane& lane;
    const uint8_t *top, *bottom;  // the lane's bytes of its two rows
    const float* scales;          // of the blocks of these rows

    // weight: [n, K], scales: [⌈n/128⌉, ⌈K/128⌉]. Rows from n on are not read.
    __device__ __forceinline__ RowsOfTile(const Lane& lane, const uint8_t* weight, const float* scales, int first, int n)
        : lane(lane),
          top(weight + static_cast<int64_t>(min(first + lane.group, n - 1)) * config::k),
          bottom(weight + static_cast<int64_t>(min(first + lane.group + 8, n - 1)) * config::k),
          scales(scales + static_cast<int64_t>(min(first, n - 1) / 128) * k_blocks) {}

    __device__ __forceinline__ static int block_of(int i) { return threadIdx.x / 32 + i * warps; }
};
