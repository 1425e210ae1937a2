// Attention of decoding over the paged latent cache for Hopper, for blocks of 64 heads, where multiplying takes longer than
// reading the cache.
//
//     S[64 heads, 64 keys] = Q · Kᵀ        P = exp2(S − running maximum)        O[64 heads, 512 channels] += P · V
//
// A page is K, and its first 512 channels are V, which wgmma transposes; mla_pages_64.cuh has how it is loaded. Accumulators
// of 512 channels fill the registers of two consumer warpgroups: each has half of the channels. They take pages in pairs:
// warpgroup 0 computes the scores of the first page, warpgroup 1 those of the second, and each multiplies both pages'
// weights by its half of the values. One warpgroup's softmax runs while the other one multiplies:
//
//     warpgroup 0 (left)                                warpgroup 1 (right)
//     S₀ = Q · K₀ᵀ, maximum m₀, P₀                      S₁ = Q · K₁ᵀ
//                                   m₀ →                maximum m₁ of m₀ and S₁, P₁
//     O = O · scale₀ + P₀ · V₀                  ← m₁, P₁
//     P₀ · scale₁                   P₀ →                O = O · scale₀ · scale₁ + P₁ · V₁
//     O = O · scale₁ + P₁ · V₁                          O += P₀ · V₀
//
// where scale₀ and scale₁ are the corrections of the maximum. Source of this schedule: FlashMLA's "seesaw"
// (https://github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md).
//
// NOTES
// - With a cache in BF16 the rotary channels of Q are in registers, and P₁ is stored where they were. With one in FP8 the
//   converter warps have those registers, and P₁ is stored in place of the second page's rotary channels.
// - Rows of a page after the last position may hold anything, also NaN: their weights are zero, and V is set to zero there.
#include "ptx.cuh"
#include "convert.cuh"
#include "split_kv.cuh"
#include "mla_entry.cuh"
#include "mla_pages_64.cuh"
#include "wgmma.cuh"
#include "wgmma_registers.cuh"
#include "wgmma_values.cuh"
#include "wgmma_values_registers.cuh"

constexpr bool rotary_in_registers = !config::fp8;  // of Q

// What the warpgroups tell each other of each head; and, of several queries, the positions of the row that a head does not
// attend to.
enum RowValue { maximum_0, maximum_1, scale_0, scale_1, sum, beyond };

// Of the thread blocks that share pages.
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
    float highest[2], total[2];  // total: of this warpgroup's pages and this thread's columns
    uint32_t q_rotary[4][4];  // if it is in registers
    uint32_t parity[2];  // of the pages of both warpgroups

    __device__ __forceinline__ Consumer(uint8_t* shared, Barriers& barriers, const Arguments& arguments, int warp, int head)
        : shared(shared), barriers(barriers), arguments(arguments), warp(warp), lane(ptx::lane_id()), first_head(head),
          parity{0, 0} {}

    __device__ __forceinline__ uint8_t* page(int which) const { return shared + smem::pages + which * tiles * tile; }
    __device__ __forceinline__ float& shared_value(RowValue value, int h) const {
        return reinterpret_cast<float*>(shared + smem::rows)[value * heads + 16 * warp + 8 * h + lane / 4];
    }
    __device__ __forceinline__ int head(int h) const { return first_head + 16 * warp + 8 * h + lane / 4; }
    __device__ __forceinline__ static void sync_warpgroup() { ptx::named_barrier_sync(1 + own, 128); }
    __device__ __forceinline__ static void sync_both() { ptx::named_barrier_sync(3, consumer_threads); }
    // Events of a pair of pages, by the warpgroup that waits: m₀ is there; m₁ and P₁ are; P₀ is.
    enum Event { has_first_maximum = 4, has_second_weights, has_first_weights };
    __device__ __forceinline__ static void notify(Event event) { ptx::named_barrier_arrive(event, consumer_threads); }
    __device__ __forceinline__ static void await(Event event) { ptx::named_barrier_sync(event, consumer_threads); }

    __device__ __forceinline__ void begin(const Item& item, const Lengths& lengths) {
        const uint16_t* q = arguments.q + (static_cast<int64_t>(item.row) * arguments.n_heads + first_head) * width;
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
        if (config::queries > 1 && own == 0 && lane % 4 == 0)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                shared_value(beyond, h) =
                    __int_as_float(item.length - lengths.of_head(item.row, head(h), arguments.n_heads));
        ptx::fence_proxy_async();
        sync_both();
        if constexpr (rotary_in_registers) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::ldmatrix_x4(
                    q_rotary[k], swizzled(shared + smem::p_second, 16 * warp + lane % 16, 32 * k + lane / 16 * 16));
            sync_both();  // before P₁ is written
        }
