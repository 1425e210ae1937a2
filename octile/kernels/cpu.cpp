// Block quantization to E4M3 and back on a CPU: what octile/ops/quantize.py and transpose.py specify, bit for bit
// but for the sign of a NaN. GEMMs of E4M3 operands: what octile/ops/matmul.py and grouped.py specify. GEMMs in FP32
// whose rows do not depend on each other: what octile/ops/row_invariant.py specifies. AdamW: what octile/ops/adamw.py
// specifies, bit for bit. Attention over a paged cache: what octile/ops/paged_attention.py specifies.
//
// torch needs some twelve passes over memory for what is one loop here, and its comparisons and its cast to FP8 are not
// vectorized. The loops below have no branches, so that the compiler vectorizes them. Absolute values are compared as
// integers: the order is the same, and NaN, above Inf, is the largest, so that a NaN reaches its block's scale.
//
// With OpenMP the loops run in torch's threads. Blocks do not depend on each other, nor the bits on the threads.
//
// Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.  Shapes: x [M, K], blocks of R×C, K of them along a row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Where the scale of block (i, j) lies.
struct Scale {
    float* data;
    int64_t row_stride, column_stride;  // in elements

    float& at(int64_t i, int64_t j) const { return data[i * row_stride + j * column_stride]; }
};

// An operand of a GEMM, [rows, K]: where its bytes and the scales of its blocks of block_rows×128 lie.
struct Operand {
    const uint8_t* data;
    int64_t row_stride, k_stride, group_stride;  // in elements
    Scale scale;                                 // of block (row / block_rows, k / 128)
    int64_t scale_group_stride, block_rows;
};

// Matrices [rows, K] in FP32 with contiguous rows, one after the other.
struct Matrices {
    const float* data;
    int64_t matrix_stride, row_stride;  // in elements

    const float* row(int64_t matrix, int64_t i) const { return data + matrix * matrix_stride + i * row_stride; }
};

// What a step of AdamW multiplies and adds.
struct AdamW {
    float step_size, root, decay, rest1, rest2, beta2, eps, gradient_scale;  // rest1 is 1 − β₁, rest2 is 1 − β₂
};

