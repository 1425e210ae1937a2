// The softmax's weights of top-k positions, added up over the heads, for Hopper: 128 heads of a query in a thread block.
//
//     S = Q · Kᵀ        w[key] = Σ over heads of exp2(S − lse)
//
// Rows are gathered a tile of 64 keys at a time. Each of the two consumer warpgroups has 64 heads, and releases a part of a
// tile as soon as it has been multiplied: a thread block of 64 heads and two tiles would gather twice the rows, and waited for
// them.
#include "convert.cuh"
#include "sparse_tiles.cuh"

constexpr int block_heads = 2 * heads, warps = consumer_threads / 32;

namespace smem {
constexpr int keys = 0;  // tiles, first: their swizzle needs 1024-byte alignment
constexpr int q = keys + tiles * tile;                // [2] of 64 heads
constexpr int lse = q + 2 * tiles * tile;             // float [128], in log₂
constexpr int sums = lse + block_heads * 4;           // float [2][8 warps][64 keys]
constexpr int slots = sums + 2 * warps * tile_keys * 4;  // int [2][64]: rows of a tile, or −1
constexpr int valid = slots + 2 * tile_keys * 4;      // uint2 [2]: bits of the keys of a tile
constexpr int barriers = valid + 2 * 8;
static_assert(barriers + sizeof(TileBarriers) == config::shared_bytes, "sparse_weights.py computes the same");
}  // namespace smem

// The two consumer warpgroups. A thread has the heads 16·warp + 8h + lane/4 and the keys 8j + 2·(lane%4) + i: [4j + 2h + i].
struct Consumer {
    uint8_t* const shared;
    TileBarriers& barriers;
    const float factor;  // of the scores, in log₂
    const int warp, lane;
    uint32_t parity = 0;  // of the tile

    __device__ __forceinline__ float* sums(int source) const {
        return reinterpret_cast<float*>(shared + smem::sums) + (warps * parity + source) * tile_keys;
    }
    __device__ __forceinline__ static void sync() { ptx::named_barrier_sync(1, consumer_threads); }

    __device__ __forceinline__ void load_queries(const uint16_t* q, const float* lse, int n_heads) const {
        constexpr int vectors = width / 8;
        const int thread = ptx::opaque(threadIdx.x);
        sync();  // the queries before are no longer needed
#pragma unroll 6
        for (int n = 0; n < block_heads * vectors / consumer_threads; ++n) {
            const int index = n * consumer_threads + thread, head = index / vectors, vector = index % vectors;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (head < n_heads) value = __ldg(reinterpret_cast<const uint4*>(q + head * width) + vector);
            uint8_t* to = shared + smem::q + (head / heads * tiles + vector / 8) * tile;
            *reinterpret_cast<uint4*>(swizzled(to, head % heads, vector % 8 * 16)) = value;
        }
        if (thread < block_heads)  // weights of heads that do not exist are zero
            reinterpret_cast<float*>(shared + smem::lse)[thread] =
                thread < n_heads ? lse[thread] * 1.44269504f : -minus_infinity();
        ptx::fence_proxy_async();
        sync();
    }

    __device__ __forceinline__ void multiply_part(float (&s)[32], Part part) const {
        barriers.full[part].wait(parity);
        ptx::fence_proxy_async();  // the rows are ordinary stores
        const uint64_t q = ptx::wgmma_descriptor(shared + smem::q + warp / 4 * tiles * tile);
        ::multiply_part(s, q, ptx::wgmma_descriptor(shared + smem::keys), part, part != left);
        ptx::wgmma_commit_group();
    }

    template <int in_flight>
    __device__ __forceinline__ void release(Part part) const {
        ptx::wgmma_wait_group<in_flight>();
        __syncwarp();
        if (lane == 0) barriers.empty[part].arrive();
    }

