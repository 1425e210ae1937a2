// The accumulate epilogue that loads C: a producer warp loads 64 rows of C to shared memory during the main loop, the
// consumers add to them there, and the producer warp stores them.
//
// NOTES
// - TMA can also add FP32 numbers in the L2 cache (store.cuh), but slower than memory is read and written:
//   4096×32768×512 takes 335 µs with this epilogue instead of 460. With longer sums the L2 cache keeps up, and loading
//   C to the SMs costs 5 to 18% at K of 1536 and more.
// - Only threads can add to BF16. Where consumers read memory themselves, their next wgmma waits: 8192×4096×4096 takes
//   340 µs, 220 with this epilogue, and 203 without accumulation.
// - One warp of the producer warpgroup serves each consumer warpgroup and waits in its place: for memory, and until TMA
//   has read what it stores. A lane serves a store box.
#pragma once
#include "store.cuh"

// Mbarriers between a consumer warpgroup and its warp of the producer: C is loaded; the totals are added.
struct CBarriers {
    ptx::Mbarrier *loaded, *added;
    uint32_t parity = 0;  // of the next 64 rows

    __device__ __forceinline__ CBarriers(uint8_t* shared, int warpgroup) {
        loaded = reinterpret_cast<ptx::Mbarrier*>(shared + smem::c_barriers) + 2 * warpgroup;
        added = loaded + 1;
    }
};

__device__ __forceinline__ void init_c_barriers(uint8_t* shared) {
    for (int warpgroup = 0; warpgroup < config::warpgroups; ++warpgroup) {
        const CBarriers barriers(shared, warpgroup);
        barriers.loaded->init(1);
        barriers.added->init(4);
    }
}

// The buffers of a warpgroup's store boxes.
__device__ __forceinline__ uint8_t* staging_of(uint8_t* shared, int warpgroup) {
    return shared + smem::staging + warpgroup * config::staged_boxes * store_box_bytes;
}

// Whether a warpgroup, whose rows of a tile begin at first_row, adds anything to C.
__device__ __forceinline__ bool adds_to_c(const Tile& tile, int first_row, int columns) {
    return count_k_blocks(tile) > 0 && !is_outside(tile, first_row, columns);
}

// Loads and stores C for one consumer warpgroup, whose rows of a tile begin at first_row. Called by one warp.
__device__ __forceinline__ void load_and_store_c(
    uint8_t* shared, const TensorMap* map, const ProblemSize& size, const Groups& groups, int pipeline, int warpgroup,
    int first_row) {
    CBarriers barriers(shared, warpgroup);
    TileScheduler scheduler(size, groups, pipeline, pipelines);
    Tile tile;
    const int lane = ptx::lane_id();
    const bool has_box = lane < config::staged_boxes;
    uint8_t* box = staging_of(shared, warpgroup) + lane * store_box_bytes;
    int n = -1, m = 0, group = 0;  // of the box in shared memory; none while n is −1
    auto store = [&] {
        if (n < 0) return;
        barriers.added->wait(barriers.parity);
        barriers.parity ^= 1;
        if (has_box) ptx::tma_store(map, box, n, m, group);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
        __syncwarp();
    };

    while (scheduler.next_tile(tile)) {
        if (!adds_to_c(tile, first_row, size.n)) continue;
        for (int wave = 0; wave < waves; ++wave) {
            store();
            n = tile.n + lane * store_columns, m = tile.m + first_row + wave * 64, group = tile.group;
            if (lane == 0) barriers.loaded->arrive_expect_tx(config::staged_boxes * store_box_bytes);
            if (has_box) ptx::tma_load(box, map, barriers.loaded, n, m, group);
        }
    }
    store();
}

// Adds a wave to C in shared memory. Called by a whole warpgroup.
__device__ __forceinline__ void add_to_c(const float (&total)[num_accum], uint8_t* staging, CBarriers& barriers) {
    barriers.loaded->wait(barriers.parity);
    barriers.parity ^= 1;
#pragma unroll
    for (int i = 0; i < config::staged_boxes; ++i)
        stage_box(total, i * store_columns / 8, staging + i * store_box_bytes);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::lane_id() == 0) barriers.added->arrive();
}
