// A launch: creates thread blocks, some clusters at a time, runs them, and checks them when they have ended.
#include "machine.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/time.h>

#include <algorithm>
#include <numeric>

#include "fiber.h"

namespace emulator {

Place* self;
Machine machine;

namespace {
constexpr size_t stack_bytes = 128 << 10, guard_bytes = 4096;
constexpr uint64_t stack_canary = 0x0c711e0c711e0c71;
sigjmp_buf failed;
uint8_t* memory;  // of stacks, then of shared memory
size_t memory_size;
}  // namespace

std::string text(const char* format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    return line;
}

std::string name(const Block* block) { return text("block %u", block->threads[0]->block.x); }
std::string name(const Thread* thread) {
    return text("block %u, warp %u, lane %u", thread->block.x, thread->index / 32, thread->lane);
}

void report(const std::string& message) {
    snprintf(machine.launch.message, sizeof machine.launch.message, "%s", message.c_str());
    siglongjmp(failed, 1);
}

void fail(const char* format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    report(self ? name(me()) + ": " + line : line);
    __builtin_unreachable();
}

// ---- Blocks ------------------------------------------------------------------------------------------------------

uint32_t shared_address(const void* pointer) {
    const auto* byte = static_cast<const uint8_t*>(pointer);
    const Block* block = me()->home;
    if (byte < block->window || byte >= block->shared + machine.launch.shared_bytes + guard_bytes)
        fail("%p is not an address of this block's shared memory", pointer);
    return byte - block->window;
}

uint8_t* shared_range(Block* block, const void* start, size_t bytes, const char* what) {
    auto* byte = static_cast<uint8_t*>(const_cast<void*>(start));
    if (byte < block->shared || byte + bytes > block->shared + machine.launch.shared_bytes)
        fail("%s: %zu bytes at offset %td do not lie in the %u bytes of dynamic shared memory", what, bytes,
             byte - block->shared, machine.launch.shared_bytes);
    return byte;
}

static std::unique_ptr<Block> new_block(uint32_t index, uint8_t* window, uint8_t* stack) {
    const Launch& launch = machine.launch;
    auto block = std::make_unique<Block>();
    block->rank = index % launch.cluster;
    block->live = launch.threads;
    block->window = window;
    block->shared = window + shared_start;
    const size_t bytes = shared_start + launch.shared_bytes + guard_bytes;
    block->unfenced.assign(launch.shared_bytes / 16 + 1, 0);
    block->async = window + (bytes + 1023) / 1024 * 1024 + shared_start;
    memset(window, 0xCD, bytes);
    memset(block->shared, 0xFF, launch.shared_bytes);  // NaN in every format that octile has
    memset(block->async, 0xFF, launch.shared_bytes);
    for (uint32_t i = 0; i < (launch.threads + 31) / 32; ++i) block->warps.push_back(std::make_unique<Warp>());
    for (uint32_t i = 0; i < (launch.threads + 127) / 128; ++i)
        block->warpgroups.push_back(std::make_unique<Warpgroup>());
    const uint32_t registers = std::min(255u, 65536 / launch.threads) / 8 * 8;
    for (uint32_t i = 0; i < launch.threads; ++i) {
        auto thread = std::make_unique<Thread>();
        thread->thread = {i, 0, 0};
        thread->block = {index, 0, 0};
        thread->threads = {launch.threads, 1, 1};
        thread->blocks = {launch.grid, 1, 1};
        thread->rank = block->rank;
        thread->cluster = launch.cluster;
        thread->shared = block->shared;
        thread->home = block.get();
        thread->index = i;
        thread->lane = i % 32;
        thread->warp = block->warps[i / 32].get();
        thread->warp->lanes[i % 32] = thread.get();
        thread->warpgroup = block->warpgroups[i / 128].get();
        thread->registers = registers;
        *reinterpret_cast<uint64_t*>(stack + i * stack_bytes) = stack_canary;
        thread->stack_pointer = new_stack(stack + i * stack_bytes, stack_bytes, thread_main);
        block->threads.push_back(std::move(thread));
    }
    return block;
}

static void check_guards(const Block* block, const uint8_t* stack) {
    const uint8_t* end = block->shared + machine.launch.shared_bytes;
    for (const uint8_t* byte = block->window; byte < end + guard_bytes; ++byte)
        if ((byte < block->shared || byte >= end) && *byte != 0xCD)
            report(name(block) +
                   text(": the byte at offset %td was written, outside of its %u bytes of dynamic shared memory",
                        byte - block->shared, machine.launch.shared_bytes));
    for (uint32_t i = 0; i < machine.launch.threads; ++i)
        if (*reinterpret_cast<const uint64_t*>(stack + i * stack_bytes) != stack_canary)
            report(name(block) + text(": thread %u overran its stack of %zu bytes", i, stack_bytes));
}

// Runs some clusters to their end.
static void run_clusters(const uint32_t* indices, size_t clusters) {
    const Launch& launch = machine.launch;
    const size_t count = clusters * launch.cluster, block_stacks = launch.threads * stack_bytes;
    const size_t shared = (2 * (shared_start + launch.shared_bytes + guard_bytes) + 4096) / 1024 * 1024;
    const size_t needed = count * (block_stacks + shared);
    if (needed > memory_size) {
        if (memory) munmap(memory, memory_size);
        void* got = mmap(nullptr, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        memory = got == MAP_FAILED ? nullptr : static_cast<uint8_t*>(got);
        memory_size = memory ? needed : 0;
        if (!memory) report(text("no memory for %zu blocks at once", count));
    }
    auto stack = [&](size_t i) { return memory + i * block_stacks; };

    machine.blocks.clear();
    machine.clusters.assign(clusters, {});
    machine.cluster_barriers.assign(clusters, {});
    for (size_t i = 0; i < count; ++i) {
        const size_t cluster = i / launch.cluster;
        const uint32_t index = indices[cluster] * launch.cluster + i % launch.cluster;
        auto block = new_block(index, stack(count) + i * shared, stack(i));
        machine.clusters[cluster].push_back(block.get());
        block->cluster = &machine.clusters[cluster];
        block->cluster_barrier = &machine.cluster_barriers[cluster];
        machine.blocks.push_back(std::move(block));
    }
    begin_previous();
    run();
    for (size_t i = 0; i < count; ++i) check_guards(machine.blocks[i].get(), stack(i));
}

// All clusters in random order, a random number of them at a time, or all where they must run at the same time.
static void run_grid() {
    const Launch& launch = machine.launch;
    std::vector<uint32_t> order(launch.grid / launch.cluster);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
    for (size_t begin = 0; begin < order.size();) {
        const size_t left = order.size() - begin;
        const size_t together = launch.resident ? left : 1 + random_below(std::min<size_t>(left, 4));
        run_clusters(&order[begin], together);
        begin += together;
    }
    for (const Box& box : machine.prefetched)
        if (!machine.stored.contains(box))
            fail("the box at %d, %d, %d was loaded to the L2 cache and neither stored nor added to", box.first[0],
                 box.first[1], box.first[2]);
}

// ---- A launch ----------------------------------------------------------------------------------------------------

static uint64_t last_tick;
static pthread_t emulating;
static struct sigaction old_actions[3];
static const int signals[] = {SIGSEGV, SIGBUS, SIGVTALRM};

static void on_signal(int signal, siginfo_t* info, void*) {
    if (signal == SIGVTALRM) {
        if (!pthread_equal(pthread_self(), emulating)) {
            pthread_kill(emulating, signal);
        } else if (machine.switches != last_tick) {
            last_tick = machine.switches;
        } else {
            fail("runs for ever without a function that lets others run: it polls memory by ordinary reads, or loops");
        }
        return;
    }
    if (!pthread_equal(pthread_self(), emulating)) {  // not ours: happens again, and is treated as it was
        sigaction(signal, &old_actions[signal == SIGSEGV ? 0 : 1], nullptr);
        return;
    }
    machine.launch.fault = reinterpret_cast<uint64_t>(info->si_addr);
    if (is_protected(info->si_addr)) fail("writes to global memory before wait_for_previous");
    fail("invalid access to memory at %p", info->si_addr);
}

static Tendencies tendencies_of(const Launch& launch) {
    const unsigned chances[] = {0, 4, 32, 128, 256}, contests[] = {1, 4, 32}, deals[] = {7, 10, 13};
    Tendencies tendencies{};
    tendencies.switch_early = chances[random_below(4)];
    tendencies.copy_early = chances[random_below(5)];
    tendencies.wgmma_early = chances[2 * random_below(3)];
    tendencies.contest = contests[random_below(3)];
    tendencies.deal = deals[random_below(3)];
    if (launch.lazy == 1) tendencies.copy_early = tendencies.wgmma_early = 0;
    if (launch.lazy == 0) tendencies.copy_early = tendencies.wgmma_early = 256;
    return tendencies;
}

extern "C" int octile_emulate(Launch* launch) {
    self = nullptr;
    machine.launch = *launch;
    machine.random_state = launch->seed * 0x9E3779B97F4A7C15ull + 0xD1B54A32D192ED03ull;
    for (int i = 0; i < 8; ++i) random_below(2);
    machine.tendencies = tendencies_of(*launch);
    machine.switches = machine.progress = last_tick = 0;
    machine.previous_ended = true;
    machine.previous_waiters.clear();
    machine.prefetched.clear();
    machine.stored.clear();

    emulating = pthread_self();
    static uint8_t signal_stack[64 << 10];
    stack_t alternate{}, old_alternate;
    alternate.ss_sp = signal_stack;
    alternate.ss_size = sizeof signal_stack;
    sigaltstack(&alternate, &old_alternate);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &old_actions[i]);
    const itimerval every_second{{1, 0}, {1, 0}}, never{};
    setitimer(ITIMER_VIRTUAL, &every_second, nullptr);

    const int status = sigsetjmp(failed, 1);
    if (!status) run_grid();

    setitimer(ITIMER_VIRTUAL, &never, nullptr);
    for (int i = 0; i < 3; ++i) sigaction(signals[i], &old_actions[i], nullptr);
    sigaltstack(&old_alternate, nullptr);
    machine.launch.switches = machine.switches;
    machine.launch.prefetched = machine.prefetched.size();
    *launch = machine.launch;
    return status;
}

}  // namespace emulator
