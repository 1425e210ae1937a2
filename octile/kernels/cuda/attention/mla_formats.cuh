// The two forms of pages of the latent cache: how they are loaded and multiplied.
//
// BF16: TMA loads a page as nine tiles of 64 rows and 64 channels, 128 swizzled bytes a row. wgmma reads K and, as V, the
// same tiles transposed.
//
// FP8: TMA copies a page as it is, 64 rows of 656 bytes: 512 E4M3, four FP32 scales of 128 channels each, 64 BF16. A warp
// loads the fragments of wgmma's left operand by ldmatrix, which moves pairs of E4M3, and converts them to FP16, exactly.
// Scales are not multiplied to the elements: those of K multiply the products of their channels, and those of V the
// weights of their channels, relative to a power of two near the page's highest scale so that FP16 holds them. Queries
// are multiplied by a power of two for the same reason.
#pragma once
#include "ptx.cuh"
#include "convert.cuh"
#include "split_kv.cuh"
#include "wgmma.cuh"
#include "wgmma_values.cuh"
#include "wgmma_f16.cuh"
#include "wgmma_bf16.cuh"

constexpr int heads = config::heads;            // of a thread block
constexpr int latent = 512, rotary = 64, width = latent + rotary;
constexpr int q_tile = heads * 128;             // bytes of 64 channels of Q, 128 swizzled bytes a head
constexpr int accumulators = heads / 2;         // registers of a thread for 64 rows

__device__ __forceinline__ void fence_operands(float (&o)[8][accumulators]) {
#pragma unroll
    for (int b = 0; b < 8; ++b) fence_operands(o[b]);
}

// Where byte `byte` of a row lies in a tile with rows of 128 swizzled bytes.
__device__ __forceinline__ uint8_t* swizzled(uint8_t* tile, int row, int byte) {
    return tile + row * 128 + ((byte / 16 ^ (row & 7)) * 16 + byte % 16);
}

// Stores weights [64 keys, heads] of a warpgroup, packed pairs [j][h] of the heads 2·(lane%4) + i, as rows of heads.
template <class Pack>
__device__ __forceinline__ void store_transposed(uint8_t* tile, int warp, int lane, Pack pack) {
#pragma unroll
    for (int j = 0; j < heads / 8; j += 2) {
        const int matrix = lane / 8, head = 8 * (j + matrix / 2) + lane % 8;  // matrices: (j, h) of (0, 0), (0, 1), (1, 0), …
        ptx::stmatrix_x4_trans(swizzled(tile, head, 32 * warp + 16 * (matrix % 2)), pack(j, 0), pack(j, 1),
                               pack(j + 1, 0), pack(j + 1, 1));
    }
}

struct Bf16Format {
    static constexpr int tile = page_rows * 128, page_bytes = width / 64 * tile;
    static constexpr int q_bytes = width / 64 * q_tile, p_bytes = heads * 128, maxima = heads;

    __device__ __forceinline__ static void load_page(
        uint8_t* to, const TensorMap* map, const uint8_t*, int page, ptx::Mbarrier* barrier) {
        ptx::tma_load(to, map, barrier, 0, page * page_rows, 0);
    }

    __device__ __forceinline__ static void load_q(uint8_t* to, float*, const uint16_t* q, int n_heads, int thread) {
        constexpr int vectors = width / 8;
#pragma unroll
        for (int n = 0; n < (heads * vectors + 255) / 256; ++n) {
            const int index = n * 256 + thread, head = index / vectors, vector = index % vectors;
            if (head >= heads) break;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (head < n_heads) value = __ldg(reinterpret_cast<const uint4*>(q + head * width) + vector);
            *reinterpret_cast<uint4*>(swizzled(to + vector / 8 * q_tile, head, vector % 8 * 16)) = value;
        }
    }

    __device__ __forceinline__ void begin(const float*, int) {}
    __device__ __forceinline__ float factor(int, float factor) const { return factor; }
    __device__ __forceinline__ bool rescales() const { return false; }
    __device__ __forceinline__ float rescaling(int) const { return 1.0f; }
    __device__ __forceinline__ void write_scale_maxima(const uint8_t*, float*, const bool (&)[2], int, int) {}
    __device__ __forceinline__ void end(float (&)[8][accumulators]) {}
    __device__ __forceinline__ static int channel(int warp, int lane, int h) { return 16 * warp + 8 * h + lane / 4; }

