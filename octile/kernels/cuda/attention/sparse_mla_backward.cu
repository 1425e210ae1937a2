// Gradients of latent attention over top-k positions for Hopper, 64 heads of a query in a thread block.
//
//     S = Q · Kᵀ          P = exp2(S − lse)                     of 64 keys; K's first 512 channels are V
//     dP = dO · Vᵀ        dS = scale · P · (dP − Σ dO · O)
//     dQ += dS · K        dK = dSᵀ · Q, its first 512 channels + Pᵀ · dO
//
// A producer warpgroup gathers the rows of a list as in sparse_mla.cu, one tile of 64 keys at a time. Of the two consumer
// warpgroups, 0 computes P and 1 dS, which both read from shared memory; of dQ and dK each has half of the channels:
//
//     warpgroup 0                                       warpgroup 1
//     S = Q · Kᵀ                                        dP = dO · Vᵀ
//     P                             P →
//     Pᵀ · dO                                           dS
//                                   ← dS
//     dQ += dS · K[left]                                dQ += dS · K[right]          then the next tile is gathered
//     dK[left] = dSᵀ · Q + Pᵀ · dO                      dK[right] = dSᵀ · Q + Pᵀ · dO
//
// Queries share keys, so dK is added up later (sparse_latent_gradient.cu): here it is stored for each query and entry of its
// list, rounded to BF16. No two thread blocks write to the same address, so results do not depend on their order.
#include "convert.cuh"
#include "sparse_tiles.cuh"
#include "wgmma_keys.cuh"
#include "wgmma_keys_rotary.cuh"
#include "wgmma_queries.cuh"
#include "wgmma_queries_rotary.cuh"

constexpr int latent_tiles = tiles - 1;
constexpr int half = latent / 2, rotary_half = rotary / 2;  // channels of a warpgroup

namespace smem {
constexpr int keys = 0;  // tiles, first: their swizzle needs 1024-byte alignment
constexpr int q = keys + tiles * tile;
constexpr int d_out = q + tiles * tile;
constexpr int p = d_out + latent_tiles * tile;
constexpr int ds = p + tile;
constexpr int lse = ds + tile;                 // float [64], in log₂
constexpr int delta = lse + heads * 4;         // float [64]: Σ dO · O
constexpr int slots = delta + heads * 4;       // int [2][64]: rows of a tile, or −1
constexpr int valid = slots + 2 * tile_keys * 4;  // uint2 [2]: bits of the keys of a tile
constexpr int barriers = valid + 2 * 8;
}  // namespace smem

static_assert(smem::barriers + sizeof(TileBarriers) == config::shared_bytes, "sparse_mla_backward.py computes the same");

struct Tensors {
    const uint16_t *q, *out, *d_out;  // [rows, H, 576], [rows, H, 512], the same
    const float* lse;                 // [rows, H], natural
    uint16_t *dq, *partial;           // [rows, H, 576]; [rows, K, blocks of heads, 576]
    int n_heads;
};

// Warpgroup `own`. A thread has the heads, or keys, 16·warp + 8h + lane/4 and the columns 8j + 2·(lane%4) + i: [4j + 2h + i].
template <int own>
struct Consumer {
    uint8_t* const shared;
    TileBarriers& barriers;
    const int warp, lane;  // warp of the warpgroup
    const float scale, factor;  // of the scores; in log₂
    float dq[128], dq_rotary[16];
    uint32_t parity = 0;

    // Events of a tile: P is there; dS is; warpgroup 1 has read P of the tile before.
    enum Event { has_weights = 1, has_gradients, both, weights_are_read };

    __device__ __forceinline__ Consumer(uint8_t* shared, TileBarriers& barriers, float scale, int warp)
        : shared(shared), barriers(barriers), warp(warp), lane(ptx::lane_id()), scale(scale), factor(scale * 1.44269504f) {}

    __device__ __forceinline__ static void sync(Event event) { ptx::named_barrier_sync(event, consumer_threads); }
    __device__ __forceinline__ uint8_t* memory() const { return shared + ptx::opaque(0); }
    __device__ __forceinline__ int row(int h) const { return 16 * warp + 8 * h + lane / 4; }
    __device__ __forceinline__ float value(int array, int h) const {
        return reinterpret_cast<const float*>(shared + array)[row(h)];
    }

