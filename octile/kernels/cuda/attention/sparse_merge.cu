// Merges the partial results of lists that several thread blocks of sparse_mla.cu attend to, in the order of the entries.
//
// A thread block takes one row and head. The log of the sum of a part without positions is −∞; a row without any becomes zero.
#include "merge_splits.cuh"

// partial: [rows · n_splits, H, 512], lse: [rows · n_splits, H]. out: [rows, H, 512] bfloat16.
extern "C" __global__ void __launch_bounds__(channels / 4)
sparse_merge(const float* partial, const float* lse, uint16_t* out, int n_heads, int n_splits) {
    const int64_t row = blockIdx.x / n_heads, head = blockIdx.x % n_heads, first = row * n_splits * n_heads + head;
    bool is_empty = true;
    for (int i = ptx::lane_id(); i < n_splits; i += 32)
        is_empty = is_empty && lse[first + static_cast<int64_t>(i) * n_heads] == minus_infinity();
    const int count = __all_sync(all_lanes, is_empty) ? 0 : n_splits;
    merge_splits(partial + first * channels, lse + first, count, n_heads, out + (row * n_heads + head) * channels);
}
