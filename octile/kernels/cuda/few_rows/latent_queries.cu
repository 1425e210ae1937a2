// The queries of latent attention for at most 8 decode rows, which are multiplied by W_UK and rotated, and the rows'
// latents and rotary keys, which are written to the cache. Sums have the order of the operators in batch-invariant mode:
// triton/row_invariant.py multiplies, rms_norm.cu sums squares.
//
// A thread block computes 128 channels of a head's queries, a warp 16 of them; the first one of each head also rotates
// its rotary channels. One more thread block for each row normalizes its latent and rotates its key.
#include "bf16_tile.cuh"
#include "row_norm.cuh"

constexpr int nope = config::nope, rotary = config::rotary, latent = config::latent, width = latent + rotary;
constexpr int parts = latent / 128;  // thread blocks of a head
constexpr int latent_warps = latent / 256;  // that write a latent
constexpr int pairs = rotary / 2;
constexpr int row_bytes = config::fp8 ? latent + 4 * parts + 2 * rotary : 2 * width;
static_assert(latent == 512 && nope % 16 == 0 && pairs <= 32);

// Rotates a pair of channels by an angle, each product and sum rounded, and packs it as BF16.
__device__ __forceinline__ uint32_t rotated(uint32_t pair, float cos, float sin) {
    const float a = from_bf16(pair & 0xFFFF), b = from_bf16(pair >> 16);
    return ptx::pack_bf16(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)),
                          __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos)));
}

// Normalizes a latent of BF16, a warp for each 256 channels, and writes it and the rotated key to a row of the cache.
__device__ __forceinline__ void write_latent(
    const uint16_t* latent_row, const uint16_t* key_row, const uint8_t* norm_weight, float eps, const float* cos,
    const float* sin, const int64_t* slot, uint8_t* cache, int64_t n_slots, float* sums) {
    const int warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int64_t own_slot = *slot;
    const bool is_written = own_slot >= 0 && own_slot < n_slots;
    uint8_t* to = cache + (is_written ? own_slot * row_bytes : 0);
    if (warp == latent_warps && lane < pairs) {
        const uint32_t key = rotated(reinterpret_cast<const uint32_t*>(key_row)[lane], cos[lane], sin[lane]);
        if (is_written) reinterpret_cast<uint32_t*>(to + row_bytes - 2 * rotary)[lane] = key;
    }
    const float squares = sum_of_squares(latent_row, latent, sums);
    if (warp >= latent_warps || !is_written) return;
    const float rstd = ptx::rsqrt(__fadd_rn(__fmul_rn(squares, static_cast<float>(1.0 / latent)), eps));
    const int column = 256 * warp + 8 * lane;
    const uint4 bits = *reinterpret_cast<const uint4*>(latent_row + column);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float weight = config::weight_dtype == float32
            ? reinterpret_cast<const float*>(norm_weight)[column + i]
            : from_bf16(reinterpret_cast<const uint16_t*>(norm_weight)[column + i]);
        const float value = from_bf16(word(bits, i / 2) >> 16 * (i % 2) & 0xFFFF);
        x[i] = from_bf16(to_bf16(__fmul_rn(__fmul_rn(value, rstd), weight)));
    }
    if constexpr (!config::fp8) {
        *reinterpret_cast<uint4*>(to + 2 * column) =
            make_uint4(ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]),
                       ptx::pack_bf16(x[6], x[7]));
    } else {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = ptx::max_abs(amax, x[i]);
#pragma unroll
        for (int distance = 8; distance > 0; distance /= 2)  // the lanes of 128 channels
            amax = ptx::max_abs(amax, __shfl_xor_sync(all_lanes, amax, distance));
        const float scale = round_up<0xFFFF>(scale_from_amax<e4m3, false>(amax));  // to BF16
        const Divisor divisor = make_divisor<false>(scale);
        float quotient[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) quotient[i] = divisor.divide_carefully(x[i]);
        *reinterpret_cast<uint2*>(to + column) =
            make_uint2(ptx::pack_e4m3(quotient[0], quotient[1], quotient[2], quotient[3]),
                       ptx::pack_e4m3(quotient[4], quotient[5], quotient[6], quotient[7]));
        if (lane % 16 == 0) reinterpret_cast<float*>(to + latent)[column / 128] = scale;
    }
}

// q: [rows, H, nope + rotary], kv: [rows, latent + rotary] bfloat16, not rotated, with row strides q_row and kv_row.
// w_k: [H, latent, nope] bfloat16. norm_weight: [latent]. cos, sin: [rows, rotary / 2]. slots: [rows], negative or from
// n_slots on: not written. cache: [n_slots, row_bytes]. out: [rows, H, latent + rotary] bfloat16.
extern "C" __global__ void __launch_bounds__(threads, 2)
latent_queries(const uint16_t* q, int64_t q_row, const uint16_t* kv, int64_t kv_row, const uint16_t* w_k,
               const uint8_t* norm_weight, float eps, const float* cos, const float* sin, const int64_t* slots,
               uint8_t* cache, int64_t n_slots, uint16_t* out, int n_heads) {
    const int of_latents = n_heads * parts;
    if (static_cast<int>(blockIdx.x) >= of_latents) {
        const int row = blockIdx.x - of_latents;
        ptx::wait_for_previous();
        ptx::launch_dependents();  // not before, as below
        const uint16_t* of_row = kv + row * kv_row;
        write_latent(of_row, of_row + latent, norm_weight, eps, cos + row * pairs, sin + row * pairs, slots + row,
                     cache, n_slots, reinterpret_cast<float*>(ptx::dynamic_shared()));
        return;
    }
    const Lane lane;
    const int head = blockIdx.x / parts, part = blockIdx.x % parts;
    const int channel = 128 * part + tile_rows * (threadIdx.x / 32);
    Bf16Tile<nope / 16> tile;
    tile.load(lane, w_k + (static_cast<int64_t>(head) * latent + channel + lane.group) * nope, nope);
    ptx::wait_for_previous();
    ptx::launch_dependents();  // not before: mla_few_rows.cu reads what earlier kernels have written
    const int row = threadIdx.x / 32;
    if (part == 0 && row < config::rows && ptx::lane_id() < pairs) {
        const int pair = ptx::lane_id();
        const uint32_t* from = reinterpret_cast<const uint32_t*>(q + row * q_row + head * (nope + rotary) + nope);
        reinterpret_cast<uint32_t*>(out + (static_cast<int64_t>(row) * n_heads + head) * width + latent)[pair] =
            rotated(from[pair], cos[row * pairs + pair], sin[row * pairs + pair]);
    }
    float d[4] = {};
    tile.multiply(d, lane, q + min(lane.group, config::rows - 1) * q_row + head * (nope + rotary));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row_of_x = 2 * lane.member + i % 2;
        if (row_of_x < config::rows)
            out[(static_cast<int64_t>(row_of_x) * n_heads + head) * width + channel + lane.group + i / 2 * 8] =
                to_bf16(d[i]);
    }
}