namespace {

constexpr float MAX = 448;  // of E4M3
constexpr float SMALLEST_SCALE = 0x1p-126f;
constexpr uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;
constexpr int64_t MIN_PARALLEL_VALUES = 1 << 15;  // as in torch
constexpr int64_t TILE = 128, CHUNK = 64;  // rows of a transposed tile, and the columns of it that are in the L1 cache

uint32_t bits(float x) {
    uint32_t result;
    std::memcpy(&result, &x, sizeof result);
    return result;
}

float number(uint32_t x) {
    float result;
    std::memcpy(&result, &x, sizeof result);
    return result;
}

// Round x, saturated, to nearest even.
inline uint8_t encode(float x) {
    const uint32_t sign = bits(x) >> 24 & 0x80, magnitude = bits(x) & MAGNITUDE;
    const uint32_t limited = std::min(magnitude, bits(MAX));
    const uint32_t normal = ((limited + 0x7ffff + (limited >> 20 & 1)) >> 20) - (120 << 3);
    // the last place of 2^14 is 2^-9, the spacing of E4M3's subnormal numbers
    const uint32_t subnormal = bits(number(limited) + 0x1p14f) - bits(0x1p14f);
    const uint32_t encoded = limited < bits(0x1p-6f) ? subnormal : normal;
    return sign | (magnitude > INFINITE ? 0x7f : encoded);
}

inline float decode(uint8_t encoded) {
    const uint32_t sign = uint32_t(encoded & 0x80) << 24, magnitude = encoded & 0x7f;
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t subnormal = bits(float(int32_t(magnitude)) * 0x1p-9f);
    const uint32_t finite = magnitude < 8 ? subnormal : normal;
    return number(sign | (magnitude == 0x7f ? 0x7fc00000 : finite));
}

// The scale of a block, from the bits of its largest absolute value.
template <bool POWER_OF_2>
inline float scale_of(uint32_t amax) {
    if (amax == 0) return 1;
    float scale = number(amax) / MAX;
    scale = scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
    if (POWER_OF_2 && scale == scale) scale = number((bits(scale) + 0x7fffff) & INFINITE);
    return scale;
}

// What x is multiplied or divided by to be encoded: multiplying by the inverse of a power of two is exact, and faster.
template <bool POWER_OF_2>
inline float divisor(float scale) {
    return POWER_OF_2 ? 1 / scale : scale;
}

template <bool POWER_OF_2>
inline uint8_t encode_scaled(float x, float d) {
    return encode(POWER_OF_2 ? x * d : x / d);
}

inline uint32_t largest(const float* x, int64_t n) {
    uint32_t result = 0;
    for (int64_t i = 0; i < n; ++i) result = std::max(result, bits(x[i]) & MAGNITUDE);
    return result;
}

// Transpose 8 rows of 8 bytes in each of the CHUNK / 8 words of a row.
inline void transpose_8x8(uint64_t (&rows)[8][CHUNK / 8]) {
    constexpr uint64_t MASKS[] = {0x00ff00ff00ff00ff, 0x0000ffff0000ffff, 0x00000000ffffffff};
    for (int level = 0; level < 3; ++level) {
        const int distance = 1 << level, shift = 8 << level;
        for (int row = 0; row < 8; ++row) {
            if (row & distance) continue;
            for (int word = 0; word < CHUNK / 8; ++word) {
                uint64_t &a = rows[row][word], &b = rows[row + distance][word];
                const uint64_t swapped = (a >> shift ^ b) & MASKS[level];
                b ^= swapped;
                a ^= swapped << shift;
            }
        }
    }
}

template <bool POWER_OF_2>
void quantize(
    const float* x, int64_t m, int64_t k, int64_t block_rows, int64_t block_columns, uint8_t* data, const Scale& scale
) {
#pragma omp parallel for if (m * k >= MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < m / block_rows + (m % block_rows > 0); ++i) {
        const int64_t first = i * block_rows, end = first + std::min(m - first, block_rows);
        if (block_columns == 1) {  // a scale for each column
            std::vector<uint32_t> amax(k);
            std::vector<float> divisors(k);
            for (int64_t row = first; row < end; ++row)
                for (int64_t c = 0; c < k; ++c) amax[c] = std::max(amax[c], bits(x[row * k + c]) & MAGNITUDE);
            for (int64_t c = 0; c < k; ++c)
                divisors[c] = divisor<POWER_OF_2>(scale.at(i, c) = scale_of<POWER_OF_2>(amax[c]));
            for (int64_t row = first; row < end; ++row)
                for (int64_t c = 0; c < k; ++c)
                    data[row * k + c] = encode_scaled<POWER_OF_2>(x[row * k + c], divisors[c]);
            continue;
        }
        for (int64_t left = 0, j = 0; left < k; left += block_columns, ++j) {
            const int64_t width = std::min(block_columns, k - left);
            uint32_t block_amax = 0;
            for (int64_t row = first; row < end; ++row)
                block_amax = std::max(block_amax, largest(x + row * k + left, width));
            const float d = divisor<POWER_OF_2>(scale.at(i, j) = scale_of<POWER_OF_2>(block_amax));
            for (int64_t row = first; row < end; ++row)
                for (int64_t c = row * k + left; c < row * k + left + width; ++c)
                    data[c] = encode_scaled<POWER_OF_2>(x[c], d);
        }
    }
}

template <bool POWER_OF_2>
bool quantize_columns(
    const float* x, const uint8_t* encoded, int64_t row_stride, int64_t m, int64_t k, const Scale& scale,
    const int32_t* rows, int64_t count, const int32_t* ends, int64_t tiles, int64_t p, uint8_t* data_t,
    int64_t stride_t, const Scale& scale_t
) {
    std::vector<int64_t> used(tiles), all_rows(tiles * TILE);
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t begin = ends ? ends[2 * i] : i * TILE, end = ends ? ends[2 * i + 1] : std::min(count, begin + TILE);
        used[i] = std::min(std::max<int64_t>(end - begin, 0), TILE);
        for (int64_t index = begin; index < begin + used[i]; ++index) {
            if (index < 0 || index >= count) return false;
            const int64_t row = rows ? rows[index] : index;
            if (row < 0 || row >= m) return false;
            all_rows[i * TILE + index - begin] = row;
        }
    }
