// Attention of decoding over the paged latent cache for Hopper, for blocks of 64 heads, where multiplying takes longer than
// reading the cache.
//
// Two consumer warpgroups take pages in pairs (seesaw.cuh); mla_pages_64.cuh has how they are loaded.
//
// With parts a head's result depends on its own keys alone, to the last bit, although other rows share the thread block: the
// keys behind the head's length, of which there may be any number of pages, have weights of zero, and leave its maximum and
// its accumulators as they are. Sums and products are spelled so that the compiler joins none of them to another in one loop
// and not in the other.
//
// NOTES
// - P₁ is stored in place of the second page's rotary channels.
// - With a cache in BF16 the rotary channels of Q are in registers, and idle warps copy the next queries as soon as the last
//   scores of an item are computed. With one in FP8 the converter warps have these registers, and the consumers load Q.
// - Rows of a page after the last position may hold anything, also NaN: their weights are zero, and V is set to zero there.
#include "ptx.cuh"
#include "convert.cuh"
#include "split_kv.cuh"
#include "mla_entry.cuh"
#include "mla_pages_64.cuh"

constexpr bool keeps_lane = !config::fp8 || config::queries == 1 || has_parts;  // or ptxas spills

#include "seesaw.cuh"
#include "wgmma_registers.cuh"

constexpr bool rotary_in_registers = !config::fp8;  // of Q
constexpr bool loads_queries = config::fp8;          // the consumers do

// The positions from a warpgroup's page on that are within the row's length: a page's at least, unless it is among the last
// two of an item. In the loop over the others there is no code for a page's end, for which it would have no registers.
template <bool last>
struct Inside {
    int positions;
};

// One of the two consumer warpgroups.
template <int own>
struct Consumer : Seesaw<Consumer<own>, own> {
    using Base = Seesaw<Consumer<own>, own>;
    using Base::await, Base::barriers, Base::head, Base::keys, Base::lane, Base::shared, Base::shared_value;

    // Of several queries: the positions of the row that a head does not attend to; each warp has its own heads'.
    static constexpr RowValue beyond = static_cast<RowValue>(row_values + own);

    PageBarriers& of_pages;
    uint32_t q_rotary[4][4];  // if it is in registers
    uint32_t parities = 0;    // bits: of the pages of both warpgroups, and of Q; in one register
    int left_scores;          // pages of the item whose scores are not there yet
    int max_beyond;          // of several queries: the most positions that a head of this warp does not attend to

    __device__ __forceinline__ Consumer(uint8_t* shared, PageBarriers& barriers, float scale, int warp, int first_head)
        : Base(shared, barriers, scale, warp, first_head), of_pages(barriers) {}

    __device__ __forceinline__ void await(int which, Part part) const { barriers.full[which][part].wait(parities >> which & 1); }

