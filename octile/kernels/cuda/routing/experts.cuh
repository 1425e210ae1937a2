// Entries of experts: the blocks of a thread block, and an entry as an expert from 0 to E − 1.
#pragma once
#include "ptx.cuh"

constexpr int threads = 32 * config::warps, block_entries = threads * config::rounds;

template <bool wide>
struct EntryType {
    using type = int;
};
template <>
struct EntryType<true> {
    using type = int64_t;
};
using Entry = typename EntryType<config::wide>::type;

// Loads an entry; −1 outside of the tensor. Others than experts count as the nearest ones.
__device__ __forceinline__ int load_expert(const Entry* entries, int index, int count) {
    if (index >= count) return -1;
    const Entry expert = __ldg(entries + index);
    return expert < 0 ? 0 : expert >= config::experts ? config::experts - 1 : static_cast<int>(expert);
}