#pragma omp parallel for collapse(2) if (p * k >= MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < tiles; ++i) {
        for (int64_t left = 0; left < k; left += CHUNK) {
            const int64_t width = std::min(CHUNK, k - left), height = std::min(TILE, p - i * TILE);
            const int64_t* tile_rows = all_rows.data() + i * TILE;
            alignas(64) float panel[TILE][CHUNK];
            if (width < CHUNK || used[i] < TILE) std::memset(panel, 0, sizeof panel);
            for (int64_t r = 0; r < used[i]; ++r) {
                const int64_t at = tile_rows[r] * row_stride + left;
                if (x) {
                    std::memcpy(panel[r], x + at, width * sizeof(float));
                    continue;
                }
                const float s = scale.at(tile_rows[r], left / TILE);
                for (int64_t c = 0; c < width; ++c) panel[r][c] = decode(encoded[at + c]) * s;
            }
            uint32_t amax[CHUNK] = {};
            for (int64_t r = 0; r < used[i]; ++r)
                for (int64_t c = 0; c < CHUNK; ++c) amax[c] = std::max(amax[c], bits(panel[r][c]) & MAGNITUDE);
            float divisors[CHUNK] = {};
            for (int64_t c = 0; c < width; ++c)
                divisors[c] = divisor<POWER_OF_2>(scale_t.at(left + c, i) = scale_of<POWER_OF_2>(amax[c]));

            uint8_t columns[CHUNK][TILE];
            for (int64_t top = 0; top < height; top += 8) {
                uint8_t bytes[8][CHUNK];
                for (int64_t r = 0; r < 8; ++r)
                    for (int64_t c = 0; c < CHUNK; ++c)
                        bytes[r][c] = encode_scaled<POWER_OF_2>(panel[top + r][c], divisors[c]);
                uint64_t words[8][CHUNK / 8];
                std::memcpy(words, bytes, sizeof words);
                transpose_8x8(words);
                for (int64_t c = 0; c < CHUNK; ++c) std::memcpy(columns[c] + top, &words[c % 8][c / 8], 8);
            }
            for (int64_t c = 0; c < width; ++c)  // a whole tile at once: columns lie in few sets of the cache
                std::memcpy(data_t + (left + c) * stride_t + i * TILE, columns[c], height);
        }
    }
    return true;
}

// A moment in FP32 or BF16.
inline float load(const float& x) { return x; }
inline float load(const uint16_t& x) { return number(uint32_t(x) << 16); }

inline void store(float& x, float value) { x = value; }
inline void store(uint16_t& x, float value) {  // rounded to nearest even
    const uint32_t rounded = (bits(value) + 0x7fff + (bits(value) >> 16 & 1)) >> 16;
    x = (bits(value) & MAGNITUDE) > INFINITE ? 0x7fc0 : rounded;
}

template <typename Moment>
void adamw(float* weight, const float* gradient, Moment* exp_avg, Moment* exp_avg_sq, int64_t n, const AdamW& a) {
#pragma omp parallel for if (n >= MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < n; ++i) {
        const float g = gradient[i] * a.gradient_scale, before = load(exp_avg[i]);
        const float m = __builtin_fmaf(g - before, a.rest1, before);
        const float v = __builtin_fmaf(g * a.rest2, g, load(exp_avg_sq[i]) * a.beta2);
        weight[i] = weight[i] * a.decay - m * a.step_size / (__builtin_sqrtf(v) / a.root + a.eps);
        store(exp_avg[i], m);
        store(exp_avg_sq[i], v);
    }
}

#ifdef __AVX512BF16__

// GEMM: encoded values are exact in BF16, whose dot products take half the time of FP32's. As on a tensor core, the
// products of 128 values along K are summed in FP32, and each sum is then multiplied by the scales of its blocks.

constexpr int64_t K_BLOCK = 128, PAIRS = K_BLOCK / 2;
constexpr int64_t ROWS = 12, LANES = 16, COLUMNS = 2 * LANES;  // of a tile of the result, in 24 vector registers

