// Which tile a team of warps makes next. The grid is persistent: each team takes every so-and-so-many-th tile.
//
//   dense     tiles of one result, its sum over K perhaps cut into `split_k` parts
//   grouped   rows sorted by group, sizes[g] is where group g ends, wherever that is; the rows past the last group are
//             one more group, whose sum is empty: zeros; without zero_rest they stay as they are
//   masked    [groups, m, …], of which the first sizes[g] rows are wanted
//   along_k   one result a group, the sum over K cut at sizes[g], wherever that is
//
// NOTES
// - The blocks of a cluster share the rows of one operand, so a cluster takes a unit: two tiles beside or below each
//   other. A unit may reach over the end; nothing is stored there, and the copy engine fills it with zeros.
// - Tiles that run at the same time should share operands in the L2 cache. Units are taken in bands of config::raster_width
//   units along m, column by column: W teams then touch `band` row panels and W / band column panels, and their sum of
//   bytes is least where the two are equal, band² = W · cluster_tile_n / cluster_tile_m. Or bands lie along n and are taken row by row:
//   the same tiles run together, but what is stored at the same time lies in the same rows. That is up to 3% faster where
//   there are several bands, and up to 10% slower where there is one, or where the result is added to (`choose`).
// - Groups of rows begin anywhere, but the copy engine brings scales from multiples of 16 bytes only (seen on an H200; it
//   ends in an illegal instruction). A group's first tile therefore begins up to 3 rows before it, which are not stored.
// - Sizes lie on the device and cannot be refused, but they must not lead outside of the tensors: they are clamped.
#pragma once
#include "ptx.cuh"

enum Schedule { dense, grouped, masked, along_k };

struct Sizes {
    int m, n, k, groups;
    const int* groups_end;  // offsets or counts
};

struct Tile {
    int group;           // `groups` itself: rows past the last group
    int m, n;            // first row and column
    int m_begin, m_end;  // rows before and from these on belong to others
    int k_begin, k_end;  // what is summed
    int index, split;    // which tile, and which part of its sum
};

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int cluster = config::cluster_m * config::cluster_n;  // blocks, 1 or 2
constexpr int cluster_tile_m = config::tile_m * config::cluster_m, cluster_tile_n = config::tile_n * config::cluster_n;
constexpr bool rows_grouped = config::schedule == grouped || config::schedule == masked;

// What is the same in all lanes of a warp, so that the compiler knows it, too: it then keeps addresses of tiles in the
// registers that a warp shares, where wgmma wants them.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Of this block in its cluster.
__device__ __forceinline__ int block_rank() { return cluster > 1 ? ptx::cluster_ctarank() : 0; }

// Where groups begin, in shared memory.
struct Groups {
    int row[config::max_groups + 1];   // grouped, along_k: the first of group g; masked: of group g−1, how many
    int unit[config::max_groups + 2];  // grouped, masked: units along m before group g
};

__device__ __forceinline__ int count_groups(const Sizes& sizes) {
    return sizes.groups + (config::schedule == grouped && config::zero_rest);  // the rows past them are one more
}

__device__ __forceinline__ int rows_of(const Groups& groups, const Sizes& sizes, int g) {
    if constexpr (config::schedule == masked) return groups.row[g + 1];
    return (g < sizes.groups ? groups.row[g + 1] : sizes.m) - groups.row[g];
}

// Of the group before, in the first tile of group g.
__device__ __forceinline__ int rows_before(const Groups& groups, int g) {
    return config::schedule == grouped ? groups.row[g] % 4 : 0;
}

// One warp lists the groups.
__device__ __forceinline__ void list_groups(Groups& groups, const Sizes& sizes) {
    const int limit = rows_grouped ? sizes.m : sizes.k;
    for (int g = ptx::lane_id(); g <= sizes.groups; g += 32)
        groups.row[g] = g == 0 ? 0 : max(0, min(sizes.groups_end[g - 1], limit));
    __syncwarp();
    if constexpr (!rows_grouped) return;

    int before = 0;
    for (int first = 0; first < count_groups(sizes); first += 32) {
        const int g = first + ptx::lane_id();
        const int rows = g < count_groups(sizes) ? rows_of(groups, sizes, g) : 0;
        int units = rows > 0 ? ceil_div(rows + rows_before(groups, g), cluster_tile_m) : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int left = __shfl_up_sync(~0u, units, distance);
            if (ptx::lane_id() >= distance) units += left;
        }
        if (g < count_groups(sizes)) groups.unit[g + 1] = before + units;
        before += __shfl_sync(~0u, units, 31);
    }
    if (ptx::lane_id() == 0) groups.unit[0] = 0;
}

