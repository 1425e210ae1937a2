// Products as a tensor core sums them, in vector instructions of the CPU.
//
// Cutting a term toward zero at 2^(e - F), e the largest exponent of a step, is what an addition does by itself when the
// FPU rounds toward zero and the sum lies in [B, 2B) with B = 2^(e + P - F), P = 23 fraction bits of a float or 52 of a
// double: there the numbers are spaced by 2^(e - F). A negative term would be cut the wrong way, so positive and negative
// terms go into two such sums, which start at B and whose difference is the exact sum of the cut terms. A product of two
// operands is exact, so it does not matter whether multiplication and addition are fused.
//
// b is stored as its positive part and its negative part; a negative a swaps them. Both are laid out so that the columns
// of a panel lie side by side in vectors.
//
// The rounding mode belongs to the thread and changes between functions that are never inlined. NaN, Inf and sums too
// large for B are the caller's: the rows they are in are reported in `bad`.

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
constexpr int most_rows = 128;  // of a piece of work

struct Problem {
    const void *a, *a_exponent;               // [K / terms, M, terms], float or double and int8 or int16
    const void *b, *b_exponent;               // [K, N]
    float* out;                               // [M, N], holds what the sums start from
    const float *a_scale, *b_scale;           // [M, intervals], [N, intervals], or null
    uint8_t* bad;                             // [M]
    int64_t M, N, K, interval;
    int32_t terms, fraction_bits, output_bits, floor;
    int32_t nothing;                          // the exponent of zero
    int32_t promote;
};

