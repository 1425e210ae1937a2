// Latent attention over chosen positions for Hopper, 64 heads of a query in a thread block: prefill and decoding.
//
//     S[64 heads, 64 keys] = Q · Kᵀ        P = exp2(S − running maximum)        O[64 heads, 512 channels] += P · V
//
// Each query has a list of positions. A producer warpgroup gathers their rows into two tiles of 64 keys, a step of 128
// entries of the list. Two consumer warpgroups multiply by the schedule of mla_decode_64.cu, which FlashMLA calls "seesaw":
// each has half of the channels of O, one computes the scores of the first tile and the other those of the second one, and
// each multiplies the weights of both by its half of the values.
//
//     warpgroup 0 (left)                                warpgroup 1 (right)
//     S₀ = Q · K₀ᵀ, maximum m₀, P₀                      S₁ = Q · K₁ᵀ
//                                   m₀ →                maximum m₁ of m₀ and S₁, P₁
//     O = O · scale₀ + P₀ · V₀                  ← m₁, P₁
//     P₀ · scale₁                   P₀ →                O = O · scale₀ · scale₁ + P₁ · V₁
//     O = O · scale₁ + P₁ · V₁                          O += P₀ · V₀
//
// Source: FlashMLA (https://github.com/deepseek-ai/FlashMLA), docs/20250422-new-kernel-deep-dive.md and its sparse prefill.
//
// NOTES
// - Entries that are no position are gathered as zeros, and their scores are −∞.
// - Each tile is in three parts: its left and right values and its rotary channels. A part is released as soon as its last
//   reader is done, and gathered again in that order.
// - The rotary channels of Q are in registers. P₁ is stored where they were.
#include "sparse_rows.cuh"
#include "wgmma.cuh"
#include "wgmma_registers.cuh"
#include "wgmma_values.cuh"
#include "wgmma_values_registers.cuh"

constexpr int heads = 64, consumer_threads = 256;

namespace smem {
constexpr int keys = 0;                         // two tiles; first: their swizzle needs 1024-byte alignment
constexpr int q = keys + 2 * tiles * tile;
constexpr int p_second = q + (tiles - 1) * tile;  // P₁, where the rotary channels of Q were
constexpr int p_first = q + tiles * tile;         // P₀
constexpr int rows = p_first + tile;              // float [5][64]: see `RowValue`
constexpr int slots = rows + 5 * heads * 4;       // int [2][128]: of the rows of a step, or −1
constexpr int valid = slots + 2 * step_keys * 4;  // uint4 [2]: bits of the keys of a step
constexpr int seen = valid + 2 * 16;              // int: whether an item has had valid keys
constexpr int barriers = seen + 8;
constexpr int bytes = barriers + int(sizeof(Barriers));
static_assert(bytes == config::shared_bytes, "sparse_mla.py computes the same");
}  // namespace smem

// What the warpgroups tell each other of each head.
enum RowValue { maximum_0, maximum_1, scale_0, scale_1, sum };

struct Arguments {
    const uint16_t* q;
    uint16_t* out;
    float *partial, *lse;
    float scale;
    int n_heads;
};

// Of the thread blocks that share rows.
__device__ __forceinline__ void sync_all() {
    if constexpr (cluster > 1)
        ptx::cluster_sync();
    else
        __syncthreads();
}

template <int n>
__device__ __forceinline__ void fence_operands(float (&d)[n]) {
#pragma unroll
    for (int r = 0; r < n; ++r) ptx::warpgroup_fence_operand(d[r]);
}

