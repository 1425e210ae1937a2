// Logits of the lightning indexer for Hopper: multi-query attention scores of one key head, summed over query heads.
//
//     logits[s, t] = key_scale[t] · sum over h of weight[s, h] · relu(q[s, h] · k[t])
//
// The tensor cores are faster than what follows them on the CUDA cores: relu, weight and sum over heads. A tile has 64
// keys as rows and the heads of several queries as columns. So the heads of a query lie in the accumulators of a thread
// and its three neighbors, and each thread holds its heads' weights in registers for all keys.
//
// A persistent, warp-specialized kernel. The producer warp gives the consumers one item after another: some queries, and
// a range of keys. It loads the queries and their weights into one pipeline, tiles of keys into another. Consumer
// warpgroups take tiles in turn, so that the tensor cores multiply for one while another reduces.
//
// NOTES
// - The values of several queries are summed over four lanes by exchanging halves: a lane keeps those of its own queries
//   and stores them, which takes half as many shuffles as a sum in every lane, and a quarter of the stores.
// - x + |x| is twice relu(x), exactly, and keeps NaN. It is as fast as max(x, 0) or faster (2 to 4% of the whole).
// - Warpgroups that multiply strictly one after the other are slower, whether a turn ends with the wgmma's issue or with
//   its result.
#include "ptx.cuh"
#include "wgmma.cuh"

constexpr int tile_keys = 64;
constexpr int columns = config::queries * config::heads;       // of a tile: the heads of one query after the other
constexpr int own_weights = config::heads / 4;                 // of a query, in a thread
constexpr int chains = config::queries >= 4 ? 1 : 2;           // sums of a value that are independent of each other
constexpr int own_values = config::queries > 1 ? config::queries / 2 : 1;  // that a lane stores of a tile
constexpr int own_queries = own_values > 1 ? own_values / 2 : 1;
constexpr int pages_per_split = 4;                             // the unit of the paged schedule: 256 keys
constexpr int q_stages = 2;
// A warpgroup that did not wait for each phase of a stage could take an earlier phase for its own.
static_assert(config::stages % config::warpgroups == 0, "each stage must belong to one warpgroup");

// What consumers compute next. A query's keys are [begin, end), within the tiles; key t is stored at column t - shift.
struct Item {
    int first_query, first_key, tiles, unused;  // no tiles: the end
    int begin[config::queries], end[config::queries], shift[config::queries];
};

struct Barriers {
    ptx::Mbarrier full[config::stages], empty[config::stages], q_full[q_stages], q_empty[q_stages];
};

namespace smem {
constexpr int q_tile = columns * config::head_dim, k_tile = tile_keys * config::head_dim;
constexpr int q_weights = columns * 4, k_scales = tile_keys * 4;
constexpr int q = 0, k = q + q_stages * q_tile;  // tiles first: their swizzle needs an alignment of eight rows
constexpr int weights = k + config::stages * k_tile, scales = weights + q_stages * q_weights;
constexpr int items = scales + config::stages * k_scales;
constexpr int barriers = items + q_stages * int(sizeof(Item));
constexpr int bytes = barriers + int(sizeof(Barriers));
static_assert(bytes == config::shared_bytes, "mqa_logits.py computes the same");
}  // namespace smem

// Where a problem lies in memory.
struct Problem {
    const TensorMap *q_map, *weight_map, *key_map, *scale_map;
    const int *starts, *ends;       // [S]; paged: ends are context lengths [B, next_n]
    const int *pages, *schedule;    // paged: [B, pages_stride], [grid + 1, 2]
    void* out;
    int64_t out_stride;
    int queries, keys, width;       // S, T and the columns of the result
    int q_tiles, items, chunk;      // items: q_tiles for each chunk of keys
    int pages_stride, next_n;
};

// One side's position in a pipeline, which goes through its stages in their order.
template <int count>
struct Place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int by = 1) {
        stage += by;
        if (stage >= count) {
            stage -= count;
            parity ^= 1;
        }
    }
};

