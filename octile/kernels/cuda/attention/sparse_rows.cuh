// The rows of sparse attention: lists of positions, their division among thread blocks, and the producer that gathers rows.
//
// A step is 128 entries of a list, two tiles of 64 keys. Without pages a position is a row of the latents; with pages it is
// one of a text, whose page is looked up. An entry below 0 or beyond the rows, or whose page is not in the cache, is absent.
//
// Tiles are BF16, 64 channels in 128 swizzled bytes a row, as wgmma reads them. Rows in BF16 are copied by cp.async, 16 bytes
// a thread and eight threads for 128 bytes of a row: TMA has no copy of rows that lie anywhere to one swizzled tile. Rows in
// FP8 (512 E4M3, four FP32 scales of 128 channels each, 64 BF16) pass through registers, where they become BF16, rounded
// once: their scales are numbers of BF16, and E4M3 that are NaN have a scale of NaN. While a thread converts its vectors of a
// part, those of the next one are on their way to it. Two thread blocks of a cluster, which attend to one list for 64 heads
// each, convert half of the rows each, for both. Source of that exchange: FlashMLA's "crossover"
// (https://github.com/deepseek-ai/FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md).
#pragma once
#include "convert.cuh"
#include "lists.cuh"

constexpr int producer_warps = producer_threads / 32;
constexpr int row_bytes = config::fp8 ? latent + 4 * (latent / 128) + 2 * rotary : 2 * width;

// The log of a sum of weights that is not that of no weights, which is −∞.
__device__ __forceinline__ float present_lse(float lse) { return lse == minus_infinity() ? -3.402823466e38f : lse; }

struct ListBarriers : Barriers {
    ptx::Mbarrier listed;                  // the bits of a step's valid keys are there
    ptx::Mbarrier landed[producer_warps];  // of FP8: the rotary channels that a warp copies

    __device__ __forceinline__ void init() {
        listed.init(producer_warps);
        for (int warp = 0; warp < producer_warps; ++warp) landed[warp].init(32);
        Barriers::init(producer_threads);
    }
};

// Steps of a list that a thread block attends to.
struct Item {
    int row, first_step, n_steps;
};

// The items of one thread block: each list is divided into `n_splits`, and thread blocks take neighboring ones in turn.
struct Items {
    const int rows, n_splits, ranges, steps_of_list, of_split;
    int unit;  // the next one: row · n_splits + split, where its partial result is stored

    __device__ __forceinline__ Items(int rows, int n_splits, int ranges, int steps_of_list, int range)
        : rows(rows), n_splits(n_splits), ranges(ranges), steps_of_list(steps_of_list),
          of_split((steps_of_list + n_splits - 1) / n_splits), unit(range) {}

    __device__ __forceinline__ bool next(Item& item, const Lists& lists) {
        if (unit >= rows * n_splits) return false;
        const int row = unit / n_splits, first = (unit - row * n_splits) * of_split;
        item = {row, first, lists.trimmed(row, first, max(min(of_split, steps_of_list - first), 0))};
        unit += ranges;
        return true;
    }
};

// Two E4M3 in the lower or the upper half of a word as BF16, exactly but for NaN, which become 480. The bits of E4M3 are
// moved to those of BF16, whose exponents are then 120 too small.
__device__ __forceinline__ uint32_t e4m3_to_bf16(uint32_t four, bool upper) {
    const uint32_t bytes = __byte_perm(four, 0, upper ? 0x3424 : 0x1404);  // each at the upper byte of 16 bits
    const uint32_t bits = (bytes >> 4 & 0x07F007F0) | (bytes & 0x80008000);
    constexpr uint32_t two_to_120 = 0x7B807B80, minus_zero = 0x80008000;
    return ptx::fma_bf16x2(bits, two_to_120, minus_zero);
}

__device__ __forceinline__ uint32_t product(uint32_t values, uint32_t scale) {
    return ptx::fma_bf16x2(values, scale, 0x80008000);
}

// The producer warpgroup.
struct Producer {
    // Of FP8: rows of a tile that this thread block, a warp and a thread convert, and vectors that it converts before their place
    // is released.
    static constexpr int own_rows = tile_keys / cluster, warp_rows = own_rows / producer_warps, thread_rows = warp_rows / 8;
    static constexpr int ahead = cluster;

    const int warp;            // of the producers
    uint8_t* const keys;       // two tiles of nine
    int* const slots;          // [2][128]: of two steps, whose tiles are named by their first slot
    uint32_t* const valid;     // [2][4]
    ListBarriers& barriers;
    const uint8_t* const cache;
    const Lists& lists;
    Items& items;
    int row = 0, entry = 0, steps_left = 0;  // of the item: this thread's next entry, and the steps from it on
    uint32_t parity = 1;                     // of the tiles, which are empty at first
    uint4 vectors[thread_rows][4];           // of FP8: those of the part that is converted next, and their scales
    float2 scales[thread_rows];

    // An entry of a step on its way to a slot of the cache.
    struct Entry {
        int position, page;
        bool exists;  // the step does
    };

    __device__ __forceinline__ static int thread() { return threadIdx.x % producer_threads; }

