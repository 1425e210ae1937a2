// A warp's part of a BF16 tile: 16 rows of a weight, `chunks` · 32 columns of each, times rows of x.
#pragma once
#include "warp_sums.cuh"

template <int chunks>
struct Bf16Tile {
    uint4 bytes[chunks][2];  // [32 columns][row]

    // top: row lane.group of the tile, from the warp's first column on; rows begin `width` elements apart.
    __device__ __forceinline__ void load(const Lane& lane, const uint16_t* top, int width) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
            bytes[c][0] = ptx::load_weight_16(top + 32 * c + 8 * lane.member);
            bytes[c][1] = ptx::load_weight_16(top + 8 * width + 32 * c + 8 * lane.member);
        }
    }

    // d[16, 8] += the product; of_x(c): the lane's 8 values of its row of x, from column 32 · c + 8 · member on.
    template <class Values>
    __device__ __forceinline__ void multiply(float (&d)[4], Values of_x) const {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
            const uint4 x = of_x(c);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                ptx::mma_bf16(d, word(bytes[c][0], 2 * j), word(bytes[c][1], 2 * j), word(bytes[c][0], 2 * j + 1),
                              word(bytes[c][1], 2 * j + 1), word(x, 2 * j), word(x, 2 * j + 1));
        }
    }
};
