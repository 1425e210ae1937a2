// The two consumer warpgroups of latent attention for 64 heads: softmax of one while the other one multiplies.
//
//     S[64 heads, 64 keys] = Q · Kᵀ        P = exp2(S − running maximum)        O[64 heads, 512 channels] += P · V
//
// A tile of 64 keys is K, and its first 512 channels are V, which wgmma transposes. Accumulators of 512 channels fill the
// registers of two warpgroups: each has half of the channels. They take tiles in pairs: warpgroup 0 computes the scores of
// the first, warpgroup 1 those of the second, and each multiplies the weights of both by its half of the values:
//
//     warpgroup 0 (left)                                warpgroup 1 (right)
//     S₀ = Q · K₀ᵀ, maximum m₀, P₀                      S₁ = Q · K₁ᵀ
//                                   m₀ →                maximum m₁ of m₀ and S₁, P₁
//     O = O · scale₀ + P₀ · V₀                  ← m₁    O = O · scale₀ · scale₁ + P₁ · V₁
//     P₀ · scale₁                   P₀ →                O += P₀ · V₀
//     O = O · scale₁ + P₁ · V₁                  ← P₁
//     S₀ of the next pair
//
// where scale₀ and scale₁ are the corrections of the maximum. Source of this schedule: FlashMLA's "seesaw"
// (https://github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md).
//
// The kernel's namespace smem says where the tiles (keys, q, p_first, p_second) and the values of heads (rows) lie, and its
// keeps_lane whether the lane stays in a register.
#pragma once
#include "convert.cuh"
#include "scores.cuh"
#include "wgmma_values.cuh"
#include "wgmma_values_registers.cuh"

// What the warpgroups tell each other of each head.
enum RowValue { maximum_0, maximum_1, scale_0, scale_1, sum_0, sum_1, row_values };

// The maximum of no scores, of which −∞ can be subtracted: a head without keys so far has weights of zero, not NaN.
constexpr float lowest = -3.402823466e38f;

// Where the results of heads go: to the rows of `out` if they are final, else to those of `partial`.
struct Results {
    uint16_t* out;
    float *partial, *lse;
    int n_heads;
};

// The lane, kept in a register or, where there would be one too few, read anew each time.
template <bool is_kept>
struct Lane {
    const int value = ptx::lane_id();

    __device__ __forceinline__ operator int() const {
        if constexpr (is_kept) return value;
        return ptx::opaque(ptx::lane_id());
    }
};

// Warpgroup `own`. A thread has the heads 16·warp + 8h + lane/4: [h], and of each the columns 8j + 2·(lane%4) + i:
// [4j + 2h + i]. Derived has, of a tile `which`,
//     begin_scores(s)            multiplies Q by the part of its own tile that is there first, and commits that to a group
//     end_scores(s)              the same for the others
//     release_scores()           releases what only they need
//     mask(s, inside)            sets those of keys outside to −∞; inside: an argument of `attend`
//     await(which, part)         waits for a part
//     release_second_left()      releases the left values of the second tile, and what else is read last
//     begin_next(pair)           after a pair of tiles, or one
template <class Derived, int own>
struct Seesaw {
    uint8_t* const shared;
    Barriers& barriers;
    const int warp;  // of the warpgroup
    const Lane<keeps_lane> lane;
    const int first_head;
    const float factor;  // of the scores, in log₂
    float o[128];
    float highest[2], total[2];  // total: of this warpgroup's tiles and this thread's columns

    __device__ __forceinline__ Seesaw(uint8_t* shared, Barriers& barriers, float scale, int warp, int first_head)
        : shared(shared), barriers(barriers), warp(warp), first_head(first_head),
          factor(scale * 1.44269504f) {}

