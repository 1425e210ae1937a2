// What lies where in a block's shared memory, and the ring of stages that the copy engine fills and the products empty.
#pragma once
#include "scheduler.cuh"

enum Scales { per_tensor, per_block, per_row };  // one; one for 128×128; one a row for 128 along K
enum Store { single, pairs, tma };               // one element, two, or a tile at a time

constexpr int teams = config::ping_pong ? config::warpgroups : 1;
constexpr int team_warpgroups = config::warpgroups / teams, team_threads = 128 * team_warpgroups;
constexpr int waves = config::tile_m / (64 * team_warpgroups);  // of 64 rows that a warpgroup multiplies in turn
constexpr bool a_rows = config::a_scales == per_row, b_rows = config::b_scales == per_row;
constexpr bool one_is_block = config::a_scales == per_block || config::b_scales == per_block;
constexpr bool two_blocks = config::b_scales == per_block && 128 % config::tile_n != 0;  // of columns in a tile

__device__ constexpr int greatest_divisor(int a, int b) { return b == 0 ? a : greatest_divisor(b, a % b); }
__device__ constexpr int round_up(int bytes, int unit) { return ceil_div(bytes, unit) * unit; }

// A stored piece: 64 rows and as many columns as fit 128 bytes and divide the tile; transposed, all columns, each a row of 64.
constexpr int out_bytes = config::out_float ? 4 : 2;
constexpr int store_columns = config::transposed ? config::tile_n : greatest_divisor(config::tile_n, 128 / out_bytes);
constexpr int store_box_bytes = 64 * store_columns * out_bytes;
constexpr int pieces = waves * config::tile_n / store_columns;  // of a warpgroup

namespace memory {
constexpr int a_tile = config::tile_m * 128, b_tile = config::tile_n * 128;
constexpr int a_scales = a_rows ? config::tile_m * 4 : 0, b_scales = b_rows ? round_up(config::tile_n * 4, 128) : 0;
constexpr int stages = config::stages * teams;

constexpr int staging = 0;  // tiles first: their swizzle wants 1024-byte alignment
constexpr int a = staging + config::warpgroups * config::staged_boxes * store_box_bytes;
constexpr int b = a + stages * a_tile;
constexpr int a_scale = b + stages * b_tile;
constexpr int b_scale = a_scale + stages * a_scales;
constexpr int places = 64;  // of a team's scales of blocks: two for a step, twice; 32 are written at once
constexpr int block_scale = b_scale + stages * b_scales;
constexpr int barriers = block_scale + (one_is_block ? teams * places * 16 : 0);
static_assert(config::stages <= places - 32, "what is written must not be what is under way");
constexpr int fetches = barriers + 2 * stages * int(sizeof(ptx::Mbarrier));  // two barriers for each warpgroup
constexpr int last = fetches + (config::load_c ? 2 * config::warpgroups * int(sizeof(ptx::Mbarrier)) : 0);  // a word for each
constexpr int groups = last + 4 * config::warpgroups;
constexpr int bytes = groups + (config::max_groups > 0 ? int(sizeof(Groups)) : 0);
static_assert(bytes == config::shared_bytes, "config.py computes the same");

constexpr int stage_bytes = (config::tile_m + config::tile_n) * 128 + (a_rows ? config::tile_m * 4 : 0) +
                            (b_rows ? config::tile_n * 4 : 0);  // that arrive
}  // namespace memory

// One team's stages. Both sides walk around it in the same order; the parity of a phase tells the rounds apart.
struct Ring {
    ptx::Mbarrier *full, *empty;
    int first, stage;
    uint32_t parity = 0;
    uint32_t place = 0;  // of the step's scales of blocks, in bytes; a thread may add up to 15 of its own

    __device__ __forceinline__ Ring(uint8_t* shared, int team) : first(team * config::stages), stage(first) {
        full = reinterpret_cast<ptx::Mbarrier*>(shared + memory::barriers);
        empty = full + memory::stages;
    }

    __device__ __forceinline__ void advance() {
        place = (place + 16) % (16 * memory::places);
        if (++stage == first + config::stages) {
            stage = first;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ int before(int which) const {
        return (which == first ? first + config::stages : which) - 1;
    }

    // A warp, all its lanes, has read what it needs of a stage, which may be filled again. Of the blocks of a cluster the
    // first brings what they share: it must know of all of them. `rank`: this block's.
    __device__ __forceinline__ void release(int which, int rank) {
        __syncwarp();
        if constexpr (cluster == 1) {
            if (ptx::lane_id() == 0) empty[which].arrive();
        } else {
            if (ptx::lane_id() <= rank) empty[which].arrive_cluster(ptx::lane_id() == 0 ? rank : 0);
        }
    }
};

__device__ __forceinline__ void init_barriers(uint8_t* shared, int rank) {
    Ring ring(shared, 0);
    for (int stage = 0; stage < memory::stages; ++stage) {
        ring.full[stage].init(1);
        ring.empty[stage].init(4 * team_warpgroups * (rank == 0 ? cluster : 1));
    }
}

// A team zeroes the bytes outside of [begin, end) of rows of 128 swizzled bytes. NaN times zero is NaN, so of what is
// not summed both operands must be zero.
__device__ __forceinline__ void keep_between(uint8_t* tile, int rows, int begin, int end, int thread) {
    for (int i = thread; i < rows * 8; i += team_threads) {
        const int first = ((i & 7) ^ (i >> 3 & 7)) * 16;  // of the 16 bytes that the swizzle put here
        if (begin <= first && first + 16 <= end) continue;
        uint32_t* words = reinterpret_cast<uint32_t*>(tile + i * 16);
        for (int w = 0; w < 4; ++w) {
            const int low = max(0, min(begin - first - 4 * w, 4)), high = max(low, min(end - first - 4 * w, 4));
            words[w] &= static_cast<uint32_t>((1ull << 8 * high) - (1ull << 8 * low));
        }
    }
}
