// The layout of a thread block's shared memory, and the pipeline of stages between its producer and its consumers.
#pragma once
#include "scheduler.cuh"

enum Scales { per_tensor, per_block, per_row };  // the block of a scale: the whole tensor; 128×128; 1×128
enum Store { single, pairs, tma };               // one element, two elements, or a store box at a time

// Cooperative consumers share one tile and pipeline; ping-pong consumers have one each.
constexpr int pipelines = config::ping_pong ? config::warpgroups : 1;
constexpr int warpgroups_per_tile = config::warpgroups / pipelines, threads_per_tile = 128 * warpgroups_per_tile;
constexpr int waves = config::tile_m / (64 * warpgroups_per_tile);  // of 64 rows that a warpgroup multiplies in turn
constexpr bool a_row_scales = config::a_scales == per_row, b_row_scales = config::b_scales == per_row;
constexpr bool has_block_scales = config::a_scales == per_block || config::b_scales == per_block;
constexpr bool two_b_blocks = config::b_scales == per_block && 128 % config::tile_n != 0;  // in reach of a tile

__device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
__device__ constexpr int round_up(int bytes, int unit) { return ceil_div(bytes, unit) * unit; }

// A store box: 64 rows and as many columns as fit 128 bytes and divide the tile; transposed, all columns of 64 rows.
constexpr int out_bytes = config::out_float ? 4 : 2;
constexpr int store_columns = config::transposed ? config::tile_n : gcd(config::tile_n, 128 / out_bytes);
constexpr int store_box_bytes = 64 * store_columns * out_bytes;
constexpr int store_boxes = waves * config::tile_n / store_columns;  // of a warpgroup

// A tile that the producer passes to the consumers, in the first stage that it takes. m < 0: there is none any more.
// GEMMs of few rows take 0.97 to 1.02 of the time then, 0.995 on average (benchmarks/history/gemm-few-rows).
struct alignas(16) PassedTile {
    int m, n, group, m_end;
};

// Offsets in shared memory, and sizes, in bytes.
namespace smem {
constexpr int a_tile = config::tile_m * 128, b_tile = config::tile_n * 128;
constexpr int a_scales = a_row_scales ? config::tile_m * 4 : 0;
constexpr int b_scales = b_row_scales ? round_up(config::tile_n * 4, 128) : 0;
constexpr int stages = config::stages * pipelines;

constexpr int staging = 0;  // tiles first: their swizzle needs 1024-byte alignment
constexpr int a = staging + config::warpgroups * config::staged_boxes * store_box_bytes;
constexpr int b = a + stages * a_tile;
constexpr int a_scale = b + stages * b_tile;
constexpr int b_scale = a_scale + stages * a_scales;
constexpr int scale_slots = 64;  // k-blocks whose 128×128 scales a pipeline holds
constexpr int scale_batch = 32;  // k-blocks whose scales the producer writes at a time, a lane each
constexpr int block_scale = b_scale + stages * b_scales;
constexpr int barriers = block_scale + (has_block_scales ? pipelines * scale_slots * 16 : 0);
// Why the slots suffice. Count the k-blocks of a pipeline through all of its tiles; k-block p has slot p % scale_slots.
// - The slot is written again for k-block p + scale_slots. The producer does that, at the earliest, when it begins the
//   batch that ends there: at k-block p + scale_slots - scale_batch + 1.
// - Before, it acquired the stage of k-block p + scale_slots - scale_batch. So the consumers had released the k-block
//   that was in this stage before: p + scale_slots - scale_batch - stages.
// - They release k-blocks in their order, each after all lanes have read its scales (consumer_release). So they have
//   read those of p if that one is p or a later one, which is the assertion. (Stages that were never loaded need no
//   acquire. As long as there are any, fewer k-blocks than stages were loaded, and no slot that was read is written.)
// - A consumer with two accumulators begins a second k-block before it releases the first, so it holds two stages.
static_assert(config::stages + scale_batch <= scale_slots, "scales of k-blocks in flight must not be overwritten");
static_assert(config::accumulators <= config::stages, "a consumer must not wait for a stage that it holds itself");
constexpr int c_barriers = barriers + 2 * stages * int(sizeof(ptx::Mbarrier));  // two for each warpgroup
constexpr int passed_tiles = c_barriers + (config::load_c ? 2 * config::warpgroups * int(sizeof(ptx::Mbarrier)) : 0);
constexpr int last_split = passed_tiles + (config::passes_tiles ? stages * int(sizeof(PassedTile)) : 0);
constexpr int groups = last_split + 4 * config::warpgroups;
constexpr int bytes = groups + (config::max_groups > 0 ? int(sizeof(Groups)) : 0);
static_assert(bytes == config::shared_bytes, "config.py computes the same");
static_assert(!config::passes_tiles || passed_tiles % sizeof(PassedTile) == 0, "a tile is stored at once");

constexpr int stage_bytes = (config::tile_m + config::tile_n) * 128 + (a_row_scales ? config::tile_m * 4 : 0) +
                            (b_row_scales ? config::tile_n * 4 : 0);  // that TMA writes
}  // namespace smem

