// Fragments of mma.m16n8k16 in the kernels of few rows: 16 rows of a weight are operand A, up to 8 rows of x are the
// columns of operand B. One to eight rows of x take the same time, that of reading the weight.
//
// mma sums over K in any order as long as both operands have the same. So a lane loads 16 contiguous bytes of two rows
// of the weight and of a row of x, whose words are operands of several instructions.
#pragma once
#include "ptx.cuh"

constexpr int tile_rows = 16, max_rows = 8;

// Where a lane's fragments lie. Its four results are of these rows of the weight and of x: (group, 2 · member), (group,
// 2 · member + 1), (group + 8, 2 · member), (group + 8, 2 · member + 1).
struct Lane {
    const int group = ptx::lane_id() / 4;   // of the weight, rows `group` and `group + 8`; of x, row `group`
    const int member = ptx::lane_id() % 4;  // of each 64 bytes of these rows, the vector of 16
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
