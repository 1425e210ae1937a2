// The state of an emulated GPU during one launch.
//
// Threads are fibers on one CPU thread. Each runs until it calls a function of the core that blocks, or that lets
// others run; then the scheduler picks another at random. TMA copies and wgmmas are asynchronous, as on the GPU: they
// happen at some random moment between the instruction and the wait for it. A seed determines all that is random.
#pragma once
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../device/ptx.cuh"

namespace emulator {

struct Block;
struct Copy;
struct Thread;

using Threads = std::vector<Thread*>;
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// An mbarrier. Its 8 bytes of shared memory only contain `word(i)`, so that stray writes to them are detected.
struct MbarrierState {
    uint32_t offset, count, pending;
    uint32_t in_flight = 0;  // of the pending arrivals, those that wait for copies of cp.async
    int bytes = 0;
    uint64_t phase = 0;
    const Thread* fence_due;  // who initialized it and has not called fence_mbarrier_init yet
    struct Waiter {
        Thread* thread;
        uint64_t phase;
    };
    std::vector<Waiter> waiters;
};

struct NamedBarrier {
    uint32_t threads = 0, arrived = 0;
    bool completed = false;  // at least once
    Threads waiters;
};

// Lanes that execute the same warp-level primitive with the same mask.
struct WarpCall {
    WarpPrimitive kind;
    uint32_t mask, arrived;
};

struct Warp {
    std::deque<WarpCall> calls;  // in flight
    Thread* lanes[32] = {};
    std::vector<uint32_t> unfenced;  // chunks of 16 bytes of shared memory that stmatrix wrote
    uint32_t fenced = 0;             // lanes that called fence_proxy_async since
};

// An accumulator with wgmmas in flight: meanwhile the registers themselves contain `poison`.
struct InFlight {
    int n;
    float* homes[128] = {};
    std::vector<float> matrix;  // [64][n]
};

struct Wgmma {
    uint64_t a, b;
    bool accumulate;
    int n, a_format, b_format;
    uint32_t issued = 0, done = 0;  // of 128 threads, of 4 warps
    std::shared_ptr<InFlight> accumulator;
    bool a_transposed = false, b_transposed = false;
    std::vector<float> a_values;  // [64][k], of operand a in registers
};

struct Warpgroup {
    std::vector<Wgmma> wgmmas;
    size_t done[4] = {};          // wgmmas, each warp for its 16 rows
    std::vector<size_t> commits;  // wgmmas before each commit
    Threads waiters;
};

// 16 bytes that cp.async copies to shared memory; from nowhere: `value`, zeros or what it has read already.
struct Piece {
    uint8_t* to;
    const void* from;
    uint4 value;
};

// Bytes that a thread copies for itself to shared memory, in groups that it waits for.
struct OwnPiece {
    uint8_t* to;
    const void* from;
    uint32_t bytes;
};

struct Thread : Place {
    Block* home;
    Warpgroup* warpgroup;
    Warp* warp;
    uint32_t index, lane;
    void* stack_pointer = nullptr;
    bool done = false;
    std::function<std::string()> why;  // what it waits for, for the report of a deadlock

    uint64_t input, result;  // of a warp-level primitive
    uint32_t argument, width;
    Rows rows;
    uint32_t registers = 0, register_changes = 0;

    std::vector<std::shared_ptr<Copy>> open_group;
    std::vector<Piece> pieces;  // for which it has not arrived yet
    std::deque<std::vector<std::shared_ptr<Copy>>> groups;
    std::vector<OwnPiece> own_pieces;  // since the last group
    std::deque<std::vector<OwnPiece>> own_groups;