// One side's view of a pipeline. Producer and consumers go through its stages in the same order; the parity of the
// mbarriers' phases changes from one round to the next.
struct Pipeline {
    ptx::Mbarrier *full, *empty;
    int first, stage;
    uint32_t parity = 0;
    uint32_t scale_slot = 0;  // of the k-block's 128×128 scales, in bytes; a thread may add up to 15 of its own

    __device__ __forceinline__ Pipeline(uint8_t* shared, int pipeline)
        : first(pipeline * config::stages), stage(first) {
        full = reinterpret_cast<ptx::Mbarrier*>(shared + smem::barriers);
        empty = full + smem::stages;
    }

    __device__ __forceinline__ void advance() {
        scale_slot = (scale_slot + 16) % (16 * smem::scale_slots);
        if (++stage == first + config::stages) {
            stage = first;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ int previous(int which) const {
        return (which == first ? first + config::stages : which) - 1;
    }

    // Waits until the consumers have released the stage.
    __device__ __forceinline__ void producer_acquire() { empty[stage].wait(parity ^ 1); }

    // Arrives for the TMA loads of the stage, which the consumers wait for.
    __device__ __forceinline__ void producer_commit() { full[stage].arrive_expect_tx(smem::stage_bytes); }

    // Waits until the stage is loaded.
    __device__ __forceinline__ void consumer_wait() { full[stage].wait(parity); }

    // Whether the stage is loaded; true where `predicate` is false. See ptx::Mbarrier.
    __device__ __forceinline__ bool consumer_try_wait(bool predicate) {
        return full[stage].try_wait(parity, predicate);
    }

    // Releases a stage that all lanes of this warp have read. The first thread block of a cluster loads what the blocks
    // share, so it must know of both: `rank` is this block's.
    __device__ __forceinline__ void consumer_release(int which, int rank) {
        __syncwarp();
        if constexpr (cluster_size == 1) {
            if (ptx::lane_id() == 0) empty[which].arrive();
        } else {
            if (ptx::lane_id() <= rank) empty[which].arrive_cluster(ptx::lane_id() == 0 ? rank : 0);
        }
    }
};

__device__ __forceinline__ PassedTile& passed_tile(uint8_t* shared, int stage) {
    return reinterpret_cast<PassedTile*>(shared + smem::passed_tiles)[stage];
}

// Waits for the tile that the producer passes next; false where there is none. Called by all consumer warps.
__device__ __forceinline__ bool wait_for_tile(
    uint8_t* shared, Pipeline& pipeline, const ProblemSize& size, Tile& tile) {
    pipeline.consumer_wait();
    const PassedTile passed = passed_tile(shared, pipeline.stage);
    tile.m = warp_uniform(passed.m);
    tile.n = warp_uniform(passed.n);
    tile.group = config::schedule == masked ? warp_uniform(passed.group) : 0;
    tile.m_end = config::schedule == masked ? warp_uniform(passed.m_end) : size.m;
    tile.m_begin = tile.k_begin = tile.index = tile.split = 0;
    tile.k_end = size.k;
    return tile.m >= 0;
}

__device__ __forceinline__ void init_pipelines(uint8_t* shared, int rank) {
    Pipeline pipeline(shared, 0);
    for (int stage = 0; stage < smem::stages; ++stage) {
        pipeline.full[stage].init(1);
        pipeline.empty[stage].init(4 * warpgroups_per_tile * (rank == 0 ? cluster_size : 1));
    }
}

// A producer of a dense GEMM finds its first tile, and requests its scales, while warp 0 initializes the mbarriers.
// These two warps, which synchronize at different places of the code, have a named barrier for each pipeline.
constexpr bool finds_tile_early = config::schedule == dense && cluster_size == 1;
constexpr int init_barrier = 7;  // of the first pipeline

// Synchronizes the warps that call it before they use a pipeline: all of the thread block, or of the cluster, but for a
// producer that finds its tile early.
__device__ __forceinline__ void sync_warps(int warp) {
    if constexpr (cluster_size > 1) {
        ptx::cluster_sync();
    } else if constexpr (finds_tile_early) {
        if (warp == 0)
            for (int i = 0; i < pipelines; ++i) ptx::named_barrier_arrive(init_barrier + i, 64);
        ptx::named_barrier_sync(0, 128 * (config::warpgroups + 1) - 32 * pipelines);
    } else {
        __syncthreads();
    }
}

// Sets the bytes outside of [begin, end) to zero in rows of 128 swizzled bytes. Both operands must be zero where K is
// not summed, since NaN times zero is NaN. Called by all threads that share a tile.
__device__ __forceinline__ void zero_outside(uint8_t* tile, int rows, int begin, int end, int thread) {
    for (int i = thread; i < rows * 8; i += threads_per_tile) {
        const int first = ((i & 7) ^ (i >> 3 & 7)) * 16;  // of the 16 bytes that the swizzle put here
        if (begin <= first && first + 16 <= end) continue;
        uint32_t* words = reinterpret_cast<uint32_t*>(tile + i * 16);
        for (int w = 0; w < 4; ++w) {
            const int low = max(0, min(begin - first - 4 * w, 4)), high = max(low, min(end - first - 4 * w, 4));
            words[w] &= static_cast<uint32_t>((1ull << 8 * high) - (1ull << 8 * low));
        }
    }
}