    __device__ __forceinline__ void scores(float (&s)[accumulators], const uint8_t* page, const uint8_t* q, int, int) {
        const uint64_t k_tile = ptx::wgmma_descriptor(page), q_first = ptx::wgmma_descriptor(q);
        ptx::wgmma_fence();
#pragma unroll
        for (int c = 0; c < width / 64; ++c)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                ptx::wgmma(s, k_tile + c * (tile / 16) + 2 * k, q_first + c * (q_tile / 16) + 2 * k, c + k > 0);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        fence_operands(s);
    }

    __device__ __forceinline__ static void zero_rows(uint8_t* page, int first, int thread) {
        for (int i = thread; i < (page_rows - first) * (latent / 8); i += 128) {
            const int row = first + i / (latent / 8), vector = i % (latent / 8);
            *reinterpret_cast<uint4*>(page + vector / 8 * tile + row * 128 + vector % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void write_weights(
        const float (&weight)[accumulators], uint8_t* p, const float*, int warp, int lane) {
        store_transposed(p, warp, lane, [&](int j, int h) {
            return ptx::pack_bf16(weight[4 * j + 2 * h], weight[4 * j + 2 * h + 1]);
        });
    }

    __device__ __forceinline__ void add_values(
        float (&o)[8][accumulators], const uint8_t* page, const uint8_t* p, int, int) {
        const uint64_t v_tile = ptx::wgmma_transposed_descriptor(page, tile), weights = ptx::wgmma_descriptor(p);
        fence_operands(o);
        ptx::wgmma_fence();
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int k = 0; k < 4; ++k)  // 16 keys are 2048 bytes
                ptx::wgmma_values(o[b], v_tile + b * (tile / 16) + k * 128, weights + 2 * k, true);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        fence_operands(o);
    }
};

struct Fp8Format {
    static constexpr int tiles = 4, row_bytes = latent + 4 * tiles + 2 * rotary, page_bytes = page_rows * row_bytes;
    static constexpr int q_bytes = width / 64 * q_tile, p_bytes = tiles * heads * 128, maxima = heads + tiles;
    static constexpr int heads_at_once = 2;  // whose queries a warp loads together
    static constexpr int together = config::together;  // tiles, or blocks of 64 channels, whose wgmmas are interleaved

    const float* query_factors;  // of the thread's heads
    int reference[tiles];    // exponents to which the values of each channel tile are relative
    float rescale[tiles];    // by which the accumulators of a tile are multiplied for this page
    float4 key_scales[2];    // of the thread's two keys

    __device__ __forceinline__ static void load_page(
        uint8_t* to, const TensorMap*, const uint8_t* cache, int page, ptx::Mbarrier* barrier) {
        ptx::bulk_load(to, cache + static_cast<int64_t>(page) * page_bytes, page_bytes, barrier);
    }

    // Each warp loads heads: latents as FP16, in the order of the channels in `scores`, rotary channels as BF16.
    __device__ __forceinline__ static void load_q(
        uint8_t* to, float* factors, const uint16_t* q, int n_heads, int thread) {
        const int lane = thread % 32;
        for (int first = thread / 32; first < heads; first += 8 * heads_at_once) {
            uint32_t pairs[heads_at_once][width / 64];
#pragma unroll
            for (int h = 0; h < heads_at_once; ++h)
#pragma unroll
                for (int n = 0; n < width / 64; ++n) {
                    const int head = first + 8 * h, pair = 32 * n + lane;
                    pairs[h][n] = 0;
                    if (head < n_heads) pairs[h][n] = __ldg(reinterpret_cast<const uint32_t*>(q + head * width) + pair);
                }
#pragma unroll
            for (int h = 0; h < heads_at_once; ++h) store_query(to, factors, pairs[h], first + 8 * h, lane);
        }
    }

    // Stores the channels 2·(32n + lane) + i of a head.
    __device__ __forceinline__ static void store_query(
        uint8_t* to, float* factors, const uint32_t (&pairs)[width / 64], int head, int lane) {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < width / 64; ++n) most = ptx::max_abs(most, ptx::max_abs(low(pairs[n]), high(pairs[n])));
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2)
            most = ptx::max_abs(most, __shfl_xor_sync(all_lanes, most, distance));
        const int exponent = max(1, min(253, 254 + 7 - (__float_as_int(most) >> 23 & 255)));
        const float up = power(exponent);
        if (lane == 0) factors[head] = power(254 - exponent);
#pragma unroll
        for (int n = 0; n < width / 64; ++n) {
            const int channel = 2 * (32 * n + lane);
            const float a = low(pairs[n]) * up, b = high(pairs[n]) * up;
            int byte = channel % 64 * 2;
            if (channel < latent) byte = channel % 64 / 16 * 32 + channel % 4 / 2 * 16 + channel % 16 / 4 * 4;
            *reinterpret_cast<uint32_t*>(swizzled(to + channel / 64 * q_tile, head, byte)) =
                channel < latent ? ptx::pack_f16(a, b) : ptx::pack_bf16(a, b);
        }
    }

