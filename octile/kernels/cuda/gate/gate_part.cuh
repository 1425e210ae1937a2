// A part of the columns of 16 experts in the registers of a warp: operand A of the gates whose rows do not depend on each
// other.
//
// As octile/kernels/triton/row_invariant.py defines their bits, tensor cores add up the products of a part, 16 columns at
// a time, and the parts of a logit are added in their order, beginning with zero.
#pragma once
#include "choice.cuh"
#include "fragments.cuh"
#include "vector_io.cuh"

constexpr int part_columns = config::part, column_parts = (config::columns + part_columns - 1) / part_columns;
constexpr int expert_tiles = (experts + tile_rows - 1) / tile_rows;

struct GatePart {
    static constexpr int steps = part_columns / 16;
    uint2 bytes[steps][2];  // [16 columns][row], the lane's columns from 4 · member on

    // Loads the steps from `first` to `end` of a tile of experts and a part of the columns; gate: [experts, columns].
    __device__ __forceinline__ void load(const Lane& lane, const uint16_t* gate, int tile, int part, int first = 0,
                                         int end = steps) {
        const int expert = tile * tile_rows + lane.group, begin = part * part_columns + 4 * lane.member;
        const uint16_t* top = gate + static_cast<int64_t>(min(expert, experts - 1)) * config::columns + begin;
        const uint16_t* bottom = gate + static_cast<int64_t>(min(expert + 8, experts - 1)) * config::columns + begin;
#pragma unroll
        for (int s = first; s < end; ++s) {
            const bool inside = begin + 16 * s < config::columns;
            bytes[s][0] = ptx::load_8(top + 16 * s, inside);
            bytes[s][1] = ptx::load_8(bottom + 16 * s, inside);
        }
    }

    // Adds a step's product with rows of x, of which the lane brings row `group` in the same four columns.
    __device__ __forceinline__ void multiply(float (&d)[4], int step, uint2 four) const {
        ptx::mma_bf16(d, bytes[step][0].x, bytes[step][1].x, bytes[step][0].y, bytes[step][1].y, four.x, four.y);
    }
};
