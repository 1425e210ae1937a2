// Few rows of x in shared memory: quantized to E4M3 in 1×128 tiles and, exactly, converted to FP16.
//
// Each thread block of a product quantizes all rows, and normalizes them first if the product has a norm: that takes
// less time than one more kernel. The warps of a block divide the rows among them: one row has all warps, eight have
// one each.
//
// If row_invariant, there is one row, which stays in E4M3 for wgmma, and whose norm has the bits of rms_norm.cu.
#pragma once
#include "row_norm.cuh"
#include "row_product.cuh"
#include "vec8.cuh"
#include "warp_sums.cuh"

constexpr int k_blocks = (config::k + 127) / 128;
static_assert(!config::row_invariant || config::rows == 1);

struct Fp8Rows {
    static constexpr int pitch = 256 * k_blocks + 16;  // bytes of a row; rows begin in different banks
    static constexpr int rows_bytes = config::row_invariant ? RowOfX::bytes(k_blocks) : config::rows * pitch;
    static constexpr int bytes = rows_bytes + k_blocks * max_rows * 4 + warps * 4;
    static constexpr int warps_of_row = warps / config::rows;
    static constexpr int threads_of_row = 32 * warps_of_row;
    static constexpr int vectors = (16 * k_blocks + threads_of_row - 1) / threads_of_row;  // of 8 columns, in a thread
    // Whether the norm's weight is loaded before the previous kernel has ended: if it takes few registers.
    static constexpr bool loads_early = config::norm && vectors <= 2;
    using NormVec8 = Vec8<config::weight_dtype>;
    uint8_t* const shared;
    const uint8_t* const norm_weight;
    NormVec8 of_norm[loads_early ? vectors : 1];

    __device__ __forceinline__ Fp8Rows(uint8_t* shared, const uint8_t* norm_weight)
        : shared(shared), norm_weight(norm_weight) {
        if constexpr (loads_early)
#pragma unroll
            for (int v = 0; v < vectors; ++v) of_norm[v] = load_norm(v);
    }

    // The thread's first column of a vector.
    __device__ __forceinline__ static int column(int v) {
        return 8 * (v * threads_of_row + static_cast<int>(threadIdx.x) % threads_of_row);
    }
    __device__ __forceinline__ NormVec8 load_norm(int v) const {
        return load_vec8<config::weight_dtype>(
            norm_weight + ::bytes<config::weight_dtype>(column(v)), column(v) < config::k);
    }

    __device__ __forceinline__ float* all_scales() const {  // [k_blocks][max_rows]
        return reinterpret_cast<float*>(shared + rows_bytes);
    }
    // 8 values from column k on.
    __device__ __forceinline__ uint4 values(int row, int k) const {
        return *reinterpret_cast<const uint4*>(shared + row * pitch + 2 * k);
    }
    // The scales of two rows of x; those of rows that do not exist are undefined.
    __device__ __forceinline__ float2 scales(int block, int row) const {
        return *reinterpret_cast<const float2*>(all_scales() + block * max_rows + row);
    }

    // x: [rows, K] bfloat16 with strides x_row and 1.
    __device__ __forceinline__ void quantize(const uint16_t* x, int64_t x_row, float eps) const {
        const int row = threadIdx.x / threads_of_row;
        const bool has_row = row < config::rows;
        const uint16_t* from = x + static_cast<int64_t>(has_row ? row : 0) * x_row;
        auto load = [&](int v) {
            Bf16Vec8 loaded{};
            if (has_row && column(v) < config::k) {
                const uint4 bits = *reinterpret_cast<const uint4*>(from + column(v));
                loaded = {bits.x, bits.y, bits.z, bits.w};
            }
            return loaded;
        };
        float rstd = 1.0f;
        if constexpr (config::norm) {
            if constexpr (config::row_invariant)
                rstd = rstd_of(sum_of_squares(x, config::k, all_scales() + k_blocks * max_rows), eps);
            else
                rstd = rstd_of_loaded(load, eps);
        }
        if (!has_row) return;
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            const Bf16Vec8 loaded = load(v);
            FloatVec8 y;
            if constexpr (config::norm) {
                const NormVec8 w = loads_early ? of_norm[loads_early ? v : 0] : load_norm(v);
#pragma unroll
                for (int j = 0; j < 8; ++j) y.value[j] = __fmul_rn(__fmul_rn(loaded.at(j), rstd), w.at(j));
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) y.value[j] = loaded.at(j);
            }
            quantize_vec8(row, column(v), y);
        }
    }

    // 1 / √(mean of squares + eps) of the thread's row. All threads call it.
    template <class Load>
    __device__ __forceinline__ float rstd_of_loaded(Load load, float eps) const {
        float squares = 0.0f;
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            const Bf16Vec8 loaded = load(v);
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = __fmaf_rn(loaded.at(j), loaded.at(j), squares);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            squares += __shfl_xor_sync(all_lanes, squares, distance);
        if constexpr (warps_of_row > 1) {
            float* sums = all_scales() + k_blocks * max_rows;
            const int warp = threadIdx.x / 32;
            if (ptx::lane_id() == 0) sums[warp] = squares;
            __syncthreads();
            squares = 0.0f;
#pragma unroll
            for (int w = 0; w < warps_of_row; ++w) squares += sums[warp / warps_of_row * warps_of_row + w];
        }
        return rstd_of(squares, eps);
    }
    __device__ __forceinline__ static float rstd_of(float squares, float eps) {
        return ptx::rsqrt(__fadd_rn(__fmul_rn(squares, static_cast<float>(1.0 / config::k)), eps));
    }

    // Quantizes 8 values of a tile, which 16 lanes hold.
    __device__ __forceinline__ void quantize_vec8(int row, int column, const FloatVec8& y) const {
        float amax = y.amax();
#pragma unroll
        for (int distance = 1; distance < 16; distance *= 2)
            amax = ptx::max_abs(amax, __shfl_xor_sync(all_lanes, amax, distance));
        const float scale = scale_from_amax<e4m3, config::power_of_2>(amax);
        const Divisor divisor = make_divisor<config::power_of_2>(scale);
        float quotient[8];
        if (!config::power_of_2 && __any_sync(all_lanes, divisor.needs_careful_division())) {
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[j] = divisor.divide_carefully(y.value[j]);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) quotient[j] = divisor.template divide<config::power_of_2>(y.value[j]);
        }
        const uint32_t first = ptx::pack_e4m3(quotient[0], quotient[1], quotient[2], quotient[3]);
        const uint32_t second = ptx::pack_e4m3(quotient[4], quotient[5], quotient[6], quotient[7]);
        if (column >= 128 * k_blocks) return;
        if (ptx::lane_id() % 16 == 0) all_scales()[column / 128 * max_rows + row] = scale;
        if constexpr (config::row_invariant) {
            const RowOfX of_row{shared};
            of_row.store_4(column, first), of_row.store_4(column + 4, second);
            return;
        }
        const uint4 converted = make_uint4(ptx::e4m3_to_f16(first, false), ptx::e4m3_to_f16(first, true),
                                           ptx::e4m3_to_f16(second, false), ptx::e4m3_to_f16(second, true));
        *reinterpret_cast<uint4*>(shared + row * pitch + 2 * column) = converted;
    }
};