#pragma unroll
        for (int r = 0; r < 128; ++r) o[r] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Of a head without positions in these pages the weights are exp2(−∞ − 0).
            const bool reaches =
                config::queries == 1 ||
                item.length - __float_as_int(shared_value(beyond, h)) > item.first_page * page_rows;
            highest[h] = reaches ? minus_infinity() : 0.0f, total[h] = 0.0f;
        }
    }

    __device__ __forceinline__ void multiply_rotary(float (&s)[32], bool accumulate) {
        const uint64_t k_tile = ptx::wgmma_descriptor(page(own) + (tiles - 1) * tile);
        const uint64_t q_tile = ptx::wgmma_descriptor(shared + smem::q + (tiles - 1) * tile);
        barriers.full[own][rotary_part].wait(parity[own]);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (rotary_in_registers)
                ptx::wgmma_registers(s, q_rotary[k], k_tile + 2 * k, accumulate || k > 0);
            else
                ptx::wgmma(s, q_tile + 2 * k, k_tile + 2 * k, accumulate || k > 0);
        }
    }

    // The scores of this warpgroup's page.
    __device__ __forceinline__ void scores(float (&s)[32]) {
        const uint64_t k_first = ptx::wgmma_descriptor(page(own)), q_first = ptx::wgmma_descriptor(shared + smem::q);
        constexpr bool rotary_first = own == 0 || rotary_in_registers;  // in the order in which parts are written
        if constexpr (rotary_first) multiply_rotary(s, false);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int part = own == 0 ? half : 1 - half;
            barriers.full[own][part].wait(parity[own]);
            ptx::wgmma_fence();
#pragma unroll
            for (int t = 4 * part; t < 4 * part + 4; ++t)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    ptx::wgmma(s, q_first + t * (tile / 16) + 2 * k, k_first + t * (tile / 16) + 2 * k,
                               rotary_first || half + t % 4 + k > 0);
        }
        if constexpr (!rotary_first) multiply_rotary(s, true);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
        if (own == 0 || rotary_in_registers) barriers.release(own, rotary_part);
    }

    // Scales the scores, −∞ outside of the row's length, and returns the heads' maxima over this page and `before`.
    __device__ __forceinline__ void mask(float (&s)[32], int valid, const float (&before)[2], float (&maximum)[2]) {
        const float factor = arguments.scale * 1.44269504f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = before[h];
            const int of_head = config::queries > 1 ? valid - __float_as_int(shared_value(beyond, h)) : valid;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = s[4 * j + 2 * h + i];
                    score = 8 * j + 2 * (lane % 4) + i < of_head ? score * factor : minus_infinity();
                    maximum[h] = fmaxf(maximum[h], score);
                }
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(all_lanes, maximum[h], distance));
        }
        if (valid < page_rows) {
            for (int i = threadIdx.x % 128; i < (page_rows - valid) * (latent / 8); i += 128)
                *reinterpret_cast<uint4*>(page(own) + i % 64 / 8 * tile + (valid + i / 64) * 128 + i % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
            ptx::fence_proxy_async();
            sync_warpgroup();
        }
    }

    // s becomes the weights, whose sums are added to `total`.
    __device__ __forceinline__ void weights(float (&s)[32], const float (&maximum)[2]) {
#pragma unroll
        for (int r = 0; r < 32; ++r) {
            s[r] = ptx::exp2(s[r] - maximum[r / 2 % 2]);
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

    // This warpgroup's half of the values of a page: 256 channels in four tiles.
    __device__ __forceinline__ uint64_t values(int which) const {
        return ptx::wgmma_transposed_descriptor(page(which) + own * 4 * tile, tile);
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

    // Attends to a pair of pages, or to one. `valid` positions from this warpgroup's page on are within the row's length.
    template <bool pair>
    __device__ __forceinline__ void attend(int valid) {
        float s[32], maximum[2];
        uint32_t p[4][4];
        if constexpr (own == 0) {
            scores(s);
            mask(s, valid, highest, maximum);
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h] = ptx::exp2(highest[h] - maximum[h]);
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
            if constexpr (pair) {
                barriers.full[1][left].wait(parity[1]);
                fence_operands(o);
                add_other_values(smem::p_second);
                ptx::wgmma_wait_group<0>();
                fence_operands(o);
                barriers.release(1, left);
                if constexpr (!rotary_in_registers) barriers.release(1, rotary_part);
            }
        } else {
            if constexpr (pair) scores(s);
            await(has_first_maximum);
            float before[2], scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) maximum[h] = before[h] = shared_value(maximum_0, h);
            if constexpr (pair) mask(s, valid, before, maximum);
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
            if constexpr (pair) {
                weights(s, maximum);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    pack(s, k, p[k]);
                    store(p[k], k, smem::p_second);
                }
                ptx::fence_proxy_async();
            }
            notify(has_second_weights);
            rescale(scale[0], scale[1]);
            fence_operands(o);
            if constexpr (pair) add_own_values(p);
            await(has_first_weights);
            barriers.full[0][right].wait(parity[0]);
            add_other_values(smem::p_first);
            if constexpr (pair) {
                ptx::wgmma_wait_group<1>();
                barriers.release(1, right);
            }
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            barriers.release(0, right);
        }
        parity[0] ^= 1;
        parity[1] ^= pair;
    }

    // Stores this warpgroup's half of the channels.
    __device__ __forceinline__ void end(const Item& item) {
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
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float all = shared_value(maximum_0, h) + shared_value(sum, h);
            if (head(h) >= n_heads) continue;
            const float inverse = all == 0.0f ? 0.0f : __frcp_rn(all);  // 0: the head's query has no positions here
            const int64_t to = static_cast<int64_t>(item.whole ? item.row : item.slot) * n_heads + head(h);
            const int64_t first = to * latent + own * 256 + 2 * (lane % 4);
            if (item.whole) {
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
            if (own == 0 && !item.whole && lane % 4 == 0) arguments.lse[to] = highest[h] + log2f(all);
        }
    }

    __device__ __forceinline__ void run(Items& items) {
        Item item;
        while (items.next(item)) {
            begin(item, items.lengths);
            int left_over = item.length - (item.first_page + own) * page_rows;  // positions from this warpgroup's page on
            for (int page = 1; page < item.n_pages; page += 2, left_over -= 2 * page_rows)
                attend<true>(left_over);
            if (item.n_pages % 2 == 1) attend<false>(left_over);
            end(item);
        }
    }
};

