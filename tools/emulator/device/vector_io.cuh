// Emulated octile/kernels/cuda/quantize/vector_io.cuh: the same functions. An unaligned address is an error, as on a
// GPU.
#pragma once
#include <ptx.cuh>

namespace emulator {

template <class T>
const T& aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) fail("an access of %zu bytes is not aligned", sizeof(T));
    return *static_cast<const T*>(address);
}

}  // namespace emulator

namespace ptx {

inline uint4 load_16(const void* from, bool there) { return there ? emulator::aligned<uint4>(from) : uint4{}; }
inline uint2 load_8(const void* from, bool there) { return there ? emulator::aligned<uint2>(from) : uint2{}; }
inline uint32_t load_4(const void* from, bool there) { return there ? emulator::aligned<uint32_t>(from) : 0; }
inline float load_float(const float* from, bool there) { return there ? emulator::aligned<float>(from) : 0.0f; }

inline uint4 bits_of(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}
inline void store_16(void* to, const uint4& v, bool there) {
    if (there) const_cast<uint4&>(emulator::aligned<uint4>(to)) = v;
}
inline void store_8(void* to, const uint2& v, bool there) {
    if (there) const_cast<uint2&>(emulator::aligned<uint2>(to)) = v;
}
inline void store_float(float* to, float x, bool there) {
    if (there) const_cast<float&>(emulator::aligned<float>(to)) = x;
}
inline void cp_async_4(void* shared, const void* from, bool there) {
    const_cast<uint32_t&>(emulator::aligned<uint32_t>(shared)) = there ? emulator::aligned<uint32_t>(from) : 0;
}
inline void cp_async_wait_all() {}
template <class T>
const T* opaque(const T* address) {
    return address;
}
inline uint32_t opaque(uint32_t bits) { return bits; }

}  // namespace ptx