    __device__ __forceinline__ void begin(const uint16_t* q, int n_heads, const Item& item, const Lengths& lengths) {
        if constexpr (loads_queries)
            Base::load_queries(q + (static_cast<int64_t>(item.row) * n_heads + Base::first_head) * width, n_heads);
        if constexpr (config::queries > 1) {
            int most = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int of_head = item.length - lengths.of_head(item.row, head(h), n_heads);
                if (lane % 4 == 0) shared_value(beyond, h) = __int_as_float(of_head);
                most = max(most, of_head);
            }
            max_beyond = __reduce_max_sync(all_lanes, most);
        }
        if constexpr (loads_queries) {
            Base::sync_both();
        } else {
            of_pages.q_full.wait(parities >> 2);
            parities ^= 4;
            __syncwarp();
        }
        if constexpr (rotary_in_registers) Base::load_rotary(q_rotary);
        Base::clear();
    }

    // Once the last scores of an item are there.
    __device__ __forceinline__ void release_queries(bool is_last) {
        if constexpr (loads_queries) return;
        __syncwarp();
        if (is_last && lane == 0) of_pages.q_empty.arrive();
    }

    __device__ __forceinline__ void multiply_rotary(float (&s)[32], bool accumulate) {
        const uint64_t k_tile = ptx::wgmma_descriptor(keys(own) + (tiles - 1) * tile);
        const uint64_t q_tile = ptx::wgmma_descriptor(Base::operand(smem::q + (tiles - 1) * tile));
        await(own, rotary_part);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (rotary_in_registers)
                ptx::wgmma_registers(s, q_rotary[k], k_tile + 2 * k, accumulate || k > 0);
            else
                ptx::wgmma(s, q_tile + 2 * k, k_tile + 2 * k, accumulate || k > 0);
        }
    }

    // In the order in which parts are written.
    __device__ __forceinline__ void begin_scores(float (&s)[32]) {
        Base::multiply_part(s, own, false);
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ void end_scores(float (&s)[32]) {
        Base::multiply_part(s, 1 - own, true);
        multiply_rotary(s, true);
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ void release_scores() {
        if constexpr (own == 0) barriers.release(own, rotary_part);
        release_queries(--left_scores == 0);
    }

    template <bool last>
    __device__ __forceinline__ void mask(float (&s)[32], const Inside<last>& inside) const {
        if (last || (config::queries > 1 && inside.positions - max_beyond < page_rows)) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int of_head = inside.positions;
                if constexpr (config::queries > 1) of_head -= __float_as_int(shared_value(beyond, h));
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (8 * j + 2 * (lane % 4) + i >= of_head) s[4 * j + 2 * h + i] = minus_infinity();
            }
        }
        if constexpr (last) clear_beyond(inside.positions);
    }

    // Sets the values of a page's positions from `inside` on to zero.
    __device__ __forceinline__ void clear_beyond(int inside) const {
        if (inside >= page_rows) return;
        for (int i = threadIdx.x % 128; i < (page_rows - inside) * (latent / 8); i += 128)
            *reinterpret_cast<uint4*>(keys(own) + i % 64 / 8 * tile + (inside + i / 64) * 128 + i % 8 * 16) =
                make_uint4(0, 0, 0, 0);
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(1 + own, 128);
    }

    __device__ __forceinline__ void release_second_left() const {
        barriers.release(1, left);
        barriers.release(1, rotary_part);
    }

    __device__ __forceinline__ void begin_next(bool pair) {
        parities ^= pair ? 3 : 1;
    }

    // to: the row of final results, or −1 − the slot of partial ones.
    __device__ __forceinline__ void end(const Results& results, int to) {
        float all[2];
        Base::find_sums(all);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = all[h] == 0.0f ? 0.0f : __frcp_rn(all[h]);  // 0: the head's query has no positions here
            const float lse = Base::highest[h] + log2f(all[h]);
            Base::store_results(results, to >= 0 ? to : ~to, to >= 0, h, inverse, lse);
        }
    }

    // With parts. reach: the positions from the part's first one up to the row's length; slot: of its partial results.
    __device__ __forceinline__ void end_part(const Results& results, int slot, int reach, int max_parts) {
        float all[2];
        Base::find_sums(all);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int of_head = reach;
            if constexpr (config::queries > 1) of_head -= __float_as_int(shared_value(beyond, h));
            const float inverse = all[h] == 0.0f ? 0.0f : __frcp_rn(all[h]);
            const float lse = __fadd_rn(Base::highest[h], log2f(all[h]));
            // That of a head whose positions all lie in the first part is final.
            const bool is_final = slot % max_parts == 0 && of_head <= part_pages * page_rows;
            if (__any_sync(all_lanes, is_final)) Base::store_final(results, slot / max_parts, h, inverse, is_final);
            if (!is_final && of_head > 0) Base::store_partial(results, slot, h, inverse);
            if (of_head > 0) Base::store_lse(results, slot, h, lse);
        }
    }

    __device__ __forceinline__ void run(const uint16_t* q, const Results& results, Items& items, int max_parts) {
        Item item;
        while (items.next(item)) {
            begin(q, results.n_heads, item, items.lengths);
            // As results of reductions these are in uniform registers: ptxas would otherwise take the loop for one that threads
            // of a warp leave at different times, and would move wgmma's descriptors to uniform registers each time.
            int inside = __reduce_max_sync(all_lanes, item.length - (item.first_page + own) * page_rows);
            const int n_pages = __reduce_max_sync(all_lanes, item.n_pages);
            const int to = __reduce_max_sync(all_lanes, item.whole && !has_parts ? item.row : ~item.slot);
            left_scores = (n_pages + 1 - own) / 2;
            if constexpr (own == 1) release_queries(left_scores == 0);
            float s[32];
            if constexpr (own == 0) Base::scores(s);
            int page = 2;
#pragma unroll 1
            for (; page < n_pages; page += 2, inside -= 2 * page_rows)
                Base::template attend<true>(s, Inside<false>{inside}, true);
            if (page == n_pages)
                Base::template attend<true>(s, Inside<true>{inside}, false);
            else
                Base::template attend<false>(s, Inside<true>{inside}, false);
            if constexpr (has_parts)
                end_part(results, ~to, inside + (page - 2 + own) * page_rows, max_parts);
            else
                end(results, to);
        }
    }
};

// map: the cache [P, 64, 576] bfloat16, or as [P·64, 328] bfloat16 that of [P, 64, 656] bytes. q: [rows, H, 576] bfloat16.
// pages: [rows, M]. out: [rows, H, 512] bfloat16. partial: [slots, H, 512], lse: [slots, H]. starts: [rows + 1].
extern "C" __global__ void __launch_bounds__(consumer_threads + 128, 1)
mla_decode_64(const __grid_constant__ TensorMap map, const uint8_t* cache, const uint16_t* q, const int* pages,
              const int* lengths, uint16_t* out, float* partial, float* lse, int* starts, float scale, int n_heads,
              int page_step, int length_step, int rows, int max_parts, int ranges) {
    uint8_t* shared = ptx::dynamic_shared();
    PageBarriers& barriers = *reinterpret_cast<PageBarriers*>(shared + smem::barriers);
    const Arguments arguments{cache, q, pages, out, partial, lse, scale, n_heads, page_step};
    const Role role(n_heads, heads);
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(&map);
        barriers.init();
    }
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    sync_all();
    // In each branch anew: registers that all branches share are spilled.
    int* const written = role.is_producer() ? starts : nullptr;
    const auto items_here = [&] { return items_of(role, {lengths, length_step}, rows, max_parts, ranges, written); };
    if (!role.is_consumer()) {
        ptx::setmaxnreg_dec<config::fp8 ? 72 : 40>();
        Items items = items_here();
        if constexpr (config::fp8)
            produce(Converter(shared, barriers, &map, cache), arguments, items);
        else if (role.is_producer())
            produce(Loader{shared, barriers, &map}, arguments, items);
        else
            QueryLoader{role.warp - consumer_threads / 32 - 1, barriers, {q, n_heads, role.first_head, shared + smem::q}}
                .run(items);
    } else {
        ptx::setmaxnreg_inc<config::fp8 ? 216 : 232>();
        Items items = items_here();
        if (role.warp < 4)
            Consumer<0>(shared, barriers, scale, role.warp, role.first_head)
                .run(q, {out, partial, lse, n_heads}, items, max_parts);
        else
            Consumer<1>(shared, barriers, scale, role.warp - 4, role.first_head)
                .run(q, {out, partial, lse, n_heads}, items, max_parts);
    }
    if constexpr (cluster > 1) ptx::cluster_sync();  // the other thread block may still write here
}
