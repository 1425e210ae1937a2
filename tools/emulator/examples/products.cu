// d[16, 8] = a[16, 16] · bᵀ, with b [8, 16], by mma of FP16 or BF16. Block 0 of the cluster gets what block 1 computes.
#include "ptx.cuh"

extern "C" __global__ void products(const uint32_t* a, const uint32_t* b, float* out, int bfloat16) {
    auto* shared = reinterpret_cast<float*>(ptx::dynamic_shared());
    const int lane = ptx::lane_id(), group = lane / 4, member = lane % 4;
    const uint32_t* of_a = a + group * 8 + member;
    const uint32_t* of_b = b + group * 8 + member;
    float d[4] = {};
    if (bfloat16)
        ptx::mma_bf16(d, of_a[0], of_a[64], of_a[4], of_a[68], of_b[0], of_b[4]);
    else
        ptx::mma_f16(d, of_a[0], of_a[64], of_a[4], of_a[68], of_b[0], of_b[4]);
    ptx::cluster_sync();
    for (int i = 0; i < 4; ++i) {
        const float* to = shared + (group + i / 2 * 8) * 8 + 2 * member + i % 2;
        if (ptx::cluster_ctarank() == 1) ptx::store_cluster(ptx::cluster_address(to, 0), __float_as_uint(d[i]));
    }
    ptx::cluster_sync();
    if (ptx::cluster_ctarank() == 0)
        for (int i = lane; i < 128; i += 32) out[i] = shared[i];
}
