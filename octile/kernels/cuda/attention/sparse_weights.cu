// The softmax's weights of chosen positions, added up over the heads, for Hopper: 64 heads of a query in a thread block.
//
//     S = Q · Kᵀ        w[key] = Σ over heads of exp2(S − lse)
//
// The lists' rows are gathered as in sparse_mla.cu, two tiles of 64 keys at a time, one for each consumer warpgroup.
#include "sparse_rows.cuh"
#include "wgmma.cuh"

namespace smem {
constexpr int keys = 0;  // two tiles; first: their swizzle needs 1024-byte alignment
constexpr int q = keys + 2 * tiles * tile;
constexpr int lse = q + tiles * tile;               // float [64], in log₂
constexpr int sums = lse + heads * 4;               // float [8 warps][64 keys]
constexpr int slots = sums + 8 * tile_keys * 4;     // int [2][128]: of the rows of a step, or −1
constexpr int valid = slots + 2 * step_keys * 4;    // uint4 [2]: bits of the keys of a step
constexpr int barriers = valid + 2 * 16;
static_assert(barriers + int(sizeof(ListBarriers)) == config::shared_bytes, "sparse_weights.py computes the same");
}  // namespace smem

// Warpgroup `own`. A thread has the heads 16·warp + 8h + lane/4 and the keys 8j + 2·(lane%4) + i: [4j + 2h + i].
template <int own>
struct Consumer {
    uint8_t* const shared;
    ListBarriers& barriers;
    const float factor;  // of the scores, in log₂
    const int warp, lane;
    uint32_t parity = 0;  // of the step

    __device__ __forceinline__ float* sums(int of_warp) const {
        return reinterpret_cast<float*>(shared + smem::sums) + (4 * own + of_warp) * tile_keys;
    }
    __device__ __forceinline__ static void sync_both() { ptx::named_barrier_sync(3, consumer_threads); }
    __device__ __forceinline__ static void sync_own() { ptx::named_barrier_sync(1 + own, consumer_threads / 2); }

    __device__ __forceinline__ void load_queries(const uint16_t* q, const float* lse, int n_heads) const {
        constexpr int vectors = width / 8;
        const int thread = ptx::opaque(threadIdx.x);
        sync_both();  // the queries before are no longer needed
#pragma unroll 6
        for (int n = 0; n < heads * vectors / consumer_threads; ++n) {
            const int index = n * consumer_threads + thread, head = index / vectors, vector = index % vectors;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (head < n_heads) value = __ldg(reinterpret_cast<const uint4*>(q + head * width) + vector);
            *reinterpret_cast<uint4*>(swizzled(shared + smem::q + vector / 8 * tile, head, vector % 8 * 16)) = value;
        }
        if (thread < heads)  // weights of heads that do not exist are zero
            reinterpret_cast<float*>(shared + smem::lse)[thread] =
                thread < n_heads ? lse[thread] * 1.44269504f : -minus_infinity();
        ptx::fence_proxy_async();
        sync_both();
    }

