// The GEMM kernel for Hopper: a[M, K] · b[N, K]ᵀ of 8-bit floats with scales, dense and grouped.
//
// A persistent, warp-specialized kernel. The producer warpgroup loads tiles by TMA, a k-block of 128 bytes at a time,
// into a pipeline of stages in shared memory. The consumer warpgroups multiply them on the tensor cores (wgmma),
// promote each k-block's accumulator, times its scales, to FP32, and store the tile.
//
//   scheduler   which tile comes next, dense or grouped
//   pipeline    layout of shared memory, and the pipeline
//   producer    loads tiles and scales, prefetches C
//   promotion   scales of a k-block, and the FP32 totals
//   split_k     reduces the partials of split-K
//   store       rounds and stores
//   accumulate  the epilogue that loads C
//   epilogue    reduces, stores or accumulates a tile
//   main_loop   multiplies the k-blocks of a tile and promotes their accumulators
#include "ptx.cuh"
#include "wgmma.cuh"
#include "scheduler.cuh"
#include "pipeline.cuh"
#include "producer.cuh"
#include "promotion.cuh"
#include "split_k.cuh"
#include "store.cuh"
#include "accumulate.cuh"
#include "epilogue.cuh"
#include "main_loop.cuh"

// Prefetches tensor maps, initializes mbarriers and reads the groups. All warps synchronize before they use them.
__device__ __forceinline__ void prologue(
    uint8_t* shared, const TensorMaps& maps, const TensorMap* out_map, Groups& groups, const ProblemSize& size,
    int rank, int warp) {
    if (warp == 0 && ptx::lane_id() == 0) {
        init_pipelines(shared, rank);
        if constexpr (config::load_c) init_c_barriers(shared);
        ptx::fence_mbarrier_init();
    }
    if (warp == 2 && ptx::lane_id() == 0) {
        ptx::prefetch_tensormap(maps.a);
        ptx::prefetch_tensormap(maps.b);
        if (a_row_scales) ptx::prefetch_tensormap(maps.a_scale);
        if (b_row_scales) ptx::prefetch_tensormap(maps.b_scale);
        if (config::store == tma) ptx::prefetch_tensormap(out_map);
    }
    if constexpr (config::programmatic && !loads_weights_early) ptx::wait_and_launch_dependents();
    if (config::schedule != dense && warp == 1) load_groups(groups, size);
}

extern "C" __global__ void __launch_bounds__(128 * (config::warpgroups + 1), 1) gemm(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap a_scale_map, const __grid_constant__ TensorMap b_scale_map,
    const __grid_constant__ TensorMap out_map,
    const float* a_scale, const float* b_scale, int64_t scale_group, int64_t scale_row, int64_t scale_column,
    void* out_data, int64_t out_group_stride, int64_t out_row_stride, int64_t out_column_stride,
    float* partials, int* arrivals, const int* offsets, int m, int n, int k, int group_count) {
    uint8_t* shared = ptx::dynamic_shared();
    Groups& groups = *reinterpret_cast<Groups*>(shared + smem::groups);
    const ProblemSize size{m, n, k, group_count, offsets};
    const int warp = warp_uniform(threadIdx.x / 32), warpgroup = warp / 4, rank = block_rank_in_cluster();
    const TensorMaps maps{&a_map, &b_map, &a_scale_map, &b_scale_map, &out_map};
    prologue(shared, maps, &out_map, groups, size, rank, warp);
    const bool is_producer = warpgroup == config::warpgroups && warp % 4 < pipelines;
    if (!finds_tile_early || !is_producer) sync_warps(warp);
    if (loads_weights_early && !is_producer) ptx::wait_and_launch_dependents();  // a producer does so itself

    if (warpgroup == config::warpgroups) {
        // ---- Producer warpgroup: a warp for each pipeline, and one for each consumer whose C is loaded ----
        if constexpr (config::warpgroups > 1) ptx::setmaxnreg_dec<config::producer_registers>();
        const float* block_scale = config::a_scales == per_block ? a_scale : b_scale;
        const BlockScales blocks{block_scale, scale_group, scale_row, scale_column};
        const int role = warp % 4;
        if (role < pipelines) {
            run_producer(shared, maps, blocks, size, groups, role);
        } else if (const int consumer = role - pipelines; config::load_c && consumer < config::warpgroups) {
            const int pipeline = config::ping_pong ? consumer : 0, member = config::ping_pong ? 0 : consumer;
            load_and_store_c(shared, &out_map, size, groups, pipeline, consumer, member * waves * 64);
        }
        __syncwarp();
    } else {
        // ---- Consumer warpgroup ----
        if constexpr (config::warpgroups > 1) ptx::setmaxnreg_inc<config::consumer_registers>();
        const Output out{&out_map, out_data, out_group_stride, out_row_stride, out_column_stride};
        const int pipeline = config::ping_pong ? warpgroup : 0, member = config::ping_pong ? 0 : warpgroup;
        const int first_row = member * waves * 64;  // of this warpgroup in a tile
        MainLoop main_loop(shared, rank, pipeline, member, first_row, warp);
        TileScheduler scheduler(size, groups, pipeline, pipelines);
        Tile tile;
        Totals total = {};
        Epilogue epilogue(shared, out, warpgroup, first_row, n, a_scale, b_scale);
        PingPongStart start(pipeline);

        auto next_tile = [&] {
            if constexpr (config::passes_tiles) return wait_for_tile(shared, main_loop.pipeline, size, tile);
            else return scheduler.next_tile(tile);
        };

        while (next_tile()) {
            const KBlocks k_blocks(tile);
            const bool is_half = has_half_tiles && is_outside(tile, first_row + 64, n);
            const int border = 128 - tile.n % 128;  // the column at which the next 128×128 block of b begins
            if (is_outside(tile, first_row, n)) {
                main_loop.skip(tile, k_blocks);
                start.let_other_begin(true);
                if (config::split_k == 1) continue;
            } else if constexpr (!config::promote) {
                main_loop.run_unpromoted(total, tile, k_blocks, start);
            } else if constexpr (config::accumulators == 2 && waves == 2) {
                main_loop.run_two_waves(total, tile, k_blocks, border, epilogue);
            } else if constexpr (config::accumulators == 2) {
                main_loop.run_two_accumulators(total, tile, k_blocks, border);
            } else {
                if (is_half) main_loop.run_promoted<1>(total, tile, k_blocks, border, start, epilogue);
                else main_loop.run_promoted<waves>(total, tile, k_blocks, border, start, epilogue);
            }
            start.let_other_begin(true);
            epilogue.store_tile(total, tile, k_blocks.count, k, is_half, partials, arrivals);
        }
        epilogue.store_pending(total);
        start.let_other_begin(true);  // where this warpgroup has no tile at all
        if (config::store == tma) ptx::bulk_wait_group_read<0>();
    }
    __syncwarp();
    if constexpr (cluster_size > 1) ptx::cluster_sync();  // the other block may still arrive at this one's mbarriers
}
