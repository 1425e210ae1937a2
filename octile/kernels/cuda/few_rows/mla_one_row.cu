// Attention of one decode row over the paged latent cache in BF16: the partial results of its parts, with the bits that
// mla_decode_64.cu computes for them.
//
//     S[64 keys, 8 heads] = K · Qᵀ        P = exp2(S − running maximum)        O[64 channels, 8 heads] += Vᵀ · P
//
// A cluster of 8 thread blocks takes 8 heads and one part of the row after the other, 8 pages at a time: a chunk. Each
// block computes the scores of one page and sends them to all. Then it computes the weights of all pages, which is little,
// and O for its own 64 of the 512 channels. So all sums are whole, in the order of mla_decode_64.cu and seesaw.cuh, where
// warpgroup 0 takes the even pages of a part and warpgroup 1 the odd ones:
//
//     scores       the channels of an even page from the first on; those of an odd one from 256 to 511, from 0 to 255, and
//                  the rotary ones
//     maxima       of a page and those before; the weights of an even page are rescaled by its successor's maximum
//     O            channels 0 to 255: an even page, then the odd one. Channels 256 to 511: the odd page, then the even
//                  one, whose weights are rescaled before they are rounded
//     denominator  a thread of a warpgroup sums the weights of its columns, four threads are added in pairs, then the two
//                  warpgroups
//
// mma adds 16 products a step with the arithmetic of wgmma.
//
// NOTES
// - The previous kernel writes the row's own position to the cache, which is among the last 8. All other positions are
//   requested before it has ended: a page of 64 rows, and of all pages of the chunk the block's channels.
// - Rows in shared memory are an odd number of 16-byte units apart, so that ldmatrix meets no bank twice.
// - Positions from the row's length on are zeros in shared memory: the cache may hold NaN there.
#include "ptx.cuh"
#include "convert.cuh"
#include "warps.cuh"

constexpr int latent = 512, rotary = 64, width = latent + rotary, page_rows = 64;
constexpr int cluster = 8, heads = 8, block_threads = 256, group_threads = block_threads / 2;
constexpr int part_pages = config::part_pages, chunk_pages = cluster, chunk_keys = chunk_pages * page_rows;
constexpr int own_channels = latent / cluster;    // of a thread block
constexpr int newest = 8;                         // last positions of a row, which the previous kernel may write
constexpr int pitch = 2 * width + 16;             // bytes of a row of K or Q, padded as the next three are
constexpr int v_pitch = 2 * own_channels + 16;    // bytes
constexpr int p_pitch = 2 * chunk_keys + 16;      // bytes
constexpr int s_pitch = chunk_keys + 4;           // float32
constexpr int vectors = 2 * width / 16;           // of 16 bytes, in a row
constexpr int v_vectors = 2 * own_channels / 16;  // in a block's channels of a row
constexpr int steps = width / 16, pairs = chunk_pages / 2;
constexpr float lowest = -3.402823466e38f;        // the maximum of no scores
static_assert(part_pages % chunk_pages == 0);

namespace smem {
constexpr int k = 0;
constexpr int v = k + page_rows * pitch;
constexpr int q = v + chunk_keys * v_pitch;
constexpr int s = q + heads * pitch;                    // float [2][heads][s_pitch]: scores, then weights, of two chunks
constexpr int p = s + 2 * heads * s_pitch * 4;          // bfloat16 [heads][p_pitch]
constexpr int corrections = p + heads * p_pitch;        // float2 [pairs][heads]
constexpr int maxima = corrections + pairs * heads * 8;  // float [heads]
constexpr int inverses = maxima + heads * 4;            // float [heads]
constexpr int barriers = inverses + heads * 4;
constexpr int bytes = barriers + 2 * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "attention.py computes the same");
}  // namespace smem

// The positions of a row, which two groups of threads copy to shared memory: pages, and channels of all pages of a chunk.
struct Positions {
    uint8_t* const shared;
    const uint8_t* const cache;
    const int* const pages;
    const int length, thread, rank;  // thread: of its group

