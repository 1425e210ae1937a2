// RMSNorm of a few rows, their quantization in tiles of 1×128, their logits of the experts, and the choice of experts.
//
// One cluster of thread blocks does it all, since the choice of a row needs all its logits. Each block normalizes all
// rows; each row is quantized by one block. In normalization a thread holds vectors of 8 columns of each row, and 16
// consecutive threads hold a tile. Then a warp computes the logits of all rows for one expert, then for another, and
// stores them in the shared memory of the first block, which chooses, a warp for each row.
//
// If row_invariant, the one row has the bits of rms_norm.cu and of octile/kernels/triton/row_invariant.py: tensor cores
// multiply parts of 512 columns, and the parts of a logit are added in their order. A warp takes 16 experts and a part.
//
// NOTES
// - The first vectors of the gate's weight are loaded before what the rows depend on has run.
#include "gate_part.cuh"
#include "routes.cuh"
#include "row_norm.cuh"
#include "tile.cuh"

constexpr int num_rows = config::rows, k = config::columns, gate_warps = config::warps, gate_threads = 32 * gate_warps;
constexpr int step = 8 * gate_threads, x_vectors = (k + step - 1) / step;  // of a row of x, in a thread
constexpr int gate_vectors = 8, chunk = gate_vectors * 32 * 8;  // columns of the gate's weight that a warp holds
constexpr int units = expert_tiles * column_parts;  // of which each warp takes one after the other, if row_invariant
static_assert(!config::row_invariant || num_rows == 1);

// The choice of all rows in shared memory.
struct alignas(8) Choice {
    unsigned char slot[experts][max_rows];  // as in `Route`
    float weight[max_rows][chosen];
    short active[experts];  // the chosen experts, ascending
    int count;
};

struct alignas(16) GateShared {
    float sums[num_rows][gate_warps], logits[config::row_invariant ? column_parts : num_rows][experts];
    Choice choice;
    alignas(16) uint16_t normed[num_rows][k];  // as the gate reads it: bfloat16
};
static_assert(sizeof(GateShared) == config::shared_bytes);  // mixture.py computes the same

