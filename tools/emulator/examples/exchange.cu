// Each thread of two thread blocks of a cluster copies a vector of 16 bytes to the other one's shared memory.
#include "ptx.cuh"

extern "C" __global__ void exchange(const uint4* from, uint4* to, int announced, int fences, int waits, int ends_together) {
    uint8_t* shared = ptx::dynamic_shared();
    const int threads = blockDim.x, own = blockIdx.x * threads + threadIdx.x;
    auto* source = reinterpret_cast<uint4*>(shared) + threadIdx.x;
    auto* slot = source + threads;
    auto* barrier = reinterpret_cast<ptx::Mbarrier*>(shared + 32 * threads);
    if (threadIdx.x == 0) {
        ptx::bulk_prefetch(from + blockIdx.x * threads, 16 * threads);
        barrier->init(1);
        ptx::fence_mbarrier_init();
        barrier->arrive_expect_tx(announced);
    }
    *source = from[own];
    if (fences) ptx::fence_proxy_async();
    ptx::cluster_sync();
    const uint32_t other = ptx::cluster_ctarank() ^ 1;
    ptx::bulk_copy(ptx::cluster_address(slot, other), source, 16, ptx::cluster_address(barrier, other));
    if (waits) barrier->wait(0);
    to[own] = *slot;
    barrier->wait(0);
    if (ends_together) ptx::cluster_sync();
}
