// y[1, n] = quantized x · weightᵀ in bfloat16 for one row, as few_rows_nt.cu, with the bits of octile's GEMM.
//
// A thread block computes 16 columns of y. Its warps multiply k-blocks 8 at a time, one each; the products of all k-blocks
// are then added in their order.
#include "rows_of_tile.cuh"

// A warp's part of a tile of 16 rows of a weight: its k-blocks, in registers.
struct RowTile : RowsOfTile {
    uint2 bytes[depth][4][2];  // [k-block][32 columns][row]
    float scale[depth];

    __device__ __forceinline__ RowTile(const Lane& lane, const uint8_t* weight, const float* scales, int first, int n)
        : RowsOfTile(lane, weight, scales, first, n) {
#pragma unroll
        for (int i = 0; i < depth; ++i) load(i, i);
    }

    __device__ __forceinline__ void load(int slot, int round) {
        const int block = block_of(round);
        if (block >= k_blocks) return;
        scale[slot] = __ldg(scales + block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int k = 128 * block + 32 * i + 8 * lane.member;
            const bool in_bounds = config::k % 128 == 0 || k < config::k;
            bytes[slot][i][0] = in_bounds ? ptx::load_weight_8(top + k) : make_uint2(0, 0);
            bytes[slot][i][1] = in_bounds ? ptx::load_weight_8(bottom + k) : make_uint2(0, 0);
        }
    }

    // Stores the products of the warp's k-blocks with a row of x.
    __device__ __forceinline__ void multiply(const BlockProducts& to, const Fp8Rows& x) {
        const RowOfX row{x.shared};
#pragma unroll 1
        for (int round = 0; round < blocks; round += depth) {
            RowFragments a[depth] = {};
            float d[depth][4];
            uint64_t operands[depth];
#pragma unroll
            for (int slot = 0; slot < depth; ++slot) {
                operands[slot] = row.operand(min(round + slot, blocks - 1) * warps);
                if (block_of(round + slot) < k_blocks)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        a[slot][i][0] = bytes[slot][i][0].x, a[slot][i][1] = bytes[slot][i][1].x;
                        a[slot][i][2] = bytes[slot][i][0].y, a[slot][i][3] = bytes[slot][i][1].y;
                    }
            }
            multiply_k_blocks(d, a, operands);
#pragma unroll
            for (int slot = 0; slot < depth; ++slot) {
                const int block = block_of(round + slot);
                if (block < k_blocks)
                    to.put(d[slot], lane, threadIdx.x / 32, block, __fmul_rn(x.scales(block, 0).x, scale[slot]));
                if (blocks > depth) load(slot, round + slot + depth);
            }
        }
    }
};
static_assert(warps == group_blocks);  // a round's k-blocks are the columns of a wgmma

namespace smem {
constexpr int row = 0, products = (Fp8Rows::bytes + 15) / 16 * 16;
static_assert(products + BlockProducts::bytes(k_blocks) == config::shared_bytes, "launcher.py computes the same");
}  // namespace smem

// Arguments as of few_rows_nt.
extern "C" __global__ void __launch_bounds__(threads, config::blocks)
one_row_nt(const uint16_t* x, int64_t x_row, const uint8_t* norm_weight, float eps, const uint8_t* weight,
           const float* scales, const uint16_t* add, int64_t add_row, uint16_t* y, int n) {
    uint8_t* shared = ptx::dynamic_shared();
    const int first = blockIdx.x * tile_rows;
    const Lane lane;
    const Fp8Rows row(shared + smem::row, norm_weight);
    float* sums = reinterpret_cast<float*>(shared + smem::products);
    const BlockProducts products{sums, sums + k_blocks * tile_rows};
    RowTile tile(lane, weight, scales, first, n);
    ptx::wait_for_previous();
    ptx::launch_dependents();
    row.quantize(x, x_row, eps);
    ptx::fence_proxy_async();
    __syncthreads();
    tile.multiply(products, row);
    __syncthreads();
    const int column = first + threadIdx.x;
    if (threadIdx.x >= tile_rows || column >= n) return;
    float total = products.sum(threadIdx.x, 0, k_blocks);
    if constexpr (config::add) total = from_bf16(to_bf16(total)) + from_bf16(add[column]);
    y[column] = to_bf16(total);
}
