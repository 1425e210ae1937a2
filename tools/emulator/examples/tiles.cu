// d[64, n] += a[64, k] · b[n, k]ᵀ by wgmma, from tiles that TMA loaded.
#include "ptx.cuh"
#include "wgmma.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    tiles(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* out, int steps) {
    uint8_t* shared = ptx::dynamic_shared();
    uint8_t* b_tile = shared + 64 * 128;
    auto* barrier = reinterpret_cast<ptx::Mbarrier*>(b_tile + config::n * 128);
    if (threadIdx.x == 0) {
        barrier->init(1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    float d[config::n / 2];
    auto at = [&](int i) -> float& {
        const int warp = threadIdx.x / 32, lane = ptx::lane_id();
        return out[(16 * warp + i / 2 % 2 * 8 + lane / 4) * config::n + i / 4 * 8 + lane % 4 * 2 + i % 2];
    };
    for (int i = 0; i < config::n / 2; ++i) d[i] = at(i);
    for (int step = 0; step < steps; ++step) {
        __syncthreads();
        if (threadIdx.x == 0) {
            barrier->arrive_expect_tx((64 + config::n) * 128);
            ptx::tma_load(shared, &a, barrier, step * 128, 0, 0);
            ptx::tma_load(b_tile, &b, barrier, step * 128, 0, 0);
        }
        barrier->wait(step % 2);
        ptx::wgmma_fence();
        for (int i = 0; i < 4; ++i)
            ptx::wgmma(d, ptx::wgmma_descriptor(shared) + 2 * i, ptx::wgmma_descriptor(b_tile) + 2 * i, true);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
    }
    for (int i = 0; i < config::n / 2; ++i) at(i) = d[i];
}
