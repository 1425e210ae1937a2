// CUDA C++ for a C++ compiler: qualifiers, built-in variables, vector types and the intrinsics that kernels use.
#pragma once
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "thread.h"

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static_assert(false, "the emulator has dynamic shared memory only (ptx::dynamic_shared)");
#define __restrict__ __restrict

#define threadIdx (emulator::self->thread)
#define blockIdx (emulator::self->block)
#define blockDim (emulator::self->threads)
#define gridDim (emulator::self->blocks)
constexpr int warpSize = 32;

#define OCTILE_VECTORS(T, name)                                                        \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
    struct name##3 { T x, y, z; };                                                     \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
OCTILE_VECTORS(char, char)
OCTILE_VECTORS(unsigned char, uchar)
OCTILE_VECTORS(short, short)
OCTILE_VECTORS(unsigned short, ushort)
OCTILE_VECTORS(int, int)
OCTILE_VECTORS(unsigned, uint)
OCTILE_VECTORS(long long, longlong)
OCTILE_VECTORS(unsigned long long, ulonglong)
OCTILE_VECTORS(float, float)
OCTILE_VECTORS(double, double)
#undef OCTILE_VECTORS

// ---- Arithmetic --------------------------------------------------------------------------------------------------

template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
    using T = decltype(a + b);
    if constexpr (static_cast<T>(0.5) != T(0)) return fmin(T(a), T(b));
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
    using T = decltype(a + b);
    if constexpr (static_cast<T>(0.5) != T(0)) return fmax(T(a), T(b));
    return T(a) < T(b) ? T(b) : T(a);
}

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }

template <class To, class From>
To octile_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float x) { return octile_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return octile_bits<unsigned>(x); }
inline float __int_as_float(int x) { return octile_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return octile_bits<float>(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> 4 * i & 7;  // not the sign of a byte, as PTX's prmt
        result |= unsigned(bytes >> 8 * pick & 0xFF) << 8 * i;
    }
    return result;
}

// ---- Memory ------------------------------------------------------------------------------------------------------

#define OCTILE_LOAD(name) \
    template <class T>    \
    T name(const T* p) { return *p; }
OCTILE_LOAD(__ldg)
OCTILE_LOAD(__ldca)
OCTILE_LOAD(__ldcg)
OCTILE_LOAD(__ldcs)
#undef OCTILE_LOAD
#define OCTILE_STORE(name) \
    template <class T>     \
    void name(T* p, T value) { *p = value; }
OCTILE_STORE(__stcg)
OCTILE_STORE(__stcs)
OCTILE_STORE(__stwt)
#undef OCTILE_STORE
inline size_t __cvta_generic_to_shared(const void* p) { return emulator::shared_address(p); }

#define OCTILE_ATOMIC(name, expression)                          \
    template <class T, class V>                                  \
    T name(T* address, V operand) {                              \
        emulator::must_switch();                                 \
        const T old = *address, value = static_cast<T>(operand); \
        *address = static_cast<T>(expression);                   \
        return old;                                              \
    }
OCTILE_ATOMIC(atomicAdd, old + value)
OCTILE_ATOMIC(atomicSub, old - value)
OCTILE_ATOMIC(atomicExch, value)
OCTILE_ATOMIC(atomicMin, value < old ? value : old)
OCTILE_ATOMIC(atomicMax, old < value ? value : old)
OCTILE_ATOMIC(atomicAnd, value & old)
OCTILE_ATOMIC(atomicOr, value | old)
OCTILE_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
#undef OCTILE_ATOMIC
template <class T>
T atomicCAS(T* address, T expected, T value) {
    emulator::must_switch();
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}
inline void __threadfence() { emulator::may_switch(); }
inline void __threadfence_block() { emulator::may_switch(); }
inline void __nanosleep(unsigned) { emulator::must_switch(); }
[[noreturn]] inline void __trap() { emulator::fail("__trap()"); }
#define assert(condition) ((condition) ? void() : emulator::fail("assert(%s) at %s:%d", #condition, __FILE__, __LINE__))

// ---- Threads of a block and of a warp ----------------------------------------------------------------------------

namespace emulator {
void named_barrier(uint32_t id, uint32_t threads, bool wait);

enum class WarpPrimitive {
    sync,
    shuffle,
    shuffle_xor,
    shuffle_up,
    shuffle_down,
    ballot,
    reduce_add,
    reduce_min,
    reduce_max,
    reduce_or,
    reduce_and,
    match,
    stmatrix,
    ldmatrix,
    mma
};
// Runs a warp-level primitive for the lanes of `mask`; each lane gets its own result.
uint64_t warp_primitive(WarpPrimitive kind, uint32_t mask, uint64_t value, uint32_t argument = 0, uint32_t width = 32);

template <class T>
T shuffle(WarpPrimitive kind, uint32_t mask, T value, uint32_t argument, uint32_t width) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = warp_primitive(kind, mask, bits, argument, width);
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace emulator

inline void __syncthreads() { emulator::named_barrier(0, blockDim.x * blockDim.y * blockDim.z, true); }
inline void __syncwarp(unsigned mask = ~0u) { emulator::warp_primitive(emulator::WarpPrimitive::sync, mask, 0); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return emulator::shuffle(emulator::WarpPrimitive::shuffle, mask, value, lane, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return emulator::shuffle(emulator::WarpPrimitive::shuffle_xor, mask, value, lanes, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emulator::shuffle(emulator::WarpPrimitive::shuffle_up, mask, value, delta, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return emulator::shuffle(emulator::WarpPrimitive::shuffle_down, mask, value, delta, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emulator::warp_primitive(emulator::WarpPrimitive::ballot, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
#define OCTILE_REDUCE(T, name)                                                         \
    inline T __reduce_##name##_sync(unsigned mask, T value) {                          \
        return emulator::warp_primitive(emulator::WarpPrimitive::reduce_##name, mask, int64_t(value)); \
    }
OCTILE_REDUCE(int, min)
OCTILE_REDUCE(int, max)
OCTILE_REDUCE(unsigned, min)
OCTILE_REDUCE(unsigned, max)
OCTILE_REDUCE(int, add)
OCTILE_REDUCE(unsigned, add)
OCTILE_REDUCE(unsigned, or)
OCTILE_REDUCE(unsigned, and)
#undef OCTILE_REDUCE
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
    return emulator::shuffle(emulator::WarpPrimitive::match, mask, uint64_t(value), 0, 32);
}