inline uint16_t to_bf16(uint8_t encoded) { return bits(decode(encoded)) >> 16; }

// Transpose 16 rows of 16 numbers; rows are `stride` numbers apart.
inline void transpose_16x16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
    __m512i x[LANES], y[LANES];
    for (int i = 0; i < LANES; ++i) x[i] = _mm512_load_si512(from + i * from_stride);
    for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    }
    // x[4 i + j] holds the columns j, j + 4, j + 8 and j + 12 of the rows 4 i ... 4 i + 3
    for (int j = 0; j < 4; ++j) {
        const __m512i top_even = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
        const __m512i top_odd = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i bottom_even = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i bottom_odd = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        _mm512_store_si512(to + j * to_stride, _mm512_shuffle_i32x4(top_even, bottom_even, 0x88));
        _mm512_store_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(top_odd, bottom_odd, 0x88));
        _mm512_store_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(top_even, bottom_even, 0xdd));
        _mm512_store_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(top_odd, bottom_odd, 0xdd));
    }
}

// What a tile of the result reads of an operand in one k-block: pairs of neighbors along K, and a scale for each row.
struct PackedA {
    uint32_t pairs[ROWS][PAIRS];
    float scale[ROWS];
};

struct alignas(64) PackedB {
    uint32_t pairs[PAIRS][COLUMNS];
    float scale[COLUMNS];
};

// Decode a row's values from k to the end of the k-block or k_end; the rest is zero.
inline void decode_row(const Operand& x, int64_t row, int64_t k, int64_t k_end, uint16_t (&values)[K_BLOCK]) {
    const uint8_t* from = x.data + row * x.row_stride + k * x.k_stride;
    const int64_t width = std::min(K_BLOCK, k_end - k);
    if (width < K_BLOCK) std::memset(values, 0, sizeof values);
    if (x.k_stride == 1)
        for (int64_t i = 0; i < width; ++i) values[i] = to_bf16(from[i]);
    else
        for (int64_t i = 0; i < width; ++i) values[i] = to_bf16(from[i * x.k_stride]);
}

void pack_a(const Operand& a, int64_t row, int64_t end, int64_t k, int64_t k_end, PackedA& packed) {
    for (int64_t r = 0; r < ROWS; ++r) {
        if (row + r >= end) {
            std::memset(packed.pairs[r], 0, sizeof packed.pairs[r]);
            packed.scale[r] = 0;
            continue;
        }
        uint16_t values[K_BLOCK];
        decode_row(a, row + r, k, k_end, values);
        std::memcpy(packed.pairs[r], values, sizeof values);
        packed.scale[r] = a.scale.at((row + r) / a.block_rows, k / K_BLOCK);
    }
}

void pack_b(const Operand& b, int64_t row, int64_t end, int64_t k, int64_t k_end, PackedB& packed) {
    const int64_t count = std::min(COLUMNS, end - row);
    for (int64_t c = 0; c < COLUMNS; ++c)
        packed.scale[c] = c < count ? b.scale.at((row + c) / b.block_rows, k / K_BLOCK) : 0;
    if (count < COLUMNS || k_end - k < K_BLOCK) std::memset(packed.pairs, 0, sizeof packed.pairs);
    if (b.row_stride != 1) {
        for (int64_t first = 0; first < count; first += LANES) {
            alignas(64) uint32_t pairs[LANES][PAIRS] = {};
            for (int64_t c = first; c < std::min(count, first + LANES); ++c) {
                uint16_t values[K_BLOCK];
                decode_row(b, row + c, k, k_end, values);
                std::memcpy(pairs[c - first], values, sizeof values);
            }
            for (int64_t p = 0; p < PAIRS; p += LANES)
                transpose_16x16(&pairs[0][p], PAIRS, &packed.pairs[p][first], COLUMNS);
        }
        return;
    }
    for (int64_t p = 0; p < (std::min(K_BLOCK, k_end - k) + 1) / 2; ++p) {
        const uint8_t* first = b.data + row + (k + 2 * p) * b.k_stride;
        const bool has_second = k + 2 * p + 1 < k_end;
        for (int64_t c = 0; c < count; ++c) {
            const uint32_t second = has_second ? to_bf16(first[b.k_stride + c]) : 0;
            packed.pairs[p][c] = to_bf16(first[c]) | second << 16;
        }
    }
}