    __device__ __forceinline__ static float low(uint32_t pair) { return __int_as_float(pair << 16); }
    __device__ __forceinline__ static float high(uint32_t pair) { return __int_as_float(pair & 0xFFFF0000); }
    __device__ __forceinline__ static float power(int exponent) { return __int_as_float(exponent << 23); }
    __device__ __forceinline__ static float scale(const float4& scales, int t) {
        return t == 0 ? scales.x : t == 1 ? scales.y : t == 2 ? scales.z : scales.w;
    }

    __device__ __forceinline__ void begin(const float* factors, int lane) {
        query_factors = factors + 2 * (lane % 4);
#pragma unroll
        for (int t = 0; t < tiles; ++t) reference[t] = 1;
    }

    __device__ __forceinline__ float factor(int k, float factor) const { return factor * query_factors[8 * (k / 2) + k % 2]; }
    __device__ __forceinline__ bool rescales() const {
        return rescale[0] != 1.0f || rescale[1] != 1.0f || rescale[2] != 1.0f || rescale[3] != 1.0f;
    }
    __device__ __forceinline__ float rescaling(int b) const { return rescale[b / 2]; }
    __device__ __forceinline__ static int channel(int warp, int lane, int h) { return 16 * warp + 2 * (lane / 4) + h; }

