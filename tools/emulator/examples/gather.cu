// Each thread copies a vector of 16 bytes by cp.async, zeros where its index is negative, and TMA stores what has landed.
// The barrier counts to `count`, and thread 0 arrives once more if `arrives`.
#include "ptx.cuh"

extern "C" __global__ void gather(
    const uint8_t* from, const int* indices, uint8_t* to, int waits, int fences, int count, int arrives) {
    uint8_t* shared = ptx::dynamic_shared();
    const int threads = blockDim.x;
    auto* barrier = reinterpret_cast<ptx::Mbarrier*>(shared + 16 * threads);
    if (threadIdx.x == 0) {
        barrier->init(count);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int index = indices[threadIdx.x];
    ptx::cp_async_16(shared + 16 * threadIdx.x, from + 16 * (index < 0 ? 0 : index), index >= 0);
    barrier->arrive_after_copies();
    if (arrives && threadIdx.x == 0) barrier->arrive();
    if (waits) barrier->wait(0);
    if (fences) ptx::fence_proxy_async();
    if (threadIdx.x == 0) {
        ptx::bulk_store(to, shared, 16 * threads);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group_read<0>();
    }
    barrier->wait(0);
}
