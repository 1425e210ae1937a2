// Attention of decoding over the paged latent cache for Hopper: the results of one range of each row's positions.
//
//     Sᵀ[64 keys, heads] = K · Qᵀ        P = exp2(S − running maximum)        Oᵀ[512 channels, heads] += Vᵀ · Pᵀ
//
// Keys and channels are the rows of both products and heads the columns, so that few heads fill wgmma's instructions: with
// 16 heads a tile of 64 queries would be a quarter full. A page is K, and its first 512 channels are V, which wgmma
// transposes. A producer warp loads pages by TMA. Two consumer warpgroups take the pages of an item in turn, each with its
// own maximum and accumulators, which are merged at the item's end in a fixed order.
//
// NOTES
// - Threads hold heads 8j + 2·(lane%4) + i of S and O, and keys or channels by their warp, lane/4 and h: register
//   [4j + 2h + i] of 64 rows. Maxima over keys are taken by shuffles, then over the four warps through shared memory.
// - Rows of a page after the last position may hold anything, also NaN: their weights are zero, and V is set to zero there.
#include "ptx.cuh"
#include "convert.cuh"
#include "split_kv.cuh"
#include "mla_entry.cuh"
#include "mla_formats.cuh"

constexpr int own_heads = heads / 4;     // of a thread
constexpr int exchanged = config::exchanged;  // blocks of 64 channels that a warpgroup gives to the other one at a time

namespace smem {
constexpr int pages = 0;  // first: their swizzle needs 1024-byte alignment
constexpr int q = pages + config::stages * Format::page_bytes;
constexpr int p = q + Format::q_bytes;  // of both warpgroups
constexpr int exchange = p + 2 * Format::p_bytes;
constexpr int maxima = exchange + 2 * exchanged * (heads / 2) * 128 * 4;
constexpr int statistics = maxima + 2 * 4 * Format::maxima * 4;  // maximum and sum of each head, of both warpgroups
constexpr int factors = statistics + 2 * 2 * heads * 4;
constexpr int lengths = factors + heads * 4;  // to which the heads attend, if there are several queries
constexpr int barriers = lengths + heads * 4;
constexpr int bytes = barriers + 2 * config::stages * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "mla_decode.py computes the same");
}  // namespace smem

struct Barriers {
    ptx::Mbarrier full[config::stages], empty[config::stages];
};

// One warp loads pages, each as soon as a stage is empty, and the first ones before the previous kernel has ended if it has
// not written them.
struct Loader {
    uint8_t* const shared;
    Barriers& barriers;
    const TensorMap* const map;
    const uint8_t* const cache;
    int stage = 0;
    uint32_t parity = 1;  // the stages are empty at first
    bool waits = config::loads_early;

    __device__ __forceinline__ void load_item(const int* pages, int n_pages) {
        int ids = 0;
        for (int page = 0; page < n_pages; ++page) {
            if (waits && parity == 0) end();  // only then are stages emptied
            const int lane = ptx::lane_id();
            if (page % 32 == 0) ids = page + lane < n_pages ? pages[page + lane] : 0;
            const int id = __shfl_sync(all_lanes, ids, page % 32);
            barriers.empty[stage].wait(parity);
            __syncwarp();
            if (lane == 0) {
                barriers.full[stage].arrive_expect_tx(Format::page_bytes);
                Format::load_page(
                    shared + smem::pages + stage * Format::page_bytes, map, cache, id, barriers.full + stage);
            }
            if (++stage == config::stages) {
                stage = 0;
                parity ^= 1;
            }
        }
    }

    __device__ __forceinline__ void end() {
        if (waits) ptx::wait_for_previous();
        waits = false;
    }
};

struct Consumer {
    uint8_t* const shared;
    const Arguments& arguments;
    const int warpgroup, warp, lane;  // warp of the warpgroup
    const int first_head;
    Format format;
    float o[8][heads / 2];
    float highest[own_heads], total[own_heads];  // of heads 8j + 2·(lane%4) + i: [2j + i]; total: of the thread's keys

