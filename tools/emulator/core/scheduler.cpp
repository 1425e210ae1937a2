// The scheduler of fibers: runs a random one of those that do not wait, until all have ended or none can continue.
#include "machine.h"

#include <algorithm>
#include <map>

#include "fiber.h"

namespace emulator {

static constexpr uint64_t patience = 5'000'000;  // turns without progress

uint32_t random_below(uint32_t n) {
    uint64_t& x = machine.random_state;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return (x * 0x2545F4914F6CDD1Dull >> 32) * n >> 32;
}

static void to_scheduler() {
    Thread* thread = me();
    octile_switch(&thread->stack_pointer, machine.scheduler);
}

void park(std::function<std::string()> why) {
    me()->why = std::move(why);
    to_scheduler();
}

void wake(Threads& threads) {
    machine.progress = machine.switches;
    machine.ready.insert(machine.ready.end(), threads.begin(), threads.end());
    threads.clear();
}

void must_switch() {
    machine.ready.push_back(me());
    to_scheduler();
}

void may_switch() {
    if (chance(machine.tendencies.switch_early)) must_switch();
}

void thread_main() {
    machine.launch.call(machine.launch.arguments);
    Thread* thread = me();
    check_exit(thread);
    thread->done = true;
    --machine.live;
    machine.progress = machine.switches;
    if (--thread->home->live == 0) check_block_exit(thread->home);
    to_scheduler();
}

static uint32_t priority(const Thread* thread) {
    const uint64_t warp = thread->block.x * 64 + thread->index / 32, deal = machine.switches >> machine.tendencies.deal;
    return ((deal ^ machine.launch.seed << 20) * 1000003 + warp) * 0x9E3779B97F4A7C15ull >> 40;
}

static Thread* next_thread() {
    Threads& ready = machine.ready;
    uint32_t best = random_below(ready.size());
    for (unsigned i = 1; i < machine.tendencies.contest; ++i) {
        const uint32_t other = random_below(ready.size());
        if (priority(ready[other]) > priority(ready[best])) best = other;
    }
    std::swap(ready[best], ready.back());
    Thread* thread = ready.back();
    ready.pop_back();
    return thread;
}

static std::string deadlock(const char* what) {
    std::map<std::string, Threads> reasons;
    for (const auto& block : machine.blocks)
        for (const auto& thread : block->threads)
            if (!thread->done)
                reasons[name(block.get()) + ": " + (thread->why ? thread->why() : "polls memory")].push_back(
                    thread.get());
    std::string message = what;
    for (const auto& [reason, threads] : reasons) {
        message += text("\n  %3zu threads of warps ", threads.size());
        uint32_t first = threads[0]->index / 32, last = first;
        std::string warps;
        auto end = [&] {
            warps += (warps.empty() ? "" : ", ") + (first == last ? text("%u", first) : text("%u–%u", first, last));
        };
        for (Thread* thread : threads) {
            const uint32_t warp = thread->index / 32;
            if (warp > last + 1) end(), first = warp;
            last = warp;
        }
        end();
        message += warps + " of " + reason;
    }
    return message;
}

void run() {
    machine.copies.clear();
    machine.ready.clear();
    machine.live = 0;
    for (auto& block : machine.blocks)
        for (auto& thread : block->threads) machine.ready.push_back(thread.get()), ++machine.live;
    while (machine.live) {
        const size_t copies = machine.copies.size();
        // the previous kernel ends as late as it can, so that all that is read too early is wrong
        if (machine.ready.empty() && !machine.previous_waiters.empty() &&
            !(copies && chance(machine.tendencies.copy_early)))
            end_previous();
        if (copies && (machine.ready.empty() || chance(machine.tendencies.copy_early)))
            advance_copy(random_below(copies));
        if (machine.ready.empty()) {
            if (machine.copies.empty() && machine.previous_waiters.empty())  // otherwise the previous kernel ends next
                report(deadlock("deadlock: every thread waits"));
            continue;
        }
        self = next_thread();
        if (++machine.switches - machine.progress > patience)
            report(deadlock("livelock: threads poll memory that nobody changes"));
        me()->why = nullptr;
        octile_switch(&machine.scheduler, me()->stack_pointer);
        self = nullptr;
    }
    while (!machine.copies.empty()) advance_copy(random_below(machine.copies.size()));
}

}  // namespace emulator