    __device__ __forceinline__ void scores(
        float (&s)[accumulators], const uint8_t* page, const uint8_t* q, int warp, int lane) {
        const uint8_t* row = page + (16 * warp + lane % 16) * row_bytes + lane / 16 * 16;
        const uint64_t q_first = ptx::wgmma_descriptor(q);
        constexpr int at_once = heads == 16 ? tiles : together;  // tiles that have accumulators
        float products[at_once][accumulators];
        const uint8_t* own = page + (16 * warp + lane / 4) * row_bytes + latent;
        key_scales[0] = *reinterpret_cast<const float4*>(own);
        key_scales[1] = *reinterpret_cast<const float4*>(own + 8 * row_bytes);
        uint32_t rope[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::ldmatrix_x4(rope[k], row + latent + 4 * tiles + 32 * k);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::wgmma_bf16(s, rope[k], q_first + 8 * (q_tile / 16) + 2 * k, k > 0);
        ptx::wgmma_commit_group();
#pragma unroll
        for (int first = 0; first < tiles; first += together) {  // wgmmas of several tiles do not wait for each other
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[together][4][4];
#pragma unroll
                for (int t = 0; t < together; ++t)
#pragma unroll
                    for (int n = 0; n < 2; ++n) {  // 32 channels
                        uint32_t e[4];
                        ptx::ldmatrix_x4(e, row + 128 * (first + t) + 64 * half + 32 * n);
#pragma unroll
                        for (int step = 0; step < 2; ++step)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                a[t][2 * n + step][i] = ptx::e4m3_to_f16(e[2 * step + i % 2], i / 2 == 1);
                    }
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < together; ++t)
                        ptx::wgmma_f16(products[(first + t) % at_once], a[t][k],
                                       q_first + (2 * (first + t) + half) * (q_tile / 16) + 2 * k, half + k > 0);
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<1>();
                if (first + half == 0) fence_operands(s);
            }
            if (at_once < tiles || first + together == tiles) {
                ptx::wgmma_wait_group<0>();
#pragma unroll
                for (int t = first + together - at_once; t < first + together; ++t) {
                    fence_operands(products[t % at_once]);
#pragma unroll
                    for (int r = 0; r < accumulators; ++r)
                        s[r] += products[t % at_once][r] * scale(key_scales[r / 2 % 2], t);
                }
            }
        }
    }

    __device__ __forceinline__ static void zero_rows(uint8_t* page, int first, int thread) {
        for (int i = thread; i < (page_rows - first) * (latent / 16); i += 128)
            *reinterpret_cast<uint4*>(page + (first + i / (latent / 16)) * row_bytes + i % (latent / 16) * 16) =
                make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void write_scale_maxima(
        const uint8_t*, float* of_warp, const bool (&inside)[2], int, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (!inside[h]) key_scales[h] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int t = 0; t < tiles; ++t) {  // as integers, of which NaN is the highest
            const int most = max(__float_as_int(scale(key_scales[0], t)), __float_as_int(scale(key_scales[1], t)));
            of_warp[heads + t] = __int_as_float(__reduce_max_sync(all_lanes, most));
        }
    }

    __device__ __forceinline__ void write_weights(
        const float (&weight)[accumulators], uint8_t* p, const float* of_warps, int warp, int lane) {
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
            float most = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) most = fmaxf(most, of_warps[w * maxima + heads + t]);
            const int exponent = max(reference[t], min(__float_as_int(most) >> 23 & 255, 253));
            rescale[t] = reference[t] == exponent ? 1.0f : power(max(127 - exponent + reference[t], 0));
            reference[t] = exponent;
            const float inverse = power(254 - exponent);
            const float of_key[2] = {scale(key_scales[0], t) * inverse, scale(key_scales[1], t) * inverse};
            store_transposed(p + t * (heads * 128), warp, lane, [&](int j, int h) {
                return ptx::pack_f16(weight[4 * j + 2 * h] * of_key[h], weight[4 * j + 2 * h + 1] * of_key[h]);
            });
        }
    }

    __device__ __forceinline__ void add_values(
        float (&o)[8][accumulators], const uint8_t* page, const uint8_t* p, int warp, int lane) {
        const uint64_t weights = ptx::wgmma_descriptor(p);
        const uint8_t* row = page + lane * row_bytes + 16 * warp;
        fence_operands(o);
#pragma unroll
        for (int first = 0; first < 8; first += together) {
            uint32_t a[together][4][4];
#pragma unroll
            for (int b = 0; b < together; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half) {  // 32 keys
                    uint32_t e[4];
                    ptx::ldmatrix_x4_trans(e, row + 32 * half * row_bytes + 64 * (first + b));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t sorted = __byte_perm(e[i], 0, 0x3120);  // two keys of one channel, then of the next
                        a[b][2 * half + i / 2][i % 2 * 2] = ptx::e4m3_to_f16(sorted, false);
                        a[b][2 * half + i / 2][i % 2 * 2 + 1] = ptx::e4m3_to_f16(sorted, true);
                    }
                }
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int b = 0; b < together; ++b)
                    ptx::wgmma_f16(
                        o[first + b], a[b][k], weights + (first + b) / 2 * (heads * 128 / 16) + 2 * k, true);
            ptx::wgmma_commit_group();
            if (first + together < 8) ptx::wgmma_wait_group<1>();
        }
        ptx::wgmma_wait_group<0>();
        fence_operands(o);
    }

    __device__ __forceinline__ void end(float (&o)[8][accumulators]) {
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int r = 0; r < accumulators; ++r) o[b][r] *= power(reference[b / 2]);
    }
};

template <bool fp8>
struct Chosen {
    using Format = Bf16Format;
};
template <>
struct Chosen<true> {
    using Format = Fp8Format;
};
using Format = Chosen<config::fp8>::Format;
