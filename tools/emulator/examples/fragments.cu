// d[64, 128] = a[16, 64]ᵀ · b[16, 128] by wgmma: a in registers, by ldmatrix, and MN-major tiles of b. The bytes of a are
// swizzled already.
#include "ptx.cuh"
#include "wgmma.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    fragments(const __grid_constant__ TensorMap b, const uint8_t* a, float* out) {
    constexpr int tile = 16 * 128;
    uint8_t *shared = ptx::dynamic_shared(), *b_tiles = shared + tile;
    auto* barrier = reinterpret_cast<ptx::Mbarrier*>(b_tiles + 2 * tile);
    if (threadIdx.x == 0) {
        barrier->init(1);
        ptx::fence_mbarrier_init();
        barrier->arrive_expect_tx(3 * tile);
        ptx::bulk_load(shared, a, tile, barrier);
        ptx::tma_load(b_tiles, &b, barrier, 0, 0, 0);
        ptx::tma_load(b_tiles + tile, &b, barrier, 64, 0, 0);
    }
    __syncthreads();
    barrier->wait(0);
    const int warp = threadIdx.x / 32, lane = ptx::lane_id();
    uint32_t r[4];  // matrices: rows k 0 …, 0 …, 8 …, 8 … and columns m 0 …, 8 …, 0 …, 8 … of the warp's 16
    const int row = lane / 16 * 8 + lane % 8, vector = 2 * warp + lane / 8 % 2;
    ptx::ldmatrix_x4_trans(r, shared + row * 128 + (vector ^ (row & 7)) * 16);
    float d[64];
    ptx::wgmma_fence();
    ptx::wgmma_registers(d, r, ptx::wgmma_transposed_descriptor(b_tiles, tile), false);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    for (int i = 0; i < 64; ++i)
        out[(16 * warp + i / 2 % 2 * 8 + lane / 4) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