struct Shared {
    uint8_t* memory;

    __device__ __forceinline__ Barriers& barriers() const { return *reinterpret_cast<Barriers*>(memory + smem::barriers); }
    __device__ __forceinline__ Item& item(int stage) const {
        return reinterpret_cast<Item*>(memory + smem::items)[stage];
    }
    __device__ __forceinline__ uint8_t* q(int stage) const { return memory + smem::q + stage * smem::q_tile; }
    __device__ __forceinline__ uint8_t* k(int stage) const { return memory + smem::k + stage * smem::k_tile; }
    __device__ __forceinline__ float* weights(int stage) const {
        return reinterpret_cast<float*>(memory + smem::weights + stage * smem::q_weights);
    }
    __device__ __forceinline__ float* scales(int stage) const {
        return reinterpret_cast<float*>(memory + smem::scales + stage * smem::k_scales);
    }
};

// The keys of a query that belong to a chunk.
struct Keys {
    int begin, end, shift;
};

__device__ __forceinline__ Keys keys_of(const Problem& problem, int query, int chunk_begin, int chunk_end) {
    if (query >= problem.queries) return {chunk_begin, chunk_begin, 0};
    const int start = max(__ldg(problem.starts + query), 0);
    const int end = min(__ldg(problem.ends + query), config::compressed ? start + problem.width : problem.keys);
    const int begin = min(max(start, chunk_begin), chunk_end);
    return {begin, max(min(min(end, problem.keys), chunk_end), begin), config::compressed ? start : 0};
}

// The producer: all lanes of one warp; one of them issues the copies.
struct Producer {
    const Problem& problem;
    Shared shared;
    int lane;
    Place<q_stages> q;
    Place<config::stages> k;

    __device__ __forceinline__ void run() {
        if constexpr (config::paged) produce_paged();
        else produce_chunks();
        begin_item(0, 0, 0, {}, false);
    }

    // `keys` of the lane's query.
    __device__ __forceinline__ void begin_item(int first_query, int first_key, int tiles, Keys keys, bool loads = true) {
        ptx::Mbarrier* full = shared.barriers().q_full + q.stage;
        shared.barriers().q_empty[q.stage].wait(q.parity ^ 1);
        Item& item = shared.item(q.stage);
        if (lane < config::queries) {
            item.begin[lane] = keys.begin;
            item.end[lane] = keys.end;
            item.shift[lane] = keys.shift;
        }
        if (lane == 0) {
            item.first_query = first_query;
            item.first_key = first_key;
            item.tiles = tiles;
        }
        __syncwarp();
        if (lane == 0) {
            if (loads) {
                full->arrive_expect_tx(smem::q_tile + smem::q_weights);
                ptx::tma_load(shared.q(q.stage), problem.q_map, full, 0, first_query * config::heads, 0);
                ptx::tma_load(shared.weights(q.stage), problem.weight_map, full, 0, first_query, 0);
            } else {
                full->arrive();
            }
        }
        q.advance();
    }

    // Loads 64 keys: those of a page, or the rows from `first` on.
    __device__ __forceinline__ void load_keys(int first, int page) {
        shared.barriers().empty[k.stage].wait(k.parity ^ 1);
        __syncwarp();  // all lanes have waited before the stage can be released again
        if (lane == 0) {
            ptx::Mbarrier* full = shared.barriers().full + k.stage;
            full->arrive_expect_tx(smem::k_tile + smem::k_scales);
            ptx::tma_load(shared.k(k.stage), problem.key_map, full, 0, first, page);
            ptx::tma_load(shared.scales(k.stage), problem.scale_map, full, first, 0, page);
        }
        k.advance();
    }

