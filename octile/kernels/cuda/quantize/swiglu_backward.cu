// The gradients of SwiGLU, and h recomputed: d(gate) and d(up) quantized along rows and columns, h quantized
// transposed.
//
// A thread block computes one 128×128 block each of d(gate), d(up) and h, one after the other.
//
// NOTES
// - Three blocks of FP32 values do not fit into registers, nor does one in addition to three of inputs. silu(gate),
//   which all three need, stays in shared memory. dh and up are loaded a second time, from the L2 cache, and with
//   weights dh a third time, for the gradient of the weight.
// - A thread block waits for memory most of the time. So all loads of a block are in flight at once, and are issued
//   before the previous block is stored transposed. Encoded values of up need few registers and are loaded one block
//   earlier.
// - Loads in flight occupy L1, which gets what shared memory leaves. One of the 8 rows of silu(gate) of a thread
//   therefore stays in registers, which reduces shared memory from 88 to 80 KiB.
// - A warp copies the factors of its own rows and so waits for them alone, not with the thread block.
#include "block.cuh"
#include "silu.cuh"

constexpr bool is_encoded = config::dtype >= e4m3;  // gate and up were saved in FP8 or INT8, with a scale for 1×128

namespace smem {  // offsets in shared memory, after those of block.cuh
constexpr int silu = bytes;                                 // float4 [7][2][block_threads]
constexpr int factors = silu + 7 * 2 * 16 * block_threads;  // float [3][side]: the members of Factors, of rows
}  // namespace smem

// The 8 rows of a thread in a matrix.
template <int dtype>
struct Rows {
    const uint8_t* first;
    int64_t step;

    __device__ __forceinline__ Rows(const uint8_t* matrix, int64_t row, const BlockCoord& at)
        : first(matrix + bytes<dtype>(at.row() * row + at.column())), step(bytes<dtype>(row)) {}
    __device__ __forceinline__ Vec8<dtype> load(int i, bool in_bounds) const {
        return load_vec8<dtype>(first + i * step, in_bounds);
    }
    // Makes the next loads go to memory instead of reusing registers.
    __device__ __forceinline__ void load_again() { first = ptx::opaque(first); }
};

// silu(gate) of the thread's 8 rows: the last in registers, the others in shared memory.
struct Silu {
    float4* shared;
    FloatVec8 last;

    __device__ __forceinline__ void store(int i, const FloatVec8& x) {
        if (i == 7) {
            last = x;
        } else {
            const float(&v)[8] = x.value;
            shared[2 * i * block_threads] = make_float4(v[0], v[1], v[2], v[3]);
            shared[(2 * i + 1) * block_threads] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    __device__ __forceinline__ FloatVec8 load(int i) const {
        if (i == 7) return last;
        const float4 low = shared[2 * i * block_threads], high = shared[(2 * i + 1) * block_threads];
        return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    }
};

// The factors of a row.
struct Factors {
    float gate_scale, up_scale, weight;
};

// A thread's vectors of 8 of one row.
struct Row {
    Vec8<config::dh_dtype> dh;
    Vec8<config::dtype> gate, up;

    __device__ __forceinline__ float gate_at(int j, const Factors& by) const {
        return is_encoded ? __fmul_rn(gate.at(j), by.gate_scale) : gate.at(j);
    }
    __device__ __forceinline__ float up_at(int j, const Factors& by) const {
        return is_encoded ? __fmul_rn(up.at(j), by.up_scale) : up.at(j);
    }
    __device__ __forceinline__ float dh_at(int j, const Factors& by) const {
        return config::weighted ? __fmul_rn(dh.at(j), by.weight) : dh.at(j);
    }
};

// d(gate) = dh · weight · up · silu'(gate); also returns silu(gate).
__device__ __forceinline__ FloatVec8 gradient_of_gate(const Row& row, const Factors& by, FloatVec8& silu) {
    FloatVec8 result;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float g = row.gate_at(j, by), s = sigmoid(g);
        silu.value[j] = __fmul_rn(g, s);
        const float slope = __fmaf_rn(silu.value[j], __fsub_rn(1.0f, s), s);  // s · (1 + g · (1 − s))
        result.value[j] = __fmul_rn(__fmul_rn(row.dh_at(j, by), row.up_at(j, by)), slope);
    }
    return result;
}

// d(up) = dh · weight · silu(gate).
__device__ __forceinline__ FloatVec8 gradient_of_up(const Row& row, const Factors& by, const FloatVec8& silu) {
    FloatVec8 result;
#pragma unroll
    for (int j = 0; j < 8; ++j) result.value[j] = __fmul_rn(row.dh_at(j, by), silu.value[j]);
    return result;
}

// h = silu(gate) · up · weight; adds the thread's part of the gradient of the row's weight to of_weight.
__device__ __forceinline__ FloatVec8 recompute_h(const Row& row, const Factors& by, const FloatVec8& silu,
                                                 float& of_weight) {
    FloatVec8 result;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        result.value[j] = __fmul_rn(silu.value[j], row.up_at(j, by));
        if constexpr (config::weighted) {
            of_weight = __fmaf_rn(row.dh.at(j), result.value[j], of_weight);
            result.value[j] = __fmul_rn(result.value[j], by.weight);
        }
    }
    return result;
}