    __device__ __forceinline__ void await(Part part) const {
        barriers.full[part].wait(parity);
        ptx::fence_proxy_async();  // the rows are ordinary stores
    }
    __device__ __forceinline__ void release(Part part) const {
        __syncwarp();
        if (lane == 0) barriers.empty[part].arrive();
    }

    // ---- Once for a query ----

    __device__ __forceinline__ static float dot(uint4 a, uint4 b, float sum) {
        const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum = fmaf(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), sum);
            sum = fmaf(__uint_as_float(x[i] & 0xFFFF0000), __uint_as_float(y[i] & 0xFFFF0000), sum);
        }
        return sum;
    }

    // Loads Q and dO, a head a warp at a time, and finds lse and delta.
    __device__ __forceinline__ void load_operands(const Tensors& tensors, int query, int first_head) const {
        sync(both);  // the query before no longer needs them
#pragma unroll 2
        for (int i = 0; i < heads / 8; ++i) {
            const int head = ptx::opaque(8 * i + 4 * own + warp);
            const bool exists = first_head + head < tensors.n_heads;
            const int64_t first_row = static_cast<int64_t>(query) * tensors.n_heads + first_head + head;
            const uint4 zero = make_uint4(0, 0, 0, 0);
            const uint4* q = reinterpret_cast<const uint4*>(tensors.q + first_row * width);
            const uint4* d_out = reinterpret_cast<const uint4*>(tensors.d_out + first_row * latent);
            const uint4* out = reinterpret_cast<const uint4*>(tensors.out + first_row * latent);
            uint4 q_values[3], d_out_values[2], out_values[2];
#pragma unroll
            for (int part = 0; part < 3; ++part)
                q_values[part] = exists && (part < 2 || lane < 8) ? __ldg(q + 32 * part + lane) : zero;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                d_out_values[part] = exists ? __ldg(d_out + 32 * part + lane) : zero;
                out_values[part] = exists ? __ldg(out + 32 * part + lane) : zero;
            }
            uint8_t* to = swizzled(shared + lane / 8 * tile, head, lane % 8 * 16);
#pragma unroll
            for (int part = 0; part < 3; ++part)
                if (part < 2 || lane < 8) *reinterpret_cast<uint4*>(to + smem::q + 4 * part * tile) = q_values[part];
            float delta = 0.0f;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                *reinterpret_cast<uint4*>(to + smem::d_out + 4 * part * tile) = d_out_values[part];
                delta = dot(d_out_values[part], out_values[part], delta);
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) delta += __shfl_xor_sync(all_lanes, delta, distance);
            if (lane == 0) {
                reinterpret_cast<float*>(shared + smem::delta)[head] = delta;
                reinterpret_cast<float*>(shared + smem::lse)[head] = exists ? tensors.lse[first_row] * 1.44269504f : 0.0f;
            }
        }
        ptx::fence_proxy_async();
        sync(both);
    }

    __device__ __forceinline__ void store_dq(const Tensors& tensors, int query, int first_head) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (first_head + row(h) >= tensors.n_heads) continue;
            const int64_t first_row = static_cast<int64_t>(query) * tensors.n_heads + first_head + row(h);
            uint16_t* to = tensors.dq + first_row * width + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<uint32_t*>(to + own * half + 8 * j) =
                    ptx::pack_bf16(dq[4 * j + 2 * h], dq[4 * j + 2 * h + 1]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                *reinterpret_cast<uint32_t*>(to + latent + own * rotary_half + 8 * j) =
                    ptx::pack_bf16(dq_rotary[4 * j + 2 * h], dq_rotary[4 * j + 2 * h + 1]);
        }
    }

    // ---- For each tile ----

    // The products of 64 rows of `left_operand` and the keys, over the channels of a part.
    __device__ __forceinline__ void multiply_part(float (&s)[32], int left_operand, Part part) const {
        const uint64_t a = ptx::wgmma_descriptor(memory() + left_operand), b = ptx::wgmma_descriptor(memory() + smem::keys);
        await(part);
        ::multiply_part(s, a, b, part, part != left);
    }

    __device__ __forceinline__ void store_tile(const float (&s)[32], int to) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = ptx::pack_bf16(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
            ptx::stmatrix_x4(fragment(to, k), r[0], r[1], r[2], r[3]);
        }
        ptx::fence_proxy_async();
    }
    __device__ __forceinline__ uint8_t* fragment(int matrix, int k) const {
        return swizzled(memory() + matrix, 16 * warp + lane % 16, 32 * k + lane / 16 * 16);
    }

    __device__ __forceinline__ void find_weights() {
        float s[32];
        multiply_part(s, smem::q, left);
        multiply_part(s, smem::q, right);
        multiply_part(s, smem::q, rotary_part);
        ptx::wgmma_commit_group();
        barriers.listed.wait(parity);
        const ValidKeys valid(reinterpret_cast<const uint2*>(shared + smem::valid)[parity], lane);
        const float lse[2] = {value(smem::lse, 0), value(smem::lse, 1)};
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
#pragma unroll
        for (int r = 0; r < 32; ++r)
            s[r] = valid.has(r) ? ptx::exp2(fmaf(s[r], factor, -lse[r / 2 % 2])) : 0.0f;
        sync(weights_are_read);
        store_tile(s, smem::p);
        sync(has_weights);
    }

    __device__ __forceinline__ void find_gradients() {
        float s[32];
        multiply_part(s, smem::d_out, left);
        multiply_part(s, smem::d_out, right);
        ptx::wgmma_commit_group();
        const float delta[2] = {value(smem::delta, 0), value(smem::delta, 1)};
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
        sync(has_weights);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint32_t p[4];
            ptx::ldmatrix_x4(p, fragment(smem::p, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* ds = s + 8 * k + 2 * i;
                const float head_delta = delta[i % 2];
                ds[0] = __uint_as_float(p[i] << 16) * scale * (ds[0] - head_delta);
                ds[1] = __uint_as_float(p[i] & 0xFFFF0000) * scale * (ds[1] - head_delta);
            }
        }
        store_tile(s, smem::ds);
    }

    // dQ += dS · K.
    __device__ __forceinline__ void accumulate_dq() {
        const uint64_t a = ptx::wgmma_descriptor(memory() + smem::ds);
        const uint64_t keys = ptx::wgmma_transposed_descriptor(memory() + smem::keys + own * 4 * tile, tile);
        const uint64_t rotary_keys =
            ptx::wgmma_transposed_descriptor(memory() + smem::keys + latent_tiles * tile + own * 2 * rotary_half, tile);
        await(rotary_part);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_queries(dq, a + 2 * k, keys + 128 * k, true);
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_queries_rotary(dq_rotary, a + 2 * k, rotary_keys + 128 * k, true);
        ptx::wgmma_commit_group();
    }

    // d = aᵀ · b or d += aᵀ · b, over the heads, in 64 channels.
    __device__ __forceinline__ void multiply_heads(float (&d)[32], int a, int b, bool accumulate) const {
        const uint64_t first = ptx::wgmma_transposed_descriptor(memory() + a, tile);
        const uint64_t second = ptx::wgmma_transposed_descriptor(memory() + b, tile);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            ptx::wgmma_keys(d, first + 128 * k, second + 128 * k, accumulate || k > 0);
        ptx::wgmma_commit_group();
    }

    // dK of this warpgroup's rotary channels.
    __device__ __forceinline__ void multiply_heads_rotary(float (&d)[16]) const {
        const uint64_t ds = ptx::wgmma_transposed_descriptor(memory() + smem::ds, tile);
        const uint64_t q =
            ptx::wgmma_transposed_descriptor(memory() + smem::q + latent_tiles * tile + own * 2 * rotary_half, tile);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_keys_rotary(d, ds + 128 * k, q + 128 * k, k > 0);
        ptx::wgmma_commit_group();
    }

    // Stores dK of some channels. In each 32 channels, those of a thread follow each other: sparse_latent_gradient.cu.
    template <int n>
    __device__ __forceinline__ void store_dk(
        const float (&d)[n], uint16_t* partial, int64_t entry_stride, int n_entries, int channel) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row(h) >= n_entries) continue;
            uint16_t* to = partial + row(h) * entry_stride + channel + 8 * (lane % 4);
