// The choice of the experts of rows by their logits, a warp for each row, as mixture_gate.cu chooses.
//
// So a row has the same experts and weights, to the last bit, in small-batch decode and in any other step.
#include "choice.cuh"

constexpr int warps = config::warps, parts = config::parts;

// products: [rows, parts · experts], contiguous: the parts of logits, which are added in their order. bias: [experts], or
// any address if there is none. logits: [rows, experts], written if there are several parts. weights, expert_of: [rows,
// chosen].
extern "C" __global__ void __launch_bounds__(32 * warps)
choose_experts(const float* products, const float* bias, float* logits, float* weights, int64_t* expert_of, float factor,
               float eps, int rows) {
    const int row = blockIdx.x * warps + threadIdx.x / 32, lane = ptx::lane_id();
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    if (row >= rows) return;
    products += static_cast<int64_t>(row) * parts * experts;
    auto logit_of = [&](int e) {
        float sum = products[e];
#pragma unroll
        for (int p = 1; p < parts; ++p) sum = __fadd_rn(sum, products[p * experts + e]);
        if constexpr (parts > 1) logits[static_cast<int64_t>(row) * experts + e] = sum;
        return sum;
    };
    const Chosen own = choose(logit_of, bias, factor, eps);
    if (lane >= chosen) return;
    weights[static_cast<int64_t>(row) * chosen + lane] = own.weight;
    expert_of[static_cast<int64_t>(row) * chosen + lane] = own.expert;
}
