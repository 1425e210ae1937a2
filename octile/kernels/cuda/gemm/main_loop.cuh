// The main loop of a consumer warpgroup: it multiplies the k-blocks of a tile and promotes their accumulators.
//
// NOTES
// - Consumer warpgroups share the stages of a pipeline but nothing else: each waits, multiplies, promotes and stores on
//   its own. While one promotes on the CUDA cores, the tensor cores multiply for the other. With `ping_pong` each has
//   its own tile and pipeline, so that the epilogue of one also overlaps the main loop of the other. With two
//   `accumulators` a warpgroup begins its next k-block before it promotes the last one; or, with two waves, the second
//   wave of a k-block before it promotes the first.
// - A k-block in flight at the end of the loop's body would make the compiler run all wgmmas one after the other. So
//   two accumulators take the k-blocks in pairs, and every second promotion waits.
// - 1×128 scales of a k-block are in its stage. Of 128×128 scales a k-block needs one or two, which the producer writes
//   for 32 k-blocks at a time; each thread knows their address before the stage is loaded.
// - The time between the last wgmma of a k-block and the first one of the next is what counts. So a stage is released
//   before promotion, and try_wait for the next one is issued then: its result arrives during promotion. The loop with
//   one accumulator is unrolled, and a tile's first and last k-block, which store, stand outside of it: with a jump and
//   the addresses of the next stage behind it, and 34% more instructions, large products were 2.5 to 4.5% slower.
// - Promotion with one scale of b per column would wait for shared memory, which wgmma keeps busy. As many of these
//   scales as fit into registers are read once for all waves of a k-block.
#pragma once
#include "wgmma.cuh"
#include "epilogue.cuh"

// Scales are read after the first wave's wgmma is issued, where another wave follows. With one wave that was slower.
constexpr bool reads_scales_after_wgmma = b_row_scales && waves > 1;

// Where registers suffice, which others spill, and where it was measured: not with one warpgroup. With half tiles there
// are two loops, of which none is unrolled. With FP32 results only a single copy of the stores leaves enough registers.
constexpr bool stores_outside_of_loop =
    overlaps_stores && has_block_scales && config::warpgroups > 1 &&
    (config::out_float ? config::schedule == dense && !config::load_c && !config::ping_pong
                       : config::schedule != along_k);
constexpr int unrolled_k_blocks = has_half_tiles ? 1 : 4;

// A descriptor that stays in a register; the compiler would compute it again for every k-block.
__device__ __forceinline__ uint64_t hoisted(uint64_t descriptor) {
    return descriptor & ~0xFFFFFFFFull | static_cast<uint32_t>(warp_uniform(static_cast<int>(descriptor)));
}

// The descriptor of the tile 16·offset bytes further on. Its upper half remains a constant.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t offset) {
    return descriptor & ~0xFFFFFFFFull | static_cast<uint32_t>(descriptor) + offset;
}

// The start of ping-pong consumers: the second one begins when the first one has done half of its first tile, so that
// one stores while the other multiplies.
struct PingPongStart {
    bool is_first;  // and has not let the other one begin

    __device__ __forceinline__ explicit PingPongStart(int pipeline) : is_first(config::ping_pong && pipeline == 0) {
        if (config::ping_pong && pipeline == 1) ptx::named_barrier_sync(1, 256);
    }

    __device__ __forceinline__ void let_other_begin(bool now) {
        if (is_first && now) {
            ptx::named_barrier_arrive(1, 256);
            is_first = false;
        }
    }
};

// The main loop of one consumer warpgroup.
struct MainLoop {
    uint8_t* const shared;
    const int rank, pipeline_index, member;
    const int thread_row, thread_column;
    const uint64_t a_descriptor, b_descriptor;
    Pipeline pipeline;
    const uint8_t* const block_scales;

