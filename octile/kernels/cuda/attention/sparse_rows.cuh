// The rows of sparse attention: lists of positions, their division among thread blocks, and the producer that gathers rows.
//
// A step is 128 entries of a list, two tiles of 64 keys. Without pages a position is a row of the latents; with pages it is
// one of a text, whose page is looked up. An entry below 0 or beyond the rows, or whose page is not in the cache, is absent.
//
// Tiles are BF16, 64 channels in 128 swizzled bytes a row, as wgmma reads them. Rows in BF16 are copied by cp.async, 16 bytes
// a thread and eight threads for 128 bytes of a row: TMA has no copy of rows that lie anywhere to one swizzled tile. Rows in
// FP8 (512 E4M3, four FP32 scales of 128 channels each, 64 BF16) pass through registers, where they become BF16, rounded
// once: their scales are numbers of BF16, and E4M3 that are NaN have a scale of NaN. Four vectors of 16 bytes are always on
// their way to a thread, and some are converted before their place is released. Two thread blocks of a cluster, which attend
// to one list for 64 heads each, convert half of the rows each, for both. Source of that exchange: FlashMLA's "crossover"
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
    int unit;     // row · n_splits + split: where its partial result is stored
    int n_steps;
};

// The items of one thread block: each list is divided into `n_splits`, and thread blocks take neighboring ones in turn.
struct Items {
    const int rows, n_splits, ranges, steps_of_list;
    int unit;

    __device__ __forceinline__ bool next(Item& item, const Lists& lists) {
        if (unit >= rows * n_splits) return false;
        const int first = first_step(unit), n = max(min(of_split(), steps_of_list - first), 0);
        item = {unit, lists.trimmed(row(unit), first, n)};
        unit += ranges;
        return true;
    }
    __device__ __forceinline__ int of_split() const { return (steps_of_list + n_splits - 1) / n_splits; }
    __device__ __forceinline__ int row(int unit) const { return unit / n_splits; }
    __device__ __forceinline__ int first_step(int unit) const { return unit % n_splits * of_split(); }
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
    // Of FP8: rows that this thread block converts; vectors of a part of a thread, those that it loads together, and those
    // that it converts before their place is released.
    static constexpr int own_rows = tile_keys / cluster, passes = 8 / cluster, at_once = 4;
    static constexpr int ahead = config::paged || cluster > 1 ? 2 : 1;  // or ptxas spills

    uint8_t* const keys;       // two tiles of nine
    int* const slots;          // [2][128]
    uint32_t* const valid;     // [2][4]
    ListBarriers& barriers;
    const uint8_t* const cache;
    const Lists& lists;
    Items& items;
    Item item{0, 0};
    int next_step = 0;      // of the item
    uint32_t parity = 1;    // of the tiles, which are empty at first
    uint4 rolling[at_once]; // of FP8: the next vectors
    float scales[at_once];

    // An entry of a step on its way to a slot of the cache; row −1: the step does not exist.
    struct Entry {
        int row, position, page;

        __device__ __forceinline__ bool exists() const { return row >= 0; }
    };

    __device__ __forceinline__ static int thread() { return threadIdx.x % producer_threads; }
    __device__ __forceinline__ static void sync() { ptx::named_barrier_sync(7, producer_threads); }

    __device__ __forceinline__ Entry next_entry() {
        while (next_step == item.n_steps) {
            if (!items.next(item, lists)) return {-1, -1, -1};
            next_step = 0;
        }
        const int row = items.row(item.unit);
        const int entry = (items.first_step(item.unit) + next_step++) * step_keys + thread();
        return {row, lists.load(row, entry), -1};
    }

    __device__ __forceinline__ void look_up(Entry& entry) const {
        if constexpr (config::paged) entry.page = lists.load_page(entry.row, entry.position);
    }

    __device__ __forceinline__ int slot_of(const Entry& entry) const {
        if (entry.position < 0) return -1;
        if constexpr (!config::paged) return entry.position;
        return entry.page >= 0 && entry.page < lists.n_pages ? entry.page * page_rows + entry.position % page_rows : -1;
    }

    __device__ __forceinline__ const uint8_t* row_at(int slot) const {
        return cache + static_cast<int64_t>(max(slot, 0)) * row_bytes;
    }

    // Of FP8: a warp waits for the rotary channels that it copies before it reports the values that it converts next. So they
    // need no barrier of the consumers, who need no proxy fence.
    __device__ __forceinline__ ptx::Mbarrier& landed() const { return barriers.landed[thread() / 32]; }

