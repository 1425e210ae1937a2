// A warp's part of a BF16 tile: 16 rows of a weight, 16 · `steps` columns of each, times rows of x.
//
// mma takes 16 columns a step, in the order of K, as wgmma does: both have the same arithmetic, so a chain of all columns
// has the bits of triton/row_invariant.py. Within a step a lane may have any four columns, here contiguous ones.
#pragma once
#include "warp_sums.cuh"

template <int steps>
struct Bf16Tile {
    uint2 bytes[steps][2];  // [16 columns][row]

    // top: row lane.group of the tile, from the warp's first column on; rows begin `width` elements apart.
    __device__ __forceinline__ void load(const Lane& lane, const uint16_t* top, int width) {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            bytes[step][0] = ptx::load_weight_8(top + 16 * step + 4 * lane.member);
            bytes[step][1] = ptx::load_weight_8(top + 8 * width + 16 * step + 4 * lane.member);
        }
    }

    // d[16, 8] += the product; x: the lane's row of x, from the warp's first column on.
    __device__ __forceinline__ void multiply(float (&d)[4], const Lane& lane, const uint16_t* x) const {
        const uint2* of_x = reinterpret_cast<const uint2*>(x) + lane.member;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            const uint2 own = of_x[4 * step];
            ptx::mma_bf16(d, bytes[step][0].x, bytes[step][1].x, bytes[step][0].y, bytes[step][1].y, own.x, own.y);
        }
    }
};
