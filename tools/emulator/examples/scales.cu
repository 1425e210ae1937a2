// Scales and quotients, one element a thread.
#include "scale.cuh"

extern "C" __global__ void scales(const float* x, const float* scale, float* quotient, float* scale_of_x, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const Divisor divisor = make_divisor<false>(scale[i]);
    quotient[i] = divisor.needs_careful_division() ? divisor.divide_carefully(x[i]) : divisor.divide<false>(x[i]);
    scale_of_x[i] = ::scale_from_amax<config::format, false>(fabsf(x[i]));
}