    __device__ __forceinline__ void produce_chunks() {
        for (int index = blockIdx.x; index < problem.items; index += gridDim.x) {
            const int first_query = index % problem.q_tiles * config::queries;
            const int chunk_begin = index / problem.q_tiles * problem.chunk;
            const int chunk_end = min(chunk_begin + problem.chunk, problem.keys);
            const Keys keys = keys_of(problem, lane < config::queries ? first_query + lane : problem.queries, chunk_begin,
                                      chunk_end);
            const bool any = keys.begin < keys.end;
            const int begin = __reduce_min_sync(all_lanes, any ? keys.begin : problem.keys) / tile_keys * tile_keys;
            const int end = __reduce_max_sync(all_lanes, any ? keys.end : 0);
            if (begin >= end) continue;
            const int tiles = (end - begin + tile_keys - 1) / tile_keys;
            begin_item(first_query, begin, tiles, keys);
            for (int tile = 0; tile < tiles; ++tile) load_keys(begin + tile * tile_keys, 0);
        }
    }

    __device__ __forceinline__ void produce_paged() {
        const int* entry = problem.schedule + 2 * blockIdx.x;
        const int first = __ldg(entry), first_split = __ldg(entry + 1), last = __ldg(entry + 2);
        const int last_split = __ldg(entry + 3), sequences = problem.queries / problem.next_n;
        for (int sequence = first; sequence <= last && sequence < sequences; ++sequence) {
            int length = 0;
            for (int i = lane; i < problem.next_n; i += 32)
                length = max(length, __ldg(problem.ends + sequence * problem.next_n + i));
            length = min(__reduce_max_sync(all_lanes, length), problem.width);
            const int pages = (length + tile_keys - 1) / tile_keys;
            const int begin = sequence == first ? first_split * pages_per_split : 0;
            const int end = sequence == last ? min(last_split * pages_per_split, pages) : pages;
            if (begin >= end) continue;
            for (int query = 0; query < problem.next_n; query += config::queries)
                produce_pages(sequence, query, begin, end);
        }
    }

    // Some queries of a sequence with its pages from `begin` to `end`.
    __device__ __forceinline__ void produce_pages(int sequence, int query, int begin, int end) {
        const int first_query = sequence * problem.next_n + query;
        const int* table = problem.pages + sequence * int64_t(problem.pages_stride);
        Keys keys{begin * tile_keys, begin * tile_keys, 0};
        if (lane < config::queries && query + lane < problem.next_n)
            keys.end = max(min(min(__ldg(problem.ends + first_query + lane), problem.width), end * tile_keys), keys.begin);
        begin_item(first_query, begin * tile_keys, end - begin, keys);
        for (int page = begin; page < end; page += 32) {
            const int of_lane = page + lane < end ? __ldg(table + page + lane) : 0;
            const int count = min(32, end - page);
            for (int i = 0; i < count; ++i) load_keys(0, __shfl_sync(all_lanes, of_lane, i));
        }
    }
};

template <bool bfloat16>
struct Stored {
    using Type = float;
};
template <>
struct Stored<true> {
    using Type = uint16_t;
};
using Logit = typename Stored<config::bfloat16_out>::Type;

template <class T>
__device__ __forceinline__ T rounded(float x) {
    if constexpr (sizeof(T) == 4) return x;
    else return static_cast<T>(ptx::pack_bf16(x, 0.0f));
}


// Stores −∞ at the keys of each query's row that do not belong to it. `warp` of `warps` take turns.
__device__ __forceinline__ void clean(const Problem& problem, int warp, int warps) {
    const int lane = ptx::lane_id();
    const Logit infinite = rounded<Logit>(__int_as_float(0xFF800000));
    for (int index = blockIdx.x; index < problem.items; index += gridDim.x) {
        const int first_query = index % problem.q_tiles * config::queries;
        const int chunk_begin = index / problem.q_tiles * problem.chunk;
        const int chunk_end = min(chunk_begin + problem.chunk, problem.keys);
        for (int i = warp; i < config::queries; i += warps) {
            const int query = first_query + i;
            if (query >= problem.queries) break;
            const Keys keys = keys_of(problem, query, chunk_begin, chunk_end);
            Logit* row = static_cast<Logit*>(problem.out) + query * problem.out_stride;
            for (int key = chunk_begin + lane; key < keys.begin; key += 32) row[key] = infinite;
            for (int key = keys.end + lane; key < chunk_end; key += 32) row[key] = infinite;
        }
    }
}