#pragma unroll
            for (int r = 0; r < n; r += 16)
                __stcs(reinterpret_cast<uint4*>(to + 2 * r),
                       make_uint4(ptx::pack_bf16(d[r + 2 * h], d[r + 2 * h + 1]),
                                  ptx::pack_bf16(d[r + 4 + 2 * h], d[r + 4 + 2 * h + 1]),
                                  ptx::pack_bf16(d[r + 8 + 2 * h], d[r + 8 + 2 * h + 1]),
                                  ptx::pack_bf16(d[r + 12 + 2 * h], d[r + 12 + 2 * h + 1])));
        }
    }

    // partial: of the tile's first entry; entry_stride: elements between two of its n_entries.
    __device__ __forceinline__ void add_tile(uint16_t* partial, int64_t entry_stride, int n_entries) {
        constexpr int first = own * 4;
        float dk[32];
        if constexpr (own == 0) {
            find_weights();
            multiply_heads(dk, smem::p, smem::d_out + first * tile, false);
            sync(has_gradients);
        } else {
            find_gradients();
            sync(has_gradients);
            multiply_heads(dk, smem::p, smem::d_out + first * tile, false);
        }
        accumulate_dq();
        multiply_heads(dk, smem::ds, smem::q + first * tile, true);
        ptx::wgmma_wait_group<1>();
        release(own == 0 ? left : right);
        release(rotary_part);
#pragma unroll
        for (int t = first; t < first + 4; ++t) {
            if (t > first) {
                multiply_heads(dk, smem::p, smem::d_out + t * tile, false);
                multiply_heads(dk, smem::ds, smem::q + t * tile, true);
            }
            ptx::wgmma_wait_group<0>();
            fence_operands(dk);
            store_dk(dk, partial, entry_stride, n_entries, 64 * t);
        }
        float dk_rotary[16];
        multiply_heads_rotary(dk_rotary);
        ptx::wgmma_wait_group<0>();
        fence_operands(dk_rotary);
        if constexpr (own == 1) ptx::named_barrier_arrive(weights_are_read, consumer_threads);
        store_dk(dk_rotary, partial, entry_stride, n_entries, latent + own * rotary_half);
        parity ^= 1;
    }

    __device__ __forceinline__ void run(const Tensors& tensors, const Units& units) {
        if constexpr (own == 1) ptx::named_barrier_arrive(weights_are_read, consumer_threads);
        const int64_t entry_stride = static_cast<int64_t>(units.head_blocks) * width;
        for (int unit = blockIdx.x; unit < units.count; unit += gridDim.x) {
            const int query = units.row(unit), first_head = units.first_head(unit), n_tiles = units.n_tiles(unit);
            const int k = units.lists.k;
            load_operands(tensors, query, first_head);
#pragma unroll
            for (int r = 0; r < 128; ++r) dq[r] = 0.0f;
#pragma unroll
            for (int r = 0; r < 16; ++r) dq_rotary[r] = 0.0f;
            uint16_t* partial = tensors.partial + static_cast<int64_t>(query) * k * entry_stride + first_head / heads * width;
            for (int t = 0; t < n_tiles; ++t)
                add_tile(partial + t * tile_keys * entry_stride, entry_stride, k - t * tile_keys);
            fence_operands(dq);
            fence_operands(dq_rotary);
            store_dq(tensors, query, first_head);
        }
        if constexpr (own == 0) sync(weights_are_read);
    }
};