    __device__ __forceinline__ Derived& derived() { return *static_cast<Derived*>(this); }
    // Where `wgmma` finds what is at `offset`. Opaque: descriptors that are computed before a loop need registers in all of it.
    __device__ __forceinline__ uint8_t* operand(int offset) const { return shared + ptx::opaque(offset); }
    __device__ __forceinline__ uint8_t* keys(int which) const { return operand(smem::keys + which * tiles * tile); }
    __device__ __forceinline__ float& shared_value(RowValue value, int h) const {
        return reinterpret_cast<float*>(shared + smem::rows)[value * heads + 16 * warp + 8 * h + lane / 4];
    }
    __device__ __forceinline__ int head(int h) const { return first_head + 16 * warp + 8 * h + lane / 4; }
    __device__ __forceinline__ static void sync_both() { ptx::named_barrier_sync(3, consumer_threads); }
    // Events of a pair of tiles, in their order: m₀ is there; m₁, P₀ and P₁ are. Barrier 7 is the producers'.
    enum Event { has_first_maximum = 4, has_second_maximum = 5, has_first_weights = 6, has_second_weights = 8 };
    __device__ __forceinline__ static void notify(Event event) { ptx::named_barrier_arrive(event, consumer_threads); }
    __device__ __forceinline__ static void await(Event event) { ptx::named_barrier_sync(event, consumer_threads); }

    // Loads the queries of a row; q: of this thread block's first head. sync_both must follow.
    __device__ __forceinline__ void load_queries(const uint16_t* q, int n_heads) const {
        constexpr int vectors = width / 8;
        const int thread = ptx::opaque(threadIdx.x);
        sync_both();  // the item before no longer needs Q and P₁
#pragma unroll 6
        for (int n = 0; n < heads * vectors / consumer_threads; ++n) {
            const int index = n * consumer_threads + thread, head = index / vectors, vector = index % vectors;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (first_head + head < n_heads)
                value = __ldg(reinterpret_cast<const uint4*>(q + head * width) + vector);
            *reinterpret_cast<uint4*>(swizzled(shared + smem::q + vector / 8 * tile, head, vector % 8 * 16)) = value;
        }
        ptx::fence_proxy_async();
    }

