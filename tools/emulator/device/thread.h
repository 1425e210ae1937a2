// The state of a thread that its kernel can see.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

struct Place {
    dim3 thread, block, threads, blocks;
    unsigned rank;     // of the block in its cluster
    unsigned cluster;  // blocks of a cluster
    uint8_t* shared;   // the block's dynamic shared memory
};

extern Place* self;

// Shared memory starts at this address of its window: the system keeps 1024 bytes for itself, as on sm_90.
constexpr uint32_t shared_start = 1024;

uint32_t shared_address(const void* pointer);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void may_switch();   // another thread may run here
void must_switch();  // others run here: whoever polls memory calls it

}  // namespace emulator
