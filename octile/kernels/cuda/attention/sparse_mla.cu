// Latent attention over top-k positions for Hopper, 64 heads of a query in a thread block: prefill and decoding.
//
// Each query has a list of positions. A producer warpgroup gathers their rows into two tiles of 64 keys, a step of 128
// entries of the list (sparse_rows.cuh), and two consumer warpgroups multiply them by the queries (seesaw.cuh). Entries
// that are no position are gathered as zeros, and their scores are −∞. With rows in BF16 the rotary channels of Q are in
// registers, and P₀ is stored in place of the first tile's, which come and go with its right values. With rows in FP8 the
// producers have those registers, and P₁ is stored in place of the second tile's rotary channels.
//
// Source: FlashMLA's sparse prefill (https://github.com/deepseek-ai/FlashMLA).
#include "sparse_rows.cuh"

namespace smem {
constexpr int keys = 0;                         // two tiles; first: their swizzle needs 1024-byte alignment
constexpr int q = keys + 2 * tiles * tile;
constexpr int p = q + tiles * tile;
constexpr int p_first = config::fp8 ? p : keys + (tiles - 1) * tile;
constexpr int p_second = config::fp8 ? keys + (2 * tiles - 1) * tile : p;
constexpr int rows = p + tile;                    // float [6][64]
constexpr int slots = rows + 6 * heads * 4;       // int [2][128]: of the rows of a step, or −1
constexpr int valid = slots + 2 * step_keys * 4;  // uint4 [2]: bits of the keys of a step
constexpr int barriers = valid + 2 * 16;
constexpr int bytes = barriers + int(sizeof(ListBarriers));
static_assert(bytes == config::shared_bytes, "sparse_mla.py computes the same");
}  // namespace smem

constexpr bool keeps_lane = !config::fp8 || cluster > 1;  // or ptxas spills

#include "seesaw.cuh"
#include "wgmma_registers.cuh"

constexpr bool rotary_in_registers = !config::fp8;  // of Q

// One of the two consumer warpgroups.
template <int own>
struct Consumer : Seesaw<Consumer<own>, own> {
    using Base = Seesaw<Consumer<own>, own>;
    using Base::barriers, Base::keys, Base::lane, Base::shared;

    ListBarriers& of_lists;
    uint32_t q_rotary[4][4];  // if it is in registers
    uint32_t parity = 0;  // of the step
    uint2 valid;          // bits of the keys of this warpgroup's tile
    uint32_t seen;        // not 0: the item has had valid keys

    __device__ __forceinline__ Consumer(uint8_t* shared, ListBarriers& barriers, float scale, int warp, int first_head)
        : Base(shared, barriers, scale, warp, first_head), of_lists(barriers) {}

    __device__ __forceinline__ void await(int which, Part part) const {
        barriers.full[which][part].wait(parity);
        if constexpr (!config::fp8) ptx::fence_proxy_async();  // the rows are ordinary stores
    }
    using Base::await;

    // In the order in which parts are gathered: the rotary channels come with the right values, those in FP8 with the left.
    __device__ __forceinline__ void begin_scores(float (&s)[32]) {
        Base::multiply_part(s, own, false);
        if constexpr (own == 1 && rotary_in_registers) multiply_rotary(s);
        ptx::wgmma_commit_group();
    }

    // Reads the bits of the valid keys, too.
    __device__ __forceinline__ void end_scores(float (&s)[32]) {
        Base::multiply_part(s, 1 - own, true);
        if constexpr (own == 0 || !rotary_in_registers) multiply_rotary(s);
        ptx::wgmma_commit_group();
        of_lists.listed.wait(parity);
        const uint4 bits = reinterpret_cast<const uint4*>(shared + smem::valid)[parity];
        valid = own == 0 ? make_uint2(bits.x, bits.y) : make_uint2(bits.z, bits.w);
        // In every thread: after a branch that some threads of a warp take, ptxas would no longer have wgmma's descriptors in
        // uniform registers, and would move them there, four words before each wgmma.
        seen |= bits.x | bits.y | bits.z | bits.w;
    }

    __device__ __forceinline__ void release_scores() const {
        if constexpr (own == 0 && config::fp8) barriers.release(own, rotary_part);
    }

