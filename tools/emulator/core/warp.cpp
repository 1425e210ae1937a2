// Warp-level primitives: shuffles, votes, reductions and stmatrix; and the proxy fence that stmatrix needs.
#include <algorithm>

#include "../device/convert.cuh"
#include "machine.h"
#include "tensor_core.h"

namespace emulator {

static uint64_t result_of(const Warp& warp, WarpPrimitive kind, uint32_t mask, const Thread& to) {
    auto input = [&](uint32_t lane) -> uint64_t {
        if (!(mask >> lane & 1)) fail("lane %u reads from lane %u, which is not in the mask %08x", to.lane, lane, mask);
        return warp.lanes[lane]->input;
    };
    auto fold = [&](auto combine) {
        uint64_t result = to.input;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && lane != int(to.lane)) result = combine(int64_t(result), int64_t(input(lane)));
        return result;
    };
    auto bits = [&](auto predicate) {
        uint32_t result = 0;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && predicate(input(lane))) result |= 1u << lane;
        return result;
    };
    const uint32_t width = to.width, start = to.lane / width * width, at = to.lane % width, argument = to.argument;
    switch (kind) {
        case WarpPrimitive::sync:
        case WarpPrimitive::stmatrix:
        case WarpPrimitive::ldmatrix:
        case WarpPrimitive::mma: return 0;
        case WarpPrimitive::shuffle: return input(start + argument % width);
        case WarpPrimitive::shuffle_xor: return (at ^ argument) < width ? input(start + (at ^ argument)) : to.input;
        case WarpPrimitive::shuffle_up: return at >= argument ? input(to.lane - argument) : to.input;
        case WarpPrimitive::shuffle_down: return at + argument < width ? input(to.lane + argument) : to.input;
        case WarpPrimitive::ballot: return bits([](uint64_t x) { return x != 0; });
        case WarpPrimitive::match: return bits([&](uint64_t x) { return x == to.input; });
        case WarpPrimitive::reduce_add: return fold([](int64_t x, int64_t y) { return x + y; });
        case WarpPrimitive::reduce_min: return fold([](int64_t x, int64_t y) { return std::min(x, y); });
        case WarpPrimitive::reduce_max: return fold([](int64_t x, int64_t y) { return std::max(x, y); });
        case WarpPrimitive::reduce_or: return fold([](int64_t x, int64_t y) { return x | y; });
        case WarpPrimitive::reduce_and: return fold([](int64_t x, int64_t y) { return x & y; });
    }
    __builtin_unreachable();
}

// The last lane to arrive runs `together`; then all continue.
static void run_together(WarpPrimitive kind, uint32_t mask, const std::function<void(Warp&)>& together) {
    Thread* thread = me();
    Warp& warp = *thread->warp;
    if (!(mask >> thread->lane & 1)) fail("is not in the mask %08x that it gives", mask);
    auto call = std::find_if(warp.calls.begin(), warp.calls.end(),
                                [&](const WarpCall& other) { return other.kind == kind && other.mask == mask; });
    if (call == warp.calls.end()) call = warp.calls.insert(warp.calls.end(), {kind, mask, 0});
    call->arrived |= 1u << thread->lane;
    if (call->arrived != mask) {
        park([&warp, kind, mask] {
            uint32_t arrived = 0;
            for (const WarpCall& other : warp.calls)
                if (other.kind == kind && other.mask == mask) arrived = other.arrived;
            return text("waits for lanes %08x of its warp", mask & ~arrived);
        });
        return;
    }
    warp.calls.erase(call);
    together(warp);
    Threads others;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && lane != int(thread->lane)) others.push_back(warp.lanes[lane]);
    wake(others);
    may_switch();
}

uint64_t warp_primitive(WarpPrimitive kind, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width) {
    Thread* thread = me();
    thread->input = value;
    thread->argument = argument;
    thread->width = width;
    run_together(kind, mask, [kind, mask](Warp& warp) {
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) warp.lanes[lane]->result = result_of(warp, kind, mask, *warp.lanes[lane]);
    });
    return thread->result;
}

void stmatrix(void* row, const Rows& rows) {
    Thread* thread = me();
    thread->input = reinterpret_cast<uint64_t>(row);
    thread->rows = rows;
    run_together(WarpPrimitive::stmatrix, ~0u, [](Warp& warp) {
        const Rows& first = warp.lanes[0]->rows;
        Block* block = warp.lanes[0]->home;
        for (int matrix = 0; matrix < first.count; ++matrix)
            for (int i = 0; i < 8; ++i) {
                const Thread* owner = warp.lanes[8 * matrix + i];
                auto* to = reinterpret_cast<uint8_t*>(owner->input);
                shared_range(block, to, 16, "stmatrix");
                if (reinterpret_cast<uintptr_t>(to) % 16)
                    fail("stmatrix: the row of lane %u is not 16-byte aligned", owner->lane);
                for (int j = 0; j < 8; ++j) {
                    const int r = first.transposed ? j : i, c = first.transposed ? i : j;
                    const uint32_t pair = warp.lanes[4 * r + c / 2]->rows.registers[matrix];
                    const uint16_t element = pair >> 16 * (c % 2);
                    memcpy(to + 2 * j, &element, 2);
                }
                const uint32_t chunk = (to - block->shared) / 16;
                block->unfenced[chunk] = 1 + owner->index / 32;
                warp.unfenced.push_back(chunk);
            }
        warp.fenced = 0;
    });
}