    // The rotary channels of Q as wgmma's left operand.
    __device__ __forceinline__ void load_rotary(uint32_t (&q_rotary)[4][4]) const {
        uint8_t* of_q = shared + smem::q + (tiles - 1) * tile;
        const int own_lane = ptx::opaque(lane);  // the addresses are computed here, not kept in registers
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::ldmatrix_x4(q_rotary[k], swizzled(of_q, 16 * warp + own_lane % 16, 32 * k + own_lane / 16 * 16));
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 128; ++r) o[r] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) highest[h] = lowest, total[h] = 0.0f;
    }

    // Adds the products of this warpgroup's tile and Q in the 256 channels of a part, or overwrites s.
    __device__ __forceinline__ void multiply_part(float (&s)[32], int part, bool accumulate) {
        const uint64_t k_first = ptx::wgmma_descriptor(keys(own)), q_first = ptx::wgmma_descriptor(operand(smem::q));
        derived().await(own, static_cast<Part>(part));
        ::multiply_part(s, q_first, k_first, static_cast<Part>(part), accumulate);
    }

    // Waits for the scores.
    __device__ __forceinline__ static void finish(float (&s)[32]) {
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
    }

    // Scores are multiplied by the factor when the maximum is subtracted, in one instruction. With a factor that is not positive,
    // whose maxima are not those of the scores, they are multiplied before; rows in FP8 leave no registers for the choice.
    __device__ __forceinline__ bool scales_first() const { return config::fp8 || !(factor > 0.0f); }
    __device__ __forceinline__ float later_factor() const { return scales_first() ? 1.0f : factor; }
    __device__ __forceinline__ void scale_first(float (&s)[32]) const {
        if (!scales_first()) return;
#pragma unroll
        for (int r = 0; r < 32; ++r) s[r] = __fmul_rn(s[r], factor);
    }

    // The heads' maxima of this tile, scaled.
    __device__ __forceinline__ void find_maximum(const float (&s)[32], float (&maximum)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            maximum[h] = minus_infinity();
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) maximum[h] = fmaxf(maximum[h], s[4 * j + 2 * h + i]);
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                maximum[h] = fmaxf(maximum[h], __shfl_xor_sync(all_lanes, maximum[h], distance));
            maximum[h] = __fmul_rn(maximum[h], later_factor());
        }
    }

    // s becomes the weights, whose sums are added to `total`.
    __device__ __forceinline__ void weights(float (&s)[32], const float (&maximum)[2]) {
        const float by = later_factor();
#pragma unroll
        for (int r = 0; r < 32; ++r) {
            s[r] = ptx::exp2(fmaf(s[r], by, -maximum[r / 2 % 2]));
            total[r / 2 % 2] += s[r];
        }
    }

    // Keys 16k … of the weights as wgmma's left operand.
    __device__ __forceinline__ static void pack(const float (&s)[32], int k, uint32_t (&p)[4]) {
#pragma unroll
        for (int r = 0; r < 4; ++r) p[r] = ptx::pack_bf16(s[8 * k + 2 * r], s[8 * k + 2 * r + 1]);
    }

    // Opaque: the addresses of the four k differ in two bits, and are not kept in registers.
    __device__ __forceinline__ void store(const uint32_t (&p)[4], int k, int to) const {
        const int first = swizzled(shared + to, 16 * warp + lane % 16, lane / 16 * 16) - shared;
        ptx::stmatrix_x4(shared + (ptx::opaque(first) ^ 32 * k), p[0], p[1], p[2], p[3]);
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
        const uint64_t p = ptx::wgmma_descriptor(operand(stored));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_values(o, p + 2 * k, values(1 - own) + k * 128, true);
        ptx::wgmma_commit_group();
    }

    // The scores of this warpgroup's tile, scaled only by `mask`.
    __device__ __forceinline__ void scores(float (&s)[32]) {
        derived().begin_scores(s);
        derived().end_scores(s);
        finish(s);
        derived().release_scores();
    }

    // Attends to a pair of tiles, or to one. s: of warpgroup 0 the scores of its tile, which become those of its next one if
    // there is any, `more`.
    template <bool pair, class Inside>
    __device__ __forceinline__ void attend(float (&s)[32], const Inside& inside, bool more) {
        float maximum[2];
        uint32_t p[4][4];
        if constexpr (own == 0) {
            scale_first(s);
            derived().mask(s, inside);
            find_maximum(s, maximum);
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                maximum[h] = fmaxf(maximum[h], highest[h]);
                scale[h] = ptx::exp2(highest[h] - maximum[h]);
                total[h] = __fmul_rn(total[h], scale[h]);
                if (lane % 4 == 0) {
                    shared_value(maximum_0, h) = maximum[h];
                    shared_value(scale_0, h) = scale[h];
                }
            }
            notify(has_first_maximum);
            rescale(scale[0], scale[1]);
            weights(s, maximum);
#pragma unroll
            for (int k = 0; k < 4; ++k) pack(s, k, p[k]);
            fence_operands(o);
            add_own_values(p);
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            barriers.release(0, left);  // before anything else is waited for: its next rows are multiplied first
            await(has_second_maximum);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[h] = shared_value(scale_1, h);
                highest[h] = shared_value(maximum_1, h);
                total[h] = __fmul_rn(total[h], scale[h]);
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
            rescale(scale[0], scale[1]);
            fence_operands(o);
            if constexpr (pair) {
                await(has_second_weights);  // warpgroup 1 has seen that V₁ is there
                add_other_values(smem::p_second);
            }
            derived().begin_next(pair);
            if (more) {
                fence_operands(s);
                derived().begin_scores(s);  // right behind the values of this pair
                if constexpr (pair) {
                    ptx::wgmma_wait_group<1>();
                    derived().release_second_left();
                }
                derived().end_scores(s);
            }
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            fence_operands(s);
            if (more)
                derived().release_scores();
            else if constexpr (pair)
                derived().release_second_left();
        } else {
            maximum[0] = maximum[1] = minus_infinity();
            if constexpr (pair) {
                scores(s);
                scale_first(s);
                derived().mask(s, inside);
                find_maximum(s, maximum);
            }
            await(has_first_maximum);
            float before[2], scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                before[h] = shared_value(maximum_0, h);
                maximum[h] = fmaxf(maximum[h], before[h]);
                const float second = maximum[h] == before[h] ? 1.0f : ptx::exp2(before[h] - maximum[h]);
                scale[h] = shared_value(scale_0, h) * second;
                total[h] = __fmul_rn(total[h], scale[h]);
                highest[h] = maximum[h];
                if (lane % 4 == 0) {
                    shared_value(maximum_1, h) = maximum[h];
                    shared_value(scale_1, h) = second;
                }
            }
            notify(has_second_maximum);
            rescale(scale[0], scale[1]);
            if constexpr (pair) {
                weights(s, maximum);
#pragma unroll
                for (int k = 0; k < 4; ++k) pack(s, k, p[k]);
            }
            fence_operands(o);
            if constexpr (pair) {
                add_own_values(p);
#pragma unroll
                for (int k = 0; k < 4; ++k) store(p[k], k, smem::p_second);  // while they are multiplied
                ptx::fence_proxy_async();
            }
            await(has_first_weights);  // warpgroup 0 has seen that V₀ is there
            add_other_values(smem::p_first);
            if constexpr (pair) {
                notify(has_second_weights);  // only now: warpgroup 0 multiplies much, and V₀'s right half is to be released
                ptx::wgmma_wait_group<1>();
                barriers.release(1, right);
            }
            ptx::wgmma_wait_group<0>();
            fence_operands(o);
            barriers.release(0, right);
            derived().begin_next(pair);
        }
    }

    // Adds the weights of each head, of both warpgroups.
    __device__ __forceinline__ void find_sums(float (&all)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                total[h] += __shfl_xor_sync(all_lanes, total[h], distance);
            // Not where the maxima were: warpgroup 0 may have begun another item before warpgroup 1 has read its sums.
            if (lane % 4 == 0) shared_value(own == 0 ? sum_0 : sum_1, h) = total[h];
        }
        sync_both();
