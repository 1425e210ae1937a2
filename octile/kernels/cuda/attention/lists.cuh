// The lists of positions of sparse attention, a row of them for each query.
#pragma once
#include "tiles.cuh"

constexpr int step_keys = 2 * tile_keys, page_rows = 64, producer_threads = 128;

// Which of a tile's keys are valid, for a thread whose scores [4j + 2h + i] are those of the keys 8j + 2·(lane%4) + i.
struct ValidKeys {
    uint32_t bits[2];

    __device__ __forceinline__ ValidKeys(uint2 tile_bits, int lane)
        : bits{tile_bits.x >> 2 * (lane % 4), tile_bits.y >> 2 * (lane % 4)} {}
    __device__ __forceinline__ bool has(int score) const { return bits[score / 16] >> (8 * (score / 4 % 4) + score % 2) & 1; }
};

struct Lists {
    const int *positions, *pages;
    int k, position_step, page_step;  // entries of a list; elements between those of two rows
    int n_positions, n_pages;         // positions of a text; pages of the cache

    // An entry as it is, which need not be a position: who asks `has` later waits later.
    __device__ __forceinline__ int load_entry(int row, int entry) const {
        return entry < k ? __ldg(positions + static_cast<int64_t>(row) * position_step + entry) : -1;
    }
    __device__ __forceinline__ bool has(int position) const {
        return static_cast<uint32_t>(position) < static_cast<uint32_t>(n_positions);
    }
    __device__ __forceinline__ int load(int row, int entry) const {
        const int position = load_entry(row, entry);
        return position < n_positions ? position : -1;
    }
    __device__ __forceinline__ int load_page(int row, int position) const {
        return position < 0 ? -1 : __ldg(pages + static_cast<int64_t>(row) * page_step + position / page_rows);
    }

    // The steps up to the last one that has a position, of `n` from `first`. All lanes of a warp compute the same.
    __device__ __forceinline__ int trimmed(int row, int first, int n) const {
        constexpr int at_once = config::fp8 ? 1 : 4;  // steps whose entries are loaded together
        while (n > 0) {
            int found = 0;
            int position[4 * at_once];
            const int start = max(n - at_once, 0);
#pragma unroll
            for (int i = 0; i < 4 * at_once; ++i)
                position[i] = load(row, (first + start) * step_keys + 32 * i + static_cast<int>(ptx::lane_id()));
#pragma unroll
            for (int i = 0; i < 4 * at_once; ++i)
                if (position[i] >= 0 && start + i / 4 < n) found = start + i / 4 + 1;
            found = __reduce_max_sync(all_lanes, found);
            if (found > 0) return found;
            n = start;
        }
        return 0;
    }
};
