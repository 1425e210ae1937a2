// SwiGLU's gradients and its result, from squares of dh, gate and up: d(gate) and d(up) along rows and columns, h turned.
//
// A block makes one square of each, one after the other.
//
// NOTES
// - Three squares of FP32 numbers do not fit into a block's registers, nor does one beside three of inputs. What the three
//   share, silu(gate), waits in shared memory; dh and up are loaded a second time, from the L2 cache, and with weights dh
//   a third time, for their gradient.
// - A block waits for memory for most of its time. So all that is loaded for a square is under way at once, and before the
//   square ahead of it is stored turned; codes of up, of which a square takes few registers, come one square earlier still.
// - L1 holds what is under way, and what shared memory leaves is L1: one of a thread's eight rows of silu(gate) stays in
//   registers, with which shared memory needs 80 KiB instead of 88.
// - A warp copies the factors of its own rows, and so waits for them alone and not with the block.
#include "block.cuh"
#include "silu.cuh"

constexpr bool codes = config::dtype >= e4m3;  // of gate and up, with a scale for 1×128

namespace place {  // in shared memory, behind what a square takes
constexpr int silu = bytes;                                 // float4 [7][2][square_threads]
constexpr int factors = silu + 7 * 2 * 16 * square_threads;  // float [3][side], of rows: as in Factors
}  // namespace place

// The thread's eight rows of a matrix.
template <int number>
struct Rows {
    const uint8_t* first;
    int64_t step;

    __device__ __forceinline__ Rows(const uint8_t* matrix, int64_t row, const Square& at)
        : first(matrix + bytes<number>(at.row() * row + at.column())), step(bytes<number>(row)) {}
    __device__ __forceinline__ Eight<number> load(int i, bool there) const {
        return load_eight<number>(first + i * step, there);
    }
    // Once more, with nothing kept of what was loaded.
    __device__ __forceinline__ void forget() { first = ptx::forget(first); }
};

// silu(gate) of the thread's rows: the last in registers, the others in shared memory.
struct Silu {
    float4* shared;
    Floats last;

    __device__ __forceinline__ void keep(int i, const Floats& x) {
        if (i == 7) {
            last = x;
        } else {
            const float(&v)[8] = x.value;
            shared[2 * i * square_threads] = make_float4(v[0], v[1], v[2], v[3]);
            shared[(2 * i + 1) * square_threads] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    __device__ __forceinline__ Floats kept(int i) const {
        if (i == 7) return last;
        const float4 low = shared[2 * i * square_threads], high = shared[(2 * i + 1) * square_threads];
        return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    }
};

struct Factors {  // of a row
    float gate_scale, up_scale, weight;
};

// What the thread has loaded of a row.
struct Row {
    Eight<config::dh_dtype> dh;
    Eight<config::dtype> gate, up;

    __device__ __forceinline__ float gate_at(int j, const Factors& by) const {
        return codes ? __fmul_rn(gate.at(j), by.gate_scale) : gate.at(j);
    }
    __device__ __forceinline__ float up_at(int j, const Factors& by) const {
        return codes ? __fmul_rn(up.at(j), by.up_scale) : up.at(j);
    }
    __device__ __forceinline__ float dh_at(int j, const Factors& by) const {
        return config::weighted ? __fmul_rn(dh.at(j), by.weight) : dh.at(j);
    }
};

// d(gate); silu: found with it.
__device__ __forceinline__ Floats gradient_of_gate(const Row& row, const Factors& by, Floats& silu) {
    Floats found;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float g = row.gate_at(j, by), s = sigmoid(g);
        silu.value[j] = __fmul_rn(g, s);
        const float slope = __fmaf_rn(silu.value[j], __fsub_rn(1.0f, s), s);  // s · (1 + g · (1 − s))
        found.value[j] = __fmul_rn(__fmul_rn(row.dh_at(j, by), row.up_at(j, by)), slope);
    }
    return found;
}

__device__ __forceinline__ Floats gradient_of_up(const Row& row, const Factors& by, const Floats& silu) {
    Floats found;
#pragma unroll
    for (int j = 0; j < 8; ++j) found.value[j] = __fmul_rn(row.dh_at(j, by), silu.value[j]);
    return found;
}

// h; of_weight: the row's part of the gradient of its weight.
__device__ __forceinline__ Floats result_of(const Row& row, const Factors& by, const Floats& silu, float& of_weight) {
    Floats found;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        found.value[j] = __fmul_rn(silu.value[j], row.up_at(j, by));
        if constexpr (config::weighted) {
            of_weight = __fmaf_rn(row.dh.at(j), found.value[j], of_weight);
            found.value[j] = __fmul_rn(found.value[j], by.weight);
        }
    }
    return found;
}

