// The gate of few rows: their logits, and the choice of their experts, in one kernel. An FP32 weight is three BF16 terms.
//
// A cluster of 8 thread blocks has 8 rows, or 16, and each block an eighth of the columns. A warp multiplies the weights of 16
// experts, a tile, by the rows. A block chooses for one row, or two: it receives the partial sums of these rows from all blocks,
// and adds them in the order of the blocks. So a row has the same bits whatever the number of rows is.
//
// If row_invariant, a row has the bits of octile/kernels/triton/row_invariant.py, and so of a single row in mixture_gate.cu:
// the weight is in BF16, a warp multiplies the weights of a tile in a part of 512 columns, a unit, by the rows, and the
// parts of a logit are added in their order. Each block has an eighth of the units, by part, and stages their columns of the
// rows in shared memory.
//
// NOTES
// - The first weights are loaded before the previous kernel has ended, which must not write them.
// - mma sums over 16 columns in any order, if both operands have the same. A lane loads 8 neighboring columns of both, and
//   takes four of them for each of two mma. If row_invariant, it loads 4, since the 16 have to be neighbors, too.
#include "gate_part.cuh"
#include "terms.cuh"
#include "vec8.cuh"

constexpr int k = config::columns, gate_warps = config::warps, gate_threads = 32 * gate_warps;
constexpr int cluster = 8, row_tiles = config::row_tiles, num_rows = 8 * row_tiles;  // a row of each tile for each block
constexpr int chunk = 32;                                                            // columns of a warp at a time
constexpr int block_chunks = (k + chunk * cluster - 1) / (chunk * cluster);          // of a thread block
constexpr int tile_warps = expert_tiles < gate_warps ? expert_tiles : gate_warps;
constexpr int parts = gate_warps / tile_warps;  // of a block's columns, of which each has a warp for a tile
constexpr int held = row_tiles == 1 ? 4 : 2;  // chunks that a lane holds: of many rows two thread blocks fit on an SM
constexpr int terms = config::weight_dtype == float32 ? 3 : 1;

// If row_invariant: units of a block, and the parts of the columns that they lie in at most.
constexpr int units = column_parts * expert_tiles, block_units = (units + cluster - 1) / cluster;
constexpr int block_parts = config::row_invariant ? (block_units + expert_tiles - 2) / expert_tiles + 1 : 0;
constexpr int sources = config::row_invariant ? column_parts : cluster * parts;  // of sums that make up a logit
constexpr int steps_ahead = 8;  // that are loaded together, of the next unit
static_assert(!config::row_invariant || config::weight_dtype == bfloat16);

struct alignas(16) Shared {
    float sums[row_tiles][sources][experts];  // of the rows that this block chooses for
    float logits[row_tiles][experts];
};

// Columns of a row in a part. The padding puts what a warp reads of four rows at a time into different banks.
struct alignas(16) RowOfPart {
    uint16_t column[part_columns + 16];
};
static_assert(sizeof(Shared) + block_parts * num_rows * sizeof(RowOfPart) == config::shared_bytes);  // as in few_rows.py

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

// Copies the rows' columns in some parts, with zeros for those that do not exist.
__device__ __forceinline__ void stage_rows(RowOfPart* staged, const uint8_t* x, int64_t x_row, int first_row, int rows,
                                           int first_part, int end_part) {
    constexpr int vectors = part_columns / 8;
    for (int i = threadIdx.x; i < (end_part - first_part) * num_rows * vectors; i += gate_threads) {
        const int row = first_row + i / vectors % num_rows;
        const int column = i % vectors * 8, at = (first_part + i / vectors / num_rows) * part_columns + column;
        uint16_t* to = &staged[i / vectors].column[column];
        if (row < rows && at < k)
            ptx::cp_async_16(to, x + 2 * (row * x_row + at));  // past the read-only cache, as in load_rows
        else
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
}

// Sends the four sums of a lane, sum(i), of a tile of rows and one of experts to the blocks that choose for the rows.
template <class Sum>
__device__ __forceinline__ void send(Shared& shared, int r, int source, int tile, Sum sum) {
    const int lane = ptx::lane_id();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int expert = 16 * tile + 8 * (i / 2) + lane / 4, chooser = lane % 4 * 2 + i % 2;
        if (expert < experts)
            ptx::store_cluster(ptx::cluster_address(&shared.sums[r][source][expert], chooser), __float_as_uint(sum(i)));
    }
}