// total += a · bᵀ for one k-block.
inline void multiply(const PackedA& a, const PackedB& b, bool is_first, float (&total)[ROWS][COLUMNS]) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < PAIRS; ++p) {
        const __m512bh left = (__m512bh)_mm512_load_si512(b.pairs[p]);
        const __m512bh right = (__m512bh)_mm512_load_si512(b.pairs[p] + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(a.pairs[r][p]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], pair, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], pair, right);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            float* to = total[r] + half * LANES;
            const __m512 scaled = _mm512_mul_ps(sum[r][half], _mm512_load_ps(b.scale + half * LANES));
            const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_load_ps(to);
            _mm512_store_ps(to, _mm512_fmadd_ps(scaled, _mm512_set1_ps(a.scale[r]), before));
        }
    }
}

int64_t count_blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// out[rows, n] = or += a · bᵀ, of the rows of a from begin to end and of k from k_begin, a multiple of 128, to k_end.
void gemm(
    const Operand& a, const Operand& b, int64_t begin, int64_t end, int64_t n, int64_t k_begin, int64_t k_end,
    float* out, int64_t out_stride, bool accumulate
) {
    const int64_t tiles = count_blocks(end - begin, ROWS), panels = count_blocks(n, COLUMNS);
    const int64_t k_blocks = count_blocks(k_end - k_begin, K_BLOCK);
    const std::unique_ptr<PackedA[]> packed_a(new PackedA[tiles * k_blocks]);
#pragma omp parallel if ((end - begin) * n * (k_end - k_begin) >= MIN_PARALLEL_VALUES * K_BLOCK)
    {
#pragma omp for
        for (int64_t i = 0; i < tiles; ++i)
            for (int64_t j = 0; j < k_blocks; ++j)
                pack_a(a, begin + i * ROWS, end, k_begin + j * K_BLOCK, k_end, packed_a[i * k_blocks + j]);
        const std::unique_ptr<PackedB[]> panel(new PackedB[k_blocks]);
#pragma omp for
        for (int64_t p = 0; p < panels; ++p) {
            for (int64_t j = 0; j < k_blocks; ++j)
                pack_b(b, p * COLUMNS, n, k_begin + j * K_BLOCK, k_end, panel[j]);
            for (int64_t i = 0; i < tiles; ++i) {
                alignas(64) float total[ROWS][COLUMNS] = {};
                for (int64_t j = 0; j < k_blocks; ++j) multiply(packed_a[i * k_blocks + j], panel[j], j == 0, total);
                const int64_t width = std::min(COLUMNS, n - p * COLUMNS);
                for (int64_t r = 0; r < std::min(ROWS, end - begin - i * ROWS); ++r) {
                    float* to = out + (begin + i * ROWS + r) * out_stride + p * COLUMNS;
                    for (int64_t c = 0; c < width; ++c) to[c] = accumulate ? to[c] + total[r][c] : total[r][c];
                }
            }
        }
    }
}

#endif

// A paged cache of latents: rows of `row_bytes`, `page` of them in a page.
struct Cache {
    const uint8_t* data;
    int64_t row_bytes, page, latent, rope;  // channels of a latent, and of a rotary key
    int32_t format;                         // 0: FP32, 1: BF16, 2: E4M3 with a scale per 128 channels, then BF16
};

inline float from_bf16(const uint8_t* bytes, int64_t i) {
    uint16_t value;
    std::memcpy(&value, bytes + 2 * i, sizeof value);
    return number(uint32_t(value) << 16);
}

