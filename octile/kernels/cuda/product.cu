// a[M, K] · b[N, K]ᵀ of 8-bit floats with scales, for Hopper: dense, and for a mixture of experts.
//
// One warpgroup has the copy engine bring tiles, 128 bytes along K at a time, into a ring of stages in shared memory;
// the others multiply them on the tensor cores and add each step's sums, times their scales, in FP32.
//
//   scheduler   which tile comes next, dense or grouped
//   memory      what lies where in shared memory, and the ring
//   promotion   the scales of a step, and the FP32 sum
//   split       parts of a sum over K, added in their order
//   epilogue    rounding and storing
//
// NOTES
// - Warpgroups share the stages of a tile but nothing else: each waits, multiplies, adds and stores by itself. While
//   one adds on the CUDA cores, the tensor cores multiply for the other. With `ping_pong` each has its own tile and
//   stages, so that one's epilogue, too, lies under the other's products. With two `accumulators` a warpgroup starts
//   its next step before it adds the last.
// - A step under way at the end of a loop's body would make the compiler run all products one after the other. So two
//   accumulators take the steps in pairs, and every second addition waits.
// - The scales of rows come with the stage, those of 128×128 blocks through registers.
// - The copy engine takes any coordinates: a tile begins at its group's own first row, and what it loads of the next
//   group is harmless. Along K it is not: what is not summed there is zeroed in shared memory.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "scheduler.cuh"
#include "memory.cuh"
#include "promotion.cuh"
#include "split.cuh"
#include "epilogue.cuh"

struct Maps {
    const TensorMap *a, *b, *a_scale, *b_scale;
};

// Brings a team's tiles: one warp, of which one thread waits for room and starts the copies.
__device__ __forceinline__ void load_tiles(
    uint8_t* shared, const Maps& maps, const Sizes& sizes, const Groups& groups, int team) {
    Ring ring(shared, team);
    Scheduler scheduler(sizes, groups, team, teams);
    Tile tile;
    const int rank = config::cluster > 1 ? ptx::cluster_rank() : 0;
    constexpr uint16_t all = (1 << config::cluster) - 1;

    while (scheduler.take(tile)) {
        const int a_group = config::schedule == masked ? tile.group : 0, b_group = rows_grouped ? tile.group : 0;
        const int steps = count_steps(tile);
        for (int step = 0; step < steps; ++step, ring.advance()) {
            const int stage = ring.stage, k_step = first_step(tile) + step, k = k_step * 128;
            ptx::Barrier* full = ring.full + stage;
            if (ptx::lane() != 0) continue;
            ring.empty[stage].wait(ring.parity ^ 1);
            full->arrive_and_expect(memory::stage_bytes);

            // of an operand that the cluster shares, each block brings its part to all
            uint8_t* a = shared + memory::a + stage * memory::a_tile;
            uint8_t* b = shared + memory::b + stage * memory::b_tile;
            if constexpr (multicast_a) {
                constexpr int rows = config::tile_m / config::cluster;
                ptx::load_3d_multicast(a + rank * rows * 128, maps.a, full, k, tile.m + rank * rows, a_group, all);
            } else {
                ptx::load_3d(a, maps.a, full, k, tile.m, a_group);
            }
            if constexpr (multicast_b) {
                constexpr int rows = config::tile_n / config::cluster;
                ptx::load_3d_multicast(b + rank * rows * 128, maps.b, full, k, tile.n + rank * rows, b_group, all);
            } else {
                ptx::load_3d(b, maps.b, full, k, tile.n, b_group);
            }
            uint8_t* a_scale = shared + memory::a_scale + stage * memory::a_scales;
            uint8_t* b_scale = shared + memory::b_scale + stage * memory::b_scales;
            if constexpr (a_rows) ptx::load_3d(a_scale, maps.a_scale, full, tile.m, k_step, a_group);
            if constexpr (b_rows) ptx::load_3d(b_scale, maps.b_scale, full, tile.n, k_step, b_group);
        }
    }
}

// The descriptor of a tile that lies 16·offset bytes further on. Its upper half stays the constant that it is.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t offset) {
    return descriptor & ~0xFFFFFFFFull | static_cast<uint32_t>(descriptor) + offset;
}

