// Which entry of each query's list a key is, for sparse_latent_gradient.cu: the inverse of the lists of positions.
#include "ptx.cuh"

// entries: [T, rows] uint16, filled with 65535 before. A position is at most once in a list.
extern "C" __global__ void __launch_bounds__(256)
sparse_entries(const int* positions, uint16_t* entries, int rows, int k, int position_step, int n_latents) {
    const int entry = blockIdx.x / rows * 256 + threadIdx.x, query = blockIdx.x % rows;
    if (entry >= k) return;
    const int position = positions[static_cast<int64_t>(query) * position_step + entry];
    if (position >= 0 && position < n_latents)
        entries[static_cast<int64_t>(position) * rows + query] = static_cast<uint16_t>(entry);
}