    __device__ __forceinline__ void multiply_rotary(float (&s)[32]) {
        const uint64_t k_tile = ptx::wgmma_descriptor(keys(own) + (tiles - 1) * tile);
        const uint64_t q_tile = ptx::wgmma_descriptor(Base::operand(smem::q + (tiles - 1) * tile));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (rotary_in_registers)
                ptx::wgmma_registers(s, q_rotary[k], k_tile + 2 * k, true);
            else
                ptx::wgmma(s, q_tile + 2 * k, k_tile + 2 * k, true);
        }
    }

    __device__ __forceinline__ void mask(float (&s)[32], int) const {
        if ((valid.x & valid.y) == all_lanes) return;
        const ValidKeys valid_keys(valid, lane);
#pragma unroll
        for (int r = 0; r < 32; ++r)
            if (!valid_keys.has(r)) s[r] = minus_infinity();
    }

    __device__ __forceinline__ void release_second_left() const {
        barriers.release(1, left);
        if constexpr (!rotary_in_registers) barriers.release(1, rotary_part);
    }
    __device__ __forceinline__ void begin_next(bool) { parity ^= 1; }

    __device__ __forceinline__ void begin(const uint16_t* q, int row, int n_heads) {
        Base::load_queries(q + (static_cast<int64_t>(row) * n_heads + Base::first_head) * width, n_heads);
        Base::sync_both();
        if constexpr (rotary_in_registers) Base::load_rotary(q_rotary);
        seen = 0;
        Base::clear();
    }

    __device__ __forceinline__ void end(const Results& results, int unit, bool is_final) {
        float all[2];
        Base::find_sums(all);
        const bool has_keys = seen != 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float lse = has_keys ? present_lse(Base::highest[h] + log2f(all[h])) : minus_infinity();
            Base::store_results(results, unit, is_final, h, has_keys ? __frcp_rn(all[h]) : 0.0f, lse);
            if (own == 0 && is_final && results.lse != nullptr && lane % 4 == 0 && Base::head(h) < results.n_heads)
                results.lse[static_cast<int64_t>(unit) * results.n_heads + Base::head(h)] = lse * 0.69314718f;
        }
    }

    __device__ __forceinline__ void run(const uint16_t* q, const Results& results, Items& items, const Lists& lists) {
        Item item;
        while (items.next(item, lists)) {
            begin(q, item.row, results.n_heads);
            float s[32];
            if (own == 0 && item.n_steps > 0) Base::scores(s);
            for (int n = item.n_steps; n > 0; --n) Base::template attend<true>(s, 0, n > 1);
            end(results, items.unit - items.ranges, items.n_splits == 1);  // its unit, without a register of its own
        }
    }
};

// q: [rows, H, 576] bfloat16. out: [rows, H, 512] bfloat16. partial: [rows · n_splits, H, 512], lse: [rows · n_splits, H] in
// log₂; without splits lse may be null, and is natural.
extern "C" __global__ void __launch_bounds__(consumer_threads + producer_threads, 1)
sparse_mla(const uint8_t* cache, const uint16_t* q, const int* positions, const int* pages, uint16_t* out, float* partial,
           float* lse, float scale, int n_heads, int rows, int k, int position_step, int page_step, int n_positions,
           int n_pages, int n_splits, int ranges) {
    uint8_t* shared = ptx::dynamic_shared();
    ListBarriers& barriers = *reinterpret_cast<ListBarriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0);
    const int head_blocks = (n_heads + heads - 1) / heads;
    const int range = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * heads;
    const Results results{out, partial, lse, n_heads};
    const Lists lists{positions, pages, k, position_step, page_step, n_positions, n_pages};
    if (threadIdx.x == 0) barriers.init();
    sync_all();
    Items items(rows, n_splits, ranges, (k + step_keys - 1) / step_keys, range);
    if (warp >= consumer_threads / 32) {
        ptx::setmaxnreg_dec<config::producer_registers>();
        Producer producer{warp - consumer_threads / 32, shared + smem::keys, reinterpret_cast<int*>(shared + smem::slots),
                          reinterpret_cast<uint32_t*>(shared + smem::valid), barriers, cache, lists, items};
        producer.run();
    } else {
        ptx::setmaxnreg_inc<config::consumer_registers>();
        if (warp < 4)
            Consumer<0>(shared, barriers, scale, warp, first_head).run(q, results, items, lists);
        else
            Consumer<1>(shared, barriers, scale, warp - 4, first_head).run(q, results, items, lists);
    }
    if constexpr (cluster > 1) ptx::cluster_sync();  // the other thread block may still write here
}