// What a maximum is subtracted as: a head without keys so far has weights of zero, not NaN.
__device__ __forceinline__ float base_of(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// One of the two consumer warpgroups. A thread has the heads 16·warp + 8h + lane/4: [h], and of each the columns
// 8j + 2·(lane%4) + i: [4j + 2h + i].
template <int own>
struct Consumer {
    uint8_t* const shared;
    Barriers& barriers;
    const Arguments& arguments;
    const int warp, lane;  // warp of the warpgroup
    const int first_head;
    float o[128];
    float highest[2], total[2];  // total: of this warpgroup's tiles and this thread's columns
    uint32_t q_rotary[4][4];
    uint32_t parity = 0;  // of the step

    __device__ __forceinline__ Consumer(uint8_t* shared, Barriers& barriers, const Arguments& arguments, int warp, int head)
        : shared(shared), barriers(barriers), arguments(arguments), warp(warp), lane(ptx::lane_id()), first_head(head) {}

    __device__ __forceinline__ int& seen() const { return *reinterpret_cast<int*>(shared + smem::seen); }
    __device__ __forceinline__ uint8_t* keys(int which) const { return shared + smem::keys + which * tiles * tile; }
    __device__ __forceinline__ float& shared_value(RowValue value, int h) const {
        return reinterpret_cast<float*>(shared + smem::rows)[value * heads + 16 * warp + 8 * h + lane / 4];
    }
    __device__ __forceinline__ void await_part(int which, Part part) const {
        barriers.full[which][part].wait(parity);
        ptx::fence_proxy_async();  // the rows are ordinary stores
    }
    __device__ __forceinline__ static void sync_both() { ptx::named_barrier_sync(3, consumer_threads); }
    // Events of a step, by the warpgroup that waits: m₀ is there; m₁ and P₁ are; P₀ is.
    enum Event { has_first_maximum = 4, has_second_weights, has_first_weights };
    __device__ __forceinline__ static void notify(Event event) { ptx::named_barrier_arrive(event, consumer_threads); }
    __device__ __forceinline__ static void await(Event event) { ptx::named_barrier_sync(event, consumer_threads); }

    __device__ __forceinline__ void begin(int row) {
        const uint16_t* q = arguments.q + (static_cast<int64_t>(row) * arguments.n_heads + first_head) * width;
        constexpr int vectors = width / 8;
        const int thread = ptx::opaque(threadIdx.x);
        sync_both();  // the item before no longer needs Q and P₁
#pragma unroll 6
        for (int n = 0; n < heads * vectors / consumer_threads; ++n) {
            const int index = n * consumer_threads + thread, head = index / vectors, vector = index % vectors;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (first_head + head < arguments.n_heads)
                value = __ldg(reinterpret_cast<const uint4*>(q + head * width) + vector);
            *reinterpret_cast<uint4*>(swizzled(shared + smem::q + vector / 8 * tile, head, vector % 8 * 16)) = value;
        }
        ptx::fence_proxy_async();
        sync_both();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::ldmatrix_x4(q_rotary[k], swizzled(shared + smem::p_second, 16 * warp + lane % 16, 32 * k + lane / 16 * 16));
        if (own == 0 && threadIdx.x == 0) seen() = false;
        sync_both();  // before P₁ is written
#pragma unroll
        for (int r = 0; r < 128; ++r) o[r] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) highest[h] = minus_infinity(), total[h] = 0.0f;
    }

    // The scores of this warpgroup's tile, and the bits of its valid keys.
    __device__ __forceinline__ uint2 scores(float (&s)[32]) {
        const uint64_t k_first = ptx::wgmma_descriptor(keys(own)), q_first = ptx::wgmma_descriptor(shared + smem::q);
        await_part(own, rotary_part);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::wgmma_registers(s, q_rotary[k], k_first + (tiles - 1) * (tile / 16) + 2 * k, k > 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int part = own == 0 ? half : 1 - half;  // in the order in which they are gathered
            await_part(own, static_cast<Part>(part));
            ptx::wgmma_fence();
#pragma unroll
            for (int t = 4 * part; t < 4 * part + 4; ++t)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    ptx::wgmma(s, q_first + t * (tile / 16) + 2 * k, k_first + t * (tile / 16) + 2 * k, true);
        }
        ptx::wgmma_commit_group();
        barriers.listed.wait(parity);
        const uint4 valid = reinterpret_cast<const uint4*>(shared + smem::valid)[parity];
        if (own == 0 && threadIdx.x == 0 && (valid.x | valid.y | valid.z | valid.w) != 0) seen() = true;
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
        barriers.release(own, rotary_part);
        return own == 0 ? make_uint2(valid.x, valid.y) : make_uint2(valid.z, valid.w);
    }

    // Scales the scores, −∞ where there is no key, and returns the heads' maxima over this tile and `before`.
    __device__ __forceinline__ void mask(float (&s)[32], uint2 valid, const float (&before)[2], float (&maximum)[2]) {
        const float factor = arguments.scale * 1.44269504f;
#pragma unroll
        for (int r = 0; r < 32; ++r) s[r] *= factor;
        if ((valid.x & valid.y) != all_lanes) {
            const uint32_t own_bits[2] = {valid.x >> 2 * (lane % 4), valid.y >> 2 * (lane % 4)};
#pragma unroll
            for (int r = 0; r < 32; ++r)
                if (!(own_bits[r / 16] >> (8 * (r / 4 % 4) + r % 2) & 1)) s[r] = minus_infinity();
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = before[h];
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) maximum[h] = fmaxf(maximum[h], s[4 * j + 2 * h + i]);
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(all_lanes, maximum[h], distance));
        }
    }

    // s becomes the weights, whose sums are added to `total`.
    __device__ __forceinline__ void weights(float (&s)[32], const float (&maximum)[2]) {
        const float base[2] = {base_of(maximum[0]), base_of(maximum[1])};
#pragma unroll
        for (int r = 0; r < 32; ++r) {
            s[r] = ptx::exp2(s[r] - base[r / 2 % 2]);
            total[r / 2 % 2] += s[r];
        }
    }

    // Keys 16k … of the weights as wgmma's left operand.
    __device__ __forceinline__ static void pack(const float (&s)[32], int k, uint32_t (&p)[4]) {
#pragma unroll
        for (int r = 0; r < 4; ++r) p[r] = ptx::pack_bf16(s[8 * k + 2 * r], s[8 * k + 2 * r + 1]);
    }

    __device__ __forceinline__ void store(const uint32_t (&p)[4], int k, int to) const {
        ptx::stmatrix_x4(swizzled(shared + to, 16 * warp + lane % 16, 32 * k + lane / 16 * 16), p[0], p[1], p[2], p[3]);
    }

    __device__ __forceinline__ void rescale(float first, float second) {
#pragma unroll
        for (int r = 0; r < 128; ++r) o[r] *= r / 2 % 2 ? second : first;
    }

    // This warpgroup's half of the values of a tile: 256 channels.
    __device__ __forceinline__ uint64_t values(int which) const {
        return ptx::wgmma_transposed_descriptor(keys(which) + own * 4 * tile, tile);
    }
    __device__ __forceinline__ void add_own_values(const uint32_t (&p)[4][4]) {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_values_registers(o, p[k], values(own) + k * 128, true);
        ptx::wgmma_commit_group();
    }
    __device__ __forceinline__ void add_other_values(int stored) {
        const uint64_t p = ptx::wgmma_descriptor(shared + stored);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_values(o, p + 2 * k, values(1 - own) + k * 128, true);
        ptx::wgmma_commit_group();
    }

    // Attends to the two tiles of a step.
    __device__ __forceinline__ void attend() {
        float s[32], maximum[2];
        uint32_t p[4][4];
        const uint2 valid = scores(s);
        if constexpr (own == 0) {
            mask(s, valid, highest, maximum);
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h] = ptx::exp2(highest[h] - base_of(maximum[h]));
                total[h] *= scale[h];
                if (lane % 4 == 0) {
                    shared_value(maximum_0, h) = maximum[h];
                    shared_value(scale_0, h) = scale[h];
                }
            }
            notify(has_first_maximum);
            weights(s, maximum);
