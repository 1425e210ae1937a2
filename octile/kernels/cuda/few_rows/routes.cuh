// The experts that at least one of a few rows has chosen: mixture_gate.cu lists them, the kernels after it read them.
#pragma once
#include "fragments.cuh"

constexpr unsigned char not_chosen = 255;

struct alignas(16) Route {
    int expert;
    unsigned char slot[max_rows];  // of each row: which of its choices the expert is, or `not_chosen`
    int unused;
    float weight[max_rows];  // of the expert in each row; 0 if not chosen
};

struct Routes {
    int count;
    int unused[3];
    Route route[1];  // as many as experts can be chosen
};
static_assert(sizeof(Route) == 48 && sizeof(Routes) == 16 + sizeof(Route));  // mixture.py has the same

// Copies routes to shared memory: `max_count` of them, as many as there may be. All threads call it, and synchronize
// afterwards.
__device__ __forceinline__ void read_routes(Routes& to, const Routes* from, int max_count) {
    constexpr int header = sizeof(Routes) - sizeof(Route);
    const int vectors = (header + max_count * sizeof(Route)) / 16;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x)
        reinterpret_cast<uint4*>(&to)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
}