// One consumer warpgroup.
struct Consumer {
    const Problem& problem;
    Shared shared;
    int warpgroup, warp, lane;
    Place<q_stages> q;
    Place<config::stages> k{warpgroup, 0};
    int next_tile = warpgroup, first_tile = 0;  // of this warpgroup; of the item; counted through all items

    float weight[config::queries][own_weights];
    int begin[own_queries], length[own_queries];
    Logit* row[own_queries];

    __device__ __forceinline__ void run() {
        while (true) {
            shared.barriers().q_full[q.stage].wait(q.parity);
            const Item& item = shared.item(q.stage);
            const int tiles = item.tiles, first_key = item.first_key;
            if (tiles == 0) return;
            read_item(item);
            for (; next_tile < first_tile + tiles; next_tile += config::warpgroups) {
                compute(first_key + (next_tile - first_tile) * tile_keys);
                k.advance(config::warpgroups);
            }
            first_tile += tiles;
            __syncwarp();
            if (lane == 0) shared.barriers().q_empty[q.stage].arrive();
            q.advance();
        }
    }

    // The index, in the order (query, upper or lower eight rows), of the first value that this lane stores.
    __device__ __forceinline__ int first_value() const {
        const int quarter = lane % 4;
        if constexpr (config::queries == 1) return quarter / 2;
        else return quarter / 2 * config::queries + quarter % 2 * (config::queries / 2);
    }

    __device__ __forceinline__ void read_item(const Item& item) {
        const float* weights = shared.weights(q.stage) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < config::queries; ++i)
#pragma unroll
            for (int j = 0; j < own_weights; j += 2) {
                const float2 pair = *reinterpret_cast<const float2*>(weights + i * config::heads + 4 * j);
                weight[i][j] = pair.x;
                weight[i][j + 1] = pair.y;
            }
#pragma unroll
        for (int i = 0; i < own_queries; ++i) {
            const int query = first_value() / 2 + i;
            begin[i] = item.begin[query];
            length[i] = item.end[query] - begin[i];
            row[i] = static_cast<Logit*>(problem.out) + (item.first_query + query) * problem.out_stride - item.shift[query];
        }
    }

    __device__ __forceinline__ void compute(int first_key) {
        float d[columns / 2];
        shared.barriers().full[k.stage].wait(k.parity);
        const uint64_t keys = ptx::wgmma_descriptor<config::head_dim>(shared.k(k.stage));
        const uint64_t heads = ptx::wgmma_descriptor<config::head_dim>(shared.q(q.stage));
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) ptx::warpgroup_fence_operand(d[i]);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < config::head_dim / 32; ++i) ptx::wgmma(d, keys + 2 * i, heads + 2 * i, i > 0);
        ptx::wgmma_commit_group();
        const float* scales = shared.scales(k.stage) + warp % 4 * 16 + lane / 4;
        const int half = own_values > 1 ? 0 : first_value() % 2;  // of the 16 rows of a warp
        const float scale[2] = {0.5f * scales[8 * half], own_values > 1 ? 0.5f * scales[8] : 0.0f};
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) ptx::warpgroup_fence_operand(d[i]);
        __syncwarp();
        if (lane == 0) shared.barriers().empty[k.stage].arrive();

        float value[2 * config::queries];
        sum_own_heads(d, value);
        sum_lanes(value);