// values[latent + rope] of one row.
void load_row(const Cache& cache, const uint8_t* from, float* values) {
    const int64_t width = cache.latent + cache.rope;
    if (cache.format == 0) {
        std::memcpy(values, from, width * sizeof(float));
    } else if (cache.format == 1) {
        for (int64_t i = 0; i < width; ++i) values[i] = from_bf16(from, i);
    } else {
        for (int64_t left = 0; left < cache.latent; left += TILE) {
            float scale;
            std::memcpy(&scale, from + cache.latent + left / TILE * sizeof scale, sizeof scale);
            const int64_t right = std::min(cache.latent, left + TILE);
            for (int64_t i = left; i < right; ++i) values[i] = decode(from[i]) * scale;
        }
        const uint8_t* rope = from + cache.latent + (cache.latent + TILE - 1) / TILE * sizeof(float);
        for (int64_t i = 0; i < cache.rope; ++i) values[cache.latent + i] = from_bf16(rope, i);
    }
}

typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));  // reads panels of floats
constexpr int64_t VECTOR = 8, STRIP = 6, PANEL = 2 * VECTOR;  // rows of a strip, columns of a panel: 12 vectors of sums
constexpr int64_t STRIPS = 16;                                // of a block of rows

#ifdef __clang__
#define FUSES_MULTIPLY_ADD
#else
#define FUSES_MULTIPLY_ADD __attribute__((optimize("fp-contract=fast")))
#endif

// sums[r][j] = Σ rows[r][i] · panel[i][j] over k products, which are added one after the other: a row's bits depend on no
// other row, nor on its place in a strip. With an instruction for it a product is added without being rounded.
FUSES_MULTIPLY_ADD void multiply_strip(
    const float* const (&rows)[STRIP], const float* panel, int64_t k, Vector (&sums)[STRIP][2]
) {
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    Vector s[STRIP][2] = {};
    const Vector* b = reinterpret_cast<const Vector*>(panel);
    for (int64_t i = 0; i < k; ++i, b += 2)
#pragma GCC unroll 6
        for (int64_t r = 0; r < STRIP; ++r) {
            const float x = rows[r][i];
#pragma GCC unroll 2
            for (int64_t j = 0; j < 2; ++j) s[r][j] += x * b[j];
        }
    std::memcpy(sums, s, sizeof s);
}

// Rows `begin` to `end` of out[M, N], in a panel's columns from `first` on. A strip that is not full repeats its last row.
void multiply_rows(
    const Matrices& a, int64_t matrix, int64_t begin, int64_t end, const float* panel, int64_t first, int64_t n, int64_t k,
    float* out
) {
    for (int64_t row = begin; row < end; row += STRIP) {
        const float* rows[STRIP];
        for (int64_t r = 0; r < STRIP; ++r) rows[r] = a.row(matrix, std::min(row + r, end - 1));
        Vector sums[STRIP][2];
        multiply_strip(rows, panel, k, sums);
        for (int64_t r = 0; r < std::min(STRIP, end - row); ++r)
            std::memcpy(out + (row + r) * n + first, sums[r], std::min(PANEL, n - first) * sizeof(float));
    }
}

// Σ a[i] · b[i], in 16 partial sums, so that the compiler vectorizes it.
inline float dot(const float* a, const float* b, int64_t n) {
    constexpr int64_t PARTS = 16;
    float parts[PARTS] = {};
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int64_t j = 0; j < PARTS; ++j) parts[j] += a[i + j] * b[i + j];
    for (int64_t j = 0; i < n; ++i, ++j) parts[j] += a[i] * b[i];
    for (int64_t half = PARTS / 2; half; half /= 2)
        for (int64_t j = 0; j < half; ++j) parts[j] += parts[j + half];
    return parts[0];
}