#pragma unroll
        for (int h = 0; h < 2; ++h) all[h] = shared_value(sum_0, h) + shared_value(sum_1, h);
    }

    // Gives the lanes of four, of which each has two channels of four groups of eight, the eight channels of a group each.
    __device__ __forceinline__ void gather_channels(uint32_t (&pairs)[4]) const {
        const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t other = __shfl_xor_sync(all_lanes, odd ? pairs[i] : pairs[i + 1], 1);
            (odd ? pairs[i] : pairs[i + 1]) = other;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t other = __shfl_xor_sync(all_lanes, upper ? pairs[i] : pairs[i + 2], 2);
            (upper ? pairs[i] : pairs[i + 2]) = other;
        }
    }

    // Stores this warpgroup's half of the channels of head h, times `inverse`, if there is such a head; row: of the results,
    // of all heads.
    __device__ __forceinline__ void store_results(
        const Results& results, int row, bool is_final, int h, float inverse, float lse) const {
        if (is_final) {
            store_final(results, row, h, inverse, true);
        } else {
            store_partial(results, row, h, inverse);
            store_lse(results, row, h, lse);
        }
    }

    // By all lanes of a warp: BF16 is stored in 64 bytes of a head, not in the 16 that four lanes have. stores: whether this
    // lane stores its head's.
    __device__ __forceinline__ void store_final(const Results& results, int row, int h, float inverse, bool stores) const {
        uint16_t* out = results.out + first_of(results, row, h) + 8 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = ptx::pack_bf16(result(2 * (j + i), h, inverse), result(2 * (j + i) + 1, h, inverse));
            gather_channels(pairs);
            if (stores && head(h) < results.n_heads)
                *reinterpret_cast<uint4*>(out + 8 * j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
    __device__ __forceinline__ void store_partial(const Results& results, int row, int h, float inverse) const {
        if (head(h) >= results.n_heads) return;
        float* out = results.partial + first_of(results, row, h) + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 32; ++j)
            *reinterpret_cast<float2*>(out + 8 * j) =
                make_float2(result(2 * j, h, inverse), result(2 * j + 1, h, inverse));
    }
    __device__ __forceinline__ void store_lse(const Results& results, int row, int h, float lse) const {
        if (own == 0 && lane % 4 == 0 && head(h) < results.n_heads)
            results.lse[static_cast<int64_t>(row) * results.n_heads + head(h)] = lse;
    }
    __device__ __forceinline__ int64_t first_of(const Results& results, int row, int h) const {
        return (static_cast<int64_t>(row) * results.n_heads + head(h)) * latent + own * 256;
    }
    // Of head h; n: of this thread's channels. Never −0, which a weight of zero may have made +0.
    __device__ __forceinline__ float result(int n, int h, float inverse) const {
        return fmaf(o[n / 2 * 4 + 2 * h + n % 2], inverse, 0.0f);
    }
};