    // Adds values of this lane and lane ^ 2·count; each of the two keeps one half of them.
    template <int count>
    __device__ __forceinline__ void add_half(float (&values)[16]) const {
        const bool upper = lane & 2 * count;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float kept = upper ? values[count + i] : values[i], other = upper ? values[i] : values[count + i];
            values[i] = kept + __shfl_xor_sync(all_lanes, other, 2 * count);
        }
    }

    // Writes the weights of a tile, up to n of them.
    __device__ __forceinline__ void add_tile(float* weights, int n) {
        float s[32];
        multiply_part(s, left);
        multiply_part(s, right);
        multiply_part(s, rotary_part);
        barriers.listed.wait(parity);
        const ValidKeys valid(reinterpret_cast<const uint2*>(shared + smem::valid)[parity], lane);
        float lse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            lse[h] = reinterpret_cast<const float*>(shared + smem::lse)[16 * warp + 8 * h + lane / 4];
        release<2>(left);
        release<1>(right);
        release<0>(rotary_part);
        fence_operands(s);
        float values[16];  // of key 8j + 2·(lane%4) + i: [2j + i]
#pragma unroll
        for (int r = 0; r < 32; r += 4)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float first = ptx::exp2(fmaf(s[r + i], factor, -lse[0]));
                const float second = ptx::exp2(fmaf(s[r + 2 + i], factor, -lse[1]));
                values[r / 2 + i] = valid.has(r + i) ? first + second : 0.0f;
            }
        add_half<8>(values);
        add_half<4>(values);
        add_half<2>(values);
        const int j = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
        *reinterpret_cast<float2*>(sums(warp) + 8 * j + 2 * (lane % 4)) = make_float2(values[0], values[1]);
        sync();  // sums of the tile before last have been read
        const int key = threadIdx.x;
        if (key < min(n, tile_keys)) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < warps; ++w) sum += sums(w)[key];
            weights[key] = sum;
        }
        parity ^= 1;
    }

    // weights: [rows, blocks of heads, K].
    __device__ __forceinline__ void run(
        const uint16_t* q, const float* lse, float* weights, const Units& units, int n_heads) {
        const int k = units.lists.k;
        for (int unit = blockIdx.x; unit < units.count; unit += gridDim.x) {
            const int first_head = units.first_head(unit), n_tiles = units.n_tiles(unit);
            const int64_t first = static_cast<int64_t>(units.row(unit)) * n_heads + first_head;
            load_queries(q + first * width, lse + first, n_heads - first_head);
            float* to = weights + static_cast<int64_t>(unit) * k;
            for (int t = 0; t < n_tiles; ++t) add_tile(to + t * tile_keys, k - t * tile_keys);
            for (int n = n_tiles * tile_keys + static_cast<int>(threadIdx.x); n < k; n += consumer_threads) to[n] = 0.0f;
        }
    }
};

// q: [rows, H, 576] bfloat16. lse: [rows, H], natural. weights: [rows, blocks of heads, K].
extern "C" __global__ void __launch_bounds__(consumer_threads + producer_threads, 1)
sparse_weights(const uint8_t* latents, const uint16_t* q, const float* lse, const int* positions, float* weights, float scale,
               int n_heads, int rows, int k, int position_step, int n_latents) {
    uint8_t* shared = ptx::dynamic_shared();
    TileBarriers& barriers = *reinterpret_cast<TileBarriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0), lane = ptx::lane_id();
    const Lists lists{positions, nullptr, k, position_step, 0, n_latents, 0};
    const int head_blocks = (n_heads + block_heads - 1) / block_heads;
    const Units units{rows * head_blocks, head_blocks, block_heads, lists};
    if (threadIdx.x == 0) barriers.init(8, 8);
    __syncthreads();
    if (warp >= warps) {
        TileProducer producer{shared + smem::keys, reinterpret_cast<int*>(shared + smem::slots),
                              reinterpret_cast<uint32_t*>(shared + smem::valid), barriers, latents, units};
        producer.run();
    } else {
        Consumer{shared, barriers, scale * 1.44269504f, warp, lane}.run(q, lse, weights, units, n_heads);
    }
}
