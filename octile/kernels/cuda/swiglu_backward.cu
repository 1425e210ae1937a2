// SwiGLU's gradients and its result, from squares of dh, gate and up: d(gate) and d(up) along rows and columns, h turned.
//
// A block makes one square of each, one after the other.
//
// NOTES
// - Three squares of FP32 numbers do not fit into a block's registers, nor does one beside three of inputs. What the three
//   share, silu(gate), waits in shared memory; dh and up are loaded a second time, from the L1 cache.
// - All that is loaded of a square is under way at once.
#include "square.cuh"
#include "silu.cuh"

enum Part { of_gate, of_up, of_h };

namespace place {  // in shared memory, behind what a square takes
constexpr int silu = bytes;
constexpr int factors = silu + 4 * side * side;  // of the square's rows: the scales of gate and of up, and the weights
}  // namespace place

struct Inputs {
    const uint8_t *dh, *gate, *up;
    int64_t dh_row, gate_row, up_row;
    float* parts;  // of the gradient of each row's weight, one for each square along the row
};

// silu(gate) of the thread's row i.
__device__ __forceinline__ float4* silu_of(uint8_t* shared, int i) {
    return reinterpret_cast<float4*>(shared + place::silu) + 2 * i * square_threads + threadIdx.x;
}

// The thread's part of one row.
template <int part>
struct Row {
    Eight<config::dh_number> dh;
    Eight<config::number> gate, up;

    // Of d(gate), d(up) or h. factors: of this row. silu: found with d(gate), and read afterwards. of_weight: the row's part
    // of the gradient of its weight, with h.
    __device__ __forceinline__ Floats find(const float* factors, float4* silu, float& of_weight) const {
        constexpr bool kept = config::number >= e4m3;
        const float weight = factors[2 * side];
        auto gate_at = [&](int j) { return kept ? __fmul_rn(gate.at(j), factors[0]) : gate.at(j); };
        auto up_at = [&](int j) { return kept ? __fmul_rn(up.at(j), factors[side]) : up.at(j); };
        Floats found, gated;
        if constexpr (part != of_gate) {
            const float4 low = silu[0], high = silu[square_threads];
            gated = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float x;
            if constexpr (part == of_h) {
                x = __fmul_rn(gated.value[j], up_at(j));
                if constexpr (config::weighted) {
                    of_weight = __fmaf_rn(dh.at(j), x, of_weight);
                    x = __fmul_rn(x, weight);
                }
            } else {
                x = config::weighted ? __fmul_rn(dh.at(j), weight) : dh.at(j);
                if constexpr (part == of_up) {
                    x = __fmul_rn(x, gated.value[j]);
                } else {
                    const float g = gate_at(j), s = sigmoid(g);
                    gated.value[j] = __fmul_rn(g, s);
                    const float slope = __fmaf_rn(gated.value[j], __fsub_rn(1.0f, s), s);  // s · (1 + g · (1 − s))
                    x = __fmul_rn(__fmul_rn(x, up_at(j)), slope);
                }
            }
            found.value[j] = x;
        }
        if constexpr (part == of_gate) {
            const float(&v)[8] = gated.value;
            silu[0] = make_float4(v[0], v[1], v[2], v[3]);
            silu[square_threads] = make_float4(v[4], v[5], v[6], v[7]);
        }
        return found;
    }
};

// What the thread needs of `count` rows from the first on, all of it under way at once.
template <int part, int count>
__device__ __forceinline__ void load(Row<part> (&row)[count], const Inputs& from, const Square& at, int first) {
    const int64_t m = at.row() + first;
    const int there = at.rows() - first;
    const uint8_t* dh = ptx::forget(from.dh) + bytes<config::dh_number>(m * from.dh_row + at.column());
    const uint8_t* gate = from.gate + bytes<config::number>(m * from.gate_row + at.column());
    const uint8_t* up = ptx::forget(from.up) + bytes<config::number>(m * from.up_row + at.column());
    auto load_rows = [&](bool all) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const bool is_there = all || i < there;
            if constexpr (part != of_h || config::weighted) row[i].dh = load_eight<config::dh_number>(dh, is_there);
            if constexpr (part == of_gate) row[i].gate = load_eight<config::number>(gate, is_there);
            if constexpr (part != of_up) row[i].up = load_eight<config::number>(up, is_there);
            dh += bytes<config::dh_number>(from.dh_row);
            gate += bytes<config::number>(from.gate_row), up += bytes<config::number>(from.up_row);
        }
    };
    if ((at.m_tile + 1) * side <= at.m)  // most squares: nothing is asked, and nothing set to zero
        load_rows(true);
    else
        load_rows(false);
}

