// The balance of experts within sequences, second part: what `balance_parts` found is summed, and f of each sequence and
// expert, and the loss, follow. A thread block takes config::columns experts of a sequence; the last one to end sums the losses.
#include "ptx.cuh"

constexpr int threads = 32 * config::warps, experts = config::experts, columns = config::columns;
constexpr int slices = threads / columns, chunks = experts / columns;  // threads of an expert; blocks of a sequence

// counts, shares: [sequences · parts, E]. f: [sequences, E]. losses: [sequences, chunks]. ended: 0. loss: [].
extern "C" __global__ void __launch_bounds__(threads)
balance_sums(const int* counts, const float* shares, float* f, float* losses, int* ended, float* loss, int length,
             int parts, int sequences) {
    int* counts_of_slices = reinterpret_cast<int*>(ptx::dynamic_shared());  // [slices, columns]
    float* shares_of_slices = reinterpret_cast<float*>(counts_of_slices + threads);
    const int column = threadIdx.x % columns, slice = threadIdx.x / columns;
    const int sequence = blockIdx.x / chunks, expert = blockIdx.x % chunks * columns + column;
    int count = 0;
    float share = 0.0f;
#pragma unroll 8
    for (int p = slice; p < parts; p += slices) {
        const int64_t at = (static_cast<int64_t>(sequence) * parts + p) * experts + expert;
        count += counts[at];
        share = __fadd_rn(share, shares[at]);
    }
    counts_of_slices[threadIdx.x] = count;
    shares_of_slices[threadIdx.x] = share;
    __syncthreads();
    float own = 0.0f;
    if (threadIdx.x < columns) {
#pragma unroll
        for (int s = 1; s < slices; ++s) {
            count += counts_of_slices[s * columns + column];
            share = __fadd_rn(share, shares_of_slices[s * columns + column]);
        }
        const float entries = static_cast<float>(static_cast<int64_t>(config::chosen) * length);
        const float of_expert = __fdiv_rn(static_cast<float>(static_cast<int64_t>(count) * experts), entries);
        f[sequence * experts + expert] = of_expert;
        own = __fmul_rn(of_expert, __fdiv_rn(share, static_cast<float>(length)));
    }
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) own = __fadd_rn(own, __shfl_xor_sync(all_lanes, own, bit));
    int is_last = 0;
    if (threadIdx.x == 0) {
        __stcg(losses + blockIdx.x, own);
        __threadfence();
        is_last = atomicAdd(ended, 1) == sequences * chunks - 1;
        __threadfence();
    }
    if (!__shfl_sync(all_lanes, is_last, 0)) return;
    float total = 0.0f;
    for (int i = threadIdx.x; i < sequences * chunks; i += 32) total = __fadd_rn(total, __ldcg(losses + i));
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) total = __fadd_rn(total, __shfl_xor_sync(all_lanes, total, bit));
    if (threadIdx.x == 0) *loss = __fdiv_rn(total, static_cast<float>(sequences));
}
