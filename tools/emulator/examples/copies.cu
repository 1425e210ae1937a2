// TMA loads a box, whose bytes in shared memory are copied to `raw`; or TMA stores a box of the bytes of `raw`, or adds
// it; or loads it to the L2 cache before TMA adds as many bytes at column `other`.
#include "ptx.cuh"

enum Kind { load, store, add, prefetch };

extern "C" __global__ void copies(const __grid_constant__ TensorMap map, uint8_t* raw, int bytes, int room, int kind,
                                  int fence, int other, int x, int y, int z) {
    uint8_t* shared = ptx::dynamic_shared();
    auto* barrier = reinterpret_cast<ptx::Mbarrier*>(shared + room);
    if (threadIdx.x == 0) {
        barrier->init(1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (kind == load) {
        if (threadIdx.x == 0) {
            barrier->arrive_expect_tx(bytes);
            ptx::tma_load(shared, &map, barrier, x, y, z);
        }
        barrier->wait(0);
        for (int i = threadIdx.x; i < bytes; i += blockDim.x) raw[i] = shared[i];
    } else {
        for (int i = threadIdx.x; i < bytes; i += blockDim.x) shared[i] = raw[i];
        if (fence) ptx::fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            if (kind == prefetch) ptx::tma_prefetch(&map, x, y, z);
            if (kind == store)
                ptx::tma_store(&map, shared, x, y, z);
            else
                ptx::tma_reduce_add(&map, shared, kind == prefetch ? other : x, y, z);
            ptx::bulk_commit_group();
            ptx::bulk_wait_group_read<0>();
        }
    }
}
