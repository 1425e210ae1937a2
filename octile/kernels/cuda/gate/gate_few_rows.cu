// The gate of few rows: their logits, and the choice of their experts, in one kernel. An FP32 weight is three BF16 terms.
//
// A cluster of 8 thread blocks has 8 rows, or 16, and each block an eighth of the columns. A warp multiplies the weights of 16
// experts, a tile, by the rows. A block chooses for one row, or two: it receives the partial sums of these rows from all blocks,
// and adds them in the order of the blocks. So a row has the same bits whatever the number of rows is.
//
// NOTES
// - The first weights are loaded before the previous kernel has ended, which must not write them.
// - mma sums over 16 columns in any order, if both operands have the same. A lane loads 8 neighboring columns of both, and
//   takes four of them for each of two mma.
#include "choice.cuh"
#include "terms.cuh"
#include "vec8.cuh"

constexpr int k = config::columns, gate_warps = config::warps, gate_threads = 32 * gate_warps;
constexpr int cluster = 8, row_tiles = config::row_tiles, num_rows = 8 * row_tiles;  // a row of each tile for each block
constexpr int chunk = 32;                                                            // columns of a warp at a time
constexpr int block_chunks = (k + chunk * cluster - 1) / (chunk * cluster);          // of a thread block
constexpr int tiles = (experts + 15) / 16, tile_warps = tiles < gate_warps ? tiles : gate_warps;
constexpr int parts = gate_warps / tile_warps;  // of a block's columns, of which each has a warp for a tile
constexpr int held = row_tiles == 1 ? 4 : 2;  // chunks that a lane holds: of many rows two thread blocks fit on an SM
constexpr int terms = config::weight_dtype == float32 ? 3 : 1;

struct alignas(16) Shared {
    float sums[row_tiles][cluster * parts][experts];  // of the rows that this block chooses for
    float logits[row_tiles][experts];
};
static_assert(sizeof(Shared) == config::shared_bytes);  // few_rows.py computes the same

// The weights of a lane's two experts of a tile, in some chunks.
struct Weights {
    Vec8<config::weight_dtype> of[held][2];
};

__device__ __forceinline__ Weights load_weights(const uint8_t* weight, int tile, int first, int end) {
    Weights loaded;
#pragma unroll
    for (int i = 0; i < held; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int c = first + i * parts, at = chunk * c + ptx::lane_id() % 4 * 8;
            const int expert = 16 * tile + 8 * h + ptx::lane_id() / 4;
            loaded.of[i][h] = load_vec8<config::weight_dtype>(
                weight + bytes<config::weight_dtype>(int64_t(expert) * k + at), expert < experts && c < end && at < k);
        }
    return loaded;
}

// Columns of the rows that a lane multiplies by them.
struct Rows {
    uint4 of[row_tiles][held];
};

__device__ __forceinline__ Rows load_rows(const uint8_t* x, int64_t x_row, int first_row, int rows, int first, int end) {
    Rows loaded;
#pragma unroll
    for (int r = 0; r < row_tiles; ++r)
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const int c = first + i * parts, at = chunk * c + ptx::lane_id() % 4 * 8;
            const int row = first_row + 8 * r + ptx::lane_id() / 4;
            loaded.of[r][i] = make_uint4(0, 0, 0, 0);
            if (row < rows && c < end && at < k)  // not through the read-only cache: the previous kernel may write x
                loaded.of[r][i] = __ldcg(reinterpret_cast<const uint4*>(x + 2 * (row * x_row + at)));
        }
    return loaded;
}

// Splits off a term of four neighboring weights of both experts: what they are to one mma.
template <int dtype>
__device__ __forceinline__ void next_terms(uint32_t (&a)[4], Vec8<dtype> (&of)[2], int quad) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            if constexpr (dtype == float32)
                a[h + 2 * p] = next_term(of[h].value[4 * quad + 2 * p], of[h].value[4 * quad + 2 * p + 1]);
            else
                a[h + 2 * p] = of[h].pair[2 * quad + p];
        }
}

// x: [rows, k] bfloat16, rows at x_row elements from each other. weight: [experts, k], contiguous. bias: [experts], or any
// address if there is none. logits: [rows, experts]. weights, expert_of: [rows, chosen].
extern "C" __global__ void __launch_bounds__(gate_threads, row_tiles)
gate_few_rows(const uint8_t* x, const uint8_t* weight, const float* bias, float* logits, float* weights,
              int64_t* expert_of, float factor, float eps, int64_t x_row, int rows) {
    Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    const int rank = ptx::cluster_ctarank(), warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int first_row = blockIdx.x / cluster * num_rows, first_tile = warp % tile_warps, part = warp / tile_warps;
    const int begin = rank * block_chunks + part, end = part < parts ? (rank + 1) * block_chunks : 0;
    Weights own = load_weights(weight, first_tile, begin, end);
    ptx::cluster_sync();  // all blocks have begun, so that they can be written to; ptxas loads no weight after it
    if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
    Rows read = load_rows(x, x_row, first_row, rows, begin, end);

    for (int tile = first_tile; tile < tiles && part < parts; tile += tile_warps) {
        float sums[row_tiles][4] = {}, rest[row_tiles][4] = {};  // of the first terms, and of the others
        for (int first = begin; first < end; first += held * parts) {
            if (tile != first_tile || first != begin) {
                own = load_weights(weight, tile, first, end);
                read = load_rows(x, x_row, first_row, rows, first, end);
            }
#pragma unroll
            for (int i = 0; i < held; ++i)
#pragma unroll
                for (int term = 0; term < terms; ++term)
#pragma unroll
                    for (int quad = 0; quad < 2; ++quad) {
                        uint32_t a[4];
                        next_terms(a, own.of[i], quad);
#pragma unroll
                        for (int r = 0; r < row_tiles; ++r) {
                            const uint4& b = read.of[r][i];
                            ptx::mma_bf16(term == 0 ? sums[r] : rest[r], a[0], a[1], a[2], a[3], quad ? b.z : b.x,
                                          quad ? b.w : b.y);
                        }
                    }
        }
#pragma unroll
        for (int r = 0; r < row_tiles; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int expert = 16 * tile + 8 * (i / 2) + lane / 4, chooser = lane % 4 * 2 + i % 2;
                if (expert < experts)
                    ptx::store_cluster(
                        ptx::cluster_address(&shared.sums[r][rank * parts + part][expert], chooser),
                        __float_as_uint(terms > 1 ? __fadd_rn(sums[r][i], rest[r][i]) : sums[r][i]));
            }
    }
    ptx::cluster_sync();

    for (int i = threadIdx.x; i < row_tiles * experts; i += gate_threads) {
        const int r = i / experts, e = i % experts, row = first_row + 8 * r + rank;
        float logit = shared.sums[r][0][e];
#pragma unroll
        for (int source = 1; source < cluster * parts; ++source) logit = __fadd_rn(logit, shared.sums[r][source][e]);
        shared.logits[r][e] = logit;
        if (row < rows) logits[int64_t(row) * experts + e] = logit;
    }
    __syncthreads();
    const int64_t row = first_row + 8 * warp + rank;
    if (warp >= row_tiles || row >= rows) return;
    const Chosen found = choose([&](int e) { return shared.logits[warp][e]; }, bias, factor, eps);
    if (lane >= chosen) return;
    weights[row * chosen + lane] = found.weight;
    expert_of[row * chosen + lane] = found.expert;
}
