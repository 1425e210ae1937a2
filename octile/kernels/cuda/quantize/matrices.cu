// Quantizes many matrices in 128×128 blocks by one launch, each as blocks.cu does.
//
// NOTES: a model has a hundred weights, most of them too small to fill a GPU or to take longer than their launch; and the
// gradients of layers that read one input are quantized next to each other, as one matrix. The matrices are an argument
// and not a table in memory, so nothing must be copied to the GPU before the launch.
#include "block.cuh"

// A batch of matrices [m, k] with strides x_batch, x_row and 1. Its results are those of the columns from 128 · k_tile on
// of a matrix [m, all_k] with the outputs that follow x. row_bytes_t: from one row of data_t to the next. first: the
// thread block that takes its first 128×128 block. `launcher.py` packs it.
struct Matrix {
    const uint8_t* x;
    uint8_t *data, *data_t;
    float *scale, *scale_t;
    int64_t x_batch;
    int x_row, m, k, raster_inverse, row_bytes_t;
    unsigned first, all_k, k_tile;
};

struct Matrices {
    Matrix at[config::capacity];
};

// The last of `count` matrices whose first thread block is not after this one.
__device__ __forceinline__ const Matrix& find_matrix(const Matrices& matrices, unsigned count) {
    unsigned low = 0;
    for (unsigned high = count; high - low > 1;) {
        const unsigned middle = (low + high) / 2;
        if (matrices.at[middle].first <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return matrices.at[low];
}

extern "C" __global__ void __launch_bounds__(block_threads, config::blocks)
matrices(const __grid_constant__ Matrices all, int count) {
    constexpr int dtype = config::dtype;
    const Matrix& own = find_matrix(all, count);
    const Outputs to{own.data, own.data_t, own.scale, own.scale_t};
    uint8_t* shared = ptx::dynamic_shared();
    BlockCoord at =
        block_coord<config::raster_height>(blockIdx.x - own.first, own.m, own.k, own.raster_inverse, nullptr, 0);
    const int64_t first = at.batch * own.x_batch + at.row() * static_cast<int64_t>(own.x_row) + at.column();
    const int64_t row_bytes = bytes<dtype>(own.x_row);
    const uint8_t* x = own.x + bytes<dtype>(first);
    at.k = own.all_k, at.k_tile += own.k_tile;

    Vec8<dtype> loaded[8];
    for_each_row(at, [&](int i, bool in_bounds) { loaded[i] = load_vec8<dtype>(x + i * row_bytes, in_bounds); });
    quantize_block<config::form, config::format, config::power_of_2>(to, at, loaded, shared);
    if constexpr (has_transposed(config::form)) store_transposed(to.data_t, at, own.row_bytes_t, shared);
}
