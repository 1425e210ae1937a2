// Tiles of latents and queries in shared memory, as the kernels of latent attention for blocks of 64 heads divide them.
#pragma once
#include "warps.cuh"

constexpr int heads = 64, latent = 512, rotary = 64, width = latent + rotary;
constexpr int tile_keys = 64, tile = tile_keys * 128, tiles = width / 64;  // bytes of 64 rows of 64 channels: 128 a row
constexpr int cluster = config::cluster;  // thread blocks that share converted rows

// The parts of 64 keys, which are released and written one by one: left and right values, and rotary channels.
enum Part { left, right, rotary_part, parts };

// Where byte `byte` of a row lies in a tile with rows of 128 swizzled bytes.
__device__ __forceinline__ uint8_t* swizzled(uint8_t* to, int row, int byte) {
    return to + row * 128 + ((byte / 16 ^ (row & 7)) * 16 + byte % 16);
}

// Of this thread block among those that share converted rows. Not kept in a register, of which converters have one too few.
__device__ __forceinline__ int cluster_rank() { return cluster > 1 ? static_cast<int>(ptx::cluster_ctarank()) : 0; }

// Of the thread blocks that share converted rows.
__device__ __forceinline__ void sync_all() {
    if constexpr (cluster > 1)
        ptx::cluster_sync();
    else
        __syncthreads();
}

// By a warp that has written `rows` rows of the four tiles of a part, from `first` on: reports them, and in a cluster copies
// them to the other thread block. The same warp there copies as many here.
__device__ __forceinline__ void publish_rows(ptx::Mbarrier& full, const uint8_t* part, int first, int rows) {
    if (ptx::lane_id() != 0) return;
    if constexpr (cluster > 1) {
        const int bytes = rows * 128;
        full.arrive_expect_tx(4 * bytes);
        const uint32_t other = cluster_rank() ^ 1, to_full = ptx::cluster_address(&full, other);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const uint8_t* of_tile = part + t * tile + first * 128;
            ptx::bulk_copy(ptx::cluster_address(of_tile, other), of_tile, bytes, to_full);
        }
    } else {
        full.arrive();
    }
}

struct Barriers {
    ptx::Mbarrier full[2][parts], empty[2][parts];  // of both tiles of 64 keys

    // Converted values are written by four warps, here and, in a cluster, in both thread blocks; others by `writers` arrivals.
    __device__ __forceinline__ void init(int writers) {
        for (int which = 0; which < 2; ++which)
            for (int part = 0; part < parts; ++part) {
                const bool is_converted = config::fp8 && part != rotary_part;
                full[which][part].init(is_converted ? 4 : writers);
                empty[which][part].init(is_converted ? 4 * cluster : 4);
            }
        ptx::fence_mbarrier_init();
    }

    // By a warp that no longer reads a part.
    __device__ __forceinline__ void release(int which, Part part) {
        __syncwarp();
        if (ptx::lane_id() == 0) empty[which][part].arrive();
        if (cluster > 1 && part != rotary_part && ptx::lane_id() == 1)
            empty[which][part].arrive_cluster(cluster_rank() ^ 1);
    }
};