    // `member`: index of the warpgroup among those of a tile; `first_row`: its first row in a tile.
    __device__ __forceinline__ MainLoop(
        uint8_t* shared, int rank, int pipeline_index, int member, int first_row, int warp)
        : shared(shared), rank(rank), pipeline_index(pipeline_index), member(member),
          thread_row(first_row + warp % 4 * 16 + ptx::lane_id() / 4),
          thread_column(2 * (ptx::lane_id() % 4)),
          a_descriptor(hoisted(ptx::wgmma_descriptor(shared + smem::a + first_row * 128))),
          b_descriptor(hoisted(ptx::wgmma_descriptor(shared + smem::b))),
          pipeline(shared, pipeline_index),
          block_scales(shared + smem::block_scale + 16 * pipeline_index * smem::scale_slots) {
        // There are two copies of each scale. What all lanes read from one address the compiler would move to a uniform
        // register, and wait for it.
        pipeline.scale_slot = ptx::lane_id() % 2 * 4 + (config::a_scales == per_block ? 8 * member : 0);
    }

    // Waits for the stage of a k-block unless it is `ready`, and sets to zero what is not summed.
    __device__ __forceinline__ void acquire(const Tile& tile, int k_block, bool zeros, bool ready = false) {
        const int stage = pipeline.stage;
        if (!ready) pipeline.consumer_wait();
        if (!zeros) return;
        const int k = (first_k_block(tile) + k_block) * 128, begin = tile.k_begin - k, end = tile.k_end - k;
        const int thread = member * 128 + threadIdx.x % 128;
        zero_outside(shared + smem::a + stage * smem::a_tile, config::tile_m, begin, end, thread);
        zero_outside(shared + smem::b + stage * smem::b_tile, config::tile_n, begin, end, thread);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(2 + pipeline_index, threads_per_tile);
    }

