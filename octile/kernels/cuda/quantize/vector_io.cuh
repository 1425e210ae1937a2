// Loads and stores of 4 to 16 bytes of global memory that a thread may leave out: as instructions with a predicate.
//
// Written as branches, the compiler would split loops at them and guard every exchange between lanes that comes later.
// Source: PTX ISA 8.5, the instructions ld, st and cp.async.
#pragma once
#include "ptx.cuh"

namespace ptx {

// What is read does not change while the kernel runs. Zeros where nothing is loaded.
__device__ __forceinline__ uint4 load_16(const void* from, bool there) {
    uint4 v;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(static_cast<int>(there)));
    return v;
}

__device__ __forceinline__ uint2 load_8(const void* from, bool there) {
    uint2 v;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
        "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
        : "=&r"(v.x), "=&r"(v.y)
        : "l"(from), "r"(static_cast<int>(there)));
    return v;
}

__device__ __forceinline__ uint32_t load_4(const void* from, bool there) {
    uint32_t v;
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
        : "=&r"(v)
        : "l"(from), "r"(static_cast<int>(there)));
    return v;
}

__device__ __forceinline__ float load_float(const float* from, bool there) {
    return __uint_as_float(load_4(from, there));
}

__device__ __forceinline__ uint4 bits_of(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}

__device__ __forceinline__ void store_16(void* to, const uint4& v, bool there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(there))
                 : "memory");
}

__device__ __forceinline__ void store_8(void* to, const uint2& v, bool there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(static_cast<int>(there))
                 : "memory");
}

__device__ __forceinline__ void store_float(float* to, float x, bool there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(to), "f"(x),
                 "r"(static_cast<int>(there))
                 : "memory");
}

// To shared memory, without a register and without waiting; zero where there is nothing.
__device__ __forceinline__ void cp_async_4(void* shared, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(from),
                 "r"(there ? 4 : 0)
                 : "memory");
}

// Until what the thread copies has arrived.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same address, of which the compiler knows nothing: what is loaded from it again is not kept in registers instead.
template <class T>
__device__ __forceinline__ const T* forget(const T* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// The same bits, of which the compiler knows nothing: what it found of them before it does not keep.
__device__ __forceinline__ uint32_t forget(uint32_t bits) {
    asm volatile("" : "+r"(bits));
    return bits;
}

}  // namespace ptx