    bool has_waited = false;  // for the previous kernel
    bool fenced = false;  // wgmma_fence since its registers were last its own
    size_t issued = 0, commits = 0;
    struct Accumulator {
        std::shared_ptr<InFlight> registers;
        size_t last;  // wgmma
    };
    std::vector<Accumulator> accumulators;  // with wgmmas in flight
};

struct Block {
    uint32_t rank, live;
    uint8_t *window, *shared, *async;  // `async` is shared memory as TMA and wgmma see it
    std::vector<uint8_t> unfenced;     // for each 16 bytes: 1 + the warp whose stmatrix wrote them, until its fence
    std::vector<std::unique_ptr<MbarrierState>> barriers;
    NamedBarrier named[16];
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Warpgroup>> warpgroups;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Block*>* cluster;
    NamedBarrier* cluster_barrier;
    uint32_t register_pool = 0;
    Threads register_waiters;
};

// Memory that the previous kernel writes, and what it has written when it has ended.
struct Written {
    uint8_t* start;
    uint64_t bytes;
    uint8_t* values;
};

// The memory of a tensor's storage: whole pages.
struct Pages {
    void* start;
    uint64_t bytes;
};

// The arguments of a launch, in the order of the ctypes structure in __init__.py.
struct Launch {
    void (*call)(void** arguments);
    void** arguments;
    uint32_t grid, cluster, threads, shared_bytes;
    uint64_t seed;
    int32_t lazy;      // 1: copies and wgmmas as late as allowed, 0: as early, −1: the seed decides
    int32_t hopper;    // sums as Hopper's tensor core computes them
    int32_t resident;  // all blocks run at the same time
    const Written* written;  // by the previous kernel, which ends while this one waits for it
    uint64_t n_written;
    const Pages* storages;  // not to be written before
    uint64_t n_storages;
    uint64_t switches;
    uint64_t prefetched;  // boxes that TMA loaded to the L2 cache
    uint64_t fault;  // the address of an invalid access
    char message[8192];
};

// The probabilities of this run, from its seed, out of 256.
struct Tendencies {
    unsigned switch_early, copy_early, wgmma_early;
    unsigned contest;  // candidates for the next turn, of which the one with the highest priority gets it
    unsigned deal;     // warps get new priorities every 2^deal turns
};

// A box of a tensor, by the coordinates of its first element.
struct Box {
    const uint8_t* base;
    int first[5] = {};
    auto operator<=>(const Box&) const = default;
};

struct Machine {
    Launch launch;
    Tendencies tendencies;
    uint64_t random_state;
    Threads ready;
    std::vector<std::shared_ptr<Copy>> copies;  // not finished yet
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::vector<Block*>> clusters;
    std::vector<NamedBarrier> cluster_barriers;
    void* scheduler;              // its stack pointer
    uint64_t switches, progress;  // progress: the switch at which something last happened
    uint32_t live;
    bool previous_ended;
    Threads previous_waiters;
    std::set<Box> prefetched, stored;  // boxes that TMA loaded to the L2 cache; that it stored or added to
};
extern Machine machine;

inline Thread* me() { return static_cast<Thread*>(self); }
uint32_t random_below(uint32_t n);
inline bool chance(unsigned of_256) { return random_below(256) < of_256; }

[[noreturn]] void report(const std::string& message);  // ends the launch
void run();                                            // all of machine.blocks, until their last thread has ended
void thread_main();                                    // what a fiber runs
void park(std::function<std::string()> why);           // the running thread stops until `wake`
void wake(Threads& threads);
std::string name(const Thread* thread);
std::string name(const Block* block);
uint8_t* shared_range(Block* block, const void* start, size_t bytes, const char* what);  // checked

MbarrierState& barrier_of(Block* block, const uint64_t& state);
void check_lacks_arrival(const Block* block, const MbarrierState& barrier);
void complete_phase(Block* block, MbarrierState& barrier);
void complete_tx(Block* block, MbarrierState& barrier, uint32_t bytes);
void advance_copy(size_t index);
void begin_previous();
void end_previous();
bool is_protected(const void* address);
void check_exit(Thread* thread);
void check_block_exit(Block* block);

}  // namespace emulator
