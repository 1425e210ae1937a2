// Block quantization to E4M3 and back on a CPU: what octile/ops/quantize.py and transpose.py specify, bit for bit
// but for the sign of a NaN.
//
// torch needs some twelve passes over memory for what is one loop here, and its comparisons and its cast to FP8 are not
// vectorized. The loops below have no branches, so that the compiler vectorizes them. Absolute values are compared as
// integers: the order is the same, and NaN, above Inf, is the largest, so that a NaN reaches its block's scale.
//
// With OpenMP the loops run in torch's threads. Blocks do not depend on each other, nor the bits on the threads.
//
// Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.  Shapes: x [M, K], blocks of R×C, K of them along a row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// Where the scale of block (i, j) lies.
struct Scale {
    float* data;
    int64_t row_stride, column_stride;  // in elements

    float& at(int64_t i, int64_t j) const { return data[i * row_stride + j * column_stride]; }
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
    for (int64_t i = 0; i < (m + block_rows - 1) / block_rows; ++i) {
        const int64_t first = i * block_rows, end = std::min(m, first + block_rows);
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

}  // namespace

extern "C" {

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

}  // extern "C"
