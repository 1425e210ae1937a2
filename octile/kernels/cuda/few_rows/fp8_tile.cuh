// A warp's part of an FP8 tile: 16 rows of a weight in 128×128 blocks, times rows of x in 1×128 tiles.
//
// The warp loads the weight to registers; weight_rows.cuh copies it to shared memory.
#pragma once
#include "fp8_product.cuh"
#include "rows_of_tile.cuh"

struct Fp8Tile : RowsOfTile {
    uint4 bytes[depth][2][2];  // [block][half of 64 bytes][row]
    float scale[depth];

    __device__ __forceinline__ Fp8Tile(const Lane& lane, const uint8_t* weight, const float* scales, int first, int n)
        : RowsOfTile(lane, weight, scales, first, n) {
#pragma unroll
        for (int i = 0; i < depth; ++i) load(i, i);
    }

    __device__ __forceinline__ void load(int slot, int i) {
        const int block = block_of(i);
        if (block >= k_blocks) return;
        scale[slot] = __ldg(scales + block);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int k = 128 * block + 64 * half + 16 * lane.member;
            const bool in_bounds = config::k % 128 == 0 || k < config::k;
            bytes[slot][half][0] = in_bounds ? ptx::load_weight_16(top + k) : make_uint4(0, 0, 0, 0);
            bytes[slot][half][1] = in_bounds ? ptx::load_weight_16(bottom + k) : make_uint4(0, 0, 0, 0);
        }
    }

    // d[16, 8] = the product over the warp's k-blocks.
    __device__ __forceinline__ void multiply(float (&d)[4], const Fp8Rows& x) {
        d[0] = d[1] = d[2] = d[3] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < blocks; i += depth)
#pragma unroll
            for (int slot = 0; slot < depth; ++slot) {
                if (block_of(i + slot) < k_blocks) multiply_block(d, slot, block_of(i + slot), x);
                if (blocks > depth) load(slot, i + slot + depth);
            }
    }

    __device__ __forceinline__ void multiply_block(float (&d)[4], int slot, int block, const Fp8Rows& x) {
        float sum[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 of_x[2] = {};
            if (lane.group < config::rows) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    of_x[i] = x.values(lane.group, 128 * block + 64 * half + 16 * lane.member + 8 * i);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint4& four = of_x[j / 2];
                multiply_word(sum[half], word(bytes[slot][half][0], j), word(bytes[slot][half][1], j),
                              word(four, j % 2 * 2), word(four, j % 2 * 2 + 1));
            }
        }
        add_scaled(d, sum, scale[slot], scale[slot], x.scales(block, 2 * lane.member));
    }
};