template <int part, int form, int format, bool power_of_2>
__device__ __forceinline__ void cast_part(
    const Cast& to, const Square& to_at, const Inputs& from, const Square& at, uint8_t* shared) {
    Row<part> row[8];
    load<part>(row, from, at, 0);
    if constexpr (part == of_gate) __syncthreads();  // the factors are there
    const float* factors = reinterpret_cast<const float*>(shared + place::factors) + at.row() % side;
    Floats value[8];
    float of_weight[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = row[i].find(factors + i, silu_of(shared, i), of_weight[i]);
    if constexpr (config::weighted && part == of_h) {
        const float sum = over_row<crossed>(of_weight, [](float a, float b) { return __fadd_rn(a, b); });
        const unsigned m = at.row() + owned<8>();
        ptx::store_float(from.parts + wide(m, tiles(at.k)) + at.k_tile, sum, first_owner<8>() && m < at.m);
    }
    auto again = [&](int i) {
        Row<part> one[1];
        float ignored = 0.0f;
        load<part>(one, from, at, i);
        return one[0].find(factors + i, silu_of(shared, i), ignored);
    };
    cast_square<form, format, power_of_2>(to, to_at, value, again, shared);
}

// data, data_t, …: the gradients, [m, 2h], those of gate beside those of up. h_t, h_scale_t: h, only turned.
extern "C" __global__ void __launch_bounds__(square_threads, config::blocks)
swiglu_backward(const uint8_t* dh, const uint8_t* gate, const uint8_t* up, const float* gate_scale,
                const float* up_scale, const float* weight, uint8_t* data, float* scale, uint8_t* data_t,
                float* scale_t, uint8_t* h_t, float* h_scale_t, float* parts, int64_t dh_row, int64_t gate_row,
                int64_t up_row, int64_t gate_scale_row, int64_t gate_scale_tile, int64_t up_scale_row,
                int64_t up_scale_tile, int64_t weight_step, int m, int h, int band_inverse) {
    const Cast gradients{data, data_t, scale, scale_t}, result{nullptr, h_t, nullptr, h_scale_t};
    const Inputs from{dh, gate, up, dh_row, gate_row, up_row, parts};
    uint8_t* shared = ptx::dynamic_shared();
    const Square at = square_of<config::band>(blockIdx.x, m, h, band_inverse);
    if (threadIdx.x < side) {
        const int64_t row = at.m_tile * side + threadIdx.x;
        const bool kept = config::number >= e4m3 && row < m, weighted = config::weighted && row < m;
        float* factors = reinterpret_cast<float*>(shared + place::factors) + threadIdx.x;
        factors[0] = ptx::load_float(gate_scale + row * gate_scale_row + at.k_tile * gate_scale_tile, kept);
        factors[side] = ptx::load_float(up_scale + row * up_scale_row + at.k_tile * up_scale_tile, kept);
        factors[2 * side] = ptx::load_float(weight + row * weight_step, weighted);
    }
    Square beside = at;
    beside.k = 2 * at.k;
    cast_part<of_gate, both, config::format, config::power_of_2>(gradients, beside, from, at, shared);
    beside.k_tile += tiles(at.k);
    cast_part<of_up, both, config::format, config::power_of_2>(gradients, beside, from, at, shared);
    cast_part<of_h, turned_only, config::h_format, config::h_power_of_2>(result, at, from, at, shared);
}