    __device__ __forceinline__ static uint32_t own_lane() { return ptx::opaque(ptx::lane_id()); }
    __device__ __forceinline__ static void sync() { ptx::named_barrier_sync(7, producer_threads); }

    __device__ __forceinline__ Entry next_entry() {
        while (steps_left == 0) {
            Item item;
            if (!items.next(item, lists)) return {-1, -1, false};
            row = item.row;
            entry = item.first_step * step_keys + thread();
            steps_left = item.n_steps;
        }
        const int position = lists.load_entry(row, entry);
        entry += step_keys;
        --steps_left;
        return {position, -1, true};
    }

    // Of the last entry.
    __device__ __forceinline__ void look_up(Entry& last) const {
        if constexpr (config::paged)
            if (lists.has(last.position)) last.page = lists.load_page(row, last.position);
    }

    __device__ __forceinline__ int slot_of(const Entry& entry) const {
        if (!lists.has(entry.position)) return -1;
        if constexpr (!config::paged) return entry.position;
        const bool is_page = static_cast<uint32_t>(entry.page) < static_cast<uint32_t>(lists.n_pages);
        return is_page ? entry.page * page_rows + entry.position % page_rows : -1;
    }

    __device__ __forceinline__ const uint8_t* row_at(int slot) const {
        return cache + static_cast<int64_t>(max(slot, 0)) * row_bytes;
    }

    // Of FP8: a warp waits for the rotary channels that it copies before it reports the values that it converts next. So they
    // need no barrier of the consumers, who need no proxy fence.
    __device__ __forceinline__ ptx::Mbarrier& landed() const { return barriers.landed[warp]; }

