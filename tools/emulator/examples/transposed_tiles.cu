// d[64, n] = a[16, 64]ᵀ · b[16, n] by wgmma, from MN-major tiles that TMA loaded; n is a multiple of 64.
#include "ptx.cuh"
#include "wgmma.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    transposed_tiles(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out) {
    constexpr int tile = 16 * 128;
    uint8_t* shared = ptx::dynamic_shared();
    auto* barrier = reinterpret_cast<ptx::Mbarrier*>(shared + tile + config::n / 64 * tile);
    if (threadIdx.x == 0) {
        barrier->init(1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier->arrive_expect_tx(tile + config::n / 64 * tile);
        ptx::tma_load(shared, &a, barrier, 0, 0, 0);
        for (int i = 0; i < config::n / 64; ++i) ptx::tma_load(shared + (1 + i) * tile, &b, barrier, 64 * i, 0, 0);
    }
    barrier->wait(0);
    float d[config::n / 2];
    ptx::wgmma_fence();
    ptx::wgmma_transposed(d, ptx::wgmma_transposed_descriptor(shared, tile),
                          ptx::wgmma_transposed_descriptor(shared + tile, tile), false);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    for (int i = 0; i < config::n / 2; ++i) {
        const int row = threadIdx.x / 32 * 16 + i / 2 % 2 * 8 + ptx::lane_id() / 4;
        out[row * config::n + i / 4 * 8 + ptx::lane_id() % 4 * 2 + i % 2] = d[i];
    }
}