    // Copies tiles of a part without converting them, from `byte` of the rows on; right values with the rotary channels.
    __device__ __forceinline__ void copy(const int* of_tile, int which, Part part, int byte) {
        const int own = ptx::opaque(thread()), group = own / 8, column = own % 8;
        const int first = part * 4, count = part == rotary_part ? 1 : config::fp8 || part == left ? 4 : 5;
        uint8_t* to = swizzled(keys + (which * tiles + first) * tile, group, 16 * column);
        barriers.empty[which][part].wait(parity);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int slot = of_tile[group + 16 * i];
            const uint8_t* from = row_at(slot) + byte + 16 * column;
#pragma unroll
            for (int t = 0; t < count; ++t)
                ptx::cp_async_16(to + t * tile + 16 * i * 128, from + 128 * t, slot >= 0);
        }
        if constexpr (config::fp8)
            landed().arrive_after_copies();
        else
            barriers.full[which][part].arrive_after_copies();
    }

    // Of FP8: a warp has neighboring rows, and loads and converts 16 vectors of two of them at a time, so that its stores have
    // no bank conflicts.
    static constexpr int warp_rows = 2 * passes;

    __device__ __forceinline__ static int first_row(int own) {  // of the warp
        return warp_rows * (own / 32) + own_rows * cluster_rank();
    }
    __device__ __forceinline__ static int row_of(int own) { return first_row(own) + own / 4 % 2; }  // in the first pass

    // Loads the rows of a step that this thread block converts to the L2 cache, three lines of a row each.
    __device__ __forceinline__ void prefetch(const int* of_step) const {
        const int own = ptx::opaque(thread()), rank = cluster_rank();
#pragma unroll
        for (int i = 0; i < 2 / cluster; ++i) {
            const int row = own / 2 + 64 * i;
            const int slot = of_step[row / own_rows * tile_keys + row % own_rows + rank * own_rows];
            if (slot < 0) continue;
            const uint8_t* from = row_at(slot) + own % 2 * 3 * 128;
#pragma unroll
            for (int line = 0; line < 3; ++line) ptx::prefetch_line(from + 128 * line);
        }
    }

    __device__ __forceinline__ void load(const int* of_tile, Part part, int pass) {
        const int own = ptx::opaque(thread()), column = own % 32 / 8 * 4 + own % 4;
        const int slot = of_tile[row_of(own) + 2 * pass];
        const uint8_t* row = row_at(slot);  // absent: any row, with a scale of zero
        rolling[pass % at_once] = __ldg(reinterpret_cast<const uint4*>(row + part * 256 + 16 * column));
        scales[pass % at_once] = 0.0f;
        if (slot >= 0)
            scales[pass % at_once] = __ldg(reinterpret_cast<const float*>(row + latent) + 2 * part + column / 8);
    }

    __device__ __forceinline__ void convert(
        const int* of_tile, int which, Part part, const int* next_tile, Part next_part) {
        const int own = ptx::opaque(thread()), row = row_of(own);
        uint8_t* to = keys + (which * tiles + 4 * part + own % 32 / 8) * tile;
        const int low = swizzled(to, row, own % 4 * 32) - to, high = swizzled(to, row, own % 4 * 32 + 16) - to;
#pragma unroll
        for (int first = 0; first < passes; first += ahead) {
            uint4 values[ahead][2];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const int pass = first + i;
                const uint4 e4m3 = rolling[pass % at_once];
                const uint32_t scale = ptx::pack_bf16(scales[pass % at_once], scales[pass % at_once]);
                if (pass + at_once < passes)
                    load(of_tile, part, pass + at_once);
                else if (next_tile != nullptr)
                    load(next_tile, next_part, pass + at_once - passes);
                values[i][0] = scaled(e4m3.x, e4m3.y, scale);
                values[i][1] = scaled(e4m3.z, e4m3.w, scale);
            }
            if (first == 0) barriers.empty[which][part].wait(parity);
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const int pass = first + i, swizzle = 32 * (pass % 4);
                *reinterpret_cast<uint4*>(to + (low ^ swizzle) + 256 * pass) = values[i][0];
                *reinterpret_cast<uint4*>(to + (high ^ swizzle) + 256 * pass) = values[i][1];
            }
        }
        if (part == left) landed().wait(which);  // two phases a step
        ptx::fence_proxy_async();
        __syncwarp();
        publish_rows(
            barriers.full[which][part], keys + (which * tiles + 4 * part) * tile, first_row(own), warp_rows);
    }

    __device__ __forceinline__ static uint4 scaled(uint32_t first, uint32_t second, uint32_t scale) {
        return make_uint4(product(e4m3_to_bf16(first, false), scale), product(e4m3_to_bf16(first, true), scale),
                          product(e4m3_to_bf16(second, false), scale), product(e4m3_to_bf16(second, true), scale));
    }

    __device__ __forceinline__ void run() {
        Entry first_entry = next_entry();
        look_up(first_entry);
        bool exists = first_entry.exists();
        int slot = slot_of(first_entry);
        Entry following = next_entry();
        slots[thread()] = slot;
        sync();
        if constexpr (config::fp8) {
            if (exists)
#pragma unroll
                for (int pass = 0; pass < at_once; ++pass) load(slots, left, pass);
        }
        for (int step = 0; exists; ++step) {
            const int* first = slots + step % 2 * step_keys;
            const int* second = first + tile_keys;
            int* next = slots + (step + 1) % 2 * step_keys;
            const uint32_t bits = __ballot_sync(all_lanes, slot >= 0);
            look_up(following);
            const Entry after = next_entry();
            if constexpr (config::fp8) {  // in the order in which the consumers release the parts
                copy(first, 0, rotary_part, row_bytes - 2 * rotary);
                convert(first, 0, left, second, right);
                convert(second, 1, right, first, right);
            } else {
                copy(first, 0, left, 0);
                copy(second, 1, right, latent);
            }
            if (ptx::lane_id() == 0) {  // both consumers have read the bits of the step before
                valid[step % 2 * 4 + thread() / 32] = bits;
                barriers.listed.arrive();
            }
            __syncwarp();
            slot = slot_of(following);
            next[thread()] = slot;
            sync();
            if constexpr (config::fp8) prefetch(next);
            if constexpr (config::fp8) {
                convert(first, 0, right, second, left);
                copy(second, 1, rotary_part, row_bytes - 2 * rotary);
                convert(second, 1, left, following.exists() ? next : nullptr, left);
            } else {
                copy(first, 0, right, latent);
                copy(second, 1, left, 0);
            }
            parity ^= 1;
            exists = following.exists();
            following = after;
        }
    }
};
