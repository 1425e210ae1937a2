// The producer warp: it loads the tiles of a pipeline and their scales into shared memory.
//
// NOTES
// - TMA takes any coordinates: a tile begins at its group's first row, and rows that it loads of the next group do no
//   harm. Along K they do: the consumers set to zero what is not summed.
// - Small tiles wait for this warp, whose loop is one chain from the release of a stage to its next load. So an
//   iteration only waits and loads: 128×128 scales are written for 32 k-blocks at a time, the loading lane is elected
//   once, by elect.sync, after which the compiler needs no loop over lanes, and addresses stay in uniform registers.
//   The loop is not unrolled, since its code is first read from memory. Kernels with 1×128 scales for both operands
//   gained nothing by this, and long sums of grouped weight gradients lost 1 to 2%: they keep a plain loop, unrolled.
// - The L2 cache reads from memory what it adds to. With `prefetch_c` the producer requests that before: 9 to 17% less
//   time for weight gradients of 1,000 to 2,500 tokens. Requested with a tile's first k-blocks, it delays the operands
//   (benchmarks/history/gemm-accumulate).
#pragma once
#include "pipeline.cuh"

// Weights, the operand with 128×128 scales, are loaded before the previous kernel has ended, which must not write them,
// nor the offsets of their groups.
constexpr bool loads_weights_early = config::programmatic && has_block_scales &&
    (config::schedule == dense || (config::schedule == grouped && config::early_groups));

struct TensorMaps {
    const TensorMap *a, *b, *a_scale, *b_scale, *out;
};

// Loads C's part of a tile to the L2 cache, a store box a lane, while the tile's last k-blocks are loaded. Where there are
// too few k-blocks, the first boxes are left out. Called by a whole warp for each k-block.
__device__ __forceinline__ void prefetch_c(const TensorMap* map, const Tile& tile, int k_block, int k_blocks) {
    constexpr int boxes_along_n = config::tile_n / store_columns, boxes = config::tile_m / 64 * boxes_along_n;
    constexpr int lanes = 4, steps = ceil_div(boxes, lanes);
    const int box = (k_block - k_blocks + steps) * lanes + static_cast<int>(ptx::lane_id());
    if (ptx::lane_id() >= lanes || box < 0 || box >= boxes) return;
    const int n = tile.n + box % boxes_along_n * store_columns, m = tile.m + box / boxes_along_n * 64;
    ptx::tma_prefetch(map, n, m, output_group(tile));
}

// The 128×128 scales of one operand, with the strides of a group, of a row of blocks and of a column of blocks.
struct BlockScales {
    const float* scale;
    int64_t group, row, column;
};

// Loads a box. A box that the cluster shares is loaded by its first thread block for both.
template <bool shared>
__device__ __forceinline__ void load_box(
    uint8_t* to, const TensorMap* map, ptx::Mbarrier* full, int x, int y, int z) {
    if constexpr (!shared) ptx::tma_load(to, map, full, x, y, z);
    else if (block_rank_in_cluster() == 0) ptx::tma_load_multicast(to, map, full, x, y, z, 0b11);
}

