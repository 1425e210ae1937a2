// The epilogue of a consumer warpgroup: it reduces split-K partials, scales by a per-tensor scale, and stores the tile.
//
// NOTES
// - Stores overlap wgmma: each wave of a tile is stored during the next wave's products, and the last one during the
//   first products of the next tile. It is pending until then.
#pragma once
#include "split_k.cuh"
#include "accumulate.cuh"

// A wave is stored while the next wgmma runs.
constexpr bool overlaps_stores =
    config::store == tma && config::promote && config::accumulators <= waves && config::split_k == 1;

// The last tile of a group may be a half tile: a warpgroup has one wave of rows instead of two, and computes no other.
constexpr bool has_half_tiles =
    m_grouped && waves == 2 && config::accumulators == 1 && overlaps_stores && !config::load_c;

using Totals = float[waves][num_accum];  // FP32 sums of a thread

// The epilogue of one consumer warpgroup.
struct Epilogue {
    uint8_t* const shared;
    uint8_t* const staging;
    CBarriers c_barriers;
    const Output& out;
    const int warpgroup, first_row, columns;
    const float tensor_scale;
    Tile pending;  // a tile whose last wave is not stored yet; none while its m_end is 0

    // `first_row`: of the warpgroup in a tile.
    __device__ __forceinline__ Epilogue(
        uint8_t* shared, const Output& out, int warpgroup, int first_row, int columns, const float* a_scale,
        const float* b_scale)
        : shared(shared), staging(staging_of(shared, warpgroup)), c_barriers(shared, warpgroup), out(out),
          warpgroup(warpgroup), first_row(first_row), columns(columns),
          tensor_scale(config::a_scales == per_tensor ? __fmul_rn(__ldg(a_scale), __ldg(b_scale)) : 1.0f) {
        pending.m_end = 0;
    }

    // Stores one wave of a tile and sets its totals to zero.
    __device__ __forceinline__ void store_wave(float (&total)[num_accum], int wave, const Tile& tile) {
        if constexpr (config::a_scales == per_tensor)
            for (int i = 0; i < num_accum; ++i) total[i] *= tensor_scale;
        const int row = tile.m + first_row + wave * 64;
        if constexpr (config::load_c) add_to_c(total, staging, c_barriers);
        else if constexpr (config::store == tma)
            store_with_tma(total, wave, staging, out, tile, row, columns, warpgroup);
        else store_from_registers(total, out, tile, row, columns);
#pragma unroll
        for (int i = 0; i < num_accum; ++i) total[i] = 0.0f;
    }

    __device__ __forceinline__ void store_pending(Totals& total) {
        if (pending.m_end > 0) store_wave(total[waves - 1], waves - 1, pending);
        pending.m_end = 0;
    }

    // Stores a tile, or makes its last wave pending. `is_half`: the tile has one wave of rows.
    __device__ __forceinline__ void store_tile(
        Totals& total, const Tile& tile, int k_blocks, int k, bool is_half, float* partials, int* arrivals) {
        if constexpr (config::split_k > 1) {
            volatile int* last = reinterpret_cast<int*>(shared + smem::last_split) + warpgroup;
            const bool is_last = reduce_splits(total, partials, arrivals, last, tile, warpgroup);
            if (!is_last || is_outside(tile, first_row, columns)) {
#pragma unroll
                for (int i = 0; i < waves * num_accum; ++i) total[i / num_accum][i % num_accum] = 0.0f;
                return;
            }
        }
        const bool is_empty = (config::split_k > 1 ? k : k_blocks) == 0;
        if (config::accumulate && is_empty) return;  // nothing to add
        if constexpr (overlaps_stores) {
            if (is_empty) {
                store_zeros(out, tile, tile.m + first_row, waves * 64, columns);
            } else {
                pending = tile;
                if (is_half) {  // its wave takes the place of the second one
                    pending.m -= 64;
#pragma unroll
                    for (int i = 0; i < num_accum; ++i) total[waves - 1][i] = total[0][i], total[0][i] = 0.0f;
                    ptx::bulk_wait_group_read<0>();  // its buffer is the one of the previous tile
                }
            }
        } else {
#pragma unroll
            for (int wave = 0; wave < waves; ++wave) store_wave(total[wave], wave, tile);
        }
    }
};
