// One side's position in a pipeline, which goes through its stages in their order.
#pragma once
#include "ptx.cuh"

// A stage of a pipeline, and the parity of the phase in which it is full.
template <int stages>
struct Stage {
    int index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == stages) {
            index = 0;
            parity ^= 1;
        }
    }
};