// o[heads, latent] of the first `length` positions of a text, page by page with a running maximum of the scores, and, if
// it is not null, lse[heads], the logarithm of the softmax's denominator.
void attend(
    const Cache& cache, const int32_t* pages, int64_t length, const float* q, int64_t heads, float scale, float* o,
    float* lse
) {
    const int64_t width = cache.latent + cache.rope;
    std::vector<float> keys(cache.page * width), scores(cache.page), highest(heads, -INFINITY), total(heads);
    std::fill(o, o + heads * cache.latent, 0.0f);
    for (int64_t start = 0; start < length; start += cache.page) {
        const int64_t n = std::min(cache.page, length - start);
        const uint8_t* page = cache.data + pages[start / cache.page] * cache.page * cache.row_bytes;
        for (int64_t i = 0; i < n; ++i) load_row(cache, page + i * cache.row_bytes, &keys[i * width]);
        for (int64_t h = 0; h < heads; ++h) {
            float most = highest[h], sum = 0;
            for (int64_t i = 0; i < n; ++i) {
                scores[i] = dot(q + h * width, &keys[i * width], width) * scale;
                most = std::max(most, scores[i]);
            }
            float* of_head = o + h * cache.latent;
            const float correction = std::exp(highest[h] - most);
            for (int64_t c = 0; c < cache.latent; ++c) of_head[c] *= correction;
            for (int64_t i = 0; i < n; ++i) {
                const float weight = std::exp(scores[i] - most);
                const float* key = &keys[i * width];
                for (int64_t c = 0; c < cache.latent; ++c) of_head[c] += weight * key[c];
                sum += weight;
            }
            total[h] = total[h] * correction + sum;
            highest[h] = most;
        }
    }
    for (int64_t h = 0; length && h < heads; ++h)
        for (int64_t c = 0; c < cache.latent; ++c) o[h * cache.latent + c] /= total[h];
    for (int64_t h = 0; lse && h < heads; ++h) lse[h] = highest[h] + std::log(total[h]);
}

}  // namespace

