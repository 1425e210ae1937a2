// Tensor core arithmetic in vector instructions of the CPU.
//
// A term is truncated toward zero at 2^(e - F), where e is the largest exponent of a step, by an addition that rounds
// toward zero and whose sum lies in [B, 2B) with B = 2^(e + P - F), P = 23 fraction bits of a float or 52 of a double:
// numbers there are spaced by 2^(e - F). A negative term would be truncated in the wrong direction. Positive and negative
// terms are therefore added to two such sums, which start at B; their difference is the exact sum of the truncated
// terms. The product of two operands is exact, so multiplication and addition may be fused.
//
// b is stored as its positive part and its negative part; a negative a swaps them. Columns of a panel are adjacent in
// both, so that they fill vectors.
//
// The rounding mode belongs to the thread and changes only between functions that are never inlined. Rows of outputs
// that meet NaN, Inf or sums too large for B are reported in `bad` and left to the caller.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
constexpr int max_rows = 128;  // of a work item

struct Problem {
    const void *a, *a_exponent;               // [K / terms, M, terms], float or double and int8 or int16
    const void *b, *b_exponent;               // [K, N]
    float* out;                               // [M, N], holds the initial sums
    const float *a_scale, *b_scale;           // [M, intervals], [N, intervals], or null
    uint8_t* bad;                             // [M]
    int64_t M, N, K, interval;
    int32_t terms, fraction_bits, output_bits, floor;
    int32_t zero_exponent;                    // the exponent of zero
    int32_t promote;
};