// One thread's panel of b and the rows that it works on.
template <class Real, class Exponent> struct Worker {
    static constexpr int lanes = vector_bytes / sizeof(Real);
    static constexpr int columns = 256 / sizeof(Real);  // of a panel, whose parts so stay in the L1 cache
    static constexpr int group = 4;  // vectors that are summed at once: with two sums each they stay in registers
    static constexpr int digits = std::numeric_limits<Real>::digits - 1;
    static constexpr int bias = std::numeric_limits<Real>::max_exponent - 1;

    using Integer = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    typedef Real Reals __attribute__((vector_size(vector_bytes)));
    typedef Integer Integers __attribute__((vector_size(vector_bytes)));
    typedef float Floats __attribute__((vector_size(lanes * sizeof(float))));
    typedef int32_t Words __attribute__((vector_size(lanes * sizeof(int32_t))));
    static constexpr int bytes = columns * sizeof(Exponent);
    typedef Exponent Exponents __attribute__((vector_size(std::min(bytes, vector_bytes))));

    static constexpr float greatest = std::numeric_limits<float>::max();

    const Problem& p;
    const int64_t intervals = (p.K + p.interval - 1) / p.interval;
    std::vector<Real> parts;                  // [terms, 2, columns]: positive, negative
    std::vector<Exponent> exponent;           // [terms, columns]
    alignas(64) float accumulator[most_rows][columns];
    alignas(64) float total[most_rows][columns];

    explicit Worker(const Problem& problem) : p(problem), parts(2 * p.terms * columns),
        exponent(p.terms * columns, Exponent(p.nothing)) {}

    // Columns from n on, products from k on; past the last column everything is zero.
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

    // One step of one row, FPU toward zero.
    void step(const Real* a, const Exponent* a_exponent, float* c) {
        Exponents largest[bytes / sizeof(Exponents)];
        for (auto& e : largest) e = Exponents{} + Exponent(2 * p.nothing);
        for (int t = 0; t < p.terms; ++t) {
            const Exponent* e = &exponent[t * columns];
            for (auto& most : largest) {
                const Exponents sum = load<Exponents>(e) + a_exponent[t];
                most = sum > most ? sum : most;
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
                const Reals base = begin(load<Words>(e_max + first + v * lanes), x);
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
                const Floats x = end(up[v] - down[v]);
                std::memcpy(c + first + v * lanes, &x, sizeof x);
            }
        }
    }

    // B of some columns, from the largest exponents of their products and from their accumulators.
    Reals begin(Words e, Floats c) const {
        const Words floor = Words{} + p.floor, bits = reinterpret_cast<Words>(c), field = bits >> 23 & 0xFF;
        const Words of_c = (bits & 0x7FFFFFFF) == 0 ? floor : (field > 1 ? field : Words{} + 1) - 127;
        e = e > p.nothing / 2 ? e : floor;
        e = e > of_c ? e : of_c;
        e = e > floor ? e : floor;
        const Integers exponent_of_B = __builtin_convertvector(e, Integers) + (digits - p.fraction_bits);
        return reinterpret_cast<Reals>((exponent_of_B + bias) << digits);
    }

    // Sums as accumulators, FPU toward zero.
    Floats end(Reals x) const {
        if (sizeof(Real) > sizeof(float)) {  // what exceeds the range is Inf, which is not what this mode gives
            const Reals limit = Reals{} + Real(0x1p128);
            x = ((x >= limit) | (x <= -limit)) ? x * std::numeric_limits<Real>::infinity() : x;
        }
        const Floats cut = __builtin_convertvector(x, Floats);
        const Words bits = reinterpret_cast<Words>(cut) & int32_t(~0u << (23 - p.output_bits));
        return reinterpret_cast<Floats>((bits & 0x7FFFFFFF) == 0 ? Words{} : bits);  // there is no -0
    }

    template <class Vector> static Vector load(const void* from) {
        Vector x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }

    // An interval of products for rows m … m + rows, FPU toward zero.
    __attribute__((noinline)) void tensor_cores(int64_t m, int rows, int64_t n, int width, int64_t first,
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

    // What happens to the accumulators before (enter) and after (leave) an interval, FPU to nearest.
    __attribute__((noinline)) void enter(int64_t m, int rows, int64_t n, int64_t interval) {
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
            if (!within(accumulator[i], columns, sizeof(Real) == 4 ? 0x1p100f : greatest)) give_up(m + i);
        }
    }

    __attribute__((noinline)) void leave(int64_t m, int rows, int64_t n, int64_t interval) {
        std::fesetround(FE_TONEAREST);
        float scale[columns];
        column_scales(n, interval, scale);
        for (int i = 0; i < rows; ++i) {
            const float row = row_scale(m + i, interval);
            for (int j = 0; j < columns; ++j) total[i][j] = std::fma(accumulator[i][j], row * scale[j], total[i][j]);
        }
    }

    // 1 where there are no scales, and past the last column.
    void column_scales(int64_t n, int64_t interval, float* scale) const {
        for (int j = 0; j < columns; ++j)
            scale[j] = p.b_scale && n + j < p.N ? p.b_scale[(n + j) * intervals + interval] : 1.0f;
    }

    float row_scale(int64_t m, int64_t interval) const {
        return p.a_scale ? p.a_scale[m * intervals + interval] : 1.0f;
    }

    static bool within(const float* sums, int count, float limit) {
        bool all = true;
        for (int j = 0; j < count; ++j) all &= std::fabs(sums[j]) <= limit;
        return all;
    }

    void give_up(int64_t m) { __atomic_store_n(p.bad + m, 1, __ATOMIC_RELAXED); }

    void work(int64_t m, int rows, int64_t n) {
        const int width = int(p.N - n < columns ? p.N - n : columns);
        for (int i = 0; i < rows; ++i) {
            std::memset(total[i], 0, sizeof total[i]);
            std::memcpy(total[i], p.out + (m + i) * p.N + n, width * sizeof(float));
        }
        if (!p.promote) std::memcpy(accumulator, total, sizeof total);
        for (int64_t interval = 0; interval < intervals; ++interval) {
            const int64_t k = interval * p.interval;
            enter(m, rows, n, interval);
            tensor_cores(m, rows, n, width, k, k + p.interval < p.K ? k + p.interval : p.K);
            if (p.promote) leave(m, rows, n, interval);
        }
        if (!p.promote) {
            for (auto& sums : total) std::fill(sums, sums + columns, -0.0f);  // x + -0 is x, for x = -0 too
            leave(m, rows, n, intervals - 1);
        }
        for (int i = 0; i < rows; ++i) {
            std::memcpy(p.out + (m + i) * p.N + n, total[i], width * sizeof(float));
            if (!within(total[i], width, greatest)) give_up(m + i);
        }
    }
};

template <class Real, class Exponent> void run(const Problem& p, int threads) {
    constexpr int columns = Worker<Real, Exponent>::columns;
    const int64_t panels = (p.N + columns - 1) / columns, pieces = (p.M + most_rows - 1) / most_rows;
    std::atomic<int64_t> next{0};
    auto loop = [&] {
        std::fenv_t before;
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);  // also: subnormal numbers are kept
        auto* worker = new Worker<Real, Exponent>(p);
        for (int64_t item; (item = next++) < panels * pieces;) {
            const int64_t m = item % pieces * most_rows;
            worker->work(m, int(p.M - m < most_rows ? p.M - m : most_rows), item / pieces * columns);
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