// x: [rows, k] bfloat16, rows at x_row elements from each other. weight: [experts, k], contiguous. bias: [experts], or any
// address if there is none. logits: [rows, experts]. weights, expert_of: [rows, chosen].
extern "C" __global__ void __launch_bounds__(gate_threads, config::row_invariant ? 1 : row_tiles)
gate_few_rows(const uint8_t* x, const uint8_t* weight, const float* bias, float* logits, float* weights,
              int64_t* expert_of, float factor, float eps, int64_t x_row, int rows) {
    Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
    const int rank = ptx::cluster_ctarank(), warp = threadIdx.x / 32, lane = ptx::lane_id();
    const int first_row = blockIdx.x / cluster * num_rows;
    if constexpr (config::row_invariant) {
        RowOfPart* staged = reinterpret_cast<RowOfPart*>(&shared + 1);
        const int begin = rank * block_units, end = min(begin + block_units, units);
        const int first_part = begin / expert_tiles, end_part = (end + expert_tiles - 1) / expert_tiles;
        const Lane at;
        GatePart own;
        auto load_steps = [&](int unit, int first, int count) {
            own.load(at, reinterpret_cast<const uint16_t*>(weight), unit % expert_tiles, unit / expert_tiles, first,
                     first + count);
        };
        if (begin + warp < end) load_steps(begin + warp, 0, GatePart::steps);
        ptx::cluster_sync();  // as below
        if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
        stage_rows(staged, x, x_row, first_row, rows, first_part, end_part);

        for (int unit = begin + warp; unit < end; unit += gate_warps) {
            const RowOfPart* of_part = staged + (unit / expert_tiles - first_part) * num_rows;
            float sums[row_tiles][4] = {};
#pragma unroll
            for (int first = 0; first < GatePart::steps; first += steps_ahead) {
#pragma unroll
                for (int s = first; s < first + steps_ahead; ++s)
#pragma unroll
                    for (int r = 0; r < row_tiles; ++r) {
                        const uint16_t* from = &of_part[8 * r + at.group].column[16 * s + 4 * at.member];
                        own.multiply(sums[r], s, *reinterpret_cast<const uint2*>(from));
                    }
                if (unit + gate_warps < end) load_steps(unit + gate_warps, first, steps_ahead);
            }
#pragma unroll
            for (int r = 0; r < row_tiles; ++r)
                send(shared, r, unit / expert_tiles, unit % expert_tiles, [&](int i) { return sums[r][i]; });
        }
    } else {
        const int first_tile = warp % tile_warps, part = warp / tile_warps;
        const int begin = rank * block_chunks + part, end = part < parts ? (rank + 1) * block_chunks : 0;
        Weights own = load_weights(weight, first_tile, begin, end);
        ptx::cluster_sync();  // all blocks have begun, so that they can be written to; ptxas loads no weight after it
        if constexpr (config::programmatic) ptx::wait_and_launch_dependents();
        Rows read = load_rows(x, x_row, first_row, rows, begin, end);

        for (int tile = first_tile; tile < expert_tiles && part < parts; tile += tile_warps) {
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
                send(shared, r, rank * parts + part, tile,
                     [&](int i) { return terms > 1 ? __fadd_rn(sums[r][i], rest[r][i]) : sums[r][i]; });
        }
    }
    ptx::cluster_sync();

    for (int i = threadIdx.x; i < row_tiles * experts; i += gate_threads) {
        const int r = i / experts, e = i % experts, row = first_row + 8 * r + rank;
        float logit = config::row_invariant ? 0.0f : shared.sums[r][0][e];
#pragma unroll
        for (int source = !config::row_invariant; source < sources; ++source)
            logit = __fadd_rn(logit, shared.sums[r][source][e]);
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