    __device__ __forceinline__ int count() const { return (max(length, 0) + page_rows - 1) / page_rows; }
    __device__ __forceinline__ const uint8_t* page(int index) const {
        return cache + static_cast<int64_t>(pages[index]) * page_rows * 2 * width;
    }

    // Requests a page, but for the positions from `skipped` to before the length. Positions behind it become zeros.
    __device__ __forceinline__ void load_keys(int index, int skipped) const {
        const uint8_t* from = page(index);
        const int first = index * page_rows;
#pragma unroll 12
        for (int i = 0; i < page_rows * vectors / group_threads; ++i) {
            const int at = i * group_threads + thread, row = at / vectors, position = first + row;
            if (position < skipped || position >= length)
                ptx::cp_async_16(shared + smem::k + row * pitch + at % vectors * 16, from + 16 * at, position < length);
        }
    }

    // Requests the positions of a page from `begin` on, at most `newest`.
    __device__ __forceinline__ void load_new_keys(int index, int begin) const {
        const uint8_t* from = page(index);
        for (int at = thread; at < newest * vectors; at += group_threads) {
            const int position = begin + at / vectors, row = position - index * page_rows;
            if (row >= 0 && row < page_rows)
                ptx::cp_async_16(shared + smem::k + row * pitch + at % vectors * 16,
                                 from + row * 2 * width + at % vectors * 16, true);
        }
    }

    // The same for this block's channels of n_pages pages.
    __device__ __forceinline__ void load_values(int first_page, int n_pages, int skipped) const {
        int ids[chunk_pages];
#pragma unroll
        for (int i = 0; i < chunk_pages; ++i) ids[i] = i < n_pages ? pages[first_page + i] : 0;
#pragma unroll
        for (int i = 0; i < chunk_pages; ++i) {
            if (i >= n_pages) break;
#pragma unroll
            for (int j = 0; j < page_rows * v_vectors / group_threads; ++j) {
                const int at = j * group_threads + thread, row = at / v_vectors;
                const int position = (first_page + i) * page_rows + row;
                if (position < skipped || position >= length)
                    load_value(i * page_rows + row, static_cast<int64_t>(ids[i]) * page_rows + row, at % v_vectors,
                               position < length);
            }
        }
    }
    __device__ __forceinline__ void load_new_values(int first_page, int n_pages, int begin) const {
        if (thread >= newest * v_vectors) return;
        const int position = begin + thread / v_vectors, row = position - first_page * page_rows;
        if (row >= 0 && row < n_pages * page_rows)
            load_value(row, static_cast<int64_t>(pages[position / page_rows]) * page_rows + row % page_rows,
                       thread % v_vectors, true);
    }
    __device__ __forceinline__ void load_value(int row, int64_t slot, int vector, bool exists) const {
        ptx::cp_async_16(shared + smem::v + row * v_pitch + 16 * vector,
                         cache + slot * 2 * width + 2 * own_channels * rank + 16 * vector, exists);
    }
};

// Sends the scores of 16 keys of this block's page to all blocks; s: of the chunk.
__device__ __forceinline__ void compute_scores(const uint8_t* shared, const float* s, int rank, int warp, int lane) {
    const uint8_t* of_k = shared + smem::k + (16 * warp + lane % 16) * pitch + lane / 16 * 16;
    const uint8_t* of_q = shared + smem::q + lane % 8 * pitch + lane / 8 * 16;
    const int swapped = rank % 2 * (latent / 2);  // of an odd page the right channels are the first
    float d[4] = {};
#pragma unroll
    for (int step = 0; step < steps; step += 2) {
        const int channel = 16 * step < latent ? 16 * step ^ swapped : 16 * step;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, of_q + 2 * channel);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, of_k + 2 * (channel + 16 * i));
            ptx::mma_bf16(d, a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
        }
    }
    const float* own = s + lane % 4 * 2 * s_pitch + page_rows * rank + 16 * warp + lane / 4;
#pragma unroll
    for (int block = 0; block < cluster; ++block) {
        const uint32_t to = ptx::cluster_address(own, block);
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::store_cluster(to + 4 * (i % 2 * s_pitch + i / 2 * 8), __float_as_uint(d[i]));
    }
}

