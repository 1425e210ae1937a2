// How the pages of mla_decode_64.cu come into shared memory: by TMA from a cache in BF16, converted from one in FP8.
//
// Each page is in three parts: its left and right values and its rotary channels. A part is released as soon as its last
// reader is done, and written again in the order in which the consumers release the parts.
//
// FP8: a row has 656 bytes: 512 E4M3, four FP32 scales of 128 channels each, 64 BF16. TMA loads the rotary channels. The
// others are loaded to registers, a batch of rows ahead, multiplied by their scales, rounded to BF16 and written where
// TMA would have written them, once for 64 heads. With more heads the two thread blocks of a cluster convert half of the
// rows each, for both: once for 128 heads. Source of that exchange: FlashMLA's "crossover"
// (https://github.com/deepseek-ai/FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md).
#pragma once
#include "convert.cuh"
#include "queries.cuh"
#include "split_kv.cuh"
#include "tiles.cuh"

struct PageBarriers : Barriers {
    ptx::Mbarrier q_full, q_empty, copied[3];  // the queries of an item, from a cache in BF16

    __device__ __forceinline__ void init() {
        Barriers::init(1);
        q_full.init(3);
        q_empty.init(consumer_threads / 32);
        for (int warp = 0; warp < 3; ++warp) copied[warp].init(32);
        ptx::fence_mbarrier_init();
    }
};

namespace smem {
constexpr int keys = 0;  // two pages; first: their swizzle needs 1024-byte alignment
constexpr int q = keys + 2 * tiles * tile;
constexpr int p_second = keys + (2 * tiles - 1) * tile;  // P₁: where the second page's rotary channels were
constexpr int p_first = q + tiles * tile;                // P₀
constexpr int rows = p_first + tile;                     // [8][64] of 4 bytes: see `RowValue`
constexpr int barriers = rows + 8 * heads * 4;
constexpr int bytes = barriers + int(sizeof(PageBarriers));
static_assert(bytes == config::shared_bytes, "mla_decode.py computes the same");
}  // namespace smem

__device__ __forceinline__ uint8_t* tile_of(uint8_t* shared, int which, int index) {
    return shared + smem::keys + (which * tiles + index) * tile;
}

// One warp loads pages in BF16: tiles of 64 rows and channels.
struct Loader {
    uint8_t* const shared;
    Barriers& barriers;
    const TensorMap* const map;
    uint32_t parity[2] = {1, 1};  // the buffers are empty at first

    __device__ __forceinline__ void load(int which, Part part, int page) {
        barriers.empty[which][part].wait(parity[which]);
        ptx::Mbarrier* full = &barriers.full[which][part];
        const int first = part * 4, count = part == rotary_part ? 1 : 4;
        full->arrive_expect_tx(count * tile);
        for (int t = first; t < first + count; ++t)
            ptx::tma_load(tile_of(shared, which, t), map, full, 0, page * page_rows, t);
    }

    __device__ __forceinline__ void load_item(const int* pages, int n_pages) {
        const int lane = ptx::lane_id();
        int ids = 0;
        for (int page = 0; page < n_pages; page += 2) {
            if (page % 32 == 0) ids = page + lane < n_pages ? pages[page + lane] : 0;
            const int first = __shfl_sync(all_lanes, ids, page % 32), second = __shfl_sync(all_lanes, ids, page % 32 + 1);
            const bool pair = page + 1 < n_pages;
            if (lane == 0) {
                load(0, rotary_part, first);
                load(0, left, first);
                if (pair) load(1, right, second);
                load(0, right, first);
                if (pair) load(1, left, second);
                if (pair) load(1, rotary_part, second);
            }
            __syncwarp();
            parity[0] ^= 1;
            parity[1] ^= pair;
        }
    }
};

// The other three warps of that warpgroup copy the queries of the items, three tiles each.
struct QueryLoader {
    const int warp;  // of these
    PageBarriers& barriers;
    const Queries queries;

    __device__ __forceinline__ void run(Items& items) const {
        const int lane = ptx::lane_id();
        Item item;
        for (uint32_t parity = 0; items.next(item); parity ^= 1) {
            barriers.q_empty.wait(parity ^ 1);
            if (warp == 0)
                queries.copy<32, 0, 3>(item.row, lane);
            else if (warp == 1)
                queries.copy<32, 3, 3>(item.row, lane);
            else
                queries.copy<32, 6, 3>(item.row, lane);
            barriers.copied[warp].arrive_after_copies();
            barriers.copied[warp].wait(parity);
            ptx::fence_proxy_async();
            __syncwarp();
            if (lane == 0) barriers.q_full.arrive();
        }
    }
};

// Four warps convert pages in FP8. A thread takes 16 channels of a row at a time: eight lanes have four neighboring places
// of two rows, so that they write all 32 banks.
struct Converter {
    static constexpr int warps = 4;
    static constexpr int row_bytes = latent + 4 * (latent / 128) + 2 * rotary, page_bytes = page_rows * row_bytes;
    static constexpr int own_rows = page_rows / cluster / warps;            // of a part, of a warp
    static constexpr int batch_rows = 8, batches = own_rows / batch_rows;  // of a part
    static constexpr int loads = batch_rows / 2;                           // of a thread

    uint8_t* const shared;
    Barriers& barriers;
    const TensorMap* const map;
    const uint8_t* const cache;
    const int thread;            // of the warpgroup
    uint4 elements[loads];       // of the batch that is converted next, row by row replaced by those of the one after it
    float scales[loads];
    uint32_t parities = 3;       // bit `which`: of that page's buffer; they are empty at first