// data, data_t, …: the gradients, [m, 2h], those of gate beside those of up. h_t, h_scale_t: h, only turned. parts: of the
// gradient of each row's weight, one for each square along the row.
extern "C" __global__ void __launch_bounds__(square_threads, config::blocks)
swiglu_backward(const uint8_t* dh, const uint8_t* gate, const uint8_t* up, const float* gate_scale,
                const float* up_scale, const float* weight, uint8_t* data, float* scale, uint8_t* data_t,
                float* scale_t, uint8_t* h_t, float* h_scale_t, float* parts, int64_t dh_row, int64_t gate_row,
                int64_t up_row, int64_t gate_scale_row, int64_t gate_scale_tile, int64_t up_scale_row,
                int64_t up_scale_tile, int64_t weight_step, int m, int h, int band_inverse) {
    const Cast gradients{data, data_t, scale, scale_t}, result{nullptr, h_t, nullptr, h_scale_t};
    uint8_t* shared = ptx::dynamic_shared();
    const Square at = square_of<config::raster_height>(blockIdx.x, m, h, band_inverse);
    Square beside = at;  // in the gradients
    beside.k = 2 * at.k;

    float* all_factors = reinterpret_cast<float*>(shared + place::factors);
    const unsigned own = threadIdx.x / 32 * 16 + ptx::lane_id() % 16;  // two lanes a row
    const int64_t own_row = at.m_tile * side + own;
    const bool first = ptx::lane_id() < 16, is_row = own_row < m;
    if constexpr (codes) {
        const float* of_gate = gate_scale + own_row * gate_scale_row + at.k_tile * gate_scale_tile;
        const float* of_up = up_scale + own_row * up_scale_row + at.k_tile * up_scale_tile;
        ptx::cp_async_4(all_factors + (first ? 0 : side) + own, first ? of_gate : of_up, is_row);
    }
    if (config::weighted && first)
        ptx::cp_async_4(all_factors + 2 * side + own, weight + own_row * weight_step, is_row);

    Rows<config::dh_dtype> dh_rows(dh, dh_row, at);
    Rows<config::dtype> gate_rows(gate, gate_row, at), up_rows(up, up_row, at);
    Row row[8];
    each_row(at, [&](int i, bool there) {
        row[i] = {dh_rows.load(i, there), gate_rows.load(i, there), up_rows.load(i, there)};
    });
    ptx::cp_async_wait_all();
    __syncwarp();
    const float* factors = all_factors + at.row() % side;
    auto factors_of = [&](int i) { return Factors{factors[i], factors[side + i], factors[2 * side + i]}; };
    Silu silu{reinterpret_cast<float4*>(shared + place::silu) + threadIdx.x};
    Floats value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        Floats found;
        value[i] = gradient_of_gate(row[i], factors_of(i), found);
        silu.keep(i, found);
    }
    cast_square<both, config::format, config::power_of_2>(gradients, beside, value, shared);

    dh_rows.forget(), up_rows.forget();
    each_row(at, [&](int i, bool there) {
        row[i].dh = dh_rows.load(i, there);
        if constexpr (codes) row[i].up = up_rows.load(i, there);
    });
    store_turned(data_t, beside, shared);
    beside.k_tile += tiles(at.k);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = gradient_of_up(row[i], factors_of(i), silu.kept(i));
    cast_square<both, config::format, config::power_of_2>(gradients, beside, value, shared);

    dh_rows.forget();
    each_row(at, [&](int i, bool there) {
        if constexpr (config::weighted) row[i].dh = dh_rows.load(i, there);
        if constexpr (!codes) row[i].up = up_rows.load(i, there);
    });
    store_turned(data_t, beside, shared);
    float of_weight[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = result_of(row[i], factors_of(i), silu.kept(i), of_weight[i]);
    if constexpr (config::weighted) {
        const float sum = over_row<crossed>(of_weight, [](float a, float b) { return __fadd_rn(a, b); });
        const unsigned m_of_sum = at.row() + owned<8>();
        ptx::store_float(parts + wide(m_of_sum, tiles(at.k)) + at.k_tile, sum, first_owner<8>() && m_of_sum < at.m);
    }
    cast_square<transposed_only, config::h_format, config::h_power_of_2>(result, at, value, shared);
    store_turned(h_t, at, shared);
}