class Scheduler {
public:
    __device__ __forceinline__ Scheduler(const Sizes& sizes, const Groups& groups, int team, int teams)
        : sizes(sizes), groups(groups) {
        const int clusters = gridDim.x / cluster;
        next = uniform(team * clusters + blockIdx.x / cluster);
        step = teams * clusters;
        rank = block_rank();
    }

    // The next tile of this team, for a whole warp; false when there is none.
    __device__ __forceinline__ bool take(Tile& tile) {
        const int n_units = ceil_div(sizes.n, cluster_tile_n);
        int m_units = ceil_div(sizes.m, cluster_tile_m), m_begin = 0, unit = next;
        next += step;
        tile.group = tile.split = 0;
        tile.m_begin = 0;
        tile.m_end = sizes.m;
        tile.k_begin = 0;
        tile.k_end = sizes.k;

        if constexpr (rows_grouped) {
            while (group < count_groups(sizes) && unit >= uniform(groups.unit[group + 1]) * n_units) ++group;
            if (group == count_groups(sizes)) return false;
            const int before = uniform(groups.unit[group]);
            m_units = uniform(groups.unit[group + 1]) - before;
            unit -= before * n_units;
            tile.group = group;
            tile.m_begin = config::schedule == grouped ? uniform(groups.row[group]) : 0;
            tile.m_end = tile.m_begin + uniform(rows_of(groups, sizes, group));
            m_begin = tile.m_begin - uniform(rows_before(groups, group));
            if (group == sizes.groups) tile.k_end = 0;
        } else if constexpr (config::schedule == along_k) {
            tile.group = unit / (m_units * n_units);
            unit %= m_units * n_units;
            if (tile.group >= sizes.groups) return false;
            tile.k_begin = uniform(groups.row[tile.group]);
            tile.k_end = uniform(groups.row[tile.group + 1]);
        } else {
            if (unit >= m_units * n_units * config::split_k) return false;
            if constexpr (config::split_k > 1) {
                const int part = ceil_div(ceil_div(sizes.k, 128), config::split_k) * 128;
                tile.split = unit % config::split_k;
                unit /= config::split_k;
                tile.k_begin = min(tile.split * part, sizes.k);
                tile.k_end = min(tile.k_begin + part, sizes.k);
            }
        }

        const int length = config::raster_along_n ? m_units : n_units, across = config::raster_along_n ? n_units : m_units;
        const int band = unit / (config::raster_width * length), in_band = unit % (config::raster_width * length);
        const int width = min(config::raster_width, across - band * config::raster_width);
        const int along = in_band / width, beside = band * config::raster_width + in_band % width;
        const int m_unit = config::raster_along_n ? along : beside, n_unit = config::raster_along_n ? beside : along;
        tile.m = uniform(m_begin + m_unit * cluster_tile_m + rank / config::cluster_n * config::tile_m);
        tile.n = uniform(n_unit * cluster_tile_n + rank % config::cluster_n * config::tile_n);
        tile.index = unit * cluster + rank;
        return true;
    }

private:
    const Sizes& sizes;
    const Groups& groups;
    int next, step, rank, group = 0;
};

// The steps of 128 along K that a tile sums over. They lie where the blocks of the scales lie: the first and the last
// may reach over what is summed.
__device__ __forceinline__ int first_step(const Tile& tile) { return tile.k_begin / 128; }
__device__ __forceinline__ int count_steps(const Tile& tile) {
    return tile.k_begin < tile.k_end ? ceil_div(tile.k_end, 128) - first_step(tile) : 0;
}

// Whether all that a warpgroup sums lies outside of the result, because rows of the tile from first_row on do, or its columns.
__device__ __forceinline__ bool lies_outside(const Tile& tile, int first_row, int columns) {
    return tile.m + first_row >= tile.m_end || tile.n >= columns;
}
