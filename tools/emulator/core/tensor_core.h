// The arithmetic of wgmma and mma: each of 16 rows and n columns of d becomes d + Σ a·b over the k of one instruction.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <bit>

namespace emulator {

constexpr int nothing = -1000;  // the exponent of zero

// The exponent of a finite number's significand in a format whose subnormal numbers have the exponent `least` >= −126.
inline int exponent_of(float x, int least) {
    const int exponent = int(std::bit_cast<uint32_t>(x) >> 23 & 0xFF) - 127;
    return x == 0 ? nothing : std::max(exponent, least);
}

// The operands of an mma, or of a warp's part of a wgmma: a[16, k], b[k, n], and the exponents of Hopper's significands.
struct Operands {
    int n, k;
    bool finite;  // all of a and b
    float a[16 * 32], b[32 * 256];
    int16_t a_exponents[16 * 32], b_exponents[32 * 256];
};
extern Operands operands;

// Sets the exponents; a_least, b_least: those of the formats' subnormal numbers.
void find_exponents(int a_least, int b_least);
void sum_exact(float* d, int row);
void sum_hopper_row(float* d, int row, bool eight_bits);

}  // namespace emulator
