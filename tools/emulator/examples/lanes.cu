// Warp-level primitives, each with its result for every lane: answers[primitive][lane].
#include "ptx.cuh"

extern "C" __global__ void lanes(const int* values, int* answers, uint16_t* matrices, const float* pair,
                                 unsigned* packed) {
    const int lane = ptx::lane_id(), value = values[lane];
    int* answer = answers + lane;
    auto say = [&](int x) { *answer = x, answer += 32; };
    say(__shfl_sync(~0u, value, 5));
    say(__shfl_sync(~0u, value, lane + 1, 8));
    say(__shfl_xor_sync(~0u, value, 3));
    say(__shfl_up_sync(~0u, value, 4));
    say(__shfl_down_sync(~0u, value, 4));
    say(__ballot_sync(~0u, value % 2));
    say(__reduce_add_sync(~0u, value));
    say(__reduce_max_sync(~0u, value));
    if (lane < 8) say(__shfl_xor_sync(0xFFu, value, 1));

    uint8_t* shared = ptx::dynamic_shared();
    auto element = [&](int matrix, int i) { return matrix * 64 + lane / 4 * 8 + 2 * (lane % 4) + i; };
    auto both = [&](int matrix) -> uint32_t { return element(matrix, 0) | element(matrix, 1) << 16; };
    ptx::stmatrix_x4(shared + 16 * lane, both(0), both(1), both(2), both(3));
    ptx::stmatrix_x4_trans(shared + 512 + 16 * lane, both(0), both(1), both(2), both(3));
    ptx::stmatrix_x2(shared + 1024 + 16 * lane, both(0), both(1));
    __syncwarp();
    for (int i = lane; i < 640; i += 32) matrices[i] = reinterpret_cast<uint16_t*>(shared)[i];
    packed[lane] = ptx::pack_bf16(pair[2 * lane], pair[2 * lane + 1]);
}