    // Issues the wgmmas of one wave of a k-block.
    __device__ __forceinline__ void issue_wgmma(float (&accum)[num_accum], int stage, int wave, bool accumulate) {
        const uint32_t a = (stage * smem::a_tile + wave * 64 * 128) / 16, b = stage * smem::b_tile / 16;
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            ptx::wgmma(
                accum, advanced(a_descriptor, a + 2 * i), advanced(b_descriptor, b + 2 * i), accumulate || i > 0);
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ static void fence_operands(float (&accum)[num_accum]) {
#pragma unroll
        for (int i = 0; i < num_accum; ++i) ptx::warpgroup_fence_operand(accum[i]);
    }

    // Reads the scales of a and those of blocks for the pipeline's current k-block.
    __device__ __forceinline__ void read_scales(int stage, WaveScales (&scales)[waves]) {
        const float* a = reinterpret_cast<const float*>(shared + smem::a_scale + stage * smem::a_scales);
        const float* blocks = reinterpret_cast<const float*>(block_scales + pipeline.scale_slot);
        const float left = has_block_scales ? blocks[0] : 0;
        const float right = two_b_blocks ? blocks[2] : 0;
#pragma unroll
        for (int wave = 0; wave < waves; ++wave) {
            const int row = thread_row + wave * 64;
            scales[wave] = {{a_row_scales ? a[row] : 0, a_row_scales ? a[row + 8] : 0}, left, right};
        }
    }

    __device__ __forceinline__ ColumnScales column_scales(int stage) {
        const uint8_t* scales = shared + smem::b_scale + stage * smem::b_scales;
        return ColumnScales{reinterpret_cast<const float*>(scales) + thread_column, {}};
    }

    // Goes through the stages of a tile without multiplying: all that this warpgroup computes is outside of the result.
    __device__ __forceinline__ void skip(const Tile& tile, const KBlocks& k) {
        for (int k_block = 0; k_block < k.count; ++k_block, pipeline.advance()) {
            acquire(tile, k_block, k.is_partial(k_block));
            pipeline.consumer_release(pipeline.stage, rank);
        }
    }

    // Without promotion: the tensor cores sum over all of K.
    __device__ __forceinline__ void run_unpromoted(
        Totals& total, const Tile& tile, const KBlocks& k, PingPongStart& start) {
        for (int k_block = 0; k_block < k.count; ++k_block, pipeline.advance()) {
            acquire(tile, k_block, k.is_partial(k_block));
#pragma unroll
            for (int wave = 0; wave < waves; ++wave) issue_wgmma(total[wave], pipeline.stage, wave, k_block > 0);
            ptx::wgmma_wait_group<waves>();  // the previous k-block is done
            if (k_block > 0) pipeline.consumer_release(pipeline.previous(pipeline.stage), rank);
            start.let_other_begin(2 * k_block >= k.count);
        }
        ptx::wgmma_wait_group<0>();
        if (k.count > 0) pipeline.consumer_release(pipeline.previous(pipeline.stage), rank);
#pragma unroll
        for (int wave = 0; wave < waves; ++wave) fence_operands(total[wave]);
    }

    // A tile that is computed with one accumulator.
    struct Promoted {
        Totals& total;
        float (&accum)[num_accum];
        const Tile& tile;
        const KBlocks& k;
        const int border;
        PingPongStart& start;
        Epilogue& epilogue;
        bool ready, partial;  // the next stage is loaded; a part of its k-block is not summed
    };

    // A k-block with one accumulator, which is promoted wave by wave. waves_there: 1 in a half tile. While the first and
    // the last k-block of a tile are multiplied, waves are stored.
    template <int waves_there>
    __device__ __forceinline__ void run_k_block(Promoted& t, int k_block, bool is_first, bool is_last) {
        const int stage = pipeline.stage;
        acquire(t.tile, k_block, t.partial, t.ready);
        WaveScales scales[waves];
        ColumnScales columns = column_scales(stage);
        if constexpr (!reads_scales_after_wgmma) {
            read_scales(stage, scales);
            columns.cache();
        }
        issue_wgmma(t.accum, stage, 0, false);
        if constexpr (reads_scales_after_wgmma) {
            read_scales(stage, scales);
            columns.cache();
        }
#pragma unroll
        for (int wave = 0; wave < waves_there; ++wave) {
            if (wave > 0) issue_wgmma(t.accum, stage, wave, false);
            if constexpr (overlaps_stores) {
                if (wave == 0 && is_first) t.epilogue.store_pending(t.total);
                if (wave > 0 && is_last) t.epilogue.store_wave(t.total[wave - 1], wave - 1, t.tile);
            }
            ptx::wgmma_wait_group<0>();
            fence_operands(t.accum);
            if (wave == waves_there - 1) {
                if constexpr (!release_after_promotion) pipeline.consumer_release(stage, rank);
                pipeline.advance();
                t.ready = pipeline.consumer_try_wait(k_block + 1 < t.k.count);
                t.partial = t.k.is_partial(k_block + 1);
            }
            promote(t.total[wave], t.accum, ScaleProducts(scales[wave], columns, t.border));
        }
        if constexpr (release_after_promotion) pipeline.consumer_release(stage, rank);
        t.start.let_other_begin(2 * k_block >= t.k.count);
    }

    // With one accumulator.
    template <int waves_there>
    __device__ __forceinline__ void run_promoted(
        Totals& total, const Tile& tile, const KBlocks& k, int border, PingPongStart& start, Epilogue& epilogue) {
        float accum[num_accum];
        Promoted promoted{total, accum, tile, k, border, start, epilogue, false, k.is_ragged};
        const int last = k.count - 1;
        if constexpr (!stores_outside_of_loop) {
            for (int i = 0; i <= last; ++i) run_k_block<waves_there>(promoted, i, i == 0, i == last);
        } else if constexpr (config::out_float) {
            for (int i = 0; i <= last; ++i) {  // the inner loop runs the k-blocks between the first and the last
                run_k_block<waves_there>(promoted, i, i == 0, i == last);
#pragma unroll unrolled_k_blocks
                for (; i + 1 < last; ++i) run_k_block<waves_there>(promoted, i + 1, false, false);
            }
        } else if (last == 0) {
            run_k_block<waves_there>(promoted, 0, true, true);
        } else if (last > 0) {
            run_k_block<waves_there>(promoted, 0, true, false);
#pragma unroll unrolled_k_blocks
            for (int i = 1; i < last; ++i) run_k_block<waves_there>(promoted, i, false, false);
            run_k_block<waves_there>(promoted, last, false, true);
        }
    }

    // With an accumulator for each of two waves: one wave is promoted while the other is multiplied.
    __device__ __forceinline__ void run_two_waves(
        Totals& total, const Tile& tile, const KBlocks& k, int border, Epilogue& epilogue) {
        float first[num_accum], second[num_accum];
        bool ready = false, partial = k.is_ragged;  // of the next stage
        for (int k_block = 0; k_block < k.count; ++k_block) {
            const int stage = pipeline.stage;
            acquire(tile, k_block, partial, ready);
            issue_wgmma(first, stage, 0, false);
            WaveScales scales[waves];
            ColumnScales columns = column_scales(stage);
            read_scales(stage, scales);
            columns.cache();
            issue_wgmma(second, stage, 1, false);
            if (overlaps_stores && k_block == 0) epilogue.store_pending(total);
            ptx::wgmma_wait_group<1>();
            fence_operands(first);
            promote(total[0], first, ScaleProducts(scales[0], columns, border));
            if (overlaps_stores && k_block == k.count - 1) epilogue.store_wave(total[0], 0, tile);
            ptx::wgmma_wait_group<0>();
            fence_operands(second);
            if constexpr (!release_after_promotion) pipeline.consumer_release(stage, rank);
            pipeline.advance();
            ready = pipeline.consumer_try_wait(k_block + 1 < k.count);
            partial = k.is_partial(k_block + 1);
            promote(total[1], second, ScaleProducts(scales[1], columns, border));
            if constexpr (release_after_promotion) pipeline.consumer_release(stage, rank);
        }
    }

    // A k-block whose wgmmas are in flight.
    struct InFlight {
        int stage;
        WaveScales scales;
        ColumnScales columns;
    };

    __device__ __forceinline__ InFlight begin(
        const Tile& tile, const KBlocks& k, int k_block, float (&accum)[num_accum]) {
        const int stage = pipeline.stage;
        acquire(tile, k_block, k.is_partial(k_block));
        WaveScales scales[waves];  // one
        read_scales(stage, scales);
        issue_wgmma(accum, stage, 0, false);
        pipeline.advance();
        return InFlight{stage, scales[0], column_scales(stage)};
    }

    __device__ __forceinline__ void finish(
        Totals& total, float (&accum)[num_accum], int border, const InFlight& k_block) {
        fence_operands(accum);
        if constexpr (!release_after_promotion) pipeline.consumer_release(k_block.stage, rank);
        promote(total[0], accum, ScaleProducts(k_block.scales, k_block.columns, border));
        if constexpr (release_after_promotion) pipeline.consumer_release(k_block.stage, rank);
    }

    // With two accumulators for one wave: one k-block is promoted while the next one is multiplied.
    __device__ __forceinline__ void run_two_accumulators(
        Totals& total, const Tile& tile, const KBlocks& k, int border) {
        float even[num_accum], odd[num_accum];
        int k_block = 0;
        if (k.count % 2 == 1) {
            const InFlight first = begin(tile, k, k_block++, even);
            ptx::wgmma_wait_group<0>();
            finish(total, even, border, first);
        }
        for (; k_block < k.count; k_block += 2) {
            const InFlight even_block = begin(tile, k, k_block, even);
            const InFlight odd_block = begin(tile, k, k_block + 1, odd);
            ptx::wgmma_wait_group<1>();
            finish(total, even, border, even_block);
            ptx::wgmma_wait_group<0>();
            finish(total, odd, border, odd_block);
        }
    }
};
