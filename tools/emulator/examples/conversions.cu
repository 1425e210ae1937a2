// Conversions between number formats: to 8 bits, to 16 bits, and back.
#include "convert.cuh"

extern "C" __global__ void conversions(const float* x, uint32_t* codes, float* back) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t all[] = {ptx::pack_e4m3(x[i], 0.0f, 0.0f, 0.0f), ptx::pack_e5m2(0.0f, x[i], 0.0f, 0.0f) >> 8,
                            ptx::to_s8(x[i]) & 0xFF, ptx::pack_f16(0.0f, x[i]) >> 16};
    const float numbers[] = {ptx::low_f16(ptx::e4m3_to_f16(all[0] << 16, true)),
                             ptx::high_f16(ptx::e5m2_to_f16(all[1] << 8, false)),
                             static_cast<float>(static_cast<signed char>(all[2])), ptx::low_f16(all[3])};
    for (int f = 0; f < 4; ++f) {
        codes[4 * i + f] = all[f];
        back[4 * i + f] = numbers[f];
    }
}