// dh, gate, up: [m, h]. data, scale, data_t, scale_t: [d(gate) | d(up)], [m, 2h], and its transpose. h_t, h_scale_t:
// h transposed. parts: [m, h / 128], partial sums of the gradient of the weights, only with config::weighted. row_tiles:
// [tile_count], only with config::grouped.
extern "C" __global__ void __launch_bounds__(block_threads, config::blocks)
swiglu_backward(const uint8_t* dh, const uint8_t* gate, const uint8_t* up, const float* gate_scale,
                const float* up_scale, const float* weight, uint8_t* data, float* scale, uint8_t* data_t,
                float* scale_t, uint8_t* h_t, float* h_scale_t, float* parts, int64_t dh_row, int64_t gate_row,
                int64_t up_row, int64_t gate_scale_row, int64_t gate_scale_tile, int64_t up_scale_row,
                int64_t up_scale_tile, int64_t weight_step, int m, int h, int raster_inverse, const uint2* row_tiles,
                int tile_count) {
    const Outputs gradients{data, data_t, scale, scale_t}, result{nullptr, h_t, h_scale_t, h_scale_t};
    uint8_t* shared = ptx::dynamic_shared();
    const BlockCoord at =
        block_coord<config::raster_height>(blockIdx.x, m, h, raster_inverse, row_tiles, tile_count);
    BlockCoord gradient_at = at;
    gradient_at.k = 2 * at.k;

    float* all_factors = reinterpret_cast<float*>(shared + smem::factors);
    const unsigned own = threadIdx.x / 32 * 16 + ptx::lane_id() % 16;  // two lanes per row
    const int64_t own_row = at.first + own;
    const bool first = ptx::lane_id() < 16, is_row = own_row < at.end;
    if constexpr (is_encoded) {
        const float* of_gate = gate_scale + own_row * gate_scale_row + at.k_tile * gate_scale_tile;
        const float* of_up = up_scale + own_row * up_scale_row + at.k_tile * up_scale_tile;
        ptx::cp_async_4(all_factors + (first ? 0 : side) + own, first ? of_gate : of_up, is_row);
    }
    if (config::weighted && first)
        ptx::cp_async_4(all_factors + 2 * side + own, weight + own_row * weight_step, is_row);

    Rows<config::dh_dtype> dh_rows(dh, dh_row, at);
    Rows<config::dtype> gate_rows(gate, gate_row, at), up_rows(up, up_row, at);
    Row row[8];
    for_each_row(at, [&](int i, bool in_bounds) {
        row[i] = {dh_rows.load(i, in_bounds), gate_rows.load(i, in_bounds), up_rows.load(i, in_bounds)};
    });
    ptx::cp_async_wait_all();
    __syncwarp();
    const float* factors = all_factors + at.row_in_block();
    auto factors_of = [&](int i) { return Factors{factors[i], factors[side + i], factors[2 * side + i]}; };
    Silu silu{reinterpret_cast<float4*>(shared + smem::silu) + threadIdx.x};
    FloatVec8 value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        FloatVec8 silu_row;
        value[i] = gradient_of_gate(row[i], factors_of(i), silu_row);
        silu.store(i, silu_row);
    }
    quantize_block<both, config::format, config::power_of_2>(gradients, gradient_at, value, shared);

    dh_rows.load_again(), up_rows.load_again();
    for_each_row(at, [&](int i, bool in_bounds) {
        row[i].dh = dh_rows.load(i, in_bounds);
        if constexpr (is_encoded) row[i].up = up_rows.load(i, in_bounds);
    });
    store_transposed(data_t, gradient_at, round_up(gradient_at.columns_t, 16), shared);
    gradient_at.k_tile += tiles(at.k);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = gradient_of_up(row[i], factors_of(i), silu.load(i));
    quantize_block<both, config::format, config::power_of_2>(gradients, gradient_at, value, shared);

    dh_rows.load_again();
    for_each_row(at, [&](int i, bool in_bounds) {
        if constexpr (config::weighted) row[i].dh = dh_rows.load(i, in_bounds);
        if constexpr (!is_encoded) row[i].up = up_rows.load(i, in_bounds);
    });
    store_transposed(data_t, gradient_at, round_up(gradient_at.columns_t, 16), shared);
    float of_weight[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = recompute_h(row[i], factors_of(i), silu.load(i), of_weight[i]);
    if constexpr (config::weighted) {
        const float sum = reduce_rows<crossed>(of_weight, [](float a, float b) { return __fadd_rn(a, b); });
        const unsigned m_of_sum = at.row() + owned_index<8>();
        float* part = parts + mul_wide(m_of_sum, tiles(at.k)) + at.k_tile;
        ptx::store_float(part, sum, is_first_owner<8>() && m_of_sum < at.end);
    }
    constexpr int form_of_h = config::h_in_blocks ? transposed_block : transposed_only;
    quantize_block<form_of_h, config::h_format, config::h_power_of_2>(result, at, value, shared);
    // with one scale for h, the addresses of this store are computed again: two registers more do not fit meanwhile
    store_transposed(
        h_t, at, round_up(at.columns_t, 16), config::h_in_blocks ? ptx::opaque(shared) : shared);
}