// Sums each of `num_rows` values over the thread block.
__device__ __forceinline__ void sum_over_threads(float (&x)[num_rows], float (*buffer)[gate_warps]) {
#pragma unroll
    for (int r = 0; r < num_rows; ++r) {
#pragma unroll
        for (int bit = 16; bit >= 1; bit /= 2) x[r] = __fadd_rn(x[r], __shfl_xor_sync(all_lanes, x[r], bit));
        if (ptx::lane_id() == 0) buffer[r][threadIdx.x / 32] = x[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < num_rows; ++r) {
        x[r] = 0.0f;
#pragma unroll
        for (int w = 0; w < gate_warps; ++w) x[r] = __fadd_rn(x[r], buffer[r][w]);
    }
}

// Lists the experts that at least one row has chosen. A warp calls it.
__device__ __forceinline__ void list_active(Choice& choice) {
    int count = 0;
    for (int first = 0; first < experts; first += 32) {
        const int e = first + ptx::lane_id();
        uint2 slots = make_uint2(0xFFFFFFFF, 0xFFFFFFFF);
        static_assert(alignof(Choice) >= sizeof(uint2));
        if (e < experts) slots = *reinterpret_cast<const uint2*>(choice.slot[e]);
        const bool is_active = (slots.x & slots.y) != 0xFFFFFFFF;
        const unsigned active = __ballot_sync(all_lanes, is_active);
        if (is_active) choice.active[count + __popc(active & ((1u << ptx::lane_id()) - 1))] = e;
        count += __popc(active);
    }
    choice.count = count;
}

// x: [rows, k] bfloat16, contiguous. weight: [k], of the norm. gate: [experts, k], contiguous. bias: [experts], or any
// address if there is none. data: [rows, k]. scale: [rows, k/128], contiguous along rows, padded to 4. expert_of:
// [rows, chosen].
extern "C" __global__ void __launch_bounds__(gate_threads)
mixture_gate(const uint8_t* x, const uint8_t* weight, const uint8_t* gate, const float* bias, uint8_t* data,
             float* scale, Routes* routes, int64_t* expert_of, float eps, float inverse_k, float factor,
             float weight_eps) {
    GateShared& shared = *reinterpret_cast<GateShared*>(ptx::dynamic_shared());
    const int column = threadIdx.x * 8, rank = ptx::cluster_ctarank(), warp = threadIdx.x / 32, lane = ptx::lane_id();
    ptx::launch_dependents();
    auto gate_of = [&](int expert, int at) {
        return load_vec8<config::gate_dtype>(gate + bytes<config::gate_dtype>(int64_t(expert) * k + at),
                                             expert < experts && at < k);
    };
    const int first_expert = rank * gate_warps + warp, first_unit = warp * config::cluster + rank;
    Vec8<config::gate_dtype> of_gate[gate_vectors];
    Vec8<config::weight_dtype> of_norm[x_vectors];
    GatePart of_part;
    const Lane at;
    auto load_unit = [&](int unit) {
        of_part.load(at, reinterpret_cast<const uint16_t*>(gate), unit / column_parts, unit % column_parts);
    };
    if constexpr (config::row_invariant) {
        if (first_unit < units) load_unit(first_unit);
    } else {
#pragma unroll
        for (int v = 0; v < gate_vectors; ++v) of_gate[v] = gate_of(first_expert, v * 256 + lane * 8);
    }
#pragma unroll
    for (int u = 0; u < x_vectors; ++u) {
        const int at = column + u * step;
        of_norm[u] = load_vec8<config::weight_dtype>(weight + bytes<config::weight_dtype>(at), at < k);
    }
    if (rank == 0)
        for (int i = threadIdx.x; i < experts * max_rows; i += gate_threads)
            shared.choice.slot[i / max_rows][i % max_rows] = not_chosen;
    ptx::cluster_sync();  // all blocks have begun, so the first can be written to
    ptx::wait_for_previous();

    Bf16Vec8 row[num_rows][x_vectors];
#pragma unroll
    for (int r = 0; r < num_rows; ++r)
#pragma unroll
        for (int u = 0; u < x_vectors; ++u) {
            const int at = column + u * step;
            union {
                uint4 bits;
                Bf16Vec8 elements;
            } loaded;
            loaded.bits = make_uint4(0, 0, 0, 0);
            if (at < k) loaded.bits = __ldcg(reinterpret_cast<const uint4*>(x + bytes<bfloat16>(r * k + at)));
            row[r][u] = loaded.elements;
        }
    float rstd[num_rows];
    if constexpr (config::row_invariant) {
        rstd[0] = sum_of_squares(reinterpret_cast<const uint16_t*>(x), k, shared.sums[0]);
    } else {
#pragma unroll
        for (int r = 0; r < num_rows; ++r) {
            rstd[r] = 0.0f;
#pragma unroll
            for (int u = 0; u < x_vectors; ++u)
#pragma unroll
                for (int j = 0; j < 8; ++j) rstd[r] = __fmaf_rn(row[r][u].at(j), row[r][u].at(j), rstd[r]);
        }
        sum_over_threads(rstd, shared.sums);
    }
    auto normalized = [&](int r, int u) {
        FloatVec8 y;
#pragma unroll
        for (int j = 0; j < 8; ++j) y.value[j] = __fmul_rn(__fmul_rn(row[r][u].at(j), rstd[r]), of_norm[u].at(j));
        return y;
    };
#pragma unroll
    for (int r = 0; r < num_rows; ++r) {
        rstd[r] = ptx::rsqrt(__fadd_rn(__fmul_rn(rstd[r], inverse_k), eps));
#pragma unroll
        for (int u = 0; u < x_vectors; ++u) {
            const int at = column + u * step;
            const FloatVec8 y = normalized(r, u);
            uint32_t pair[4];
#pragma unroll
            for (int p = 0; p < 4; ++p) pair[p] = ptx::pack_bf16(y.value[2 * p], y.value[2 * p + 1]);
            if (at < k)
                *reinterpret_cast<uint4*>(&shared.normed[r][at]) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
    __syncthreads();

    if constexpr (config::row_invariant) {
        for (int unit = first_unit; unit < units; unit += config::cluster * gate_warps) {
            if (unit != first_unit) load_unit(unit);
            const int begin = unit % column_parts * part_columns;
            float d[4] = {};  // of the one row: in the lanes of member 0, d[0] and d[2]
#pragma unroll
            for (int s = 0; s < GatePart::steps; ++s) {
                if (begin + 16 * s >= k) break;
                uint2 four = make_uint2(0, 0);
                if (at.group == 0)
                    four = *reinterpret_cast<const uint2*>(&shared.normed[0][begin + 16 * s + 4 * at.member]);
                of_part.multiply(d, s, four);
            }
            const int expert = unit / column_parts * tile_rows + at.group;
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (at.member == 0 && expert + 8 * h < experts)
                    ptx::store_cluster(ptx::cluster_address(&shared.logits[unit % column_parts][expert + 8 * h], 0),
                                       __float_as_uint(d[2 * h]));
        }
    } else {
        for (int expert = first_expert; expert < experts; expert += config::cluster * gate_warps) {
            float logit[num_rows] = {};
            for (int begin = 0; begin < k; begin += chunk) {
                if (expert != first_expert || begin != 0)
#pragma unroll
                    for (int v = 0; v < gate_vectors; ++v) of_gate[v] = gate_of(expert, begin + v * 256 + lane * 8);
#pragma unroll
                for (int v = 0; v < gate_vectors; ++v) {
                    const int at = begin + v * 256 + lane * 8;
                    if (at >= k) continue;
#pragma unroll
                    for (int r = 0; r < num_rows; ++r) {
                        const uint4 four = *reinterpret_cast<const uint4*>(&shared.normed[r][at]);
                        const uint32_t pair[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                        for (int p = 0; p < 4; ++p) {
                            logit[r] = __fmaf_rn(__uint_as_float(pair[p] << 16), of_gate[v].at(2 * p), logit[r]);
                            logit[r] = __fmaf_rn(__uint_as_float(pair[p] & 0xFFFF0000), of_gate[v].at(2 * p + 1), logit[r]);
                        }
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < num_rows; ++r) {
#pragma unroll
                for (int bit = 16; bit >= 1; bit /= 2)
                    logit[r] = __fadd_rn(logit[r], __shfl_xor_sync(all_lanes, logit[r], bit));
                if (lane == 0)
                    ptx::store_cluster(ptx::cluster_address(&shared.logits[r][expert], 0), __float_as_uint(logit[r]));
            }
        }
    }
    ptx::cluster_sync();
    if (rank == 0) {
        for (int r = warp; r < num_rows; r += gate_warps) {
            auto logit_of = [&](int e) {
                if constexpr (!config::row_invariant) return shared.logits[r][e];
                float sum = 0.0f;
#pragma unroll
                for (int p = 0; p < column_parts; ++p) sum = __fadd_rn(sum, shared.logits[p][e]);
                return sum;
            };
            const Chosen own = choose(logit_of, bias, factor, weight_eps);
            if (lane < chosen) {
                shared.choice.slot[own.expert][r] = lane;
                shared.choice.weight[r][lane] = own.weight;
                expert_of[r * chosen + lane] = own.expert;
            }
        }
        __syncthreads();
        if (warp == 0) list_active(shared.choice);
        __syncthreads();
        for (int i = threadIdx.x; i < shared.choice.count * max_rows; i += gate_threads) {
            const int expert = shared.choice.active[i / max_rows], r = i % max_rows;
            const unsigned char slot = shared.choice.slot[expert][r];
            Route& to = routes->route[i / max_rows];
            if (r == 0) to.expert = expert;
            to.slot[r] = slot;
            to.weight[r] = slot == not_chosen ? 0.0f : shared.choice.weight[r][slot];
        }
        if (threadIdx.x == 0) routes->count = shared.choice.count;
    }
#pragma unroll
    for (int r = 0; r < num_rows; ++r) {
        if (r % config::cluster != config::cluster - 1 - rank) continue;  // the first block, which chooses, comes last
#pragma unroll
        for (int u = 0; u < x_vectors; ++u) {
            const int at = column + u * step;
            const FloatVec8 y = normalized(r, u);
            float amax = y.amax();
#pragma unroll
            for (int bit = 8; bit >= 1; bit /= 2)
                amax = ptx::max_abs(amax, __shfl_xor_sync(all_lanes, amax, bit));
            const float own = scale_from_amax<e4m3, config::power_of_2>(amax);
            const Divisor divisor = make_divisor<config::power_of_2>(own);
            float quotient[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                quotient[j] = config::power_of_2 ? divisor.template divide<true>(y.value[j])
                                                 : divisor.divide_carefully(y.value[j]);
            ptx::store_8(data + r * k + at, pack_8<e4m3>(quotient), at < k);
            ptx::store_float(scale + at / tile_columns * ((num_rows + 3) / 4 * 4) + r, own,
                             at < k && at % tile_columns == 0);
        }
    }
}
