// Each thread copies two vectors of 16 bytes to shared memory by cp.async, in two groups, and stores them after it has
// waited until at most `open` groups are in flight.
#include "ptx.cuh"

extern "C" __global__ void own_copies(const uint8_t* from, uint8_t* to, int open) {
    uint8_t* own = ptx::dynamic_shared() + 32 * threadIdx.x;
    for (int i = 0; i < 32; i += 16) {
        for (int j = 0; j < 16; j += 4) ptx::cp_async_4(own + i + j, from + 32 * threadIdx.x + i + j);
        ptx::cp_async_16(own + i, from + 32 * threadIdx.x + i);
        ptx::cp_async_commit_group();
    }
    if (open == 0) ptx::cp_async_wait_group<0>();
    if (open == 1) ptx::cp_async_wait_group<1>();
    for (int i = 0; i < 32; ++i) to[32 * threadIdx.x + i] = own[i];
    ptx::cp_async_wait_group<0>();
}