#pragma unroll
            for (int k = 0; k < 4; ++k) pack(s, k, p[k]);
            rescale(scale[0], scale[1]);
            fence_operands(o);
            add_own_values(p);
            await(has_second_weights);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h] = shared_value(scale_1, h);
                highest[h] = shared_value(maximum_1, h);
                total[h] *= scale[h];
            }
#pragma unroll
            for (int r = 0; r < 32; ++r) s[r] *= scale[r / 2 % 2];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                uint32_t scaled[4];
                pack(s, k, scaled);
                store(scaled, k, smem::p_first);
            }
            ptx::fence_proxy_async();
            notify(has_first_weights);
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            barriers.release(0, left);
            rescale(scale[0], scale[1]);
            await_part(1, left);
            fence_operands(o);
            add_other_values(smem::p_second);
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            barriers.release(1, left);
        } else {
            await(has_first_maximum);
            float before[2], scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) before[h] = shared_value(maximum_0, h);
            mask(s, valid, before, maximum);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float second = maximum[h] == before[h] ? 1.0f : ptx::exp2(before[h] - maximum[h]);
                scale[h] = shared_value(scale_0, h) * second;
                total[h] *= scale[h];
                highest[h] = maximum[h];
                if (lane % 4 == 0) {
                    shared_value(maximum_1, h) = maximum[h];
                    shared_value(scale_1, h) = second;
                }
            }
            weights(s, maximum);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                pack(s, k, p[k]);
                store(p[k], k, smem::p_second);
            }
            ptx::fence_proxy_async();
            notify(has_second_weights);
            rescale(scale[0], scale[1]);
            fence_operands(o);
            add_own_values(p);
            await(has_first_weights);
            await_part(0, right);
            add_other_values(smem::p_first);
            ptx::wgmma_wait_group<1>();
            barriers.release(1, right);
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            barriers.release(0, right);
        }
        parity ^= 1;
    }

    // Stores this warpgroup's half of the channels.
    __device__ __forceinline__ void end(int unit, bool is_whole) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                total[h] += __shfl_xor_sync(all_lanes, total[h], distance);
            // Warpgroup 0 gives its sum where it gave its maximum, which nobody reads any more.
            if (lane % 4 == 0) shared_value(own == 0 ? maximum_0 : sum, h) = total[h];
        }
        sync_both();
        const int n_heads = arguments.n_heads;
        const bool has_keys = seen();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float all = shared_value(maximum_0, h) + shared_value(sum, h);
            const float inverse = has_keys ? __frcp_rn(all) : 0.0f;
            const int head = first_head + 16 * warp + 8 * h + lane / 4;
            if (head >= n_heads) continue;
            const int64_t to = static_cast<int64_t>(unit) * n_heads + head;
            const int64_t first = to * latent + own * 256 + 2 * (lane % 4);
            if (is_whole) {
                uint16_t* out = arguments.out + first;
#pragma unroll
                for (int j = 0; j < 32; ++j)
                    *reinterpret_cast<uint32_t*>(out + 8 * j) =
                        ptx::pack_bf16(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
            } else {
                float* out = arguments.partial + first;
#pragma unroll
                for (int j = 0; j < 32; ++j)
                    *reinterpret_cast<float2*>(out + 8 * j) =
                        make_float2(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
            }
            if (own == 0 && !is_whole && lane % 4 == 0)
                arguments.lse[to] = has_keys ? present_lse(highest[h] + log2f(all)) : minus_infinity();
        }
    }

    __device__ __forceinline__ void run(Items& items, const Lists& lists) {
        Item item;
        while (items.next(item, lists)) {
            begin(items.row(item.unit));
            for (int n = item.n_steps; n > 0; --n) attend();
            end(item.unit, items.n_splits == 1);
        }
    }
};

