// Products of 16 rows of an FP8 weight, which a warp streams from global memory, with up to 8 rows of x.
//
// The weight is operand A of mma, the rows of x are the columns of operand B: one to eight rows of x take the
// same time, that of reading the weight. Lane l reads 16 consecutive bytes of the rows l/4 and l/4 + 8 of the weight, at
// column 16 · (l%4) of each 64, and the same columns of row l/4 of x. The words of these vectors are operands of four
// instructions: the order of k within an instruction does not matter if it is the same for both operands.
//
// A k-block of 128 is summed in FP32 by the tensor core, and added times its two scales.
//
// A warp works on units of 16 rows, one after the other. Its lanes copy the k-blocks ahead, those of the next unit too,
// to a pipeline of stages in shared memory. Each lane reads only what it has copied: no lane waits for another.
//
// NOTES
// - All warps of an SM together should have some 64 KiB in flight, as many as the latency of global memory times its
//   bandwidth.
// - The first k-blocks are copied before what x depends on has run: weights are constants.
#pragma once
#include "convert.cuh"

constexpr int k_block = 128;
constexpr int stage_bytes = 32 * (4 * 16 + 2 * 4);  // of a warp: four vectors and two scales of each lane

// Where the 16 rows of a unit begin: 8 rows of `k` bytes from `top` and 8 from `bottom`, with the scales of their blocks.
struct WeightRows {
    const uint8_t *top, *bottom;
    const float *top_scales, *bottom_scales;
};

// Scaled products of rows l/4 and l/4 + 8 of a unit with rows 2 · (l%4) and 2 · (l%4) + 1 of x.
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

// Streams units `unit`, `unit + stride`, … with `blocks` k-blocks each, of which `depth` are copied ahead.
template <int blocks, int depth>
struct WeightStream {
    uint8_t* stages;         // of the warp, `depth` of stage_bytes
    int unit, stride;        // of the k-block that is copied next
    int block = 0, copied = 0, used = 0, ahead = 0;
    WeightRows from{};

    // Copies the next k-block, if its unit is below `end`.
    template <class RowsOfUnit>
    __device__ __forceinline__ void copy(const RowsOfUnit& rows_of, int end) {
        if (unit < end) {
            if (block == 0) from = rows_of(unit);
            uint8_t* to = stages + copied * stage_bytes + ptx::lane_id() * 16;
            const uint8_t *top = from.top + block * k_block, *bottom = from.bottom + block * k_block;
            ptx::cp_async_16(to, top);
            ptx::cp_async_16(to + 512, bottom);
            ptx::cp_async_16(to + 1024, top + 64);
            ptx::cp_async_16(to + 1536, bottom + 64);
            uint8_t* scales = stages + copied * stage_bytes + 2048 + ptx::lane_id() * 4;
            ptx::cp_async_4(scales, from.top_scales + block);
            ptx::cp_async_4(scales + 128, from.bottom_scales + block);
            copied = copied + 1 == depth ? 0 : copied + 1;
            if (++block == blocks) block = 0, unit += stride;
        }
        ptx::cp_async_commit_group();
    }

    // Begins with the units below `end`, and can be called again with a higher one.
    template <class RowsOfUnit>
    __device__ __forceinline__ void begin(const RowsOfUnit& rows_of, int end) {
        for (; ahead < depth && unit < end; ++ahead) copy(rows_of, end);
    }

    // Multiplies the next unit. All units are below `end`.
    template <class RowsOfUnit>
    __device__ __forceinline__ Products multiply(const RowsOfX& x, const RowsOfUnit& rows_of, int end) {
        Products sum{};
        const int lane = ptx::lane_id(), column = lane % 4 * 16;
        for (; ahead < depth; ++ahead) copy(rows_of, end);
#pragma unroll 2
        for (int b = 0; b < blocks; ++b) {
            ptx::cp_async_wait_group<depth - 1>();
            const uint8_t* stage = stages + used * stage_bytes;
            used = used + 1 == depth ? 0 : used + 1;
            float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 of_x = make_uint4(0, 0, 0, 0);
                if (x.exists) of_x = *reinterpret_cast<const uint4*>(x.row + b * k_block + half * 64 + column);
                const uint4 top = *reinterpret_cast<const uint4*>(stage + half * 1024 + lane * 16);
                const uint4 bottom = *reinterpret_cast<const uint4*>(stage + half * 1024 + 512 + lane * 16);
                multiply_4(product, top.x, bottom.x, of_x.x);
                multiply_4(product, top.y, bottom.y, of_x.y);
                multiply_4(product, top.z, bottom.z, of_x.z);
                multiply_4(product, top.w, bottom.w, of_x.w);
            }
            const float top = *reinterpret_cast<const float*>(stage + 2048 + lane * 4);
            const float bottom = *reinterpret_cast<const float*>(stage + 2048 + 128 + lane * 4);
            const float s0 = x.scale0[b], s1 = x.scale1[b];
            sum.value[0] = __fmaf_rn(product[0], __fmul_rn(top, s0), sum.value[0]);
            sum.value[1] = __fmaf_rn(product[1], __fmul_rn(top, s1), sum.value[1]);
            sum.value[2] = __fmaf_rn(product[2], __fmul_rn(bottom, s0), sum.value[2]);
            sum.value[3] = __fmaf_rn(product[3], __fmul_rn(bottom, s1), sum.value[3]);
            copy(rows_of, end);
        }
        return sum;
    }
};

// The vectors of a lane in 16 rows of `k` bytes: 8 from `top` and 8 from `bottom`.
__device__ __forceinline__ WeightRows rows_of_lane(
    const uint8_t* top, const uint8_t* bottom, const float* top_scales, const float* bottom_scales, int k) {
    const int at = ptx::lane_id() / 4 * k + ptx::lane_id() % 4 * 16;
    return {top + at, bottom + at, top_scales, bottom_scales};
}
