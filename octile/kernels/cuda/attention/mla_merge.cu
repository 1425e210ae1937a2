// Merges the partial results of rows that several thread blocks of MLA decoding attend to, in the order of the positions.
//
// A thread block takes one row and some of its heads. Results that are final are not touched; heads without positions become
// zero. With parts it can also return the natural logarithm of the sum of a softmax's weights.
#include "merge_splits.cuh"
#include "split_kv.cuh"

// partial: [slots, H, 512], lse: [slots, H]. starts: without parts, [rows + 1], the pages before each row and then those of
// a range. out: [rows, H, 512] bfloat16. out_lse: [rows, H] or null. max_parts: of a row, each of which has a slot.
extern "C" __global__ void __launch_bounds__(channels / 4)
mla_merge(const float* partial, const float* lse, const int* lengths, const int* starts, uint16_t* out, float* out_lse,
          int n_heads, int length_step, int rows, int max_parts) {
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    const int blocks = (n_heads + config::heads - 1) / config::heads, row = blockIdx.x / blocks;
    const int first_head = blockIdx.x % blocks * config::heads;
    const Lengths of_rows{lengths, length_step};
    for (int head = first_head; head < min(first_head + config::heads, n_heads); ++head) {
        int slot, count;
        if constexpr (has_parts) {
            const int n_pages = (of_rows.of_head(row, head, n_heads) + page_rows - 1) / page_rows;
            slot = row * max_parts, count = (max(n_pages, 0) + part_pages - 1) / part_pages;
        } else {
            const int n_pages = of_rows.pages(row), of_range = starts[rows], start = starts[row];
            const int first = start / of_range, last = (start + n_pages - 1) / of_range;
            slot = 2 * first, count = n_pages > 0 ? last - first + 1 : 0;
        }
        const int64_t first = static_cast<int64_t>(slot) * n_heads + head;
        const int64_t result = static_cast<int64_t>(row) * n_heads + head;
        float sum;  // of the weights, in log₂
        if (count != 1)
            sum = merge_splits(partial + first * channels, lse + first, count, n_heads, out + result * channels);
        else if (has_parts && out_lse != nullptr)
            sum = lse[first];
        if (has_parts && out_lse != nullptr && threadIdx.x == 0) out_lse[result] = 0.693147180559945f * sum;
    }
}