    __device__ __forceinline__ float* maxima() const {
        return reinterpret_cast<float*>(shared + smem::maxima) + warpgroup * 4 * Format::maxima;
    }
    __device__ __forceinline__ float* statistics() const { return reinterpret_cast<float*>(shared + smem::statistics); }
    __device__ __forceinline__ int* of_heads() const { return reinterpret_cast<int*>(shared + smem::lengths); }
    __device__ __forceinline__ float* exchange(int of) const {
        return reinterpret_cast<float*>(shared + smem::exchange) + of * exchanged * (heads / 2) * 128;
    }
    __device__ __forceinline__ void sync_warpgroup() const { ptx::named_barrier_sync(1 + warpgroup, 128); }
    __device__ __forceinline__ static void sync_both() { ptx::named_barrier_sync(3, consumer_threads); }
    // Of the thread's head [2j + i], counted from this thread block's first.
    __device__ __forceinline__ int head(int index) const { return 8 * (index / 2) + 2 * (lane % 4) + index % 2; }

    __device__ __forceinline__ void begin(const Item& item, const Lengths& lengths) {
        const int64_t row = static_cast<int64_t>(item.row) * arguments.n_heads + first_head;
        Format::load_q(shared + smem::q, reinterpret_cast<float*>(shared + smem::factors), arguments.q + row * width,
                       arguments.n_heads - first_head, ptx::opaque(threadIdx.x));
        if (config::queries > 1 && threadIdx.x < heads)
            of_heads()[threadIdx.x] = lengths.of_head(item.row, first_head + threadIdx.x, arguments.n_heads);
        ptx::fence_proxy_async();
        sync_both();
        format.begin(reinterpret_cast<const float*>(shared + smem::factors), lane);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int r = 0; r < heads / 2; ++r) o[b][r] = 0.0f;
#pragma unroll
        for (int k = 0; k < own_heads; ++k) {
            // Of a head without positions in these pages the weights are exp2(−∞ − 0).
            const bool reaches =
                config::queries == 1 || of_heads()[head(k)] > (item.first_page + warpgroup) * page_rows;
            highest[k] = reaches ? minus_infinity() : 0.0f, total[k] = 0.0f;
        }
    }

    // Attends to one page, from which on `valid` positions are within the row's length and `before` precede it.
    __device__ __forceinline__ void attend(uint8_t* page, int valid, int before) {
        float s[heads / 2];
        format.scores(s, page, shared + smem::q, warp, lane);
        if (valid < page_rows) {
            Format::zero_rows(page, valid, threadIdx.x % 128);
            ptx::fence_proxy_async();
        }
        const float factor = arguments.scale * 1.44269504f;
        bool inside[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) inside[h] = 16 * warp + 8 * h + lane / 4 < valid;
        float above[own_heads];
#pragma unroll
        for (int k = 0; k < own_heads; ++k) {
            const int j = k / 2, i = k % 2;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& score = s[4 * j + 2 * h + i];
                bool of_head = inside[h];
                if constexpr (config::queries > 1)
                    of_head = before + 16 * warp + 8 * h + lane / 4 < of_heads()[head(k)];
                score = of_head ? score * format.factor(k, factor) : minus_infinity();
            }
            above[k] = fmaxf(s[4 * j + i], s[4 * j + 2 + i]);
#pragma unroll
            for (int distance = 4; distance <= 16; distance *= 2)
                above[k] = fmaxf(above[k], __shfl_xor_sync(all_lanes, above[k], distance));
            if (lane < 4) maxima()[warp * Format::maxima + head(k)] = above[k];
        }
        format.write_scale_maxima(page, maxima() + warp * Format::maxima, inside, warp, lane);
        sync_warpgroup();
        float correction[own_heads];
#pragma unroll
        for (int k = 0; k < own_heads; ++k) {
            float most = highest[k];
#pragma unroll
            for (int w = 0; w < 4; ++w) most = fmaxf(most, maxima()[w * Format::maxima + head(k)]);
            correction[k] = ptx::exp2(highest[k] - most);
            highest[k] = most;
            total[k] *= correction[k];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& weight = s[4 * (k / 2) + 2 * h + k % 2];
                weight = ptx::exp2(weight - most);
                total[k] += weight;
            }
        }
        uint8_t* p = shared + smem::p + warpgroup * Format::p_bytes;
        format.write_weights(s, p, maxima(), warp, lane);
        ptx::fence_proxy_async();
        bool rescales = format.rescales();
