// Predicated loads and stores of 4 to 16 bytes of global memory.
//
// With branches instead of predicates, the compiler would split loops and guard every later shuffle between lanes.
// Source: PTX ISA 8.5, the instructions ld, st and cp.async.
#pragma once
#include "ptx.cuh"

namespace ptx {

// Loads through the read-only cache: the memory must not change while the kernel runs. Returns zeros out of bounds.
__device__ __forceinline__ uint4 load_16(const void* from, bool in_bounds) {
    uint4 v;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(static_cast<int>(in_bounds)));
    return v;
}

__device__ __forceinline__ uint2 load_8(const void* from, bool in_bounds) {
    uint2 v;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
        "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
        : "=&r"(v.x), "=&r"(v.y)
        : "l"(from), "r"(static_cast<int>(in_bounds)));
    return v;
}

__device__ __forceinline__ uint32_t load_4(const void* from, bool in_bounds) {
    uint32_t v;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
        : "=&r"(v)
        : "l"(from), "r"(static_cast<int>(in_bounds)));
    return v;
}

__device__ __forceinline__ float load_float(const float* from, bool in_bounds) {
    return __uint_as_float(load_4(from, in_bounds));
}

__device__ __forceinline__ uint4 bits_of(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}

__device__ __forceinline__ void store_16(void* to, const uint4& v, bool in_bounds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(in_bounds))
                 : "memory");
}

__device__ __forceinline__ void store_8(void* to, const uint2& v, bool in_bounds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(static_cast<int>(in_bounds))
                 : "memory");
}

__device__ __forceinline__ void store_float(float* to, float x, bool in_bounds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(to), "f"(x),
                 "r"(static_cast<int>(in_bounds))
                 : "memory");
}

// Starts an asynchronous copy of 4 bytes to shared memory; writes zero out of bounds.
__device__ __forceinline__ void cp_async_4(void* shared, const void* from, bool in_bounds) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(from),
                 "r"(in_bounds ? 4 : 0)
                 : "memory");
}

// Waits until all asynchronous copies of this thread have arrived.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Returns the address and hides its origin from the compiler, which then loads from it again instead of reusing
// registers.
template <class T>
__device__ __forceinline__ const T* opaque(const T* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// Returns the bits and hides their origin from the compiler, which then recomputes what depends on them.
__device__ __forceinline__ uint32_t opaque(uint32_t bits) {
    asm volatile("" : "+r"(bits));
    return bits;
}

}  // namespace ptx
