// The gate of few rows: their logits, and the choice of their experts, in one kernel.
//
// A cluster of 8 thread blocks has 8 rows. Each warp computes the logits of these rows for one expert, then for another,
// and stores that of each row in the shared memory of the block that chooses for the row.
//
// NOTES
// - The first weights are loaded before the previous kernel has ended, which must not write them.
#include "choice.cuh"
#include "vec8.cuh"

constexpr int num_rows = 8, k = config::columns, gate_warps = config::warps, gate_threads = 32 * gate_warps;
constexpr int cluster = num_rows;                     // each thread block chooses for one row
constexpr int vectors = 8, chunk = vectors * 32 * 8;  // columns of the weight that a warp holds
constexpr int row_vectors = k / 8;                    // of 8 columns, in a row of x

struct alignas(16) Shared {
    uint16_t x[num_rows][k];
    float logits[experts];  // of the row that this block chooses for
};
static_assert(sizeof(Shared) == config::shared_bytes);  // few_rows.py computes the same

// x: [rows, k] bfloat16, rows at x_row elements from each other. weight: [experts, k], contiguous. bias: [experts], or any
// address if there is none. logits: [rows, experts]. weights, expert_of: [rows, chosen].
extern "C" __global__ void __launch_bounds__(gate_threads)
gate_few_rows(const uint8_t* x, const uint8_t* weight, const float* bias, float* logits, float* weights,
              int64_t* expert_of, float factor, float eps, int64_t x_row, int rows) {
    Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    const int rank = ptx::cluster_ctarank(), warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int first_row = blockIdx.x / cluster * num_rows, first_expert = rank * gate_warps + warp;
    auto weight_of = [&](int expert, int at) {
        return load_vec8<config::weight_dtype>(weight + bytes<config::weight_dtype>(int64_t(expert) * k + at),
                                               expert < experts && at < k);
    };
    Vec8<config::weight_dtype> own[vectors];
#pragma unroll
    for (int v = 0; v < vectors; ++v) own[v] = weight_of(first_expert, v * 256 + lane * 8);
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();

    for (int i = threadIdx.x; i < num_rows * row_vectors; i += gate_threads) {
        const int r = i / row_vectors, at = i % row_vectors * 8, row = first_row + r;
        *reinterpret_cast<uint4*>(&shared.x[r][at]) = ptx::load_16(x + 2 * (row * x_row + at), row < rows);
    }
    ptx::cluster_sync();  // all blocks have begun, so that they can be written to, and have their rows

    for (int expert = first_expert; expert < experts; expert += cluster * gate_warps) {
        float logit[num_rows] = {};
        for (int begin = 0; begin < k; begin += chunk) {
            if (expert != first_expert || begin != 0)
#pragma unroll
                for (int v = 0; v < vectors; ++v) own[v] = weight_of(expert, begin + v * 256 + lane * 8);
#pragma unroll
            for (int v = 0; v < vectors; ++v) {
                const int at = begin + v * 256 + lane * 8;
                if (at >= k) continue;
#pragma unroll
                for (int r = 0; r < num_rows; ++r) {
                    const uint4 four = *reinterpret_cast<const uint4*>(&shared.x[r][at]);
                    const uint32_t pair[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int p = 0; p < 4; ++p) {
                        logit[r] = __fmaf_rn(__uint_as_float(pair[p] << 16), own[v].at(2 * p), logit[r]);
                        logit[r] = __fmaf_rn(__uint_as_float(pair[p] & 0xFFFF0000), own[v].at(2 * p + 1), logit[r]);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < num_rows; ++r) {
#pragma unroll
            for (int bit = 16; bit >= 1; bit /= 2)
                logit[r] = __fadd_rn(logit[r], __shfl_xor_sync(all_lanes, logit[r], bit));
            if (lane == r)
                ptx::store_cluster(ptx::cluster_address(&shared.logits[expert], r), __float_as_uint(logit[r]));
        }
    }
    ptx::cluster_sync();
    const int64_t row = first_row + rank;
    if (warp != 0 || row >= rows) return;
    for (int e = lane; e < experts; e += 32) logits[row * experts + e] = shared.logits[e];
    const Chosen found = choose([&](int e) { return shared.logits[e]; }, bias, factor, eps);
    if (lane >= chosen) return;
    weights[row * chosen + lane] = found.weight;
    expert_of[row * chosen + lane] = found.expert;
}