// Loads all tiles of a pipeline. One lane issues the TMA loads, four prefetch C. All lanes read and write the 128×128
// scales: those of 32 k-blocks at a time, into slots that are reused like stages, while the tile's next 32 are being read.
__device__ __forceinline__ void run_producer(
    uint8_t* shared, const TensorMaps& maps, const BlockScales& blocks, const ProblemSize& size, const Groups& groups,
    int pipeline_index) {
    constexpr bool share_a = config::cluster_n > 1, share_b = config::cluster_m > 1;
    Pipeline pipeline(shared, pipeline_index);
    TileScheduler scheduler(size, groups, pipeline_index, pipelines);
    Tile tile;
    float4* block_scales = reinterpret_cast<float4*>(shared + smem::block_scale) + pipeline_index * smem::scale_slots;
    const bool elected = has_block_scales && ptx::elect_one();
    int unused = config::stages;  // stages that were not loaded yet, which need no acquire
    bool is_first = loads_weights_early, synced = !finds_tile_early;
    auto sync_once = [&] {
        if (synced) return;
        __syncwarp();  // lanes that have no scales to read may be ahead
        ptx::named_barrier_sync(init_barrier + pipeline_index, 64);
        synced = true;
    };

    auto pass_tile = [&](const PassedTile& passed) {  // before its first stage is committed: it has a k-block
        if constexpr (!config::passes_tiles) return;
        pipeline.producer_acquire();
        __syncwarp();
        if (ptx::lane_id() == 0) passed_tile(shared, pipeline.stage) = passed;
        __syncwarp();
    };

    while (scheduler.next_tile(tile)) {
        const int a_group = config::schedule == masked ? tile.group : 0, b_group = m_grouped ? tile.group : 0;
        const int k_blocks = count_k_blocks(tile);

        auto load_k_block = [&](int k_block, int stage, bool loads_a = true, bool loads_b = true) {
            const int at = first_k_block(tile) + k_block, k = at * 128;
            ptx::Mbarrier* full = pipeline.full + stage;
            uint8_t* a = shared + smem::a + stage * smem::a_tile;
            uint8_t* b = shared + smem::b + stage * smem::b_tile;
            uint8_t* a_scale = shared + smem::a_scale + stage * smem::a_scales;
            uint8_t* b_scale = shared + smem::b_scale + stage * smem::b_scales;
            if (loads_a) load_box<share_a>(a, maps.a, full, k, tile.m, a_group);
            if (a_row_scales && loads_a) load_box<share_a>(a_scale, maps.a_scale, full, tile.m, at, a_group);
            if (loads_b) load_box<share_b>(b, maps.b, full, k, tile.n, b_group);
            if (b_row_scales && loads_b) load_box<share_b>(b_scale, maps.b_scale, full, tile.n, at, b_group);
        };

        if constexpr (!has_block_scales) {
            sync_once();
#pragma unroll (a_row_scales ? 2 : 4)
            for (int k_block = 0; k_block < k_blocks; ++k_block, pipeline.advance()) {
                pipeline.producer_acquire();
                if (ptx::lane_id() == 0) load_k_block(k_block, pipeline.stage);
                __syncwarp();
                if (ptx::lane_id() == 0) pipeline.producer_commit();
                if constexpr (config::prefetch_c) prefetch_c(maps.out, tile, k_block, k_blocks);
            }
        } else {
            // two rows of blocks: those of the rows of two warpgroups, or those that the tile's columns reach
            constexpr bool a_blocks = config::a_scales == per_block;
            constexpr bool two_rows = a_blocks ? warpgroups_per_tile > 1 : two_b_blocks;
            const int first_block = (a_blocks ? tile.m : tile.n) / 128;
            const int second_block = a_blocks ? (tile.m + 64 * waves) / 128 : first_block + 1;
            const int last_block = ceil_div(a_blocks ? size.m : size.n, 128) - 1;
            const float* scale = blocks.scale + (m_grouped ? tile.group : 0) * blocks.group;
            const float* second_scale = scale + min(second_block, last_block) * blocks.row;
            scale += min(first_block, last_block) * blocks.row;
            auto read_block_scales = [&](int k_block) {  // each lane those of one k-block, from the given one on
                k_block += ptx::lane_id();
                float2 scales{};
                if (k_block >= k_blocks) return scales;
                scales.x = ptx::load_in_order(scale + (first_k_block(tile) + k_block) * blocks.column);
                if constexpr (two_rows)
                    scales.y = ptx::load_in_order(second_scale + (first_k_block(tile) + k_block) * blocks.column);
                return scales;
            };

            float2 next_scales = read_block_scales(0);
            sync_once();
            auto write_block_scales = [&](int k_block) {  // of the next batch, and reads those of the one after
                const uint32_t slot = (pipeline.scale_slot / 16 + ptx::lane_id()) % smem::scale_slots;
                block_scales[slot] = make_float4(next_scales.x, next_scales.x, next_scales.y, next_scales.y);
                next_scales = read_block_scales(k_block + smem::scale_batch);
                __syncwarp();
            };

            const int ahead = min(k_blocks, unused);  // loaded before the first scales arrive
            unused -= ahead;
            if (is_first) {
#pragma unroll 1
                for (int k_block = 0; k_block < ahead; ++k_block)
                    if (elected) load_k_block(k_block, pipeline.stage + k_block, a_blocks, !a_blocks);
                ptx::wait_and_launch_dependents();
#pragma unroll 1
                for (int k_block = 0; k_block < ahead; ++k_block)
                    if (elected) load_k_block(k_block, pipeline.stage + k_block, !a_blocks, a_blocks);
                is_first = false;
            } else {
#pragma unroll 1
                for (int k_block = 0; k_block < ahead; ++k_block)
                    if (elected) load_k_block(k_block, pipeline.stage + k_block);
            }
            write_block_scales(0);
            pass_tile({tile.m, tile.n, tile.group, tile.m_end});
            int k_block = 0;
#pragma unroll 1
            for (; k_block < ahead; ++k_block, pipeline.advance())
                if (elected) pipeline.producer_commit();
#pragma unroll 1
            for (; k_block < k_blocks; ++k_block, pipeline.advance()) {
                if (k_block % smem::scale_batch == 0 && k_block > 0) write_block_scales(k_block);
                pipeline.producer_acquire();
                __syncwarp();  // a lane that waits longer might miss the end of this phase, once the next one has ended
                if (elected) {
                    load_k_block(k_block, pipeline.stage);
                    pipeline.producer_commit();
                }
            }
        }
    }
    sync_once();  // these two where there was no tile
    if (is_first) ptx::wait_and_launch_dependents();
    pass_tile({-1});
    if (config::passes_tiles && ptx::lane_id() == 0) pipeline.full[pipeline.stage].arrive();
}