    // Of BF16: copies tiles of a part, from `byte` of the rows on; right values with the rotary channels.
    __device__ __forceinline__ void copy(int of_tile, int which, Part part, int byte) {
        const int own = ptx::opaque(thread()), group = own / 8, column = own % 8;
        const int first = part * 4, count = part == left ? 4 : 5;
        uint8_t* to = swizzled(keys + (which * tiles + first) * tile, group, 16 * column);
        barriers.empty[which][part].wait(parity);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int slot = slots[of_tile + group + 16 * i];
            const uint8_t* from = row_at(slot) + byte + 16 * column;
#pragma unroll
            for (int t = 0; t < count; ++t)
                ptx::cp_async_16(to + t * tile + 16 * i * 128, from + 128 * t, slot >= 0);
        }
        barriers.full[which][part].arrive_after_copies();
    }

    // Of FP8: copies the rotary channels of a tile. Four lanes have a row, 64 bytes of it at a time, of every second row the other
    // ones first: so the stores have no bank conflicts.
    __device__ __forceinline__ void copy_rotary(int of_tile, int which) {
        const uint32_t lane = own_lane();
        const int first = warp * 16 + lane / 4, byte = lane % 8 * 16;
        uint8_t* of_rotary = keys + (which * tiles + tiles - 1) * tile;
        uint8_t *here = swizzled(of_rotary, first, byte), *there = swizzled(of_rotary, first, byte ^ 64);
        barriers.empty[which][rotary_part].wait(parity);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int slot = slots[of_tile + first + 8 * i];
            const uint8_t* from = row_at(slot) + row_bytes - 2 * rotary;
            ptx::cp_async_16(here + i * 8 * 128, from + byte, slot >= 0);
            ptx::cp_async_16(there + i * 8 * 128, from + (byte ^ 64), slot >= 0);
        }
        landed().arrive_after_copies();
    }

    // Of FP8: a warp has neighboring rows. Four lanes load and convert 64 channels of a row at a time, so that the warp's stores
    // have no bank conflicts, and all channels of a part, so that few addresses are computed.
    __device__ __forceinline__ int first_row() const { return warp_rows * warp + own_rows * cluster_rank(); }
    __device__ __forceinline__ int row_of(uint32_t lane) const { return first_row() + lane / 4; }  // the thread's first

    // Loads the rows of a step that this thread block converts to the L2 cache, three lines of a row each.
    __device__ __forceinline__ void prefetch(int of_step) const {
        const uint32_t lane = own_lane(), half = lane % 2;
#pragma unroll
        for (int i = 0; i < 2 / cluster; ++i) {
            const int row = warp * 16 + lane / 2 + 64 * i;  // of those that it converts, of both tiles
            const int slot = slots[of_step + row / own_rows * tile_keys + row % own_rows + own_rows * cluster_rank()];
            if (slot < 0) continue;
            const uint8_t* from = row_at(slot) + half * 3 * 128;
#pragma unroll
            for (int line = 0; line < 3; ++line) ptx::prefetch_line(from + 128 * line);
        }
    }

    // Where the vectors of this thread's row i begin; absent: any row, with a scale of zero.
    struct Source {
        const uint8_t* vectors;
        const float2* scales;  // null: absent
    };
    __device__ __forceinline__ Source source(int of_tile, int part, int i) const {
        const uint32_t lane = own_lane();
        const int slot = slots[of_tile + row_of(lane) + 8 * i];
        const uint8_t* from = row_at(slot);
        return {from + part * 256 + lane % 4 * 16, slot < 0 ? nullptr : reinterpret_cast<const float2*>(from + latent) + part};
    }
    __device__ __forceinline__ void load_vector(const Source& from, int i, int t) {
        vectors[i][t] = __ldg(reinterpret_cast<const uint4*>(from.vectors + 64 * t));
    }
    __device__ __forceinline__ void load_scales(const Source& from, int i) {
        scales[i] = make_float2(0.0f, 0.0f);
        if (from.scales != nullptr) scales[i] = __ldg(from.scales);
    }

    __device__ __forceinline__ void load_first() {
#pragma unroll
        for (int i = 0; i < thread_rows; ++i) {
            const Source from = source(0, left, i);
#pragma unroll
            for (int t = 0; t < 4; ++t) load_vector(from, i, t);
            load_scales(from, i);
        }
    }

    // next_tile, next_part: what is loaded meanwhile.
    __device__ __forceinline__ void convert(int which, int part, int next_tile, int next_part) {
        const uint32_t lane = own_lane();
        const int first = row_of(lane);
        uint8_t* to = keys + (which * tiles + 4 * part) * tile;
        uint8_t *low = swizzled(to, first, lane % 4 * 32), *high = swizzled(to, first, lane % 4 * 32 + 16);
#pragma unroll
        for (int i = 0; i < thread_rows; ++i) {
            const uint32_t scale[2] = {ptx::pack_bf16(scales[i].x, scales[i].x), ptx::pack_bf16(scales[i].y, scales[i].y)};
            const Source next = source(next_tile, next_part, i);
            load_scales(next, i);
#pragma unroll
            for (int t = 0; t < 4; t += ahead) {
                uint4 values[ahead][2];
#pragma unroll
                for (int j = 0; j < ahead; ++j) {
                    const uint4 e4m3 = vectors[i][t + j];
                    load_vector(next, i, t + j);
                    values[j][0] = scaled(e4m3.x, e4m3.y, scale[(t + j) / 2]);
                    values[j][1] = scaled(e4m3.z, e4m3.w, scale[(t + j) / 2]);
                }
                if (i == 0 && t == 0) barriers.empty[which][part].wait(parity);
#pragma unroll
                for (int j = 0; j < ahead; ++j) {
                    *reinterpret_cast<uint4*>(low + (t + j) * tile + i * 8 * 128) = values[j][0];
                    *reinterpret_cast<uint4*>(high + (t + j) * tile + i * 8 * 128) = values[j][1];
                }
            }
        }
        if (part == left) landed().wait(which);  // two phases a step
        ptx::fence_proxy_async();
        __syncwarp();
        publish_rows(barriers.full[which][part], to, first_row(), warp_rows);
    }

    __device__ __forceinline__ static uint4 scaled(uint32_t first, uint32_t second, uint32_t scale) {
        return make_uint4(product(e4m3_to_bf16(first, false), scale), product(e4m3_to_bf16(first, true), scale),
                          product(e4m3_to_bf16(second, false), scale), product(e4m3_to_bf16(second, true), scale));
    }

    // In the middle of a step: reports its entries, and writes the slots of the next one, −1 if there is none.
    __device__ __forceinline__ void advance(int& slot, const Entry& following) {
        const uint32_t bits = __ballot_sync(all_lanes, slot >= 0);
        if (ptx::lane_id() == 0) {  // both consumers have read the bits of the step before
            valid[(parity ^ 1) * 4 + warp] = bits;
            barriers.listed.arrive();
        }
        __syncwarp();
        slots[parity * step_keys + thread()] = slot = slot_of(following);
    }

    __device__ __forceinline__ void run() {
        Entry following = next_entry();
        look_up(following);
        bool exists = following.exists;
        int slot = slot_of(following);
        slots[thread()] = slot;
        sync();
        if constexpr (config::fp8) {
            prefetch(0);
            load_first();
        }
        following = next_entry();
        while (exists) {
            const int of_step = (parity ^ 1) * step_keys, next_step = parity * step_keys;
            look_up(following);
            if constexpr (config::fp8) {
                // In the order in which the consumers release the parts: the first tile's left values, the second's right ones, the
                // first's right and the second's left ones.
#pragma unroll config::unrolled_parts
                for (int n = 0; n < 4; ++n) {
                    const int which = n % 2, part = n / 2 ^ which;
                    if (part == left) copy_rotary(of_step + which * tile_keys, which);
                    if (n == 2) {
                        advance(slot, following);
                        exists = following.exists;
                        if (exists) following = next_entry();
                        sync();
                        prefetch(next_step);
                    }
                    const int next_tile = n == 3 ? next_step : of_step + (1 - which) * tile_keys;
                    convert(which, part, next_tile, (n + 1) % 4 / 2 ^ (n + 1) % 2);
                }
            } else {
                const Entry after = next_entry();
                copy(of_step, 0, left, 0);
                copy(of_step + tile_keys, 1, right, latent);
                advance(slot, following);
                exists = following.exists;
                following = after;
                sync();
                copy(of_step, 0, right, latent);
                copy(of_step + tile_keys, 1, left, 0);
            }
            parity ^= 1;
        }
    }
};