#pragma unroll
        for (int k = 0; k < own_heads; ++k) rescales = rescales || correction[k] != 1.0f;
        if (__any_sync(all_lanes, rescales)) {
#pragma unroll
            for (int b = 0; b < 8; ++b)
#pragma unroll
                for (int r = 0; r < heads / 2; ++r) o[b][r] *= correction[r / 4 * 2 + r % 2] * format.rescaling(b);
        }
        sync_warpgroup();
        format.add_values(o, page, p, warp, lane);
    }

    // Merges both warpgroups' results and stores them: each those of four of the eight blocks of 64 channels.
    __device__ __forceinline__ void end(const Item& item) {
        float sum[own_heads];
#pragma unroll
        for (int k = 0; k < own_heads; ++k) {
            sum[k] = total[k];
#pragma unroll
            for (int distance = 4; distance <= 16; distance *= 2)
                sum[k] += __shfl_xor_sync(all_lanes, sum[k], distance);
            if (lane < 4) maxima()[warp * Format::maxima + head(k)] = sum[k];
        }
        format.end(o);
        sync_warpgroup();
        float *heads_highest = statistics(), *heads_total = statistics() + 2 * heads;  // [2][heads] each
        if (warp == 0 && lane < 4) {
#pragma unroll
            for (int k = 0; k < own_heads; ++k) {
                float all = 0.0f;
#pragma unroll
                for (int w = 0; w < 4; ++w) all += maxima()[w * Format::maxima + head(k)];
                heads_highest[warpgroup * heads + head(k)] =
                    config::queries > 1 && all == 0.0f ? minus_infinity() : highest[k];
                heads_total[warpgroup * heads + head(k)] = all;
            }
        }
        float share[2][own_heads], lse[own_heads];
#pragma unroll
        for (int round = 0; round < 4 / exchanged; ++round) {
            if (round > 0) sync_both();
            if (warpgroup == 0)
                give<0>(round);
            else
                give<1>(round);
            sync_both();  // not in `give` and `take`: synccheck asks that all threads wait at one instruction
            if (round == 0) find_shares(item, heads_highest, heads_total, share, lse);
            if (warpgroup == 0)
                take<0>(round, share);
            else
                take<1>(round, share);
        }
        if (warpgroup == 0)
            store<0>(item, lse);
        else
            store<1>(item, lse);
    }

    // Stores what the other warpgroup merges.
    template <int own>
    __device__ __forceinline__ void give(int round) const {
#pragma unroll
        for (int b = 0; b < exchanged; ++b)
#pragma unroll
            for (int r = 0; r < heads / 2; ++r)
                exchange(own)[(b * (heads / 2) + r) * 128 + threadIdx.x % 128] =
                    o[4 * (1 - own) + round * exchanged + b][r];
    }

    // The factors of both warpgroups' results, and the log-sum-exps of their sum, of this thread's heads.
    __device__ __forceinline__ void find_shares(const Item& item, const float* heads_highest, const float* heads_total,
                                                float (&share)[2][own_heads], float (&lse)[own_heads]) const {
#pragma unroll
        for (int k = 0; k < own_heads; ++k) {
            const float a = heads_highest[head(k)], b = heads_highest[heads + head(k)];
            float most = fmaxf(a, b);
            if constexpr (config::queries > 1) most = fmaxf(most, -3e38f);  // so that −∞ − most is not NaN
            share[0][k] = ptx::exp2(a - most);
            share[1][k] = item.n_pages > 1 ? ptx::exp2(b - most) : 0.0f;  // without pages it has no results
            const float all = share[0][k] * heads_total[head(k)] + share[1][k] * heads_total[heads + head(k)];
            lse[k] = most + log2f(all);
            const bool is_empty = config::queries > 1 && all == 0.0f;  // the head's query has no positions here
            const float inverse = is_empty ? 0.0f : __frcp_rn(all);
            share[0][k] *= inverse;
            share[1][k] *= inverse;
        }
    }

    template <int own>
    __device__ __forceinline__ void take(int round, const float (&share)[2][own_heads]) {
#pragma unroll
        for (int b = 0; b < exchanged; ++b)
#pragma unroll
            for (int r = 0; r < heads / 2; ++r) {
                const int k = r / 4 * 2 + r % 2, block = 4 * own + round * exchanged + b;
                const float other = exchange(1 - own)[(b * (heads / 2) + r) * 128 + threadIdx.x % 128];
                o[block][r] = o[block][r] * share[own][k] + other * share[1 - own][k];
            }
    }

    template <int own>
    __device__ __forceinline__ void store(const Item& item, const float (&lse)[own_heads]) const {
        const int n_heads = arguments.n_heads;
#pragma unroll
        for (int k = 0; k < own_heads; ++k) {
            if (first_head + head(k) >= n_heads) continue;
            const int64_t out = static_cast<int64_t>(item.whole ? item.row : item.slot) * n_heads + first_head + head(k);
#pragma unroll
            for (int b = 4 * own; b < 4 * own + 4; ++b)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int channel = 64 * b + Format::channel(warp, lane, h);
                    const float value = o[b][4 * (k / 2) + 2 * h + k % 2];
                    if (item.whole)
                        arguments.out[out * latent + channel] = static_cast<uint16_t>(ptx::pack_bf16(value, 0.0f));
                    else
                        arguments.partial[out * latent + channel] = value;
                }
            if (own == 0 && !item.whole && warp == 0 && lane < 4) arguments.lse[out] = lse[k];
        }
    }
};