    __device__ __forceinline__ void multiply_part(float (&s)[32], Part part, bool accumulate) const {
        const uint64_t q = ptx::wgmma_descriptor(shared + smem::q);
        const uint64_t keys = ptx::wgmma_descriptor(shared + smem::keys + own * tiles * tile);
        const int first = 4 * part, count = part == rotary_part ? 1 : 4;
        barriers.full[own][part].wait(parity);
        ptx::fence_proxy_async();  // the rows are ordinary stores
        ptx::wgmma_fence();
#pragma unroll
        for (int t = first; t < first + count; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::wgmma(s, q + t * (tile / 16) + 2 * k, keys + t * (tile / 16) + 2 * k, accumulate || t > first || k > 0);
    }

    // Writes the weights of a tile, up to n of them.
    __device__ __forceinline__ void add_tile(float* weights, int n) {
        float s[32];
        multiply_part(s, rotary_part, false);  // in the order in which parts are gathered
        multiply_part(s, own == 0 ? left : right, true);
        multiply_part(s, own == 0 ? right : left, true);
        ptx::wgmma_commit_group();
        barriers.listed.wait(parity);
        const uint2 valid = reinterpret_cast<const uint2*>(shared + smem::valid)[2 * parity + own];
        const uint32_t own_bits[2] = {valid.x >> 2 * (lane % 4), valid.y >> 2 * (lane % 4)};
        float lse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            lse[h] = reinterpret_cast<const float*>(shared + smem::lse)[16 * warp + 8 * h + lane / 4];
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
        for (int part = 0; part < parts; ++part) barriers.release(own, static_cast<Part>(part));
#pragma unroll
        for (int r = 0; r < 32; r += 4)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool is_valid = own_bits[r / 16] >> (8 * (r / 4 % 4) + i) & 1;
                float sum = ptx::exp2(fmaf(s[r + i], factor, -lse[0])) + ptx::exp2(fmaf(s[r + 2 + i], factor, -lse[1]));
                if (!is_valid) sum = 0.0f;
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    sum += __shfl_xor_sync(all_lanes, sum, distance);
                if (lane < 4) sums(warp)[2 * r + 2 * lane + i] = sum;
            }
        sync_own();
        const int key = threadIdx.x % 128;
        if (key < min(n, tile_keys)) weights[key] = (sums(0)[key] + sums(1)[key]) + (sums(2)[key] + sums(3)[key]);
        sync_own();  // before the sums are overwritten
        parity ^= 1;
    }

    // weights: [rows, blocks of heads, K].
    __device__ __forceinline__ void run(
        const uint16_t* q, const float* lse, float* weights, Items& items, const Lists& lists, int n_heads, int head_blocks,
        int first_head) {
        Item item;
        while (items.next(item, lists)) {
            const int64_t first = static_cast<int64_t>(item.unit) * n_heads + first_head;
            load_queries(q + first * width, lse + first, n_heads - first_head);
            float* to = weights + (static_cast<int64_t>(item.unit) * head_blocks + first_head / heads) * lists.k;
            for (int n = own * tile_keys; n < item.n_steps * step_keys; n += step_keys) add_tile(to + n, lists.k - n);
            for (int n = item.n_steps * step_keys + static_cast<int>(threadIdx.x); n < lists.k; n += consumer_threads)
                to[n] = 0.0f;
        }
    }
};

// q: [rows, H, 576] bfloat16. lse: [rows, H], natural. weights: [rows, blocks of heads, K].
extern "C" __global__ void __launch_bounds__(consumer_threads + producer_threads, 1)
sparse_weights(const uint8_t* latents, const uint16_t* q, const float* lse, const int* positions, float* weights, float scale,
               int n_heads, int rows, int k, int position_step, int n_latents, int ranges) {
    uint8_t* shared = ptx::dynamic_shared();
    ListBarriers& barriers = *reinterpret_cast<ListBarriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0), lane = ptx::lane_id();
    const int head_blocks = (n_heads + heads - 1) / heads;
    const int range = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * heads;
    const Lists lists{positions, nullptr, k, position_step, 0, n_latents, 0};
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    Items items{rows, 1, ranges, (k + step_keys - 1) / step_keys, range};
    if (warp >= consumer_threads / 32) {
        Producer producer{shared + smem::keys, reinterpret_cast<int*>(shared + smem::slots),
                          reinterpret_cast<uint32_t*>(shared + smem::valid), barriers, latents, lists, items};
        producer.run();
    } else if (warp < 4) {
        Consumer<0>{shared, barriers, scale * 1.44269504f, warp, lane}.run(
            q, lse, weights, items, lists, n_heads, head_blocks, first_head);
    } else {
        Consumer<1>{shared, barriers, scale * 1.44269504f, warp - 4, lane}.run(
            q, lse, weights, items, lists, n_heads, head_blocks, first_head);
    }
}
