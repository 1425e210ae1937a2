// The copying warp: it brings a team's tiles into the ring, with the scales of rows, and those of 128×128 blocks.
//
// NOTES
// - The copy engine takes any coordinates: a tile begins at its group's own first row, and what it loads of the next
//   group is harmless. Along K it is not: what is not summed there is zeroed in shared memory.
// - Small tiles wait for this warp, whose step is one chain from a stage's release to its next request. So a step does
//   nothing but wait and ask: scales are written 32 steps at a time, the lane that asks is chosen once, by elect.sync,
//   after which the compiler asks without a loop over lanes, and addresses stay in the registers that a warp shares.
//   That loop is not unrolled: its code has to come from memory first. Scales of rows on both sides gained nothing
//   by it, and long sums of grouped weight gradients lost 1 to 2%: they keep a plain loop, unrolled.
#pragma once
#include "pipeline.cuh"

struct Maps {
    const TensorMap *a, *b, *a_scale, *b_scale;
};

// The scales of 128×128 blocks of one operand, with the strides of a group, of a row and of a column of blocks.
struct Blocks {
    const float* scale;
    int64_t group, row, column;
};

// Starts the copy of a box. What the cluster shares, its first block brings for both.
template <bool shared>
__device__ __forceinline__ void load(uint8_t* to, const TensorMap* map, ptx::Mbarrier* full, int x, int y, int z) {
    if constexpr (!shared) ptx::tma_load(to, map, full, x, y, z);
    else if (block_rank() == 0) ptx::tma_load_multicast(to, map, full, x, y, z, 0b11);
}

// Brings a team's tiles: one warp, of which one thread starts the copies. The scales of blocks all its lanes read and
// write, 32 steps at a time, into places that go around as the stages do; a tile's next 32 they read meanwhile.
__device__ __forceinline__ void load_tiles(
    uint8_t* shared, const Maps& maps, const Blocks& blocks, const Sizes& sizes, const Groups& groups, int team) {
    constexpr bool share_a = config::cluster_n > 1, share_b = config::cluster_m > 1;
    Ring ring(shared, team);
    Scheduler scheduler(sizes, groups, team, teams);
    Tile tile;
    float4* block_scales = reinterpret_cast<float4*>(shared + memory::block_scale) + team * memory::places;
    const bool chosen = one_is_block && ptx::elect_one();
    int unused = config::stages;  // stages that nothing was copied to yet, where that matters: see `ahead`

    while (scheduler.take(tile)) {
        const int a_group = config::schedule == masked ? tile.group : 0, b_group = rows_grouped ? tile.group : 0;
        const int steps = count_steps(tile);

        auto load_step = [&](int step, int stage) {
            const int k_step = first_step(tile) + step, k = k_step * 128;
            ptx::Mbarrier* full = ring.full + stage;
            uint8_t* a = shared + memory::a + stage * memory::a_tile;
            uint8_t* b = shared + memory::b + stage * memory::b_tile;
            uint8_t* a_scale = shared + memory::a_scale + stage * memory::a_scales;
            uint8_t* b_scale = shared + memory::b_scale + stage * memory::b_scales;
            load<share_a>(a, maps.a, full, k, tile.m, a_group);
            if constexpr (a_rows) load<share_a>(a_scale, maps.a_scale, full, tile.m, k_step, a_group);
            load<share_b>(b, maps.b, full, k, tile.n, b_group);
            if constexpr (b_rows) load<share_b>(b_scale, maps.b_scale, full, tile.n, k_step, b_group);
        };

        if constexpr (!one_is_block) {
#pragma unroll (a_rows ? 2 : 4)
            for (int step = 0; step < steps; ++step, ring.advance()) {
                ring.empty[ring.stage].wait(ring.parity ^ 1);
                if (ptx::lane_id() == 0) load_step(step, ring.stage);
                __syncwarp();
                if (ptx::lane_id() == 0) ring.full[ring.stage].arrive_expect_tx(memory::stage_bytes);
            }
        } else {
            // two rows of blocks: those of the two warpgroups' rows, or those that a tile's columns reach
            constexpr bool a_blocks = config::a_scales == per_block;
            constexpr bool second = a_blocks ? team_warpgroups > 1 : two_blocks;
            const int first_block = (a_blocks ? tile.m : tile.n) / 128;
            const int second_block = a_blocks ? (tile.m + 64 * waves) / 128 : first_block + 1;
            const int last_block = ceil_div(a_blocks ? sizes.m : sizes.n, 128) - 1;
            const float* scale = blocks.scale + (rows_grouped ? tile.group : 0) * blocks.group;
            const float* second_scale = scale + min(second_block, last_block) * blocks.row;
            scale += min(first_block, last_block) * blocks.row;
            auto read_block_scales = [&](int step) {  // of this lane's step, counted from the given one
                step += ptx::lane_id();
                float2 scales{};
                if (step >= steps) return scales;
                scales.x = __ldg(scale + (first_step(tile) + step) * blocks.column);
                if constexpr (second) scales.y = __ldg(second_scale + (first_step(tile) + step) * blocks.column);
                return scales;
            };

            float2 later = read_block_scales(0);
            auto write_block_scales = [&](int step) {  // of the next 32 steps, and asks for those of the 32 after
                const uint32_t own = (ring.place / 16 + ptx::lane_id()) % memory::places;
                block_scales[own] = make_float4(later.x, later.x, later.y, later.y);
                later = read_block_scales(step + 32);
                __syncwarp();
            };

            const int ahead = min(steps, unused);  // asked for before the first scales are waited for
            unused -= ahead;
#pragma unroll 1
            for (int step = 0; step < ahead; ++step)
                if (chosen) load_step(step, ring.stage + step);
            write_block_scales(0);
            int step = 0;
#pragma unroll 1
            for (; step < ahead; ++step, ring.advance())
                if (chosen) ring.full[ring.stage].arrive_expect_tx(memory::stage_bytes);
#pragma unroll 1
            for (; step < steps; ++step, ring.advance()) {
                if (step % 32 == 0 && step > 0) write_block_scales(step);
                ring.empty[ring.stage].wait(ring.parity ^ 1);
                __syncwarp();  // a lane that waited on would not see the end of this phase, once the next has ended
                if (chosen) {
                    load_step(step, ring.stage);
                    ring.full[ring.stage].arrive_expect_tx(memory::stage_bytes);
                }
            }
        }
    }
}