#pragma unroll
        for (int i = 0; i < own_values; ++i) {
            const int key = first_key + warp % 4 * 16 + lane / 4 + 8 * (own_values > 1 ? i % 2 : half);
            const int query = i / 2;
            const bool stores = config::queries > 1 || lane % 2 == 0;
            if (stores && static_cast<uint32_t>(key - begin[query]) < static_cast<uint32_t>(length[query]))
                row[query][key] = rounded<Logit>(value[i] * scale[i % 2]);
        }
    }

    // value[2·query + half]: twice the weighted sum over the heads that this thread holds.
    __device__ __forceinline__ void sum_own_heads(const float (&d)[columns / 2], float (&value)[2 * config::queries]) const {
        float sum[2 * config::queries][chains];
#pragma unroll
        for (int j = 0; j < config::heads / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int query = 0; query < config::queries; ++query)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int at = 4 * (query * config::heads / 8 + j) + 2 * half + i;
                        const float twice = __fadd_rn(d[at], fabsf(d[at])), w = weight[query][2 * j + i];
                        float& total = sum[2 * query + half][i % chains];
                        total = j == 0 && i < chains ? __fmul_rn(twice, w) : __fmaf_rn(twice, w, total);
                    }
#pragma unroll
        for (int i = 0; i < 2 * config::queries; ++i)
            value[i] = chains == 1 ? sum[i][0] : __fadd_rn(sum[i][0], sum[i][chains - 1]);
    }

    // Sums over four lanes. A lane then holds the values from first_value() on.
    __device__ __forceinline__ void sum_lanes(float (&value)[2 * config::queries]) const {
        exchange<config::queries>(value, 2);
        if constexpr (config::queries > 1) exchange<config::queries / 2>(value, 1);
        else value[0] = __fadd_rn(value[0], __shfl_xor_sync(all_lanes, value[0], 1));
    }

    // Lanes whose `bit` is set keep the values from `count` on, the others those before.
    template <int count>
    __device__ __forceinline__ void exchange(float (&value)[2 * config::queries], int bit) const {
        const bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float sent = upper ? value[i] : value[i + count], kept = upper ? value[i + count] : value[i];
            value[i] = __fadd_rn(kept, __shfl_xor_sync(all_lanes, sent, bit));
        }
    }
};

// q_map: q [S·H, D]; weight_map: [S, H]; key_map: [T, D], paged [P, 64, D]; scale_map: [T], paged [P, 64].
extern "C" __global__ void __launch_bounds__(128 * (config::warpgroups + 1), 1) mqa_logits(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap weight_map,
    const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap scale_map, const int* starts,
    const int* ends, const int* pages, const int* schedule, void* out, int64_t out_stride, int queries, int keys, int width,
    int q_tiles, int items, int chunk, int pages_stride, int next_n) {
    const Problem problem{&q_map, &weight_map, &key_map, &scale_map, starts, ends, pages, schedule, out, out_stride,
                          queries, keys, width, q_tiles, items, chunk, pages_stride, next_n};
    const Shared shared{ptx::dynamic_shared()};
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0), warpgroup = warp / 4;
    if (threadIdx.x == 0) {
        Barriers& barriers = shared.barriers();
        for (int stage = 0; stage < config::stages; ++stage) {
            barriers.full[stage].init(1);
            barriers.empty[stage].init(4);
        }
        for (int stage = 0; stage < q_stages; ++stage) {
            barriers.q_full[stage].init(1);
            barriers.q_empty[stage].init(4 * config::warpgroups);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();

    if (warpgroup == config::warpgroups) {
        ptx::setmaxnreg_dec<config::producer_registers>();
        if (warp % 4 == 0) Producer{problem, shared, static_cast<int>(ptx::lane_id())}.run();
        else if (config::clean) clean(problem, warp % 4 - 1, 3);
        __syncwarp();
    } else {
        ptx::setmaxnreg_inc<config::consumer_registers>();
        Consumer{problem, shared, warpgroup, warp, static_cast<int>(ptx::lane_id())}.run();
    }
}
