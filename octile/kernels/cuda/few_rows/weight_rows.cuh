// Products of 16 rows of an FP8 weight, which a warp streams from global memory, with up to 8 rows of x.
//
// A warp multiplies k-blocks in a fixed order, and copies some of them ahead to a pipeline of stages in shared memory.
// With mma each lane reads only what it has copied: no lane waits for another. With wgmma, of one row of x, it reads
// what two lanes have copied.
//
// NOTES
// - Vectors of two of four rows are stored in another order, so that lanes that read halves of them meet no bank twice.
// - All warps of an SM together should have some 64 KiB in flight, as many as the latency of global memory times its
//   bandwidth.
// - The first k-blocks are copied before what x depends on has run: weights are constants.
#pragma once
#include "fp8_product.cuh"
#include "row_product.cuh"

constexpr int k_block = 128;

// A stage of a warp: vectors [half of the k-block][row `group` or `group + 8`][lane], then scales [row][lane].
constexpr int row_bytes = 32 * 16, half_bytes = 2 * row_bytes, scales_offset = 2 * half_bytes, scales_bytes = 32 * 4;
constexpr int stage_bytes = scales_offset + 2 * scales_bytes;

// Where a lane's vectors begin in its two rows of the weight, and the scales of their blocks.
struct WeightRows {
    const uint8_t *top, *bottom;
    const float *top_scales, *bottom_scales;

    __device__ __forceinline__ WeightRows at(int block) const {
        return {top + block * k_block, bottom + block * k_block, top_scales + block, bottom_scales + block};
    }
};

// The rows of a lane, of 8 rows of `k` bytes from `top` on and 8 from `bottom` on.
__device__ __forceinline__ WeightRows rows_of_lane(
    const uint8_t* top, const uint8_t* bottom, const float* top_scales, const float* bottom_scales, int k) {
    const int at = ptx::lane_id() / 4 * k + ptx::lane_id() % 4 * 16;
    return {top + at, bottom + at, top_scales, bottom_scales};
}

// Rows of x in shared memory, as a lane reads them; see `Lane`.
struct RowsOfX {
    const uint8_t* row;            // row `group`; not read if it does not exist
    const float *scale0, *scale1;  // of rows 2 · member and 2 · member + 1; any numbers if they do not exist
    bool exists;
};

// The k-blocks of a warp, of which `depth` are copied ahead. `next` finds the one that is copied next; it returns
// whether there is one.
template <int depth>
struct WeightPipeline {
    uint8_t* stages;  // of the warp, `depth` of stage_bytes
    int write_stage = 0, read_stage = 0, ahead = 0;

    // Where the lane's vector lies among those of a row of each group: with bit 1 of the member flipped in groups 2, 3, 6, 7.
    __device__ __forceinline__ static int own_vector() { return (ptx::lane_id() ^ (ptx::lane_id() >> 3 & 1) << 1) * 16; }

    template <class Next>
    __device__ __forceinline__ bool copy(Next& next) {
        WeightRows from;
        if (!next(from)) return false;
        uint8_t* stage = stages + write_stage * stage_bytes;
        uint8_t *vectors = stage + own_vector(), *scales = stage + scales_offset + ptx::lane_id() * 4;
        ptx::cp_async_16(vectors, from.top);
        ptx::cp_async_16(vectors + row_bytes, from.bottom);
        ptx::cp_async_16(vectors + half_bytes, from.top + 64);
        ptx::cp_async_16(vectors + half_bytes + row_bytes, from.bottom + 64);
        ptx::cp_async_4(scales, from.top_scales);
        ptx::cp_async_4(scales + scales_bytes, from.bottom_scales);
        write_stage = write_stage + 1 == depth ? 0 : write_stage + 1;
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

    // d += the scaled products of the first k-block that is not used yet, with k-block `block` of x.
    template <class Next>
    __device__ __forceinline__ void multiply(float (&d)[4], const RowsOfX& x, int block, Next& next) {
        const int lane = ptx::lane_id(), column = lane % 4 * 16;
        ptx::cp_async_wait_group<depth - 1>();
        const uint8_t* stage = stages + read_stage * stage_bytes;
        read_stage = read_stage + 1 == depth ? 0 : read_stage + 1;
        float sum[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 of_x = make_uint4(0, 0, 0, 0);
            if (x.exists) of_x = *reinterpret_cast<const uint4*>(x.row + block * k_block + half * 64 + column);
            const uint8_t* from = stage + half * half_bytes + own_vector();
            const uint4 top = *reinterpret_cast<const uint4*>(from);
            const uint4 bottom = *reinterpret_cast<const uint4*>(from + row_bytes);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply_word(sum[half], word(top, j), word(bottom, j), ptx::e4m3_to_f16(word(of_x, j), false),
                              ptx::e4m3_to_f16(word(of_x, j), true));
        }
        const float top = *reinterpret_cast<const float*>(stage + scales_offset + lane * 4);
        const float bottom = *reinterpret_cast<const float*>(stage + scales_offset + scales_bytes + lane * 4);
        add_scaled(d, sum, top, bottom, make_float2(x.scale0[block], x.scale1[block]));
        copy(next);
        ptx::cp_async_commit_group();
    }

    // Reads the first k-block that is not used yet for wgmma, and the product of its scales with that of x, for the rows
    // `group` and `group + 8` of the weight; copies another one in its place.
    template <class Next>
    __device__ __forceinline__ void take(RowFragments& a, float (&scale)[2], float scale_of_x, Next& next) {
        const int lane = ptx::lane_id();
        ptx::cp_async_wait_group<depth - 1>();
        __syncwarp();  // other lanes' copies are there, too
        const uint8_t* stage = stages + read_stage * stage_bytes;
        read_stage = read_stage + 1 == depth ? 0 : read_stage + 1;
        const int vector = (lane & ~3 | lane % 4 / 2) ^ (lane >> 3 & 1) << 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint8_t* from = stage + i / 2 * half_bytes + (vector ^ i % 2 * 2) * 16 + lane % 2 * 8;
            const uint2 top = *reinterpret_cast<const uint2*>(from);
            const uint2 bottom = *reinterpret_cast<const uint2*>(from + row_bytes);
            a[i][0] = top.x, a[i][1] = bottom.x, a[i][2] = top.y, a[i][3] = bottom.y;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            scale[h] = __fmul_rn(
                scale_of_x, *reinterpret_cast<const float*>(stage + scales_offset + h * scales_bytes + lane * 4));
        __syncwarp();  // all lanes have read
        copy(next);
        ptx::cp_async_commit_group();
    }
};
