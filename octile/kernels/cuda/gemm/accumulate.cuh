// Adding to a result in memory: 64 rows of a tile are fetched to shared memory while their sums are still being made, the
// sums are added there, and they go back from there.
//
// NOTES
// - The copy engine can also add FP32 numbers in the L2 cache by itself (epilogue.cuh), but not as fast as memory is read
//   and written: 4096×32768×512 takes 335 µs instead of 460. Where sums are longer the L2 cache keeps up, and what passes
//   through the multiprocessors would only slow them: 5 to 18% at K = 1536 and more.
// - To BF16 only threads can add. Where they read memory themselves the products wait: 8192×4096×4096 takes 340 µs
//   instead of 220, and 203 where it is stored.
// - A warp of the copying warpgroup serves each warpgroup that multiplies, and waits in its stead: for memory, and until
//   the copy engine has read what it stores. A lane serves a piece.
#pragma once
#include "epilogue.cuh"

// What the two sides tell each other: the rows are there; their sums are added.
struct Fetches {
    ptx::Mbarrier *there, *added;
    uint32_t parity = 0;  // of the 64 rows that are next

    __device__ __forceinline__ Fetches(uint8_t* shared, int warpgroup) {
        there = reinterpret_cast<ptx::Mbarrier*>(shared + memory::fetches) + 2 * warpgroup;
        added = there + 1;
    }
};

__device__ __forceinline__ void init_fetches(uint8_t* shared) {
    for (int warpgroup = 0; warpgroup < config::warpgroups; ++warpgroup) {
        const Fetches fetches(shared, warpgroup);
        fetches.there->init(1);
        fetches.added->init(4);
    }
}

__device__ __forceinline__ uint8_t* staging_of(uint8_t* shared, int warpgroup) {
    return shared + memory::staging + warpgroup * config::staged_boxes * store_box_bytes;
}

// Whether a warpgroup, whose rows of a tile begin with first_row, has anything to add there.
__device__ __forceinline__ bool adds(const Tile& tile, int first_row, int columns) {
    return count_steps(tile) > 0 && !lies_outside(tile, first_row, columns);
}

// Fetches and stores for one warpgroup: one warp. first_row: of the warpgroup in a tile.
__device__ __forceinline__ void exchange(
    uint8_t* shared, const TensorMap* map, const Sizes& sizes, const Groups& groups, int team, int warpgroup,
    int first_row) {
    Fetches fetches(shared, warpgroup);
    Scheduler scheduler(sizes, groups, team, teams);
    Tile tile;
    const int lane = ptx::lane_id();
    const bool serves = lane < config::staged_boxes;
    uint8_t* piece = staging_of(shared, warpgroup) + lane * store_box_bytes;
    int n = -1, m = 0, group = 0;  // where the piece lies that is in shared memory
    auto store = [&] {
        if (n < 0) return;  // none, yet
        fetches.added->wait(fetches.parity);
        fetches.parity ^= 1;
        if (serves) ptx::tma_store(map, piece, n, m, group);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
        __syncwarp();
    };

    while (scheduler.take(tile)) {
        if (!adds(tile, first_row, sizes.n)) continue;
        for (int wave = 0; wave < waves; ++wave) {
            store();
            n = tile.n + lane * store_columns, m = tile.m + first_row + wave * 64, group = tile.group;
            if (lane == 0) fetches.there->arrive_expect_tx(config::staged_boxes * store_box_bytes);
            if (serves) ptx::tma_load(piece, map, fetches.there, n, m, group);
        }
    }
    store();
}

// Adds the sums of 64 rows, of a whole warpgroup.
__device__ __forceinline__ void add_fetched(const float (&total)[count], uint8_t* staging, Fetches& fetches) {
    fetches.there->wait(fetches.parity);
    fetches.parity ^= 1;
#pragma unroll
    for (int i = 0; i < config::staged_boxes; ++i)
        stage_piece(total, i * store_columns / 8, staging + i * store_box_bytes, true);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::lane_id() == 0) fetches.added->arrive();
}
