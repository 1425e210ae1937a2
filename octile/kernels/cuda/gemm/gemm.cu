// a[M, K] · b[N, K]ᵀ of 8-bit floats with scales, for Hopper: dense, and for a mixture of experts.
//
// One warpgroup has the copy engine bring tiles, 128 bytes along K at a time, into a ring of stages in shared memory;
// the others multiply them on the tensor cores and add each step's sums, times their scales, in FP32.
//
//   scheduler   which tile comes next, dense or grouped
//   memory      what lies where in shared memory, and the ring
//   copies      the warp that fills it
//   promotion   the scales of a step, and the FP32 sum
//   split       parts of a sum over K, added in their order
//   epilogue    rounding and storing
//   additions   adding to what is there
//
// NOTES
// - Warpgroups share the stages of a tile but nothing else: each waits, multiplies, adds and stores by itself. While
//   one adds on the CUDA cores, the tensor cores multiply for the other. With `ping_pong` each has its own tile and
//   stages, so that one's epilogue, too, lies under the other's products. With two `accumulators` a warpgroup starts
//   its next step before it adds the last.
// - A step under way at the end of a loop's body would make the compiler run all products one after the other. So two
//   accumulators take the steps in pairs, and every second addition waits.
// - A step's scales of rows come with its stage by the copy engine; those of 128×128 blocks, of which it needs one or two
//   numbers, the copying warp writes for 32 steps at a time. Where they lie each thread knows before the stage is there.
// - What lies between the end of a step's products and the start of the next is what counts. So a stage is given back
//   before the additions and the next one asked for: the answer comes when it is there, and meanwhile is added.
// - Additions that read a scale of b for each column would wait for shared memory, which wgmma keeps busy. As many of
//   these scales as there are registers for are read once for all waves of a step.
// - Results are stored under products, too: each wave's under those of the next, and the last one's of a tile under the
//   first ones of the next tile.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "scheduler.cuh"
#include "pipeline.cuh"
#include "producer.cuh"
#include "promotion.cuh"
#include "split_k.cuh"
#include "epilogue.cuh"
#include "accumulate.cuh"

// The results of 64 rows are stored while the next products run.
constexpr bool stored_under_products =
    config::store == tma && config::promote && config::accumulators == 1 && config::split_k == 1;

// In the last tile of a group a warpgroup may have 64 rows instead of 128; the others are not multiplied then.
constexpr bool skips_rows = rows_grouped && waves == 2 && stored_under_products && !config::load_c;

// Many scales are read while the first wave is multiplied, where another wave follows: with one alone that took longer.
constexpr bool scales_under_products = b_rows && waves > 1;

// A descriptor that the compiler keeps, rather than make it anew from an address in every step.
__device__ __forceinline__ uint64_t kept(uint64_t descriptor) {
    return descriptor & ~0xFFFFFFFFull | static_cast<uint32_t>(uniform(static_cast<int>(descriptor)));
}

// The descriptor of a tile that lies 16·offset bytes further on. Its upper half stays the constant that it is.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t offset) {
    return descriptor & ~0xFFFFFFFFull | static_cast<uint32_t>(descriptor) + offset;
}

