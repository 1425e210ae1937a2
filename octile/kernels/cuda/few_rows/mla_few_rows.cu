// Attention of few decode rows over the paged latent cache in BF16: the partial results of each split of a row.
//
//     S[16 heads, 32 keys] = Q · Kᵀ        P = exp2(S − running maximum)        O[16 heads, 512] += P · V
//
// mla_decode.cu gives an SM at least two pages, which leaves most SMs idle if rows are few. Here a split of a row is
// one or more chunks of 32 positions, half a page each. A chunk is K, and its first 512 channels are V.
//
// Warps multiply a quarter of the channels of Q, in registers, by half of the keys; a thread then adds the quarters for
// one head and two keys. Of O a warp computes 64 channels.
//
// NOTES
// - The previous kernel writes the rows' own positions to the cache, which are among the last 8 of each row: all rows
//   may be of one text. All other positions are requested before it has ended.
// - Rows in shared memory are 1168 bytes apart: an odd number of 16-byte units, so that ldmatrix meets no bank twice.
// - Positions from the row's length on are zeros in shared memory: the cache may hold NaN there.
#include "ptx.cuh"
#include "convert.cuh"
#include "warps.cuh"

constexpr int latent = 512, rotary = 64, width = latent + rotary, page_rows = 64;
constexpr int keys = 32, heads = 16, block_threads = 256, stages = config::stages;
constexpr int newest = 8;                               // last positions of a row, which the previous kernel may write
constexpr int pitch = 2 * width + 16;                   // bytes of a row of K or Q, padded as the next two are
constexpr int p_pitch = 2 * keys + 16;                  // bytes
constexpr int s_pitch = keys + 8;                       // float32
constexpr int vectors = 2 * width / 16;                 // of 16 bytes, in a row
constexpr int slices = 4, steps = width / 16 / slices;  // a warp's slice of the channels has `steps` of 16

namespace smem {
constexpr int k = 0;
constexpr int q = k + stages * keys * pitch;
constexpr int s = q + heads * pitch;                 // float [slices][heads][s_pitch]
constexpr int p = s + slices * heads * s_pitch * 4;  // bfloat16 [heads][p_pitch]
constexpr int corrections = p + heads * p_pitch;     // float [heads]
constexpr int totals = corrections + heads * 4;      // float [heads]
constexpr int barriers = totals + heads * 4;
constexpr int bytes = barriers + stages * int(sizeof(ptx::Mbarrier));
static_assert(bytes == config::shared_bytes, "attention.py computes the same");
}  // namespace smem

struct Keys {
    uint8_t* const shared;
    ptx::Mbarrier* const full;
    const uint16_t* const cache;
    const int* const pages;
    const int length;

    __device__ __forceinline__ int first_new() const { return length - newest; }
    __device__ __forceinline__ bool has_new(int chunk) const { return (chunk + 1) * keys > first_new(); }

    // Requests the positions of a chunk from `from` to before `end`; those from the length on become zeros.
    __device__ __forceinline__ void load(int chunk, int stage, int from, int end) const {
        const int first = chunk * keys;
        const int64_t page = pages[first / page_rows];
        const uint8_t* rows = reinterpret_cast<const uint8_t*>(cache + (page * page_rows + first % page_rows) * width);
        uint8_t* to = shared + smem::k + stage * keys * pitch;
#pragma unroll
        for (int i = 0; i < keys * vectors / block_threads; ++i) {
            const int index = i * block_threads + threadIdx.x, row = index / vectors, vector = index % vectors;
            if (first + row >= from && first + row < end)
                ptx::cp_async_16(to + row * pitch + 16 * vector, rows + 16 * index, first + row < length);
        }
    }
    __device__ __forceinline__ void arrive(int stage) const { full[stage].arrive_after_copies(); }
};

constexpr int every_position = 0x7FFFFFFF;

// Stores the product of the warp's slice and half of the keys, S[16 heads, 16 keys], to shared memory.
__device__ __forceinline__ void multiply_keys(
    const uint32_t (&q)[steps][4], const uint8_t* k, float* s, int warp, int lane) {
    const int slice = warp % slices, half = warp / slices;
    float sum[2][2][4] = {};  // [step % 2][8 keys]
    const uint8_t* of_k =
        k + (16 * half + lane % 8 + lane / 16 * 8) * pitch + 2 * (16 * steps * slice) + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, of_k + 32 * step);