extern "C" {

// o[rows, heads, latent] of q[rows, heads, latent + rope]: row r attends to the first lengths[r] positions of the pages
// whose numbers begin at pages + r · page_stride. A thread computes some heads of a row; the bits do not depend on it.
// lse[rows, heads], or null, gets the logarithm of each softmax's denominator.
void octile_paged_attention(
    const Cache* cache, const float* q, int64_t rows, int64_t heads, const int32_t* pages, int64_t page_stride,
    const int32_t* lengths, float scale, int64_t head_blocks, float* o, float* lse
) {
    int64_t positions = 0;
    for (int64_t row = 0; row < rows; ++row) positions += lengths[row];
    const int64_t width = cache->latent + cache->rope, block = (heads + head_blocks - 1) / head_blocks;
#pragma omp parallel for schedule(dynamic) if (positions * heads * width >= MIN_PARALLEL_VALUES)
    for (int64_t i = 0; i < rows * head_blocks; ++i) {
        const int64_t row = i / head_blocks, first = i % head_blocks * block;
        if (first >= heads) continue;
        const int64_t head = row * heads + first;
        attend(
            *cache, pages + row * page_stride, lengths[row], q + head * width, std::min(block, heads - first), scale,
            o + head * cache->latent, lse ? lse + head : nullptr
        );
    }
}

// out[B, M, N], contiguous, of a[B, M, K] · b[B, N, K]ᵀ. A thread computes a block of rows for some columns of b, which it
// transposes to a panel; the bits do not depend on it.
void octile_multiply_rows(
    const Matrices* a, const Matrices* b, int64_t batch, int64_t m, int64_t n, int64_t k, float* out
) {
    const int64_t block = STRIP * STRIPS;
#pragma omp parallel if (batch * m * n * k >= MIN_PARALLEL_VALUES * TILE)
    {
        std::vector<float> panel(k * PANEL);
        const float* in_panel = nullptr;  // the first row of b in it
#pragma omp for collapse(3) schedule(static)
        for (int64_t matrix = 0; matrix < batch; ++matrix)
            for (int64_t first = 0; first < n; first += PANEL)
                for (int64_t begin = 0; begin < m; begin += block) {
                    if (in_panel != b->row(matrix, first))
                        for (int64_t j = 0; j < PANEL; ++j) {
                            const float* row = b->row(matrix, std::min(first + j, n - 1));
                            for (int64_t i = 0; i < k; ++i) panel[i * PANEL + j] = row[i];
                        }
                    in_panel = b->row(matrix, first);
                    const int64_t end = std::min(begin + block, m);
                    multiply_rows(*a, matrix, begin, end, panel.data(), first, n, k, out + matrix * m * n);
                }
    }
}

// data[M, K] and scale of x[M, K], both contiguous.
void octile_quantize(
    const float* x, int64_t m, int64_t k, int64_t block_rows, int64_t block_columns, bool power_of_2, uint8_t* data,
    const Scale* scale
) {
    (power_of_2 ? quantize<true> : quantize<false>)(x, m, k, block_rows, block_columns, data, *scale);
}

// values[M, K] of data, whose rows are `stride` apart.
void octile_dequantize(
    const uint8_t* data, int64_t stride, int64_t m, int64_t k, int64_t block_rows, int64_t block_columns,
    const Scale* scale, float* values
) {
#pragma omp parallel for if (m * k >= MIN_PARALLEL_VALUES)
    for (int64_t row = 0; row < m; ++row) {
        const uint8_t* from = data + row * stride;
        float* to = values + row * k;
        if (block_columns == 1) {
            for (int64_t c = 0; c < k; ++c) to[c] = decode(from[c]) * scale->at(row / block_rows, c);
            continue;
        }
        for (int64_t left = 0, j = 0; left < k; left += block_columns, ++j) {
            const float s = scale->at(row / block_rows, j);
            const int64_t right = std::min(k, left + block_columns);  // in the loop it would prevent vectorizing
            for (int64_t c = left; c < right; ++c) to[c] = decode(from[c]) * s;
        }
    }
}

// data_t[K, P] and scale_t[K, ⌈P / 128⌉], in 1×128 tiles, of rows of a matrix of m rows: x[m, K], float32, or, if x is
// null, encoded[m, K] with a scale per 1×128 tile. Tile i has the rows numbered ends[2 i] ... ends[2 i + 1] − 1, then
// zeros; without ends the rows numbered 128 i, .... Row number r of `count` is row rows[r], or row r without rows.
// Returns whether all these rows exist.
bool octile_quantize_columns(
    const float* x, const uint8_t* encoded, int64_t row_stride, int64_t m, int64_t k, const Scale* scale,
    const int32_t* rows, int64_t count, const int32_t* ends, int64_t tiles, int64_t p, bool power_of_2,
    uint8_t* data_t, int64_t stride_t, const Scale* scale_t
) {
    const auto compute = power_of_2 ? quantize_columns<true> : quantize_columns<false>;
    return compute(x, encoded, row_stride, m, k, *scale, rows, count, ends, tiles, p, data_t, stride_t, *scale_t);
}

// Update a weight and its moments, all contiguous; both moments are BF16 or both FP32.
void octile_adamw(
    float* weight, const float* gradient, void* exp_avg, void* exp_avg_sq, bool is_bf16, int64_t n, const AdamW* a
) {
    if (is_bf16)
        adamw(weight, gradient, static_cast<uint16_t*>(exp_avg), static_cast<uint16_t*>(exp_avg_sq), n, *a);
    else
        adamw(weight, gradient, static_cast<float*>(exp_avg), static_cast<float*>(exp_avg_sq), n, *a);
}

// Whether this processor multiplies BF16, and `octile_gemm` exists.
int octile_can_multiply() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512BF16__

// out = a · bᵀ or, with accumulate, out += a · bᵀ, of a[m, k] and
//     groups < 0: no groups         b[n, k] → out[m, n]
//     along k                       b[n, k] → out[groups, m, n]: group g has k = offs[g − 1] ... offs[g] − 1
//     otherwise                     b[groups, n, k] → out[m, n]: group g has the rows offs[g − 1] ... offs[g] − 1 of a
// Rows of out are out_stride apart; groups along k begin at multiples of 128.
void octile_gemm(
    const Operand* a, const Operand* b, int64_t m, int64_t n, int64_t k, const int32_t* offs, int64_t groups,
    bool along_k, float* out, int64_t out_stride, bool accumulate
) {
    if (groups < 0) return gemm(*a, *b, 0, m, n, 0, k, out, out_stride, accumulate);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g ? offs[g - 1] : 0, end = offs[g];
        if (along_k) {
            gemm(*a, *b, 0, m, n, begin, end, out + g * m * out_stride, out_stride, accumulate);
            continue;
        }
        Operand of_group = *b;
        of_group.data += g * b->group_stride;
        of_group.scale.data += g * b->scale_group_stride;
        gemm(*a, of_group, begin, end, n, 0, k, out, out_stride, accumulate);
    }
}

#endif

}  // extern "C"