extern "C" __global__ void __launch_bounds__(128 * (config::warpgroups + 1), 1) gemm(
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
    const int rank = block_rank();

    // ---- Before the first tile ----
    if (warp == 0 && ptx::lane_id() == 0) {
        ptx::prefetch_tensormap(&a_map);
        ptx::prefetch_tensormap(&b_map);
        if (a_rows) ptx::prefetch_tensormap(&a_scale_map);
        if (b_rows) ptx::prefetch_tensormap(&b_scale_map);
        if (config::store == tma) ptx::prefetch_tensormap(&out_map);
        init_barriers(shared, rank);
        if constexpr (config::load_c) init_fetches(shared);
        ptx::fence_mbarrier_init();
    }
    if (config::schedule != dense && warp == 1) list_groups(groups, sizes);
    if constexpr (cluster > 1) ptx::cluster_sync();
    else __syncthreads();

    if (warpgroup == config::warpgroups) {
        // ---- Copies ----
        if constexpr (config::warpgroups > 1) ptx::setmaxnreg_dec<config::producer_registers>();
        const int team = warp % 4;
        const Blocks blocks{
            config::a_scales == per_block ? a_scale : b_scale, scale_group, scale_row, scale_column};
        const Maps maps{&a_map, &b_map, &a_scale_map, &b_scale_map};
        if (team < teams) {
            load_tiles(shared, maps, blocks, sizes, groups, team);
        } else if (const int served = team - teams; config::load_c && served < config::warpgroups) {
            const int of_team = config::ping_pong ? served : 0, member = config::ping_pong ? 0 : served;
            exchange(shared, &out_map, sizes, groups, of_team, served, member * waves * 64);
        }
        __syncwarp();
    } else {
        // ---- Products ----
        if constexpr (config::warpgroups > 1) ptx::setmaxnreg_inc<config::consumer_registers>();
        const int team = config::ping_pong ? warpgroup : 0, member = config::ping_pong ? 0 : warpgroup;
        const int first_row = member * waves * 64;  // of this warpgroup in a tile
        const int thread_row = first_row + warp % 4 * 16 + ptx::lane_id() / 4;
        const int thread_column = 2 * (ptx::lane_id() % 4);
        const Out out{&out_map, out_data, out_group_stride, out_row_stride, out_column_stride};
        const uint64_t a_tiles = kept(ptx::wgmma_descriptor(shared + memory::a + first_row * 128));
        const uint64_t b_tiles = kept(ptx::wgmma_descriptor(shared + memory::b));
        Ring ring(shared, team);
        // There are two of each: what all lanes read from one place the compiler would move to the registers that a warp
        // shares, and wait for it.
        const uint8_t* block_scales = shared + memory::block_scale + 16 * team * memory::places;
        ring.place = ptx::lane_id() % 2 * 4 + (config::a_scales == per_block ? 8 * member : 0);
        Scheduler scheduler(sizes, groups, team, teams);
        Tile tile;
        float total[waves][count] = {};

        uint8_t* staging = staging_of(shared, warpgroup);
        Fetches fetches(shared, warpgroup);
        const float scale = config::a_scales == per_tensor ? __fmul_rn(__ldg(a_scale), __ldg(b_scale)) : 1.0f;
        // stores 64 rows of a tile, and begins their next sum
        auto store = [&](float (&sums)[count], int wave, const Tile& to) {
            if constexpr (config::a_scales == per_tensor)
                for (int i = 0; i < count; ++i) sums[i] *= scale;
            const int row = to.m + first_row + wave * 64;
            if constexpr (config::load_c) add_fetched(sums, staging, fetches);
            else if constexpr (config::store == tma) store_staged(sums, wave, staging, out, to, row, n, warpgroup);
            else store_directly(sums, out, to, row, n);
#pragma unroll
            for (int i = 0; i < count; ++i) sums[i] = 0.0f;
        };
        Tile before;  // whose last wave is not stored yet; its end is 0 where there is none
        before.m_end = 0;
        auto store_pending = [&] {
            if (before.m_end > 0) store(total[waves - 1], waves - 1, before);
            before.m_end = 0;
        };

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
            const bool has_half = skips_rows && lies_outside(tile, first_row + 64, n);
            const int border = 128 - tile.n % 128;  // where the tile's columns reach the next block of scales

            // along K a group may begin or end within its first or last step
            const bool ragged = config::schedule == along_k && (tile.k_begin % 128 > 0 || tile.k_end % 128 > 0);
            auto is_cut = [&](int step) { return ragged && (step == 0 || step == steps - 1); };

            // waits for the stage of a step, if it is not there, and removes what is not summed
            auto arrive = [&](int step, bool cut, bool ready = false) {
                const int stage = ring.stage;
                if (!ready) ring.full[stage].wait(ring.parity);
                if (!cut) return;
                const int k = (first_step(tile) + step) * 128, begin = tile.k_begin - k, end = tile.k_end - k;
                const int thread = member * 128 + threadIdx.x % 128;
                keep_between(shared + memory::a + stage * memory::a_tile, config::tile_m, begin, end, thread);
                keep_between(shared + memory::b + stage * memory::b_tile, config::tile_n, begin, end, thread);
                ptx::fence_proxy_async();
                ptx::named_barrier_sync(2 + team, team_threads);
            };
            // a step's scales
            auto factors = [&](int stage, Factors (&f)[waves]) {
                const float* a = reinterpret_cast<const float*>(shared + memory::a_scale + stage * memory::a_scales);
                const float* blocks = reinterpret_cast<const float*>(block_scales + ring.place);
                const float left = one_is_block ? blocks[0] : 0;
                const float right = two_blocks ? blocks[2] : 0;
#pragma unroll
                for (int wave = 0; wave < waves; ++wave) {
                    const int row = thread_row + wave * 64;
                    f[wave] = {{a_rows ? a[row] : 0, a_rows ? a[row + 8] : 0}, left, right};
                }
            };
            auto columns = [&](int stage) {
                const uint8_t* scales = shared + memory::b_scale + stage * memory::b_scales;
                return Columns{reinterpret_cast<const float*>(scales) + thread_column, {}};
            };
            auto multiply = [&](float (&sum)[count], int stage, int wave, bool add) {
                const uint32_t a = (stage * memory::a_tile + wave * 64 * 128) / 16, b = stage * memory::b_tile / 16;
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::wgmma(sum, further(a_tiles, a + 2 * i), further(b_tiles, b + 2 * i), add || i > 0);
                ptx::wgmma_commit_group();
            };
            auto pin = [&](float (&sum)[count]) {
#pragma unroll
                for (int i = 0; i < count; ++i) ptx::warpgroup_fence_operand(sum[i]);
            };

            if (lies_outside(tile, first_row, n)) {  // nothing to multiply
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    arrive(step, is_cut(step));
                    ring.release(ring.stage, rank);
                }
                let_other_begin(true);
                if (config::split_k == 1) continue;
            } else if constexpr (!config::promote) {
                for (int step = 0; step < steps; ++step, ring.advance()) {
                    arrive(step, is_cut(step));
#pragma unroll
                    for (int wave = 0; wave < waves; ++wave) multiply(total[wave], ring.stage, wave, step > 0);
                    ptx::wgmma_wait_group<waves>();  // the step before is done
                    if (step > 0) ring.release(ring.before(ring.stage), rank);
                    let_other_begin(2 * step >= steps);
                }
                ptx::wgmma_wait_group<0>();
                if (steps > 0) ring.release(ring.before(ring.stage), rank);
#pragma unroll
                for (int wave = 0; wave < waves; ++wave) pin(total[wave]);
            } else if constexpr (config::accumulators == 1) {
                auto sum_up = [&](const int waves_there) __attribute__((always_inline)) {
                    float sum[count];
                    bool ready = false, cut = ragged;  // the stage of the step
                    for (int step = 0; step < steps; ++step) {
                        const int stage = ring.stage;
                        arrive(step, cut, ready);
                        Factors f[waves];
                        Columns of_b = columns(stage);
                        auto read_scales = [&] {
                            factors(stage, f);
                            of_b.hold();
                        };
                        if constexpr (!scales_under_products) read_scales();
                        multiply(sum, stage, 0, false);
                        if constexpr (scales_under_products) read_scales();
#pragma unroll
                        for (int wave = 0; wave < waves_there; ++wave) {
                            if (wave > 0) multiply(sum, stage, wave, false);
                            if constexpr (stored_under_products) {
                                if (wave == 0 && step == 0) store_pending();
                                if (wave > 0 && step == steps - 1) store(total[wave - 1], wave - 1, tile);
                            }
                            ptx::wgmma_wait_group<0>();
                            pin(sum);
                            if (wave == waves_there - 1) {
                                if constexpr (!reads_late) ring.release(stage, rank);
                                ring.advance();
                                ready = ring.full[ring.stage].try_wait(ring.parity, step + 1 < steps);
                                cut = is_cut(step + 1);
                            }
                            promote(total[wave], sum, Products(f[wave], of_b, border));
                        }
                        if constexpr (reads_late) ring.release(stage, rank);
                        let_other_begin(2 * step >= steps);
                    }
                };
                if (has_half) sum_up(1);
                else sum_up(waves);
            } else {
                struct Step {
                    int stage;
                    Factors factors;
                    Columns columns;
                };
                auto begin = [&](int step, float (&sum)[count]) {
                    const int stage = ring.stage;
                    arrive(step, is_cut(step));
                    Factors f[waves];  // one
                    factors(stage, f);
                    multiply(sum, stage, 0, false);
                    ring.advance();
                    return Step{stage, f[0], columns(stage)};
                };
                auto finish = [&](float (&sum)[count], const Step& step) {
                    pin(sum);
                    if constexpr (!reads_late) ring.release(step.stage, rank);
                    promote(total[0], sum, Products(step.factors, step.columns, border));
                    if constexpr (reads_late) ring.release(step.stage, rank);
                };
                float even[count], odd[count];
                int step = 0;
                if (steps % 2 == 1) {
                    const Step first = begin(step++, even);
                    ptx::wgmma_wait_group<0>();
                    finish(even, first);
                }
                for (; step < steps; step += 2) {
                    const Step even_step = begin(step, even);
                    const Step odd_step = begin(step + 1, odd);
                    ptx::wgmma_wait_group<1>();
                    finish(even, even_step);
                    ptx::wgmma_wait_group<0>();
                    finish(odd, odd_step);
                }
            }

            // ---- Results ----
            let_other_begin(true);
            if constexpr (config::split_k > 1) {
                volatile int* last = reinterpret_cast<int*>(shared + memory::last) + warpgroup;
                const bool whole = sum_parts(total, parts, arrived, last, tile, warpgroup);
                if (!whole || lies_outside(tile, first_row, n)) {
#pragma unroll
                    for (int i = 0; i < waves * count; ++i) total[i / count][i % count] = 0.0f;
                    continue;
                }
            }
            const bool empty = (config::split_k > 1 ? k : steps) == 0;
            if (config::accumulate && empty) continue;  // nothing to add
            if constexpr (stored_under_products) {
                if (empty) {
                    store_zeros(out, tile, tile.m + first_row, waves * 64, n);
                } else {
                    before = tile;
                    if (has_half) {  // its sums take the place of the others
                        before.m -= 64;
#pragma unroll
                        for (int i = 0; i < count; ++i) total[waves - 1][i] = total[0][i], total[0][i] = 0.0f;
                        ptx::bulk_wait_group_read<0>();  // their room is that of the tile before
                    }
                }
            } else {
#pragma unroll
                for (int wave = 0; wave < waves; ++wave) store(total[wave], wave, tile);
            }
        }
        store_pending();
        let_other_begin(true);  // where this one has no tile at all
        if (config::store == tma) ptx::bulk_wait_group_read<0>();
    }
    // a block must not leave while the other may still write to its barriers
    __syncwarp();
    if constexpr (cluster > 1) ptx::cluster_sync();
}
