// Products of 16 rows of an FP8 weight, which a warp streams from global memory, with up to 8 rows of x.
//
// The weight is operand A of mma, the rows of x are the columns of operand B: one to eight rows of x take the same time,
// that of reading the weight. Lane l reads 16 consecutive bytes of the rows l/4 and l/4 + 8 of the weight, at column
// 16 · (l%4) of each 64, and the same columns of row l/4 of x. The words of these vectors are operands of four
// instructions: the order of k within an instruction does not matter if it is the same for both operands.
//
// The tensor core sums each half of a k-block of 128 in FP32; the sum of both is added times its two scales.
//
// A warp multiplies k-blocks in a fixed order, and copies some of them ahead to a pipeline of stages in shared memory.
// Each lane reads only what it has copied: no lane waits for another.
//
// NOTES
// - All warps of an SM together should have some 64 KiB in flight, as many as the latency of global memory times its
//   bandwidth.
// - The first k-blocks are copied before what x depends on has run: weights are constants.
#pragma once
#include "convert.cuh"

constexpr int k_block = 128;
constexpr int stage_bytes = 32 * (4 * 16 + 2 * 4);  // of a warp: four vectors and two scales of each lane

// Where a lane's vectors of 16 rows begin, 8 of them from `top` and 8 from `bottom`, and the scales of their blocks.
struct WeightRows {
    const uint8_t *top, *bottom;
    const float *top_scales, *bottom_scales;

    __device__ __forceinline__ WeightRows at(int block) const {
        return {top + block * k_block, bottom + block * k_block, top_scales + block, bottom_scales + block};
    }
};

// The vectors of a lane in 16 rows of `k` bytes.
__device__ __forceinline__ WeightRows rows_of_lane(
    const uint8_t* top, const uint8_t* bottom, const float* top_scales, const float* bottom_scales, int k) {
    const int at = ptx::lane_id() / 4 * k + ptx::lane_id() % 4 * 16;
    return {top + at, bottom + at, top_scales, bottom_scales};
}

// Scaled products of rows l/4 and l/4 + 8 of a weight with rows 2 · (l%4) and 2 · (l%4) + 1 of x.
struct Products {
    float value[4];  // (l/4, first), (l/4, second), (l/4 + 8, first), (l/4 + 8, second)
};

// Rows of x in shared memory, as a lane reads them.
struct RowsOfX {
    const uint8_t* row;            // row l/4; not read if it does not exist
    const float *scale0, *scale1;  // of rows 2 · (l%4) and 2 · (l%4) + 1; any numbers if they do not exist
    bool exists;
};

// d += a · b of four values of each lane along k. E4M3 becomes FP16 exactly.
__device__ __forceinline__ void multiply_4(float (&d)[4], uint32_t top, uint32_t bottom, uint32_t x) {
    using ptx::e4m3_to_f16;
    ptx::mma_f16(d, e4m3_to_f16(top, false), e4m3_to_f16(bottom, false), e4m3_to_f16(top, true),
                 e4m3_to_f16(bottom, true), e4m3_to_f16(x, false), e4m3_to_f16(x, true));
}

// The k-blocks of a warp, of which `depth` are copied ahead. `next` finds the one that is copied next; it returns whether
// there is one.
template <int depth>
struct WeightPipeline {
    uint8_t* stages;  // of the warp, `depth` of stage_bytes
    int copied = 0, used = 0, ahead = 0;

    template <class Next>
    __device__ __forceinline__ bool copy(Next& next) {
        WeightRows from;
        if (!next(from)) return false;
        uint8_t* vectors = stages + copied * stage_bytes + ptx::lane_id() * 16;
        uint8_t* scales = vectors + 2048 - ptx::lane_id() * 12;  // 4 bytes of each lane
        ptx::cp_async_16(vectors, from.top);
        ptx::cp_async_16(vectors + 512, from.bottom);
        ptx::cp_async_16(vectors + 1024, from.top + 64);
        ptx::cp_async_16(vectors + 1536, from.bottom + 64);
        ptx::cp_async_4(scales, from.top_scales);
        ptx::cp_async_4(scales + 128, from.bottom_scales);
        copied = copied + 1 == depth ? 0 : copied + 1;
        return true;
    }

    // Copies the first k-blocks as far as `next` knows them. `fill` copies the others.
    template <class Next>
    __device__ __forceinline__ void begin(Next& next) {
        for (; ahead < depth && copy(next); ++ahead) ptx::cp_async_commit_group();
    }

    template <class Next>
    __device__ __forceinline__ void fill(Next& next) {
        for (; ahead < depth; ++ahead) {
            copy(next);
            ptx::cp_async_commit_group();
        }
    }

    // Adds the products of the first k-block that is not used yet, with k-block `block` of x.
    template <class Next>
    __device__ __forceinline__ void multiply(Products& sum, const RowsOfX& x, int block, Next& next) {
        const int lane = ptx::lane_id(), column = lane % 4 * 16;
        ptx::cp_async_wait_group<depth - 1>();
        const uint8_t* stage = stages + used * stage_bytes;
        used = used + 1 == depth ? 0 : used + 1;
        float product[2][4] = {};  // of each half, for a shorter chain of instructions
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 of_x = make_uint4(0, 0, 0, 0);
            if (x.exists) of_x = *reinterpret_cast<const uint4*>(x.row + block * k_block + half * 64 + column);
            const uint4 top = *reinterpret_cast<const uint4*>(stage + half * 1024 + lane * 16);
            const uint4 bottom = *reinterpret_cast<const uint4*>(stage + half * 1024 + 512 + lane * 16);
            multiply_4(product[half], top.x, bottom.x, of_x.x);
            multiply_4(product[half], top.y, bottom.y, of_x.y);
            multiply_4(product[half], top.z, bottom.z, of_x.z);
            multiply_4(product[half], top.w, bottom.w, of_x.w);
        }
        const float top = *reinterpret_cast<const float*>(stage + 2048 + lane * 4);
        const float bottom = *reinterpret_cast<const float*>(stage + 2048 + 128 + lane * 4);
        const float s0 = x.scale0[block], s1 = x.scale1[block];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sum.value[i] = __fmaf_rn(__fadd_rn(product[0][i], product[1][i]),
                                     __fmul_rn(i < 2 ? top : bottom, i % 2 ? s1 : s0), sum.value[i]);
        copy(next);
        ptx::cp_async_commit_group();
    }
};