#pragma unroll
        for (int n = 0; n < 2; ++n)
            ptx::mma_bf16(sum[step % 2][n], q[step][0], q[step][1], q[step][2], q[step][3], b[2 * n], b[2 * n + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(
                s + (slice * heads + lane / 4 + 8 * h) * s_pitch + 16 * half + 8 * n + lane % 4 * 2) =
                make_float2(sum[0][n][2 * h] + sum[1][n][2 * h], sum[0][n][2 * h + 1] + sum[1][n][2 * h + 1]);
}

// O[16 heads, the warp's 64 channels] += P · V, as mma's results of 8 channels each.
__device__ __forceinline__ void add_values(float (&o)[8][4], const uint8_t* p, const uint8_t* v, int warp, int lane) {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, p + lane % 16 * p_pitch + lane / 16 * 16 + 32 * step);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, v + (16 * step + lane % 16) * pitch + 2 * (64 * warp + 8 * n) + lane / 16 * 16);
            ptx::mma_bf16(o[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            ptx::mma_bf16(o[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// q: [rows, H, 576] bfloat16. cache: [P, 64, 576] bfloat16. pages: [rows, page_step]. lengths: [rows].
// partial: [rows, n_splits, H, 512], lse: [rows, n_splits, H], of splits that have positions: the first ones.
extern "C" __global__ void __launch_bounds__(block_threads, 1)
mla_few_rows(const uint16_t* q, const uint16_t* cache, const int* pages, int page_step, const int* lengths,
             int length_step, float* partial, float* lse, float scale, int n_heads, int n_splits) {
    uint8_t* shared = ptx::dynamic_shared();
    ptx::Mbarrier* full = reinterpret_cast<ptx::Mbarrier*>(shared + smem::barriers);
    const int warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int head_blocks = (n_heads + heads - 1) / heads;
    const int first_head = blockIdx.x % head_blocks * heads;
    const int unit = blockIdx.x / head_blocks, row = unit / n_splits, split = unit % n_splits;
    const int length = lengths[row * length_step];
    const int chunks = (length + keys - 1) / keys, of_split = (chunks + n_splits - 1) / n_splits;
    const int first = min(split * of_split, chunks), end = min(first + of_split, chunks);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < stages; ++i) full[i].init(block_threads);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const Keys k{shared, full, cache, pages + static_cast<int64_t>(row) * page_step, length};
#pragma unroll
    for (int i = 0; i < stages; ++i) {
        if (first + i >= end) break;
        k.load(first + i, i, 0, k.first_new());
        if (!k.has_new(first + i)) k.arrive(i);
    }
    ptx::wait_for_previous();
    ptx::launch_dependents();  // not before: merge_values.cu reads lengths
    if (first >= end) return;
#pragma unroll
    for (int i = 0; i < stages; ++i) {
        if (first + i >= end || !k.has_new(first + i)) continue;
        k.load(first + i, i, k.first_new(), every_position);
        k.arrive(i);
    }
    const uint16_t* of_q = q + (static_cast<int64_t>(row) * n_heads + first_head) * width;
#pragma unroll
    for (int i = 0; i < (heads * vectors + block_threads - 1) / block_threads; ++i) {
        const int index = i * block_threads + threadIdx.x, head = index / vectors, vector = index % vectors;
        if (head >= heads) break;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (first_head + head < n_heads) value = *reinterpret_cast<const uint4*>(of_q + 8 * index);
        *reinterpret_cast<uint4*>(shared + smem::q + head * pitch + 16 * vector) = value;
    }
    __syncthreads();
    uint32_t of_slice[steps][4];
#pragma unroll
    for (int step = 0; step < steps; ++step)
        ptx::ldmatrix_x4(of_slice[step], shared + smem::q + lane % 16 * pitch + lane / 16 * 16 +
                                             32 * (warp % slices * steps + step));
    float* s = reinterpret_cast<float*>(shared + smem::s);
    float* corrections = reinterpret_cast<float*>(shared + smem::corrections);
    float* totals = reinterpret_cast<float*>(shared + smem::totals);
    const int own_head = threadIdx.x / 16, own_key = 2 * (threadIdx.x % 16);  // whose weights the thread computes
    const float factor = scale * 1.44269504f;
    float o[8][4] = {}, highest = minus_infinity(), total = 0.0f;
    for (int i = 0; first + i < end; ++i) {
        const int stage = i % stages, chunk = first + i;
        full[stage].wait(i / stages % 2);
        const uint8_t* of_chunk = shared + smem::k + stage * keys * pitch;
        multiply_keys(of_slice, of_chunk, s, warp, lane);
        __syncthreads();
        if (i > 0 && chunk - 1 + stages < end) {  // all warps are done with the chunk before
            const int before = (i - 1) % stages;
            k.load(chunk - 1 + stages, before, 0, every_position);
            k.arrive(before);
        }
        float weight[2] = {};
#pragma unroll
        for (int slice = 0; slice < slices; ++slice) {
            const float2 part = *reinterpret_cast<const float2*>(s + (slice * heads + own_head) * s_pitch + own_key);
            weight[0] += part.x, weight[1] += part.y;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
            weight[j] = chunk * keys + own_key + j < length ? weight[j] * factor : minus_infinity();
        float maximum = fmaxf(weight[0], weight[1]);
#pragma unroll
        for (int distance = 1; distance < 16; distance *= 2)
            maximum = fmaxf(maximum, __shfl_xor_sync(all_lanes, maximum, distance));
        maximum = fmaxf(highest, maximum);
        const float correction = ptx::exp2(highest - maximum);
        highest = maximum;
        weight[0] = ptx::exp2(weight[0] - maximum), weight[1] = ptx::exp2(weight[1] - maximum);
        total = total * correction + (weight[0] + weight[1]);
        *reinterpret_cast<uint32_t*>(shared + smem::p + own_head * p_pitch + 2 * own_key) =
            ptx::pack_bf16(weight[0], weight[1]);
        if (threadIdx.x % 16 == 0) corrections[own_head] = correction;
        __syncthreads();
        if (i > 0) {
            const float of_low = corrections[lane / 4], of_high = corrections[lane / 4 + 8];
#pragma unroll
            for (int n = 0; n < 8; ++n) o[n][0] *= of_low, o[n][1] *= of_low, o[n][2] *= of_high, o[n][3] *= of_high;
        }
        add_values(o, shared + smem::p, of_chunk, warp, lane);
    }
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) total += __shfl_xor_sync(all_lanes, total, distance);
    const int64_t slot = (static_cast<int64_t>(row) * n_splits + split) * n_heads + first_head;
    if (threadIdx.x % 16 == 0) {
        totals[own_head] = total;
        if (first_head + own_head < n_heads) lse[slot + own_head] = highest + log2f(total);
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = lane / 4 + 8 * h;
        if (first_head + head >= n_heads) continue;
        const float inverse = __frcp_rn(totals[head]);
        float* to = partial + (slot + head) * latent + 64 * warp + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 8; ++n)
            *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o[n][2 * h] * inverse, o[n][2 * h + 1] * inverse);
    }
}