// By a warp for one head: the weights of a chunk's pages, of which a lane has the keys 2 · lane and 2 · lane + 1. They
// replace the scores; as operand of this block's product they are rounded, those of even pages rescaled if `is_right`.
// highest: the maximum of the part's pages before, then with these. remaining: positions from the chunk's first one on.
__device__ __forceinline__ void compute_weights(uint8_t* shared, float* s, float& highest, float scale, int n_pages,
                                                int remaining, bool is_right, int head, int lane) {
    const float factor = scale * 1.44269504f;
    const bool scales_first = !(factor > 0.0f);  // as in seesaw.cuh
    const float by = scales_first ? 1.0f : factor;
    float2* own = reinterpret_cast<float2*>(s + head * s_pitch) + lane;
    float2 x[chunk_pages];
    float maximum[chunk_pages];
#pragma unroll
    for (int page = 0; page < chunk_pages; ++page) {
        maximum[page] = minus_infinity();
        if (page >= n_pages) continue;
        x[page] = own[page * (page_rows / 2)];
        if (scales_first) x[page].x = __fmul_rn(x[page].x, factor), x[page].y = __fmul_rn(x[page].y, factor);
        const int beyond = remaining - page * page_rows - 2 * lane;
        if (beyond <= 0) x[page].x = minus_infinity();
        if (beyond <= 1) x[page].y = minus_infinity();
        maximum[page] = fmaxf(x[page].x, x[page].y);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
        for (int page = 0; page < chunk_pages; ++page)
            maximum[page] = fmaxf(maximum[page], __shfl_xor_sync(all_lanes, maximum[page], distance));
    uint32_t* p = reinterpret_cast<uint32_t*>(shared + smem::p + head * p_pitch) + lane;
    float2* corrections = reinterpret_cast<float2*>(shared + smem::corrections) + head;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        const int even = 2 * pair, odd = even + 1;
        if (even >= n_pages) break;
        const float first = fmaxf(__fmul_rn(maximum[even], by), highest);
        const float second = odd < n_pages ? fmaxf(__fmul_rn(maximum[odd], by), first) : first;
        const float correction = second == first ? 1.0f : ptx::exp2(__fsub_rn(first, second));
        if (lane == 0) corrections[pair * heads] = make_float2(ptx::exp2(__fsub_rn(highest, first)), correction);
        highest = second;
        const float2 w = make_float2(ptx::exp2(fmaf(x[even].x, by, -first)), ptx::exp2(fmaf(x[even].y, by, -first)));
        own[even * (page_rows / 2)] = w;
        const float rescaled = is_right ? correction : 1.0f;
        p[even * (page_rows / 2)] = ptx::pack_bf16(__fmul_rn(w.x, rescaled), __fmul_rn(w.y, rescaled));
        if (odd >= n_pages) break;
        const float2 u = make_float2(ptx::exp2(fmaf(x[odd].x, by, -second)), ptx::exp2(fmaf(x[odd].y, by, -second)));
        own[odd * (page_rows / 2)] = u;
        p[odd * (page_rows / 2)] = ptx::pack_bf16(u.x, u.y);
    }
    if (lane == 0) reinterpret_cast<float*>(shared + smem::maxima)[head] = highest;
}

// Adds a head's weights in a chunk to the totals of eight lanes: four threads of each of two warpgroups.
__device__ __forceinline__ void add_weights(
    float& total, const uint8_t* shared, const float* s, int n_pages, int head, int lane) {
    const float2* corrections = reinterpret_cast<const float2*>(shared + smem::corrections) + head;
    const int odd = lane / 4 % 2;
    const float2* of_lane = reinterpret_cast<const float2*>(s + head * s_pitch + odd * page_rows) + lane % 4;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        if (2 * pair >= n_pages) break;
        const float2 correction = corrections[pair * heads];
        total = __fmul_rn(total, odd ? __fmul_rn(correction.x, correction.y) : correction.x);
        if (2 * pair + odd < n_pages) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 w = of_lane[pair * page_rows + 4 * j];
                total = __fadd_rn(__fadd_rn(total, w.x), w.y);
            }
        }
        if (!odd) total = __fmul_rn(total, correction.y);
    }
}