void ldmatrix(uint32_t (&registers)[4], const void* row, bool transposed) {
    Thread* thread = me();
    thread->input = reinterpret_cast<uint64_t>(row);
    thread->rows = {{}, 4, transposed};
    run_together(WarpPrimitive::ldmatrix, ~0u, [](Warp& warp) {
        for (int matrix = 0; matrix < 4; ++matrix)
            for (int i = 0; i < 8; ++i) {
                const Thread* owner = warp.lanes[8 * matrix + i];
                const auto* from = reinterpret_cast<const uint8_t*>(owner->input);
                shared_range(owner->home, from, 16, "ldmatrix");
                if (reinterpret_cast<uintptr_t>(from) % 16)
                    fail("ldmatrix: the row of lane %u is not 16-byte aligned", owner->lane);
                for (int j = 0; j < 8; ++j) {
                    const int r = owner->rows.transposed ? j : i, c = owner->rows.transposed ? i : j;
                    uint16_t element;
                    memcpy(&element, from + 2 * j, 2);
                    warp.lanes[4 * r + c / 2]->rows.registers[matrix] |= uint32_t(element) << 16 * (c % 2);
                }
            }
    });
    memcpy(registers, thread->rows.registers, sizeof registers);
}

static float element(uint32_t pair, int upper, bool bfloat16) {
    const uint32_t bits = upper ? pair >> 16 : pair & 0xFFFF;
    return bfloat16 ? __uint_as_float(bits << 16) : from_f16(bits);
}

void mma(const Fragments& of_lane, bool bfloat16) {
    me()->input = reinterpret_cast<uint64_t>(&of_lane);
    run_together(WarpPrimitive::mma, ~0u, [bfloat16](Warp& warp) {
        auto lane = [&](int g, int t) -> const Fragments& {
            return *reinterpret_cast<const Fragments*>(warp.lanes[4 * g + t]->input);
        };
        operands.n = 8, operands.k = 16;
        for (int k = 0; k < 16; ++k) {
            for (int row = 0; row < 16; ++row)
                operands.a[16 * row + k] = element(lane(row % 8, k % 8 / 2).a[k / 8 * 2 + row / 8], k % 2, bfloat16);
            for (int column = 0; column < 8; ++column)
                operands.b[8 * k + column] = element(lane(column, k % 8 / 2).b[k / 8], k % 2, bfloat16);
        }
        const int least_exponent = bfloat16 ? -126 : -14;
        if (machine.launch.hopper) find_exponents(least_exponent, least_exponent);
        for (int row = 0; row < 16; ++row) {
            float d[8];
            auto of_lane = [&](int column) -> float& { return lane(row % 8, column / 2).d[row / 8 * 2 + column % 2]; };
            for (int column = 0; column < 8; ++column) d[column] = of_lane(column);
            machine.launch.hopper ? sum_hopper_row(d, row, false) : sum_exact(d, row);
            for (int column = 0; column < 8; ++column) of_lane(column) = d[column];
        }
    });
}

void store_cluster(uint32_t to, uint32_t value) {
    may_switch();
    const uint32_t rank = to >> 24;
    const Block* own = me()->home;
    if (rank >= own->cluster->size()) fail("there is no block %u in a cluster of %zu", rank, own->cluster->size());
    Block* block = (*own->cluster)[rank];
    if (!block->live) fail("store_cluster to block %u, whose threads have all ended", rank);
    if (block != own && !own->cluster_barrier->completed)
        fail("store_cluster to block %u before a cluster_sync: the block may not have begun", rank);
    if (to % 4) fail("store_cluster: the address is not a multiple of 4");
    uint8_t* at = block->shared + ((to & 0xFFFFFF) - shared_start);
    shared_range(block, at, sizeof value, "store_cluster");
    memcpy(at, &value, sizeof value);
}

// A proxy fence orders the writes of its own thread: what the lanes of a warp wrote together needs the fences of all.
void fence_proxy_async() {
    Thread* thread = me();
    Warp& warp = *thread->warp;
    memcpy(thread->home->async, thread->home->shared, machine.launch.shared_bytes);
    warp.fenced |= 1u << thread->lane;
    if (warp.fenced != ~0u) return;
    for (uint32_t chunk : warp.unfenced)
        if (thread->home->unfenced[chunk] == 1 + thread->index / 32) thread->home->unfenced[chunk] = 0;
    warp.unfenced.clear();
}

}  // namespace emulator