    __device__ __forceinline__ Converter(
        uint8_t* shared, Barriers& barriers, const TensorMap* map, const uint8_t* cache)
        : shared(shared), barriers(barriers), map(map), cache(cache), thread(threadIdx.x % 128) {}

    __device__ __forceinline__ int lane() const { return thread % 32; }
    __device__ __forceinline__ int first_row() const { return (cluster_rank() * warps + thread / 32) * own_rows; }

    __device__ __forceinline__ const uint8_t* page_at(int page) const {
        return cache + static_cast<int64_t>(page) * page_bytes;
    }

    // Batches of a pair are numbered through its parts in the order of their release: the first page's left values, the
    // second's right, the first's right, the second's left; without a second page, the left and the right ones.
    struct Place {
        int which, part, index;
    };
    __device__ __forceinline__ static Place place_of(int n, bool pair) {
        const int unit = n / batches;
        return {pair ? unit & 1 : 0, pair ? (unit >> 1) ^ (unit & 1) : unit, n % batches};
    }

    __device__ __forceinline__ const uint8_t* row_at(int page, const Place& place) const {
        return page_at(page) + (first_row() + place.index * batch_rows + lane() / 4 % 2) * row_bytes;
    }
    __device__ __forceinline__ int element_of(int part) const { return part * 256 + lane() / 8 * 64 + lane() % 4 * 16; }
    __device__ __forceinline__ int scale_of(int part) const { return latent + (part * 2 + lane() / 16) * 4; }

    // Row i of the thread's rows in a batch, of which every second row is its own.
    __device__ __forceinline__ void load(int i, const uint8_t* row, int part) {
        elements[i] = __ldg(reinterpret_cast<const uint4*>(row + 2 * i * row_bytes + element_of(part)));
        scales[i] = __ldg(reinterpret_cast<const float*>(row + 2 * i * row_bytes + scale_of(part)));
    }

    __device__ __forceinline__ static uint32_t scaled(uint32_t pair, float scale) {
        return ptx::pack_bf16(ptx::low_f16(pair) * scale, ptx::high_f16(pair) * scale);
    }

    __device__ __forceinline__ void convert(int i, const Place& place) {
        uint8_t* to = tile_of(shared, place.which, 4 * place.part + lane() / 8);
        const int row = first_row() + place.index * batch_rows + lane() / 4 % 2 + 2 * i;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t low = half ? elements[i].z : elements[i].x, high = half ? elements[i].w : elements[i].y;
            const uint4 value = make_uint4(
                scaled(ptx::e4m3_to_f16(low, false), scales[i]), scaled(ptx::e4m3_to_f16(low, true), scales[i]),
                scaled(ptx::e4m3_to_f16(high, false), scales[i]), scaled(ptx::e4m3_to_f16(high, true), scales[i]));
            *reinterpret_cast<uint4*>(swizzled(to, row, lane() % 4 * 32 + half * 16)) = value;
        }
    }

    __device__ __forceinline__ void publish(int which, int part) {
        ptx::fence_proxy_async();
        __syncwarp();
        publish_rows(barriers.full[which][part], tile_of(shared, which, 4 * part), first_row(), own_rows);
    }

    __device__ __forceinline__ void load_rotary(int which, int page) {
        barriers.empty[which][rotary_part].wait(parities >> which & 1);
        barriers.full[which][rotary_part].arrive_expect_tx(tile);
        constexpr int first = (latent + 4 * (latent / 128)) / 2;  // in units of BF16
        ptx::tma_load(tile_of(shared, which, tiles - 1), map, &barriers.full[which][rotary_part], first,
                      page * page_rows, 0);
    }

    __device__ __forceinline__ void prefetch(const int* pages, int page, int n_pages) const {
        if (page < n_pages) ptx::bulk_prefetch(page_at(pages[page]), page_bytes);
    }

    __device__ __forceinline__ void load_item(const int* pages, int n_pages) {
        int first = pages[0];
#pragma unroll
        for (int i = 0; i < loads; ++i) load(i, row_at(first, place_of(0, true)), left);
        for (int page = 0; page < n_pages; page += 2) {
            const bool pair = page + 1 < n_pages;
            const int second = pages[pair ? page + 1 : page];
            if (thread == 0) {
                if (cluster_rank() == 0) prefetch(pages, page + 2, n_pages);
                if (cluster_rank() == cluster - 1) prefetch(pages, page + 3, n_pages);
                load_rotary(0, first);
            }
            __syncwarp();
            const int count = (pair ? 4 : 2) * batches;
#pragma unroll 1
            for (int n = 0; n < count; ++n) {
                if (n == 2 * batches) {  // of a pair: this buffer has P₁ until then
                    if (thread == 0) load_rotary(1, second);
                    __syncwarp();
                }
                const bool is_last = n + 1 == count;
                if (is_last && page + 2 < n_pages) first = pages[page + 2];
                const Place place = place_of(n, pair), next = place_of(is_last ? 0 : n + 1, pair);
                const uint8_t* next_row = row_at(next.which ? second : first, next);
                if (place.index == 0) barriers.empty[place.which][place.part].wait(parities >> place.which & 1);
#pragma unroll
                for (int i = 0; i < loads; ++i) {
                    convert(i, place);
                    load(i, next_row, next.part);
                }
                if (place.index == batches - 1) publish(place.which, place.part);
            }
            parities ^= pair ? 3 : 1;
        }
    }
};
