// The tile scheduler: which output tile a thread block computes next.
//
// The kernel is persistent. Each pipeline of a cluster takes every n-th cluster tile, n being the number of pipelines
// in the grid, and a thread block computes its own tile of it.
//
//   dense     one result; with split-K a tile is taken `split_k` times, each time with another part of K
//   grouped   rows sorted by group; offsets[g] is the end of group g, at any row. Rows after the last group are one
//             more group with an empty K, so they become zero; without zero_rest they are not written
//   masked    [groups, m, …], of which the first offsets[g] rows are computed
//   along_k   one result per group; group g sums over K up to offsets[g], which is any column
//
// NOTES
// - The thread blocks of a cluster share the rows of one operand, so a cluster takes a cluster tile: two tiles side by
//   side or one below the other. It may extend past the result: TMA loads zeros there, and nothing is stored.
// - Tiles that run at the same time should share operands in the L2 cache. The rasterization order goes through strips
//   of config::raster_width cluster tiles along M, column by column: W pipelines then read `raster_width` row panels
//   and W / raster_width column panels. Strips may also lie along N, row by row: the same tiles run together, but what
//   is stored at the same time lies in the same rows. That is up to 17% faster, and slower where the epilogue
//   accumulates or where there are few rows. candidates.py chooses.
// - Groups of rows begin at any row, but TMA loads scales from addresses that are multiples of 16 bytes only (observed
//   on an H200; it ends in an illegal instruction). A group's first tile therefore begins up to 3 rows before the
//   group; those rows are not stored.
// - Three warpgroups have 64 rows of a tile each. Where a group's last tile would have rows of one of them, it takes
//   64 from the tile before: two tiles for two warpgroups take less time than one for three and one for one, whose
//   promotion no other one's products hide.
// - Offsets are on the device and cannot be checked, but they must not lead outside of the tensors: they are clamped.
#pragma once
#include "ptx.cuh"

enum Schedule { dense, grouped, masked, along_k };

struct ProblemSize {
    int m, n, k, groups;
    const int* offsets;  // ends of groups, or for `masked` numbers of rows
};

struct Tile {
    int group;           // equal to the number of groups: rows after the last group
    int m, n;            // first row and column
    int m_begin, m_end;  // rows of the group; the tile may extend past them
    int k_begin, k_end;  // the part of K that is summed
    int index, split;    // number of the tile, and of its split
};

