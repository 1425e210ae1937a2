// Synchronization: mbarriers, named barriers, cluster barriers; and setmaxnreg.
#include <algorithm>

#include "machine.h"

namespace emulator {

// ---- mbarrier ----------------------------------------------------------------------------------------------------

static uint64_t word(size_t index) { return 0x0C711EBA221E0000ull + index; }
static uint32_t offset_of(const Block* block, const void* p) { return static_cast<const uint8_t*>(p) - block->shared; }

static std::string state_of(const MbarrierState& barrier) {
    return text("mbarrier at offset %u (phase %llu lacks %u of %u arrivals and %d bytes)", barrier.offset,
                static_cast<unsigned long long>(barrier.phase), barrier.pending, barrier.count, barrier.bytes);
}

MbarrierState& barrier_of(Block* block, const uint64_t& state) {
    const uint32_t offset = offset_of(block, &state);
    shared_range(block, &state, 8, "mbarrier");
    const uint64_t index = state - word(0);
    if (index >= block->barriers.size() || block->barriers[index]->offset != offset)
        fail("the mbarrier at offset %u of %s was not initialized, or something was written over it", offset,
             name(block).c_str());
    return *block->barriers[index];
}

void mbarrier_init(uint64_t& state, uint32_t count) {
    may_switch();
    Block* block = me()->home;
    shared_range(block, &state, 8, "mbarrier");
    if (reinterpret_cast<uintptr_t>(&state) % 8) fail("an mbarrier is 8-byte aligned");
    if (count < 1 || count >= 1 << 20) fail("an mbarrier counts to 1 … 2^20 − 1, not %u", count);
    const uint32_t offset = offset_of(block, &state);
    for (const auto& other : block->barriers)
        if (other->offset == offset) fail("the mbarrier at offset %u is initialized a second time", offset);
    state = word(block->barriers.size());
    block->barriers.push_back(std::make_unique<MbarrierState>(MbarrierState{offset, count, count, 0, 0, 0, me(), {}}));
}

void fence_mbarrier_init() {
    for (const auto& barrier : me()->home->barriers)
        if (barrier->fence_due == me()) barrier->fence_due = nullptr;
}

static void check_alive(Block* block, const char* what) {
    if (!block->live) fail("%s %s, whose threads have all ended", what, name(block).c_str());
}

void complete_phase(Block* block, MbarrierState& barrier) {
    if (barrier.pending) return;
    if (barrier.bytes < 0)
        fail("more bytes landed at the %s of %s than were expected", state_of(barrier).c_str(), name(block).c_str());
    if (barrier.bytes) return;
    Threads woken;
    for (const auto& waiter : barrier.waiters) {
        if (waiter.phase < barrier.phase)
            fail("the %s of %s ends while %s may still wait for the end of phase %llu: it would miss it",
                 state_of(barrier).c_str(), name(block).c_str(), name(waiter.thread).c_str(),
                 static_cast<unsigned long long>(waiter.phase));
        woken.push_back(waiter.thread);
    }
    ++barrier.phase;
    barrier.pending = barrier.count;
    wake(woken);
}

void complete_tx(Block* block, MbarrierState& barrier, uint32_t bytes) {
    barrier.bytes -= static_cast<int>(bytes);
    if (barrier.bytes <= -(1 << 20)) fail("the transaction count of the %s left its range", state_of(barrier).c_str());
    complete_phase(block, barrier);
}

// An arrival that waits for copies counts from when it is issued: if others took its place, it would count in the next
// phase, or in this one, as it happens to land.
void check_lacks_arrival(const Block* block, const MbarrierState& barrier) {
    if (barrier.pending > barrier.in_flight) return;
    fail("one arrival too many at the %s of %s, of which %u wait for copies of cp.async", state_of(barrier).c_str(),
         name(block).c_str(), barrier.in_flight);
}

void mbarrier_arrive(uint64_t& state, uint32_t rank, uint32_t bytes) {
    may_switch();
    Block* own = me()->home;
    if (rank >= own->cluster->size()) fail("there is no block %u in a cluster of %zu", rank, own->cluster->size());
    Block* block = (*own->cluster)[rank];
    check_alive(block, "an arrival at an mbarrier of");
    const uint32_t offset = offset_of(own, &state);
    MbarrierState& barrier = barrier_of(block, *reinterpret_cast<uint64_t*>(block->shared + offset));
    if (barrier.fence_due && block != own)
        fail("the %s was initialized without fence_mbarrier_init", state_of(barrier).c_str());
    check_lacks_arrival(block, barrier);
    if (barrier.bytes + int64_t(bytes) >= 1 << 20)
        fail("the transaction count of the %s left its range", state_of(barrier).c_str());
    barrier.bytes += static_cast<int>(bytes);
    --barrier.pending;
    complete_phase(block, barrier);
}

bool mbarrier_try_wait(uint64_t& state, uint32_t parity) {
    may_switch();
    if (parity > 1) fail("an mbarrier's parity is 0 or 1, not %u", parity);
    return (barrier_of(me()->home, state).phase & 1) != parity;
}

void mbarrier_wait(uint64_t& state, uint32_t parity) {
    may_switch();
    MbarrierState& barrier = barrier_of(me()->home, state);
    if (parity > 1) fail("an mbarrier's parity is 0 or 1, not %u", parity);
    while ((barrier.phase & 1) == parity) {
        barrier.waiters.push_back({me(), barrier.phase});
        park([&barrier, parity] { return text("waits with parity %u for the ", parity) + state_of(barrier); });
        std::erase_if(barrier.waiters, [](const auto& waiter) { return waiter.thread == me(); });
    }
}

// ---- Named barriers, __syncthreads, clusters ---------------------------------------------------------------------

static void arrive_and_wait(NamedBarrier& barrier, uint32_t threads, bool wait, const std::string& title) {
    if (barrier.threads && barrier.threads != threads)
        fail("comes to %s with %u threads, others came with %u", title.c_str(), threads, barrier.threads);
    barrier.threads = threads;
    if (++barrier.arrived == threads) {
        barrier.threads = barrier.arrived = 0;
        barrier.completed = true;
        wake(barrier.waiters);
        return;
    }
    if (!wait) return;
    barrier.waiters.push_back(me());
    park([&barrier, title] {
        return text("waits at %s, where %u of %u threads are", title.c_str(), barrier.arrived, barrier.threads);
    });
}

void named_barrier(uint32_t id, uint32_t threads, bool wait) {
    may_switch();
    Block* block = me()->home;
    if (id > 15) fail("named barriers are 0 … 15, not %u", id);
    if (threads % 32 || !threads || threads > machine.launch.threads)
        fail("barrier %u cannot wait for %u of %u threads: it takes whole warps", id, threads, machine.launch.threads);
    arrive_and_wait(block->named[id], threads, wait, id ? text("named barrier %u", id) : "__syncthreads");
    may_switch();
}

void cluster_sync() {
    may_switch();
    const Block* block = me()->home;
    arrive_and_wait(*block->cluster_barrier, machine.launch.threads * block->cluster->size(), true, "cluster_sync");
}

// ---- setmaxnreg --------------------------------------------------------------------------------------------------

void setmaxnreg(int count, bool decrease) {
    Thread* thread = me();
    Block* block = thread->home;
    const uint32_t registers = count;
    if (count < 24 || count > 256 || count % 8) fail("setmaxnreg takes a multiple of 8 from 24 to 256, not %d", count);
    if (decrease ? registers > thread->registers : registers < thread->registers)
        fail("setmaxnreg_%s<%d>, but it has %u", decrease ? "dec" : "inc", count, thread->registers);
    ++thread->register_changes;
    if (decrease) {
        block->register_pool += thread->registers - registers;
        wake(block->register_waiters);
    }
    while (!decrease && block->register_pool < registers - thread->registers) {
        block->register_waiters.push_back(thread);
        park([count] { return text("waits for registers: setmaxnreg_inc<%d>", count); });
    }
    if (!decrease) block->register_pool -= registers - thread->registers;
    thread->registers = registers;
}

}  // namespace emulator