// q: [rows, H, 576] bfloat16. out: [rows, H, 512] bfloat16. partial: [rows · n_splits, H, 512], lse: [rows · n_splits, H].
extern "C" __global__ void __launch_bounds__(consumer_threads + producer_threads, 1)
sparse_mla(const uint8_t* cache, const uint16_t* q, const int* positions, const int* pages, uint16_t* out, float* partial,
           float* lse, float scale, int n_heads, int rows, int k, int position_step, int page_step, int n_positions,
           int n_pages, int n_splits, int ranges) {
    uint8_t* shared = ptx::dynamic_shared();
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0);
    const int head_blocks = (n_heads + heads - 1) / heads;
    const int range = blockIdx.x / head_blocks, head_block = blockIdx.x % head_blocks;
    const Arguments arguments{q, out, partial, lse, scale, n_heads};
    const Lists lists{positions, pages, k, position_step, page_step, n_positions, n_pages};
    if (threadIdx.x == 0) {
        barriers.init();
        ptx::fence_mbarrier_init();
    }
    sync_all();
    Items items{rows, n_splits, ranges, (k + step_keys - 1) / step_keys, range};
    if (warp >= consumer_threads / 32) {
        ptx::setmaxnreg_dec<config::producer_registers>();
        Producer producer{shared + smem::keys, reinterpret_cast<int*>(shared + smem::slots),
                          reinterpret_cast<uint32_t*>(shared + smem::valid), barriers, cache, lists, items};
        producer.run();
    } else {
        ptx::setmaxnreg_inc<config::consumer_registers>();
        if (warp < 4)
            Consumer<0>(shared, barriers, arguments, warp, head_block * heads).run(items, lists);
        else
            Consumer<1>(shared, barriers, arguments, warp - 4, head_block * heads).run(items, lists);
    }
    if constexpr (cluster > 1) ptx::cluster_sync();  // the other thread block may still write here
}