extern "C" __global__ void __launch_bounds__(128 * (config::warpgroups + 1), 1) product(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap a_scale_map, const __grid_constant__ TensorMap b_scale_map,
    const __grid_constant__ TensorMap out_map,
    const float* a_scale, const float* b_scale, int64_t scale_group, int64_t scale_row, int64_t scale_column,
    void* out_data, int64_t out_group_stride, int64_t out_row_stride, int64_t out_column_stride,
    float* parts, int* arrived, const int* groups_end, int m, int n, int k, int group_count) {
    uint8_t* shared = ptx::dynamic_shared();
    Groups& groups = *reinterpret_cast<Groups*>(shared + memory::groups);
    const Sizes sizes{m, n, k, group_count, groups_end};
    const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4;

    // ---- Before the first tile ----
    if (warp == 0 && ptx::lane() == 0) {
        init_barriers(shared);
        ptx::prefetch_map(&a_map);
        ptx::prefetch_map(&b_map);
        if (a_rows) ptx::prefetch_map(&a_scale_map);
        if (b_rows) ptx::prefetch_map(&b_scale_map);
        if (config::store == tma) ptx::prefetch_map(&out_map);
    }
    if (config::schedule != dense && warp == 1) list_groups(groups, sizes);
    if constexpr (config::cluster > 1) ptx::cluster_sync();
    else __syncthreads();

    if (warpgroup == config::warpgroups) {
        // ---- Copies ----
        if constexpr (config::warpgroups > 1) ptx::give_registers<config::copy_registers>();
        const int team = warp % 4;
        if (team < teams) load_tiles(shared, {&a_map, &b_map, &a_scale_map, &b_scale_map}, sizes, groups, team);
        __syncwarp();
    } else {
        // ---- Products ----
        if constexpr (config::warpgroups > 1) ptx::take_registers<config::math_registers>();
        const int team = config::ping_pong ? warpgroup : 0, member = config::ping_pong ? 0 : warpgroup;
        const int first_row = member * waves * 64;  // of this warpgroup in a tile
        const int thread_row = first_row + warp % 4 * 16 + ptx::lane() / 4;
        const int thread_column = 2 * (ptx::lane() % 4);
        const Out out{&out_map, out_data, out_group_stride, out_row_stride, out_column_stride};
        const uint64_t a_tiles = ptx::tile_descriptor(shared + memory::a + first_row * 128);
        const uint64_t b_tiles = ptx::tile_descriptor(shared + memory::b);
        Ring ring(shared, team);
        Scheduler scheduler(sizes, groups, team, teams);
        Tile tile;

        // one warpgroup is to store while the other multiplies: the second begins when the first is half through
        bool ahead = config::ping_pong && team == 0;
        if (config::ping_pong && team == 1) ptx::named_barrier_sync(1, 256);
        auto let_other_begin = [&](bool now) {
            if (ahead && now) {
                ptx::named_barrier_arrive(1, 256);
                ahead = false;
            }
        };

        while (scheduler.take(tile)) {
            const int steps = count_steps(tile);
            const int border = 128 - tile.n % 128;  // where the tile's columns reach the next block of scales

            const int block = (config::a_scales == per_block ? tile.m + first_row : tile.n) / 128;
            const int blocks = ceil_div(config::a_scales == per_block ? m : n, 128);
            const float* block_scale = config::a_scales == per_block ? a_scale : b_scale;
            block_scale += (rows_grouped ? tile.group : 0) * scale_group + first_step(tile) * scale_column;
            const float* next_block_scale = block_scale + min(block + 1, blocks - 1) * scale_row;
            block_scale += min(block, blocks - 1) * scale_row;
            BlockScales scales(block_scale, scale_column, one_is_block ? steps : 0);
            BlockScales scales_after(next_block_scale, scale_column, two_blocks ? steps : 0);

            // waits for a step's stage and removes what is not summed
            auto arrive = [&](int step) {
                const int stage = config::schedule == dense ? ring.stage : uniform(ring.stage);
                ring.full[stage].wait(ring.parity);
                if constexpr (config::schedule == along_k) {
                    const int k = (first_step(tile) + step) * 128, begin = tile.k_begin - k, end = tile.k_end - k;
                    if (begin > 0 || end < 128) {
                        const int thread = member * 128 + threadIdx.x % 128;
                        keep_between(shared + memory::a + stage * memory::a_tile, config::tile_m, begin, end, thread);
                        keep_between(shared + memory::b + stage * memory::b_tile, config::tile_n, begin, end, thread);
                        ptx::fence_async_shared();
                        ptx::named_barrier_sync(2 + team, team_threads);
                    }
                }
                return stage;
            };
            auto multiply = [&](float (&sum)[count], int stage, int wave, bool add) {
                const uint32_t a = (stage * memory::a_tile + wave * 64 * 128) / 16, b = stage * memory::b_tile / 16;
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::wgmma(sum, further(a_tiles, a + 2 * i), further(b_tiles, b + 2 * i), add || i > 0);
                ptx::wgmma_commit();
            };
            // a step's scales in shared memory are read before it is multiplied: afterwards the stage may be gone
            auto factors = [&](int stage, int wave) {
                Factors f{stage};
                const float* a = reinterpret_cast<const float*>(shared + memory::a_scale + stage * memory::a_scales);
                const float* b = reinterpret_cast<const float*>(shared + memory::b_scale + stage * memory::b_scales);
                if constexpr (a_rows) f.rows[0] = a[thread_row + wave * 64], f.rows[1] = a[thread_row + wave * 64 + 8];
                if constexpr (b_rows) f.columns = b + thread_column;
                return f;
            };
            // those of blocks are taken while it is multiplied: a tile's first have only been asked for
            auto block_factors = [&](int step, Factors& f) {
                if constexpr (one_is_block) f.left = scales.at(step);
                if constexpr (two_blocks) f.right = scales_after.at(step);
            };
            auto pin = [&](float (&sum)[count]) {
#pragma unroll
                for (int i = 0; i < count; ++i) ptx::pin(sum[i]);
            };

            float total[waves][count] = {};
            if (tile.m + first_row >= tile.m_end || tile.n >= n) {  // all of it lies outside: nothing to multiply
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    arrive(step);
                    __syncwarp();
                    ring.release(ring.stage);
                }
                let_other_begin(true);
                if (config::split_k == 1) continue;
            } else if constexpr (!config::promote) {
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    const int stage = arrive(step);
#pragma unroll
                    for (int wave = 0; wave < waves; ++wave) multiply(total[wave], stage, wave, step > 0);
                    ptx::wgmma_wait<waves>();  // the step before is done
                    if (step > 0) ring.release(ring.before(stage));
                    let_other_begin(2 * step >= steps);
                }
                ptx::wgmma_wait<0>();
                if (steps > 0) ring.release(ring.before(ring.stage));
#pragma unroll
                for (int wave = 0; wave < waves; ++wave) pin(total[wave]);
            } else if constexpr (config::accumulators == 1) {
                float sum[count];
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    const int stage = arrive(step);
                    Factors blocks;
#pragma unroll
                    for (int wave = 0; wave < waves; ++wave) {
                        Factors f = factors(stage, wave);
                        multiply(sum, stage, wave, false);
                        if (wave == 0) block_factors(step, blocks);
                        f.left = blocks.left, f.right = blocks.right;
                        ptx::wgmma_wait<0>();
                        pin(sum);
                        if (wave == waves - 1 && !b_rows) ring.release(stage);
                        promote(total[wave], sum, f, border);
                    }
                    if constexpr (b_rows) {
                        __syncwarp();
                        ring.release(stage);
                    }
                    let_other_begin(2 * step >= steps);
                }
            } else {
                auto begin = [&](int step, float (&sum)[count]) {
                    const int stage = arrive(step);
                    Factors f = factors(stage, 0);
                    multiply(sum, stage, 0, false);
                    block_factors(step, f);
                    ring.advance();
                    return f;
                };
                auto finish = [&](float (&sum)[count], const Factors& f) {
                    pin(sum);
                    if constexpr (!b_rows) ring.release(f.stage);
                    promote(total[0], sum, f, border);
                    if constexpr (b_rows) {
                        __syncwarp();
                        ring.release(f.stage);
                    }
                };
                float even[count], odd[count];
                int step = 0;
                if (steps % 2 == 1) {
                    const Factors f = begin(step++, even);
                    ptx::wgmma_wait<0>();
                    finish(even, f);
                }
                for (; step < steps; step += 2) {
                    const Factors even_f = begin(step, even);
                    const Factors odd_f = begin(step + 1, odd);
                    ptx::wgmma_wait<1>();
                    finish(even, even_f);
                    ptx::wgmma_wait<0>();
                    finish(odd, odd_f);
                }
            }

            // ---- Results ----
            let_other_begin(true);
            if constexpr (config::split_k > 1) {
                volatile int* last = reinterpret_cast<int*>(shared + memory::last) + warpgroup;
                if (!sum_parts(total, parts, arrived, last, tile, warpgroup)) continue;
                if (tile.m + first_row >= tile.m_end || tile.n >= n) continue;
            }
            if constexpr (config::a_scales == per_tensor) {
                const float scale = __fmul_rn(__ldg(a_scale), __ldg(b_scale));
#pragma unroll
                for (int i = 0; i < waves * count; ++i) total[i / count][i % count] *= scale;
            }
            if (config::accumulate && (config::split_k > 1 ? k : steps) == 0) continue;  // nothing to add
            uint8_t* staging = shared + memory::staging + warpgroup * config::staged_pieces * piece_bytes;
            if constexpr (config::store == tma)
                store_staged(total, staging, out, tile, tile.m + first_row, n, warpgroup);
            else
                store_directly(total, out, tile, tile.m + first_row, n);
        }
        let_other_begin(true);  // where this one has no tile at all
        if (config::store == tma && threadIdx.x % 128 == 0) ptx::wait_stores_read<0>();
    }
    // a block must not leave while the other may still write to its barriers
    __syncwarp();
    if constexpr (config::cluster > 1) ptx::cluster_sync();
}
