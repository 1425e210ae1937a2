// The arithmetic of wgmma and mma: exact sums that are rounded once, or sums as Hopper's tensor core computes them.
#include "tensor_core.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>

namespace emulator {

Operands operands;

void find_exponents(int a_least, int b_least) {
    const auto exponents = [](const float* values, int count, int least, int16_t* to) {
        int16_t most = nothing;
        for (int i = 0; i < count; ++i) to[i] = exponent_of(values[i], least);
        for (int i = 0; i < count; ++i) most = std::max(most, to[i]);
        return most;
    };
    const int16_t a = exponents(operands.a, 16 * operands.k, a_least, operands.a_exponents);
    const int16_t b = exponents(operands.b, operands.n * operands.k, b_least, operands.b_exponents);
    operands.finite = std::max(a, b) < 128;
}

// Exact products, summed in double precision, rounded once.
void sum_exact(float* d, int row) {
    static double sums[256];
    const int n = operands.n, k = operands.k;
    std::copy_n(d, n, sums);
    for (int i = 0; i < k; ++i) {
        const double factor = operands.a[row * k + i];
        for (int column = 0; column < n; ++column) sums[column] += factor * operands.b[i * n + column];
    }
    for (int column = 0; column < n; ++column) d[column] = float(sums[column]);
}

// Hopper's sum of k products and c: each term is cut to `fraction` bits below the largest exponent, and so is the exact
// sum of them. Source: MMA-Sim, arXiv 2511.10909.
static float sum_hopper(float c, int row, int column, int largest, int fraction) {
    const float *a = operands.a + row * operands.k, *b = operands.b + column;
    double plain = c;
    for (int i = 0; i < operands.k; ++i) plain += double(a[i]) * b[i * operands.n];
    if (std::isnan(plain)) return std::bit_cast<float>(0x7FFFFFFFu);
    if (std::isinf(plain)) return plain;
    if (largest <= nothing / 2) return 0;
    auto term = [&](double x) { return static_cast<int64_t>(std::ldexp(x, fraction - largest)); };
    int64_t sum = term(c);
    for (int i = 0; i < operands.k; ++i) sum += term(double(a[i]) * b[i * operands.n]);
    if (!sum) return 0;
    const double exact = std::ldexp(double(sum), largest - fraction);
    const int keep = std::min(fraction, 23) - std::max(std::ilogb(exact), -126);
    const double cut = std::ldexp(std::trunc(std::ldexp(exact, keep)), -keep);
    return std::abs(cut) > 3.4028234663852886e38 ? std::copysign(INFINITY, cut) : float(cut);
}

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define OCTILE_WIDE_VECTORS __attribute__((noinline, target_clones("avx2", "default")))
#else
#define OCTILE_WIDE_VECTORS __attribute__((noinline))
#endif

// The same for finite 8-bit operands, quickly: with the FPU rounding toward zero, a positive number that is added to
// 2^(largest + 10) loses just what lies below 2^(largest − 13).
OCTILE_WIDE_VECTORS void sum_hopper_8_bits(float* d, int row, const int16_t* largest) {
    static float base[256], positive[256], negative[256];
    const int n = operands.n, k = operands.k;
    for (int column = 0; column < n; ++column) {
        base[column] = std::bit_cast<float>(uint32_t(largest[column] + 10 + 127) << 23);
        positive[column] = base[column] + (d[column] > 0 ? d[column] : 0);
        negative[column] = base[column] + (d[column] < 0 ? -d[column] : 0);
    }
    for (int i = 0; i < k; ++i) {
        const float factor = operands.a[row * k + i];
        for (int column = 0; column < n; ++column) {
            const float product = factor * operands.b[i * n + column];
            positive[column] += product > 0 ? product : 0;
            negative[column] += product < 0 ? -product : 0;
        }
    }
    for (int column = 0; column < n; ++column) {
        const float sum = positive[column] - negative[column];
        d[column] = std::bit_cast<float>(std::bit_cast<uint32_t>(sum) & ~0x3FFu);
    }
}

// The largest exponent of the terms of each column's sum, and in `most` that of all columns.
OCTILE_WIDE_VECTORS void find_largest(const float* d, int row, int16_t* largest, int16_t& most) {
    const int n = operands.n, k = operands.k;
    for (int column = 0; column < n; ++column) largest[column] = exponent_of(d[column], -126);
    for (int i = 0; i < k; ++i) {
        const int16_t exponent = operands.a_exponents[row * k + i];
        for (int column = 0; column < n; ++column) {
            const int16_t both = exponent + operands.b_exponents[i * n + column];
            largest[column] = largest[column] < both ? both : largest[column];
        }
    }
    most = nothing;
    for (int column = 0; column < n; ++column) most = most < largest[column] ? largest[column] : most;
}

void sum_hopper_row(float* d, int row, bool eight_bits) {
    static int16_t largest[256];
    int16_t most;
    find_largest(d, row, largest, most);
    const int n = operands.n;
    // an exponent of 128 is that of what is not finite
    if (eight_bits && operands.finite && most <= 116) {
        for (int column = 0; column < n; ++column) largest[column] = std::max<int16_t>(largest[column], -126);  // of 0
        std::fesetround(FE_TOWARDZERO);
        sum_hopper_8_bits(d, row, largest);
        std::fesetround(FE_TONEAREST);
        return;
    }
    for (int column = 0; column < n; ++column)
        d[column] = sum_hopper(d[column], row, column, largest[column], eight_bits ? 13 : 25);
}

}  // namespace emulator