// Returns the sum of the totals of `add_weights`, in all of eight lanes.
__device__ __forceinline__ float sum_totals(float total) {
#pragma unroll
    for (int distance = 1; distance <= 4; distance *= 2)
        total = __fadd_rn(total, __shfl_xor_sync(all_lanes, total, distance));
    return total;
}

// o[16 channels, 8 heads] += Vᵀ · P over the keys of a page.
__device__ __forceinline__ void add_page(float (&o)[4], const uint8_t* shared, int page, int warp, int lane) {
    const uint8_t* of_p = shared + smem::p + lane % 8 * p_pitch + lane / 8 * 16 + 2 * page * page_rows;
    const uint8_t* of_v = shared + smem::v + (page * page_rows + lane / 16 * 8 + lane % 8) * v_pitch + 32 * warp +
        lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < page_rows / 16; step += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, of_p + 32 * step);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t a[4];
            ptx::ldmatrix_x4_trans(a, of_v + 16 * (step + i) * v_pitch);
            ptx::mma_bf16(o, a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
        }
    }
}

__device__ __forceinline__ void rescale(float (&o)[4], float first, float second) {
    o[0] *= first, o[1] *= second, o[2] *= first, o[3] *= second;
}

// o += the weights of all pages of a chunk times the values of the warp's 16 channels.
__device__ __forceinline__ void multiply_values(
    float (&o)[4], const uint8_t* shared, int n_pages, bool is_right, int warp, int lane) {
    const float4* corrections = reinterpret_cast<const float4*>(shared + smem::corrections) + lane % 4;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
        const int even = 2 * pair, odd = even + 1;
        if (even >= n_pages) break;
        const float4 correction = corrections[pair * (heads / 2)];  // of two heads
        if (is_right) {
            rescale(o, __fmul_rn(correction.x, correction.y), __fmul_rn(correction.z, correction.w));
            if (odd < n_pages) add_page(o, shared, odd, warp, lane);
            add_page(o, shared, even, warp, lane);
        } else {
            rescale(o, correction.x, correction.z);
            add_page(o, shared, even, warp, lane);
            rescale(o, correction.y, correction.w);
            if (odd < n_pages) add_page(o, shared, odd, warp, lane);
        }
    }
}

// At most 8 pages of a part.
struct Chunk {
    int part, first_page, n_pages, part_end;  // the page behind the part's last one

    __device__ __forceinline__ Chunk(int part, int first_page, int count)
        : part(part), first_page(first_page), part_end(min((part + 1) * part_pages, count)) {
        n_pages = min(part_end - first_page, chunk_pages);  // none is there, if it is not positive
    }
    __device__ __forceinline__ bool exists() const { return n_pages > 0; }
    __device__ __forceinline__ bool is_first() const { return first_page == part * part_pages; }
    __device__ __forceinline__ bool is_last() const { return first_page + chunk_pages >= part_end; }
    // That after it in the part, or the first of a cluster's next part.
    __device__ __forceinline__ Chunk next(int clusters, int count) const {
        if (!is_last()) return {part, first_page + chunk_pages, count};
        return {part + clusters, (part + clusters) * part_pages, count};
    }
};