extern "C" __global__ void __launch_bounds__(consumer_threads + producer_threads, 1)
sparse_mla_backward(const uint8_t* latents, const uint16_t* q, const uint16_t* out, const uint16_t* d_out,
                    const float* lse, const int* positions, uint16_t* dq, uint16_t* partial, float scale, int n_heads,
                    int rows, int k, int position_step, int n_latents) {
    uint8_t* shared = ptx::dynamic_shared();
    TileBarriers& barriers = *reinterpret_cast<TileBarriers*>(shared + smem::barriers);
    const int warp = __shfl_sync(all_lanes, threadIdx.x / 32, 0);
    const Lists lists{positions, nullptr, k, position_step, 0, n_latents, 0};
    const int head_blocks = (n_heads + heads - 1) / heads;
    const Units units{rows * head_blocks, head_blocks, heads, lists};
    if (threadIdx.x == 0) barriers.init(4, 8);  // warpgroup 0 releases left values, 1 right ones
    __syncthreads();
    if (warp >= consumer_threads / 32) {
        ptx::setmaxnreg_dec<40>();
        TileProducer producer{shared + smem::keys, reinterpret_cast<int*>(shared + smem::slots),
                              reinterpret_cast<uint32_t*>(shared + smem::valid), barriers, latents, units};
        producer.run();
    } else {
        ptx::setmaxnreg_inc<232>();
        const Tensors tensors{q, out, d_out, lse, dq, partial, n_heads};
        if (warp < 4)
            Consumer<0>(shared, barriers, scale, warp).run(tensors, units);
        else
            Consumer<1>(shared, barriers, scale, warp - 4).run(tensors, units);
    }
}