// map: the cache [P, 64, 576] bfloat16, or as [P·64, 328] bfloat16 that of [P, 64, 656] bytes. q: [rows, H, 576] bfloat16. pages: [rows, M]. out: [rows, H, 512] bfloat16.
// partial: [slots, H, 512], lse: [slots, H]. starts: [rows + 1].
extern "C" __global__ void __launch_bounds__(consumer_threads + 128, 1)
mla_decode_64(const __grid_constant__ TensorMap map, const uint8_t* cache, const uint16_t* q, const int* pages,
              const int* lengths, uint16_t* out, float* partial, float* lse, int* starts, float scale, int n_heads,
              int page_step, int length_step, int rows, int n_splits, int ranges) {
    uint8_t* shared = ptx::dynamic_shared();
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + smem::barriers);
    const Arguments arguments{cache, q, pages, out, partial, lse, scale, n_heads, page_step};
    const Role role(n_heads, heads);
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(&map);
        barriers.init();
    }
    sync_all();
    Items items = items_of(role, {lengths, length_step}, rows, n_splits, ranges, starts);
    if (!role.is_consumer()) {
        ptx::setmaxnreg_dec<config::fp8 ? 72 : 40>();
        if constexpr (config::fp8)
            produce(Converter(shared, barriers, &map, cache), arguments, items);
        else if (role.is_producer())
            produce(Loader{shared, barriers, &map}, arguments, items);
    } else {
        ptx::setmaxnreg_inc<config::fp8 ? 216 : 232>();
        if (role.warp < 4)
            Consumer<0>(shared, barriers, arguments, role.warp, role.first_head).run(items);
        else
            Consumer<1>(shared, barriers, arguments, role.warp - 4, role.first_head).run(items);
    }
    if constexpr (cluster > 1) ptx::cluster_sync();  // the other thread block may still write here
}