// q: [H, 576] bfloat16. cache: [P, 64, 576] bfloat16. pages: those of the row. partial: [parts, H, 512], lse: [parts, H],
// of parts that have positions. Clusters of all blocks of heads follow each other for each part.
extern "C" __global__ void __launch_bounds__(block_threads, 1)
mla_one_row(const uint16_t* q, const uint8_t* cache, const int* pages, const int* lengths, float* partial, float* lse,
            float scale, int n_heads) {
    uint8_t* shared = ptx::dynamic_shared();
    ptx::Mbarrier* k_full = reinterpret_cast<ptx::Mbarrier*>(shared + smem::barriers);
    ptx::Mbarrier* v_full = k_full + 1;
    const int warp = threadIdx.x / 32, lane = ptx::lane_id(), rank = ptx::cluster_ctarank();
    const int head_blocks = (n_heads + heads - 1) / heads, of_cluster = blockIdx.x / cluster;
    const int first_head = of_cluster % head_blocks * heads;
    const int clusters = gridDim.x / cluster / head_blocks;  // of these heads
    const bool loads_keys = warp < 4, is_right = rank >= cluster / 2;
    const Positions positions{shared, cache, pages, *lengths, static_cast<int>(threadIdx.x % group_threads), rank};
    const int first_new = positions.length - newest, count = positions.count(), first_part = of_cluster / head_blocks;
    Chunk chunk(first_part, first_part * part_pages, count);
    if (threadIdx.x == 0) {
        k_full->init(group_threads), v_full->init(group_threads);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (chunk.exists()) {
        if (!loads_keys)
            positions.load_values(chunk.first_page, chunk.n_pages, first_new);
        else if (rank < chunk.n_pages)
            positions.load_keys(chunk.first_page + rank, first_new);
        ptx::cluster_sync();  // all blocks have begun: their memory may be written
    }
    ptx::wait_for_previous();
    ptx::launch_dependents();  // not before: values_one_row.cu reads lengths
    if (!chunk.exists()) return;
    if (!loads_keys) {
        positions.load_new_values(chunk.first_page, chunk.n_pages, first_new);
        v_full->arrive_after_copies();
    } else {
        for (int at = positions.thread; at < heads * vectors; at += group_threads) {
            const int head = at / vectors;
            const bool exists = first_head + head < n_heads;
            ptx::cp_async_16(shared + smem::q + head * pitch + at % vectors * 16,
                             q + (exists ? static_cast<int64_t>(first_head) * width + 8 * at : 0), exists);
        }
        if (rank < chunk.n_pages) positions.load_new_keys(chunk.first_page + rank, first_new);
        k_full->arrive_after_copies();
    }
    float highest = lowest, total = 0.0f, o[4] = {};  // of the part
    for (int parity = 0;; parity ^= 1) {
        const Chunk next = chunk.next(clusters, count);
        float* s = reinterpret_cast<float*>(shared + smem::s) + parity * heads * s_pitch;
        if (loads_keys) {
            k_full->wait(parity);
            if (rank < chunk.n_pages) compute_scores(shared, s, rank, warp, lane);
        }
        ptx::cluster_sync();
        if (loads_keys && next.exists()) {
            if (rank < next.n_pages) positions.load_keys(next.first_page + rank, positions.length);
            k_full->arrive_after_copies();
        }
        const int remaining = positions.length - chunk.first_page * page_rows;
        compute_weights(shared, s, highest, scale, chunk.n_pages, remaining, is_right, warp, lane);
        __syncthreads();
        if (loads_keys) {
            v_full->wait(parity);
            multiply_values(o, shared, chunk.n_pages, is_right, warp, lane);
        } else {
            const int head = 2 * (warp - 4) + lane / 8 % 2;
            add_weights(total, shared, s, chunk.n_pages, head, lane);
            if (chunk.is_last()) {
                const float sum = sum_totals(total);
                total = 0.0f;
                if (lane < 16 && lane % 8 == 0) {
                    reinterpret_cast<float*>(shared + smem::inverses)[head] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
                    if (rank == 0 && first_head + head < n_heads)
                        lse[static_cast<int64_t>(chunk.part) * n_heads + first_head + head] =
                            __fadd_rn(reinterpret_cast<const float*>(shared + smem::maxima)[head], log2f(sum));
                }
            }
        }
        __syncthreads();
        if (!loads_keys && next.exists()) {
            positions.load_values(next.first_page, next.n_pages, positions.length);
            v_full->arrive_after_copies();
        }
        if (chunk.is_last()) {
            if (loads_keys) {
                const int head = lane % 4 * 2;
                float* to = partial + (static_cast<int64_t>(chunk.part) * n_heads + first_head + head) * latent +
                    own_channels * rank + 16 * warp + lane / 4;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (first_head + head + i % 2 < n_heads)
                        to[i % 2 * latent + i / 2 * 8] =
                            fmaf(o[i], reinterpret_cast<const float*>(shared + smem::inverses)[head + i % 2], 0.0f);
            }
            highest = lowest;
#pragma unroll
            for (int i = 0; i < 4; ++i) o[i] = 0.0f;
        }
        if (!next.exists()) return;
        chunk = next;
    }
}