// cache: [P, 64, 576] bfloat16, described by `map`, or [P, 64, 656] bytes. q: [rows, H, 576] bfloat16. pages: [rows, M].
// out: [rows, H, 512] bfloat16. partial: [slots, H, 512], lse: [slots, H]. starts: [rows + 1].
extern "C" __global__ void __launch_bounds__(consumer_threads + 128, 1)
mla_decode(const __grid_constant__ TensorMap map, const uint8_t* cache, const uint16_t* q, const int* pages,
           const int* lengths, uint16_t* out, float* partial, float* lse, int* starts, float scale, int n_heads,
           int page_step, int length_step, int rows, int max_parts, int ranges) {
    uint8_t* shared = ptx::dynamic_shared();
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + smem::barriers);
    const Arguments arguments{cache, q, pages, out, partial, lse, scale, n_heads, page_step};
    const Role role(n_heads, heads);
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(&map);
        for (int stage = 0; stage < config::stages; ++stage) {
            barriers.full[stage].init(1);
            barriers.empty[stage].init(4);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (config::programmatic && !(config::loads_early && role.is_producer())) ptx::wait_and_launch_dependents();
    int* const written = role.warp == 0 ? starts : nullptr;  // not by the producer, which may not have waited
    Items items = items_of(role, {lengths, length_step}, rows, max_parts, ranges, written);
    if (!role.is_consumer()) {
        ptx::setmaxnreg_dec<24>();
        if (role.is_producer()) {
            Loader loader{shared, barriers, &map, cache};
            produce(loader, arguments, items);
            loader.end();
        }
        return;
    }
    ptx::setmaxnreg_inc<240>();
    Consumer consumer{shared, arguments, role.warp / 4, role.warp % 4, static_cast<int>(ptx::lane_id()), role.first_head};
    Item item;
    int first = 0;  // pages of the items before
    while (items.next(item)) {
        consumer.begin(item, items.lengths);
        for (int page = consumer.warpgroup; page < item.n_pages; page += 2) {
            const int stage = (first + page) % config::stages;
            barriers.full[stage].wait((first + page) / config::stages % 2);
            const int before = (item.first_page + page) * page_rows;
            consumer.attend(shared + smem::pages + stage * Format::page_bytes, item.length - before, before);
            __syncwarp();
            if (consumer.lane == 0) barriers.empty[stage].arrive();
        }
        consumer.end(item);
        first += item.n_pages;
    }
}
