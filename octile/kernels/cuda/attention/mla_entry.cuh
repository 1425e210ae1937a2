// What both kernels of MLA decoding begin with: a thread block's pages and heads, and the warps that load pages.
#pragma once
#include "ptx.cuh"
#include "split_kv.cuh"

struct Arguments {
    const uint8_t* cache;
    const uint16_t* q;
    const int* pages;
    uint16_t* out;
    float *partial, *lse;
    float scale;
    int n_heads, page_step;
};

// Thread blocks of all blocks of heads follow each other for each range of pages.
struct Role {
    int warp;  // of the thread block
    int range, first_head;

    __device__ __forceinline__ Role(int n_heads, int heads_of_block) : warp(__shfl_sync(all_lanes, threadIdx.x / 32, 0)) {
        const int blocks = (n_heads + heads_of_block - 1) / heads_of_block;
        range = blockIdx.x / blocks;
        first_head = blockIdx.x % blocks * heads_of_block;
    }
    __device__ __forceinline__ bool is_consumer() const { return warp < consumer_threads / 32; }
    __device__ __forceinline__ bool is_producer() const { return warp == consumer_threads / 32; }
};

// By all warps. Without parts the first thread block's warps that have `starts` write them, and mla_merge.cu reads them.
__device__ __forceinline__ Items items_of(
    const Role& role, const Lengths& lengths, int rows, int max_parts, int ranges, int* starts) {
    return Items(lengths, rows, max_parts, ranges, role.range, !has_parts && blockIdx.x == 0 ? starts : nullptr);
}

// Writes the pages of all items to shared memory.
template <class Producer>
__device__ __forceinline__ void produce(Producer&& producer, const Arguments& arguments, Items& items) {
    Item item;
    while (items.next(item))
        producer.load_item(
            arguments.pages + static_cast<int64_t>(item.row) * arguments.page_step + item.first_page, item.n_pages);
}
