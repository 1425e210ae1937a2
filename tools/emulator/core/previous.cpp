// Programmatic dependent launch: a kernel begins while the previous one of its stream still runs.
#include <sys/mman.h>

#include "machine.h"

namespace emulator {

static void protect_storages(int protection) {
    for (uint64_t i = 0; i < machine.launch.n_storages; ++i)
        mprotect(machine.launch.storages[i].start, machine.launch.storages[i].bytes, protection);
}

bool is_protected(const void* address) {
    if (machine.previous_ended) return false;
    for (uint64_t i = 0; i < machine.launch.n_storages; ++i) {
        const Pages& pages = machine.launch.storages[i];
        const ptrdiff_t offset = static_cast<const uint8_t*>(address) - static_cast<const uint8_t*>(pages.start);
        if (offset >= 0 && offset < static_cast<ptrdiff_t>(pages.bytes)) return true;
    }
    return false;
}

// Hides what the previous kernel writes from thread blocks that begin: its memory is NaN, or −1.
void begin_previous() {
    const Launch& launch = machine.launch;
    if (!launch.n_written) return;
    for (uint64_t i = 0; i < launch.n_written; ++i) {
        memcpy(launch.written[i].values, launch.written[i].start, launch.written[i].bytes);
        memset(launch.written[i].start, 0xFF, launch.written[i].bytes);
    }
    machine.previous_ended = false;
    protect_storages(PROT_READ);
}

void end_previous() {
    const Launch& launch = machine.launch;
    machine.previous_ended = true;
    protect_storages(PROT_READ | PROT_WRITE);
    for (uint64_t i = launch.n_written; i-- > 0;)  // the first of two that overlap has the values
        memcpy(launch.written[i].start, launch.written[i].values, launch.written[i].bytes);
    wake(machine.previous_waiters);
}

void wait_for_previous() {
    may_switch();
    me()->has_waited = true;
    if (machine.previous_ended) return;
    machine.previous_waiters.push_back(me());
    park([] { return text("waits for the previous kernel"); });
}

}  // namespace emulator
