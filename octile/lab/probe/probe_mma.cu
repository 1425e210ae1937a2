// Probe of mma.sync: each warp runs a chain of instructions, d[16, 8] = c + a[16, K] · b[8, K]ᵀ.
//
// Every format has the same register layout in bytes: an instruction takes 32 bytes of K. Constants: `steps`, the
// length of the chain; `half`, accumulators in FP16 instead of FP32, two neighbors in a word.
#include "mma.cuh"

template <bool half> struct Accumulators { using Word = float; };
template <> struct Accumulators<true> { using Word = unsigned; };
using Word = Accumulators<config::half>::Word;
constexpr int pair = config::half ? 1 : 2;  // words of two neighboring accumulators

// Grid: (M / 16) · (N / 8) blocks of 32 threads. a[M, K], b[N, K], c[M, N], d[M, N].
extern "C" __global__ void __launch_bounds__(32) probe_mma(
    const unsigned char* a, const unsigned char* b, const Word* c, Word* d, int n) {
    constexpr int row = 32 * config::steps;
    const long long m0 = int(blockIdx.x) / (n / 8) * 16, n0 = int(blockIdx.x) % (n / 8) * 8;
    const int group = threadIdx.x / 4, column = threadIdx.x % 4;
    const unsigned char* a_row = a + (m0 + group) * row + 4 * column;
    const unsigned char* b_row = b + (n0 + group) * row + 4 * column;
    const int row_words = n / 2 * pair;
    const long long first = (m0 + group) * row_words + (n0 / 2 + column) * pair;

    Word accum[2 * pair];
    for (int i = 0; i < 2 * pair; ++i) accum[i] = c[first + i / pair * 8ll * row_words + i % pair];
    for (int k = 0; k < row; k += 32) {
        auto word = [k](const unsigned char* from) { return *reinterpret_cast<const unsigned*>(from + k); };
        const unsigned a_words[4] = {word(a_row), word(a_row + 8 * row), word(a_row + 16), word(a_row + 8 * row + 16)};
        const unsigned b_words[2] = {word(b_row), word(b_row + 16)};
        mma(accum, a_words, b_words);
    }
    for (int i = 0; i < 2 * pair; ++i) d[first + i / pair * 8ll * row_words + i % pair] = accum[i];
}
