// Merges the partial results of rows that several thread blocks of mla_decode.cu attend to, in the order of the positions.
//
// A thread block takes one row and head. Rows whose results are final are not touched; rows without positions become zero.
#include "merge_splits.cuh"
#include "split_kv.cuh"

// partial: [slots, H, 512], lse: [slots, H]. starts: [rows + 1], the pages before each row and then
// those of a range. out: [rows, H, 512] bfloat16.
extern "C" __global__ void __launch_bounds__(channels / 4)
mla_merge(const float* partial, const float* lse, const int* lengths, const int* starts, uint16_t* out, int n_heads,
          int length_step, int rows, int n_splits) {
    const int row = blockIdx.x / n_heads, head = blockIdx.x % n_heads;
    int slot, count;
    const int n_pages = Lengths{lengths, length_step}.pages(row);
    if constexpr (config::fixed_splits) {
        const int of_split = (n_pages + n_splits - 1) / n_splits;
        slot = row * n_splits, count = n_pages > 0 ? (n_pages + of_split - 1) / of_split : 0;
    } else {
        const int of_range = starts[rows], start = starts[row];
        const int first = start / of_range, last = (start + n_pages - 1) / of_range;
        slot = 2 * first, count = n_pages > 0 ? last - first + 1 : 0;
    }
    if (count == 1) return;
    const int64_t first = static_cast<int64_t>(slot) * n_heads + head;
    merge_splits(partial + first * channels, lse + first, count, n_heads,
                 out + (static_cast<int64_t>(row) * n_heads + head) * channels);
}
