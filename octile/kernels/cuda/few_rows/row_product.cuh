// The product of a k-block, 128 columns, of 16 rows of an FP8 weight with one row of x, with the bits of octile's GEMM.
//
// Tensor cores sum 32 products in a step of wgmma for FP8, and hold fewer bits than mma of FP16 (fp8_product.cuh). wgmma
// multiplies 64 rows by 8 columns: each of the four warps of a warpgroup brings 16 rows, and the columns are 8 k-blocks
// of x. So the warps may multiply other k-blocks, of the same 8, and each keeps the column of its own one.
//
// wgmma sums the columns of a step in any order as long as both operands have the same. So a lane loads 8 contiguous bytes
// of each 32 of a row of the weight, which are two words of the operand; x is stored in the same order.
#pragma once
#include "fragments.cuh"
#include "wgmma_row.cuh"

constexpr int group_blocks = 8, group_bytes = 128 * group_blocks;  // k-blocks of x that are the columns of a wgmma

// A row of x of `blocks` k-blocks in shared memory, at a multiple of 1024 bytes: a row of 128 bytes for each k-block.
struct RowOfX {
    uint8_t* const tiles;

    __device__ __forceinline__ static constexpr int bytes(int blocks) {
        return (blocks + group_blocks - 1) / group_blocks * group_bytes;
    }
    // Stores 4 values from `column` on, a multiple of 4.
    __device__ __forceinline__ void store_4(int column, uint32_t four) const {
        const int block = column / 128 % group_blocks, vector = column % 128 / 32 * 2 + column / 4 % 2;
        *reinterpret_cast<uint32_t*>(tiles + column / 128 * 128 + (vector ^ block) * 16 + column % 32 / 8 * 4) = four;
    }
    __device__ __forceinline__ void store_16(int column, const uint4& values) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) store_4(column + 4 * i, word(values, i));
    }
    __device__ __forceinline__ uint64_t operand(int block) const {
        return ptx::wgmma_descriptor(tiles + block / group_blocks * group_bytes);
    }
};

// 16 rows of a weight in a k-block, as a warp's part of wgmma's left operand.
using RowFragments = uint32_t[4][4];  // [32 columns]
constexpr int blocks_at_once = 2;     // k-blocks of a warp that are multiplied together

// d[i][16 rows, 8 k-blocks of x] of a warp, of `count` k-blocks; operands: of each. The four warps of a warpgroup call it
// together, with the same operands.
template <int count>
__device__ __forceinline__ void multiply_k_blocks(
    float (&d)[count][4], const RowFragments (&a)[count], const uint64_t (&operands)[count]) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) d[n][r] = 0.0f, ptx::warpgroup_fence_operand(d[n][r]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < count; ++n) ptx::wgmma_row(d[n], a[n][i], operands[n] + 2 * i, i > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) ptx::warpgroup_fence_operand(d[n][r]);
}

// The products of the k-blocks of a thread block's 16 rows and the products of their scales, which are added in the order
// of the k-blocks, as promotion.cuh adds them.
struct BlockProducts {
    float* const products;  // [k-blocks][16]
    float* const scales;    // [k-blocks]

    __device__ __forceinline__ static constexpr int bytes(int blocks) { return blocks * (tile_rows + 1) * 4; }

    // d: of `multiply_k_blocks`, for k-block `block`, which is column `column` of the operand.
    __device__ __forceinline__ void put(const float (&d)[4], const Lane& lane, int column, int block, float scale) const {
        if (lane.member != column / 2) return;
        float* to = products + block * tile_rows + lane.group;
        to[0] = column % 2 ? d[1] : d[0], to[8] = column % 2 ? d[3] : d[2];
        if (lane.group == 0) scales[block] = scale;
    }

    // The sum over the k-blocks from `first` to before `end` of a row of the weight.
    __device__ __forceinline__ float sum(int row, int first, int end) const {
        float total = 0.0f;
#pragma unroll 4
        for (int block = first; block < end; ++block)
            total = __fmaf_rn(products[block * tile_rows + row], scales[block], total);
        return total;
    }
};
