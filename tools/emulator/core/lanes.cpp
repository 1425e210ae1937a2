// What the lanes of a warp do together: exchange values, store matrices; and the fence that such stores need.
#include <algorithm>

#include "machine.h"

namespace emulator {

static uint64_t answer(const Warp& warp, Meeting kind, uint32_t mask, const Thread& to) {
    auto brought = [&](uint32_t lane) -> uint64_t {
        if (!(mask >> lane & 1)) fail("lane %u reads from lane %u, which is not in the mask %08x", to.lane, lane, mask);
        return warp.lanes[lane]->brought;
    };
    auto fold = [&](auto combine) {
        uint64_t result = to.brought;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && lane != int(to.lane)) result = combine(int64_t(result), int64_t(brought(lane)));
        return result;
    };
    auto bits = [&](auto predicate) {
        uint32_t result = 0;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && predicate(brought(lane))) result |= 1u << lane;
        return result;
    };
    const uint32_t width = to.width, start = to.lane / width * width, at = to.lane % width, argument = to.argument;
    switch (kind) {
        case Meeting::sync:
        case Meeting::stmatrix: return 0;
        case Meeting::shuffle: return brought(start + argument % width);
        case Meeting::shuffle_xor: return (at ^ argument) < width ? brought(start + (at ^ argument)) : to.brought;
        case Meeting::shuffle_up: return at >= argument ? brought(to.lane - argument) : to.brought;
        case Meeting::shuffle_down: return at + argument < width ? brought(to.lane + argument) : to.brought;
        case Meeting::ballot: return bits([](uint64_t x) { return x != 0; });
        case Meeting::match: return bits([&](uint64_t x) { return x == to.brought; });
        case Meeting::reduce_add: return fold([](int64_t x, int64_t y) { return x + y; });
        case Meeting::reduce_min: return fold([](int64_t x, int64_t y) { return std::min(x, y); });
        case Meeting::reduce_max: return fold([](int64_t x, int64_t y) { return std::max(x, y); });
        case Meeting::reduce_or: return fold([](int64_t x, int64_t y) { return x | y; });
        case Meeting::reduce_and: return fold([](int64_t x, int64_t y) { return x & y; });
    }
    __builtin_unreachable();
}

// The last lane to come does what `together` says, then all go on.
static void meet_and(Meeting kind, uint32_t mask, const std::function<void(Warp&)>& together) {
    Thread* thread = me();
    Warp& warp = *thread->warp;
    if (!(mask >> thread->lane & 1)) fail("is not in the mask %08x that it gives", mask);
    auto meeting = std::find_if(warp.meetings.begin(), warp.meetings.end(),
                                [&](const Meet& other) { return other.kind == kind && other.mask == mask; });
    if (meeting == warp.meetings.end()) meeting = warp.meetings.insert(warp.meetings.end(), {kind, mask, 0});
    meeting->arrived |= 1u << thread->lane;
    if (meeting->arrived != mask) {
        park([&warp, kind, mask] {
            uint32_t arrived = 0;
            for (const Meet& other : warp.meetings)
                if (other.kind == kind && other.mask == mask) arrived = other.arrived;
            return text("waits for lanes %08x of its warp", mask & ~arrived);
        });
        return;
    }
    warp.meetings.erase(meeting);
    together(warp);
    Threads others;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && lane != int(thread->lane)) others.push_back(warp.lanes[lane]);
    wake(others);
    may_switch();
}

uint64_t meet(Meeting kind, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width) {
    Thread* thread = me();
    thread->brought = value;
    thread->argument = argument;
    thread->width = width;
    meet_and(kind, mask, [kind, mask](Warp& warp) {
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) warp.lanes[lane]->answer = answer(warp, kind, mask, *warp.lanes[lane]);
    });
    return thread->answer;
}

void stmatrix(void* row, const Rows& rows) {
    Thread* thread = me();
    thread->brought = reinterpret_cast<uint64_t>(row);
    thread->rows = rows;
    meet_and(Meeting::stmatrix, ~0u, [](Warp& warp) {
        const Rows& first = warp.lanes[0]->rows;
        Block* block = warp.lanes[0]->home;
        for (int matrix = 0; matrix < first.count; ++matrix)
            for (int i = 0; i < 8; ++i) {
                const Thread* owner = warp.lanes[8 * matrix + i];
                auto* to = reinterpret_cast<uint8_t*>(owner->brought);
                shared_range(block, to, 16, "stmatrix");
                if (reinterpret_cast<uintptr_t>(to) % 16)
                    fail("stmatrix: the row of lane %u is not 16-byte aligned", owner->lane);
                for (int j = 0; j < 8; ++j) {
                    const int r = first.transposed ? j : i, c = first.transposed ? i : j;
                    const uint32_t pair = warp.lanes[4 * r + c / 2]->rows.registers[matrix];
                    const uint16_t element = pair >> 16 * (c % 2);
                    memcpy(to + 2 * j, &element, 2);
                }
                const uint32_t piece = (to - block->shared) / 16;
                block->unfenced[piece] = 1 + owner->index / 32;
                warp.unfenced.push_back(piece);
            }
        warp.fenced = 0;
    });
}

// A proxy fence is a matter of each thread: what lanes of a warp wrote together waits for all of them.
void fence_proxy_async() {
    Thread* thread = me();
    Warp& warp = *thread->warp;
    memcpy(thread->home->async, thread->home->shared, machine.launch.shared_bytes);
    warp.fenced |= 1u << thread->lane;
    if (warp.fenced != ~0u) return;
    for (uint32_t piece : warp.unfenced)
        if (thread->home->unfenced[piece] == 1 + thread->index / 32) thread->home->unfenced[piece] = 0;
    warp.unfenced.clear();
}

}  // namespace emulator
