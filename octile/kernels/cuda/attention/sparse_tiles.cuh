// Rows of top-k positions in BF16, gathered a tile of 64 keys at a time, by a producer warpgroup.
//
// They are copied as in sparse_rows.cuh; there is one tile, whose parts are gathered again as soon as they are released.
#pragma once
#include "lists.cuh"
#include "scores.cuh"

constexpr int row_bytes = 2 * width;

struct TileBarriers {
    ptx::Mbarrier full[parts], empty[parts];
    ptx::Mbarrier listed;  // the bits of a tile's valid keys are there

    __device__ __forceinline__ void init(int latent_warps, int rotary_warps) {
        for (int part = 0; part < parts; ++part) {
            full[part].init(producer_threads);
            empty[part].init(part == rotary_part ? rotary_warps : latent_warps);
        }
        listed.init(2);
        ptx::fence_mbarrier_init();
    }
};

// The queries of a thread block in turn, and the tiles of each.
struct Units {
    const int count, head_blocks, heads_of_block;
    const Lists& lists;

    __device__ __forceinline__ int row(int unit) const { return unit / head_blocks; }
    __device__ __forceinline__ int first_head(int unit) const { return unit % head_blocks * heads_of_block; }
    __device__ __forceinline__ int n_tiles(int unit) const {
        return 2 * lists.trimmed(row(unit), 0, (lists.k + step_keys - 1) / step_keys);
    }
};

// The producer warpgroup.
struct TileProducer {
    uint8_t* const keys;     // a tile of 64 rows
    int* const slots;        // [2][64]
    uint32_t* const valid;   // [2][2]
    TileBarriers& barriers;
    const uint8_t* const latents;
    const Units& units;
    int unit = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), tile_of_unit = 0, n_tiles = 0;
    uint32_t parity = 1;  // of the tile, which is empty at first

    __device__ __forceinline__ static int thread() { return threadIdx.x % producer_threads; }

    __device__ __forceinline__ bool next() {
        if (unit >= units.count) return false;
        ++tile_of_unit;
        while (tile_of_unit >= n_tiles) {
            unit += gridDim.x;
            if (unit >= units.count) return false;
            n_tiles = units.n_tiles(unit);
            tile_of_unit = 0;
        }
        return true;
    }
    __device__ __forceinline__ int load() const {
        return units.lists.load(units.row(unit), tile_of_unit * tile_keys + thread() % tile_keys);
    }

    __device__ __forceinline__ void copy(const int* tile_slots, Part part) {
        const int own = ptx::opaque(thread()), group = own / 8, column = own % 8;
        const int first = part * 4, count = part == rotary_part ? 1 : 4;
        uint8_t* to = swizzled(keys + first * tile, group, 16 * column);
        barriers.empty[part].wait(parity);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int slot = tile_slots[group + 16 * i];
            const uint8_t* from = latents + static_cast<int64_t>(max(slot, 0)) * row_bytes + 128 * first + 16 * column;
#pragma unroll
            for (int t = 0; t < count; ++t)
                ptx::cp_async_16(to + t * tile + 16 * i * 128, from + 128 * t, slot >= 0);
        }
        barriers.full[part].arrive_after_copies();
    }

    __device__ __forceinline__ void run() {
        bool exists = next();
        int slot = exists ? load() : -1;
        for (int step = 0; exists; ++step) {
            int* tile_slots = slots + step % 2 * tile_keys;
            if (thread() < tile_keys) tile_slots[thread()] = slot;
            const uint32_t bits = __ballot_sync(all_lanes, slot >= 0);
            exists = next();
            if (exists) slot = load();
            ptx::named_barrier_sync(7, producer_threads);
            copy(tile_slots, left);
            if (thread() < tile_keys && ptx::lane_id() == 0) {  // the bits of the tile before have been read
                valid[step % 2 * 2 + thread() / 32] = bits;
                barriers.listed.arrive();
            }
            __syncwarp();
            copy(tile_slots, right);
            copy(tile_slots, rotary_part);
            parity ^= 1;
        }
    }
};
