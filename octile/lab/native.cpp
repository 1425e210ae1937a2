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
constexpr int columns = 64;  // of a panel
constexpr int most_rows = 128;  // of a piece of work

struct Problem {
    const void *a, *b;                        // [M, K], [K, N] float or double, K whole steps
    const int16_t *a_exponent, *b_exponent;
    float* out;                               // [M, N], holds what the sums start from
    const float *a_scale, *b_scale;           // [M, intervals], [N, intervals], or null
    uint8_t* bad;                             // [M]
    int64_t M, N, K, interval;
    int32_t terms, fraction_bits, output_bits, floor, promote;
};

template <class Real> using Bits = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
template <class Real> constexpr int digits = std::numeric_limits<Real>::digits - 1;

// 2^e for a normal number
template <class Real> Real power_of_2(int e) {
    Bits<Real> bits = Bits<Real>(e + std::numeric_limits<Real>::max_exponent - 1) << digits<Real>;
    Real x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// One thread's panel of b and the rows that it works on.
template <class Real> struct Worker {
    typedef Real Vector __attribute__((vector_size(vector_bytes)));
    static constexpr int lanes = vector_bytes / sizeof(Real);
    static constexpr int group = 4;  // vectors that are summed at once: with two sums each they stay in registers

    const Problem& p;
    std::vector<Real> parts;                  // [terms, 2, columns]: positive, negative
    std::vector<int16_t> exponent;            // [terms, columns]
    alignas(64) float accumulator[most_rows][columns];
    alignas(64) float total[most_rows][columns];

    explicit Worker(const Problem& problem) : p(problem), parts(2 * p.terms * columns),
        exponent(p.terms * columns, -4096) {}

    // Columns from n on, products from k on; past the last column everything is zero.
    void pack(int64_t n, int64_t k, int width) {
        for (int t = 0; t < p.terms; ++t) {
            const Real* b = static_cast<const Real*>(p.b) + (k + t) * p.N + n;
            const int16_t* e = p.b_exponent + (k + t) * p.N + n;
            Real *positive = parts.data() + 2 * t * columns, *negative = positive + columns;
            for (int j = 0; j < width; ++j) {
                positive[j] = b[j] < 0 ? Real(0) : b[j];  // written so that a NaN goes into both
                negative[j] = b[j] > 0 ? Real(0) : -b[j];
                exponent[t * columns + j] = e[j];
            }
        }
    }

    // One step of one row, FPU toward zero.
    void step(int64_t m, int64_t k, float* __restrict c) {
        const Real* a = static_cast<const Real*>(p.a) + m * p.K + k;
        const int16_t* a_exponent = p.a_exponent + m * p.K + k;

        alignas(64) int16_t e_max[columns];
        for (int j = 0; j < columns; ++j) e_max[j] = int16_t(p.floor);
        for (int t = 0; t < p.terms; ++t) {
            const int16_t* e = exponent.data() + t * columns;
            for (int j = 0; j < columns; ++j) {
                const int16_t sum = int16_t(a_exponent[t] + e[j]);
                e_max[j] = sum > e_max[j] ? sum : e_max[j];
            }
        }

        alignas(64) Real base[columns], plus[columns], minus[columns];
        for (int j = 0; j < columns; ++j) {
            int32_t bits;
            std::memcpy(&bits, c + j, 4);
            const int field = bits >> 23 & 0xFF;
            const int e_c = (bits & 0x7FFFFFFF) == 0 ? -4096 : (field > 1 ? field : 1) - 127;
            const int e = e_c > e_max[j] ? e_c : e_max[j];
            base[j] = power_of_2<Real>(e + digits<Real> - p.fraction_bits);
        }
        for (int j = 0; j < columns; ++j) {
            plus[j] = base[j] + (c[j] < 0 ? Real(0) : Real(c[j]));  // a NaN goes into both
            minus[j] = base[j] + (c[j] > 0 ? Real(0) : -Real(c[j]));
        }

        for (int first = 0; first < columns; first += group * lanes) {
            Vector up[group], down[group];
            for (int v = 0; v < group; ++v) {
                std::memcpy(&up[v], plus + first + v * lanes, vector_bytes);
                std::memcpy(&down[v], minus + first + v * lanes, vector_bytes);
            }
            for (int t = 0; t < p.terms; ++t) {
                const int swap = std::signbit(a[t]) ? columns : 0;  // in arithmetic: a branch would be mispredicted
                const Real* same = parts.data() + 2 * t * columns + first + swap;
                const Real* other = parts.data() + 2 * t * columns + first + (columns - swap);
                const Real x = std::fabs(a[t]);
                for (int v = 0; v < group; ++v) {
                    Vector s, o;
                    std::memcpy(&s, same + v * lanes, vector_bytes);
                    std::memcpy(&o, other + v * lanes, vector_bytes);
                    up[v] += s * x;
                    down[v] += o * x;
                }
            }
            for (int v = 0; v < group; ++v) {
                const Vector difference = up[v] - down[v];
                std::memcpy(plus + first + v * lanes, &difference, vector_bytes);
            }
        }

        const int32_t kept = int32_t(~0u << (23 - p.output_bits));
        for (int j = 0; j < columns; ++j) {
            float x = float(plus[j]);  // toward zero; Inf is what exceeds the range, which is not what this mode gives
            if (sizeof(Real) == 8 && std::fabs(plus[j]) >= Real(0x1p128)) x = plus[j] > 0 ? INFINITY : -INFINITY;
            int32_t bits;
            std::memcpy(&bits, &x, 4);
            bits &= kept;
            if ((bits & 0x7FFFFFFF) == 0) bits = 0;  // there is no -0
            std::memcpy(c + j, &bits, 4);
        }
    }

    // An interval of products for rows m … m + rows, FPU toward zero.
    __attribute__((noinline)) void tensor_cores(int64_t m, int rows, int64_t n, int width, int64_t first,
                                                int64_t last) {
        std::fesetround(FE_TOWARDZERO);
        for (int64_t k = first; k < last; k += p.terms) {
            pack(n, k, width);
            for (int i = 0; i < rows; ++i) step(m + i, k, accumulator[i]);
        }
    }

    // What happens to the accumulators before (enter) and after (leave) an interval, FPU to nearest.
    __attribute__((noinline)) void enter(int64_t m, int rows, int64_t n, int64_t interval) {
        std::fesetround(FE_TONEAREST);
        const float limit = sizeof(Real) == 4 ? 0x1p100f : std::numeric_limits<float>::max();
        for (int i = 0; i < rows; ++i) {
            for (int j = 0; j < columns; ++j) {
                if (p.promote) accumulator[i][j] = 0;
                else if (interval > 0 && p.a_scale)
                    accumulator[i][j] *= scale(m + i, n + j, interval - 1) / scale(m + i, n + j, interval);
                if (!(std::fabs(accumulator[i][j]) <= limit)) give_up(m + i);
            }
        }
    }

    __attribute__((noinline)) void leave(int64_t m, int rows, int64_t n, int64_t interval) {
        std::fesetround(FE_TONEAREST);
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < columns; ++j)
                total[i][j] = std::fma(accumulator[i][j], scale(m + i, n + j, interval), total[i][j]);
    }

    float scale(int64_t m, int64_t n, int64_t interval) const {
        const int64_t intervals = (p.K + p.interval - 1) / p.interval;
        return p.a_scale && n < p.N ? p.a_scale[m * intervals + interval] * p.b_scale[n * intervals + interval] : 1.0f;
    }

    void give_up(int64_t m) { __atomic_store_n(p.bad + m, 1, __ATOMIC_RELAXED); }

    void work(int64_t m, int rows, int64_t n) {
        const int width = int(p.N - n < columns ? p.N - n : columns);
        for (int i = 0; i < rows; ++i) {
            std::memset(total[i], 0, sizeof total[i]);
            std::memcpy(total[i], p.out + (m + i) * p.N + n, width * sizeof(float));
        }
        if (!p.promote) std::memcpy(accumulator, total, sizeof total);
        int64_t interval = 0;
        for (int64_t k = 0; k < p.K; k += p.interval, ++interval) {
            enter(m, rows, n, interval);
            tensor_cores(m, rows, n, width, k, k + p.interval < p.K ? k + p.interval : p.K);
            if (p.promote) leave(m, rows, n, interval);
        }
        if (!p.promote) {
            for (auto& sums : total) std::fill(sums, sums + columns, -0.0f);  // x + -0 is x, for x = -0 too
            if (interval > 0 && p.a_scale) leave(m, rows, n, interval - 1);
            else std::memcpy(total, accumulator, sizeof total);
        }
        for (int i = 0; i < rows; ++i) {
            std::memcpy(p.out + (m + i) * p.N + n, total[i], width * sizeof(float));
            for (int j = 0; j < width; ++j)
                if (!std::isfinite(total[i][j])) give_up(m + i);
        }
    }
};

template <class Real> void run(const Problem& p, int threads) {
    const int64_t panels = (p.N + columns - 1) / columns, pieces = (p.M + most_rows - 1) / most_rows;
    std::atomic<int64_t> next{0};
    auto loop = [&] {
        std::fenv_t before;
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);  // also: subnormal numbers are kept
        auto* worker = new Worker<Real>(p);
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

extern "C" void octile_sum_products(const Problem* p, int wide, int threads) {
    wide ? run<double>(*p, threads) : run<float>(*p, threads);
}
