// Counts the entries of each expert: in blocks of entries, or of sequences.
//
// The counts of a block are stored. Those of a sequence are sums of its blocks' counts; integers, so in any order.
#include "experts.cuh"

// entries: [sequences, count]. of_blocks: [blocks, E], with config::of_blocks; of_sequences: [sequences, E], zeros before.
// blocks: of a sequence.
extern "C" __global__ void __launch_bounds__(threads)
count_experts(const Entry* entries, int* of_blocks, int64_t* of_sequences, int count, int blocks) {
    int* counts = reinterpret_cast<int*>(ptx::dynamic_shared());
    const int sequence = blockIdx.x / blocks, first = blockIdx.x % blocks * block_entries;
    int expert[config::rounds];
#pragma unroll
    for (int r = 0; r < config::rounds; ++r)
        expert[r] = load_expert(entries + static_cast<int64_t>(sequence) * count, first + r * threads + threadIdx.x, count);
    for (int e = threadIdx.x; e < config::experts; e += threads) counts[e] = 0;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::rounds; ++r)
        if (expert[r] >= 0) atomicAdd(counts + expert[r], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < config::experts; e += threads) {
        const int64_t at = static_cast<int64_t>(config::of_blocks ? blockIdx.x : sequence) * config::experts + e;
        if constexpr (config::of_blocks) of_blocks[at] = counts[e];
        else if (counts[e] > 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(of_sequences + at), static_cast<unsigned long long>(counts[e]));
    }
}