// One thread's panel of b and its rows of accumulators.
template <class Real, class Exponent> struct Worker {
    static constexpr int lanes = vector_bytes / sizeof(Real);
    static constexpr int columns = 256 / sizeof(Real);  // of a panel, so that its parts stay in the L1 cache
    static constexpr int group = 4;  // vectors that are summed together: with two sums each they fit in registers
    static constexpr int digits = std::numeric_limits<Real>::digits - 1;
    static constexpr int bias = std::numeric_limits<Real>::max_exponent - 1;

    using Integer = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    typedef Real Reals __attribute__((vector_size(vector_bytes)));
    typedef Integer Integers __attribute__((vector_size(vector_bytes)));
    typedef float Floats __attribute__((vector_size(lanes * sizeof(float))));
    typedef int32_t Words __attribute__((vector_size(lanes * sizeof(int32_t))));
    static constexpr int bytes = columns * sizeof(Exponent);
    typedef Exponent Exponents __attribute__((vector_size(std::min(bytes, vector_bytes))));

    static constexpr float largest_float = std::numeric_limits<float>::max();

    const Problem& p;
    const int64_t intervals = (p.K + p.interval - 1) / p.interval;
    std::vector<Real> parts;                  // [terms, 2, columns]: positive, negative
    std::vector<Exponent> exponent;           // [terms, columns]
    alignas(64) float accumulator[max_rows][columns];
    alignas(64) float total[max_rows][columns];

    explicit Worker(const Problem& problem) : p(problem), parts(2 * p.terms * columns),
        exponent(p.terms * columns, Exponent(p.zero_exponent)) {}

    // Packs columns of b from n and rows from k; past the last column everything is zero.
    void pack(int64_t n, int64_t k, int width) {
        for (int t = 0; t < p.terms; ++t) {
            const Real* b = static_cast<const Real*>(p.b) + (k + t) * p.N + n;
            const Exponent* e = static_cast<const Exponent*>(p.b_exponent) + (k + t) * p.N + n;
            Real *__restrict positive = parts.data() + 2 * t * columns, *__restrict negative = positive + columns;
            for (int j = 0; j < width; ++j) {
                positive[j] = b[j] < 0 ? Real(0) : b[j];  // written so that a NaN goes into both
                negative[j] = b[j] > 0 ? Real(0) : -b[j];
            }
            std::memcpy(exponent.data() + t * columns, e, width * sizeof(Exponent));
        }
    }

    // Takes one step for one row. The rounding mode is toward zero.
    void step(const Real* a, const Exponent* a_exponent, float* c) {
        Exponents largest[bytes / sizeof(Exponents)];
        for (auto& e : largest) e = Exponents{} + Exponent(2 * p.zero_exponent);
        for (int t = 0; t < p.terms; ++t) {
            const Exponent* e = &exponent[t * columns];
            for (auto& maximum : largest) {
                const Exponents sum = load<Exponents>(e) + a_exponent[t];
                maximum = sum > maximum ? sum : maximum;
                e += sizeof(Exponents) / sizeof(Exponent);
            }
        }
        alignas(64) Exponent narrow[columns];
        alignas(64) int32_t e_max[columns];
        std::memcpy(narrow, largest, sizeof narrow);
        std::copy(narrow, narrow + columns, e_max);

        for (int first = 0; first < columns; first += group * lanes) {
            Reals up[group], down[group];
            for (int v = 0; v < group; ++v) {
                const Floats x = load<Floats>(c + first + v * lanes);
                const Reals base = base_of(load<Words>(e_max + first + v * lanes), x);
                const Reals term = __builtin_convertvector(x, Reals);
                up[v] = base + (term < 0 ? Reals{} : term);  // a NaN goes into both
                down[v] = base + (term > 0 ? Reals{} : -term);
            }
            for (int t = 0; t < p.terms; ++t) {
                const int swap = std::signbit(a[t]) ? columns : 0;  // in arithmetic: a branch would be mispredicted
                const Real* same = parts.data() + 2 * t * columns + first + swap;
                const Real* other = parts.data() + 2 * t * columns + first + (columns - swap);
                const Real x = std::fabs(a[t]);
                for (int v = 0; v < group; ++v) {
                    up[v] += load<Reals>(same + v * lanes) * x;
                    down[v] += load<Reals>(other + v * lanes) * x;
                }
            }
            for (int v = 0; v < group; ++v) {
                const Floats x = rounded(up[v] - down[v]);
                std::memcpy(c + first + v * lanes, &x, sizeof x);
            }
        }
    }

    // Returns B of some columns, from the largest exponents of their products and from their accumulators.
    Reals base_of(Words e, Floats c) const {
        const Words floor = Words{} + p.floor, bits = reinterpret_cast<Words>(c), field = bits >> 23 & 0xFF;
        const Words of_c = (bits & 0x7FFFFFFF) == 0 ? floor : (field > 1 ? field : Words{} + 1) - 127;
        e = e > p.zero_exponent / 2 ? e : floor;
        e = e > of_c ? e : of_c;
        e = e > floor ? e : floor;
        const Integers exponent_of_B = __builtin_convertvector(e, Integers) + (digits - p.fraction_bits);
        return reinterpret_cast<Reals>((exponent_of_B + bias) << digits);
    }

    // Converts sums to accumulators. The rounding mode is toward zero.
    Floats rounded(Reals x) const {
        if (sizeof(Real) > sizeof(float)) {  // a sum beyond the range is Inf, which this rounding mode does not give
            const Reals limit = Reals{} + Real(0x1p128);
            x = ((x >= limit) | (x <= -limit)) ? x * std::numeric_limits<Real>::infinity() : x;
        }
        const Floats truncated = __builtin_convertvector(x, Floats);
        const Words bits = reinterpret_cast<Words>(truncated) & int32_t(~0u << (23 - p.output_bits));
        return reinterpret_cast<Floats>((bits & 0x7FFFFFFF) == 0 ? Words{} : bits);  // -0 becomes +0
    }

    template <class Vector> static Vector load(const void* from) {
        Vector x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }

    // Sums an interval of products for rows m to m + rows. Rounds toward zero.
    __attribute__((noinline)) void sum_interval(int64_t m, int rows, int64_t n, int width, int64_t first,
                                                int64_t last) {
        std::fesetround(FE_TOWARDZERO);
        for (int64_t k = first; k < last; k += p.terms) {
            pack(n, k, width);
            const int64_t at = k * p.M + m * p.terms;
            const Real* a = static_cast<const Real*>(p.a) + at;
            const Exponent* a_exponent = static_cast<const Exponent*>(p.a_exponent) + at;
            for (int i = 0; i < rows; ++i) step(a + i * p.terms, a_exponent + i * p.terms, accumulator[i]);
        }
    }

    // Prepares the accumulators for an interval: zero with promotion, otherwise rescaled. Rounds to nearest.
    __attribute__((noinline)) void prepare(int64_t m, int rows, int64_t n, int64_t interval) {
        std::fesetround(FE_TONEAREST);
        if (p.promote) {
            std::memset(accumulator, 0, sizeof accumulator);
            return;
        }
        float last[columns], next[columns];
        if (interval > 0) column_scales(n, interval - 1, last);
        column_scales(n, interval, next);
        for (int i = 0; i < rows; ++i) {
            if (interval > 0 && p.a_scale) {
                const float row_last = row_scale(m + i, interval - 1), row_next = row_scale(m + i, interval);
                for (int j = 0; j < columns; ++j) accumulator[i][j] *= row_last * last[j] / (row_next * next[j]);
            }
            if (!all_within(accumulator[i], columns, sizeof(Real) == 4 ? 0x1p100f : largest_float)) mark_bad(m + i);
        }
    }

    // Promotes the accumulators after an interval. Rounds to nearest.
    __attribute__((noinline)) void promote(int64_t m, int rows, int64_t n, int64_t interval) {
        std::fesetround(FE_TONEAREST);
        float scale[columns];
        column_scales(n, interval, scale);
        for (int i = 0; i < rows; ++i) {
            const float row = row_scale(m + i, interval);
            for (int j = 0; j < columns; ++j) total[i][j] = std::fma(accumulator[i][j], row * scale[j], total[i][j]);
        }
    }

    // Loads scales of columns; 1 without scales and past the last column.
    void column_scales(int64_t n, int64_t interval, float* scale) const {
        for (int j = 0; j < columns; ++j)
            scale[j] = p.b_scale && n + j < p.N ? p.b_scale[(n + j) * intervals + interval] : 1.0f;
    }

    float row_scale(int64_t m, int64_t interval) const {
        return p.a_scale ? p.a_scale[m * intervals + interval] : 1.0f;
    }

    static bool all_within(const float* sums, int count, float limit) {
        bool all = true;
        for (int j = 0; j < count; ++j) all &= std::fabs(sums[j]) <= limit;
        return all;
    }

    void mark_bad(int64_t m) { __atomic_store_n(p.bad + m, 1, __ATOMIC_RELAXED); }

    void work(int64_t m, int rows, int64_t n) {
        const int width = int(p.N - n < columns ? p.N - n : columns);
        for (int i = 0; i < rows; ++i) {
            std::memset(total[i], 0, sizeof total[i]);
            std::memcpy(total[i], p.out + (m + i) * p.N + n, width * sizeof(float));
        }
        if (!p.promote) std::memcpy(accumulator, total, sizeof total);
        for (int64_t interval = 0; interval < intervals; ++interval) {
            const int64_t k = interval * p.interval;
            prepare(m, rows, n, interval);
            sum_interval(m, rows, n, width, k, k + p.interval < p.K ? k + p.interval : p.K);
            if (p.promote) promote(m, rows, n, interval);
        }
        if (!p.promote) {
            for (auto& sums : total) std::fill(sums, sums + columns, -0.0f);  // x + -0 is x, also for x = -0
            promote(m, rows, n, intervals - 1);
        }
        for (int i = 0; i < rows; ++i) {
            std::memcpy(p.out + (m + i) * p.N + n, total[i], width * sizeof(float));
            if (!all_within(total[i], width, largest_float)) mark_bad(m + i);
        }
    }
};

template <class Real, class Exponent> void run(const Problem& p, int threads) {
    constexpr int columns = Worker<Real, Exponent>::columns;
    const int64_t panels = (p.N + columns - 1) / columns, row_blocks = (p.M + max_rows - 1) / max_rows;
    std::atomic<int64_t> next{0};
    auto loop = [&] {
        std::fenv_t before;
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);  // also keeps subnormal numbers
        auto* worker = new Worker<Real, Exponent>(p);
        for (int64_t item; (item = next++) < panels * row_blocks;) {
            const int64_t m = item % row_blocks * max_rows;
            worker->work(m, int(p.M - m < max_rows ? p.M - m : max_rows), item / row_blocks * columns);
        }
        delete worker;
        std::fesetenv(&before);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(loop);
    loop();
    for (auto& t : others) t.join();
}

}  // namespace

// wide: the operands are double, else float; narrow: their exponents are int8, else int16
extern "C" void octile_sum_products(const Problem* p, int wide, int narrow, int threads) {
    if (wide) narrow ? run<double, int8_t>(*p, threads) : run<double, int16_t>(*p, threads);
    else narrow ? run<float, int8_t>(*p, threads) : run<float, int16_t>(*p, threads);
}