// The group's index in a result with a dimension of groups; otherwise 0.
__device__ __forceinline__ int output_group(const Tile& tile) {
    return config::schedule == masked || config::schedule == along_k ? tile.group : 0;
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int cluster_size = config::cluster_m * config::cluster_n;  // thread blocks, 1 or 2
constexpr int cluster_tile_m = config::tile_m * config::cluster_m, cluster_tile_n = config::tile_n * config::cluster_n;
constexpr bool m_grouped = config::schedule == grouped || config::schedule == masked;
constexpr bool evens_last_tiles = m_grouped && config::warpgroups == 3 && config::cluster_m == 1;

// A value that is the same in all lanes, in a form that tells the compiler so: it then keeps tile addresses in uniform
// registers, where wgmma needs them.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(all_lanes, x, 0); }

__device__ __forceinline__ int block_rank_in_cluster() { return cluster_size > 1 ? ptx::cluster_ctarank() : 0; }

// Where groups begin, in shared memory.
struct Groups {
    int row[config::max_groups + 1];           // grouped, along_k: first row of group g; masked: rows of group g − 1
    int cluster_tile[config::max_groups + 2];  // grouped, masked: cluster tiles along M before group g
};

__device__ __forceinline__ int count_groups(const ProblemSize& size) {
    return size.groups + (config::schedule == grouped && config::zero_rest);  // the rows after them are one more
}

__device__ __forceinline__ int count_rows(const Groups& groups, const ProblemSize& size, int g) {
    if constexpr (config::schedule == masked) return groups.row[g + 1];
    return (g < size.groups ? groups.row[g + 1] : size.m) - groups.row[g];
}

// Rows of the previous group in the first tile of group g.
__device__ __forceinline__ int rows_before(const Groups& groups, int g) {
    return config::schedule == grouped ? groups.row[g] % 4 : 0;
}

// Fills the table of groups. Called by one warp.
__device__ __forceinline__ void load_groups(Groups& groups, const ProblemSize& size) {
    const int limit = m_grouped ? size.m : size.k;
    for (int g = ptx::lane_id(); g <= size.groups; g += 32)
        groups.row[g] = g == 0 ? 0 : max(0, min(size.offsets[g - 1], limit));
    __syncwarp();
    if constexpr (!m_grouped) return;

    int before = 0;
    for (int first = 0; first < count_groups(size); first += 32) {
        const int g = first + ptx::lane_id();
        const int rows = g < count_groups(size) ? count_rows(groups, size, g) : 0;
        int cluster_tiles = rows > 0 ? ceil_div(rows + rows_before(groups, g), cluster_tile_m) : 0;
        for (int distance = 1; distance < 32; distance *= 2) {  // prefix sum over lanes
            const int left = __shfl_up_sync(all_lanes, cluster_tiles, distance);
            if (ptx::lane_id() >= distance) cluster_tiles += left;
        }
        if (g < count_groups(size)) groups.cluster_tile[g + 1] = before + cluster_tiles;
        before += __shfl_sync(all_lanes, cluster_tiles, 31);
    }
    if (ptx::lane_id() == 0) groups.cluster_tile[0] = 0;
}

class TileScheduler {
public:
    __device__ __forceinline__ TileScheduler(
        const ProblemSize& size, const Groups& groups, int pipeline, int pipelines)
        : size(size), groups(groups) {
        const int clusters = gridDim.x / cluster_size;
        next = warp_uniform(pipeline * clusters + blockIdx.x / cluster_size);
        stride = pipelines * clusters;
        rank = block_rank_in_cluster();
    }

    // Finds the next tile; false where there is none. Called by a whole warp.
    __device__ __forceinline__ bool next_tile(Tile& tile) {
        const int n_tiles = ceil_div(size.n, cluster_tile_n);
        int m_tiles = ceil_div(size.m, cluster_tile_m), m_begin = 0, cluster_tile = next;
        next += stride;
        tile.group = tile.split = 0;
        tile.m_begin = 0;
        tile.m_end = size.m;
        tile.k_begin = 0;
        tile.k_end = size.k;

        if constexpr (m_grouped) {
            while (group < count_groups(size) && cluster_tile >= warp_uniform(groups.cluster_tile[group + 1]) * n_tiles)
                ++group;
            if (group == count_groups(size)) return false;
            const int before = warp_uniform(groups.cluster_tile[group]);
            m_tiles = warp_uniform(groups.cluster_tile[group + 1]) - before;
            cluster_tile -= before * n_tiles;
            tile.group = group;
            tile.m_begin = config::schedule == grouped ? warp_uniform(groups.row[group]) : 0;
            tile.m_end = tile.m_begin + warp_uniform(count_rows(groups, size, group));
            m_begin = tile.m_begin - warp_uniform(rows_before(groups, group));
            if (group == size.groups) tile.k_end = 0;
        } else if constexpr (config::schedule == along_k) {
            tile.group = cluster_tile / (m_tiles * n_tiles);
            cluster_tile %= m_tiles * n_tiles;
            if (tile.group >= size.groups) return false;
            tile.k_begin = warp_uniform(groups.row[tile.group]);
            tile.k_end = warp_uniform(groups.row[tile.group + 1]);
        } else {
            if (cluster_tile >= m_tiles * n_tiles * config::split_k) return false;
            if constexpr (config::split_k > 1) {
                const int k_per_split = ceil_div(ceil_div(size.k, 128), config::split_k) * 128;
                tile.split = cluster_tile % config::split_k;
                cluster_tile /= config::split_k;
                tile.k_begin = min(tile.split * k_per_split, size.k);
                tile.k_end = min(tile.k_begin + k_per_split, size.k);
            }
        }

        const int length = config::raster_along_n ? m_tiles : n_tiles;
        const int across = config::raster_along_n ? n_tiles : m_tiles;
        // A division takes some 35 instructions: there is none for one strip that is full, or one or two tiles wide.
        constexpr int full = config::raster_width;
        const int strip = across <= full ? 0 : cluster_tile / (full * length);
        const int in_strip = cluster_tile - strip * full * length, width = min(full, across - strip * full);
        const int major = width == full ? in_strip / full : width <= 2 ? in_strip >> (width - 1) : in_strip / width;
        const int minor = strip * full + in_strip - major * width;
        const int m_tile = config::raster_along_n ? major : minor, n_tile = config::raster_along_n ? minor : major;
        tile.m = warp_uniform(m_begin + m_tile * cluster_tile_m + rank / config::cluster_n * config::tile_m);
        tile.n = warp_uniform(n_tile * cluster_tile_n + rank % config::cluster_n * config::tile_n);
        tile.index = cluster_tile * cluster_size + rank;
        if constexpr (evens_last_tiles) {
            const int last = m_begin + (m_tiles - 1) * config::tile_m;  // the first row of the last tile
            if (m_tiles > 1 && tile.m_end - last <= 64) {
                if (m_tile == m_tiles - 1) tile.m = last - 64;
                if (m_tile == m_tiles - 2) tile.m_end = last - 64;
            }
        }
        return true;
    }

private:
    const ProblemSize& size;
    const Groups& groups;
    int next, stride, rank, group = 0;
};

// The k-blocks that a tile sums over: 128 along K, aligned to the blocks of the scales. The first and the last one may
// extend past the part of K that is summed.
__device__ __forceinline__ int first_k_block(const Tile& tile) { return tile.k_begin / 128; }
__device__ __forceinline__ int count_k_blocks(const Tile& tile) {
    return tile.k_begin < tile.k_end ? ceil_div(tile.k_end, 128) - first_k_block(tile) : 0;
}

struct KBlocks {
    int count;
    bool is_ragged;  // the part of K begins or ends within a k-block: possible with along_k

    __device__ __forceinline__ explicit KBlocks(const Tile& tile)
        : count(count_k_blocks(tile)),
          is_ragged(config::schedule == along_k && (tile.k_begin % 128 > 0 || tile.k_end % 128 > 0)) {}

    __device__ __forceinline__ bool is_partial(int k_block) const {
        return is_ragged && (k_block == 0 || k_block == count - 1);
    }
};

// Whether the rows of a tile from `first_row` on, or all its columns, are outside of the result.
__device__ __forceinline__ bool is_outside(const Tile& tile, int first_row, int columns) {
    return tile.m + first_row >= tile.m_end || tile.n >= columns;
}
