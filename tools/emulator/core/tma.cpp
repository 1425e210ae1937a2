// TMA and cp.async. A copy happens at a random moment after its instruction. A load first fills its destination with 0xFF
// (NaN), because its earlier contents are undefined from the instruction on. What cp.async copies lands when the arrival
// that follows it does; TMA and wgmma see it after a proxy fence.
//
// Source: PTX ISA, "Tensors", "Swizzling modes" and "cp.async.mbarrier.arrive"; CUDA driver API, cuTensorMapEncodeTiled.
#include "machine.h"

#include <algorithm>

namespace emulator {

// The 128 opaque bytes of a tensor map, as __init__.py writes them.
struct Map {
    uint8_t* base;
    uint64_t strides[4];  // bytes, of dimensions 1 …
    uint32_t sizes[5];
    uint16_t box[5];
    uint8_t rank, element, swizzle;  // bytes of an element; 0, 32, 64 or 128
    uint8_t magic[55];
};
static_assert(sizeof(Map) == sizeof(TensorMap));

struct Copy {
    enum { load, store, add, pieces } kind;
    Map map;
    int place[5] = {};
    Block* block;       // whose shared memory
    uint32_t offset;    // there
    MbarrierState* barrier;  // of a load
    std::string issuer;
    enum { issued, read, written } state = issued;
    std::vector<uint8_t> box;
    std::vector<Piece> copied;  // by cp.async
    Block* source = nullptr;    // of bulk_copy

    uint32_t row_bytes() const { return map.box[0] * map.element; }
    uint32_t rows() const {
        uint32_t rows = 1;
        for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
        return rows;
    }
    uint32_t bytes() const { return rows() * row_bytes(); }

    // Where 16 bytes of the box lie in shared memory: address bits 4 … are mixed with bits 7 … of the same address.
    uint32_t at(uint32_t chunk) const {
        const uint32_t address = shared_start + offset + 16 * chunk;
        const uint32_t mask = map.swizzle ? map.swizzle / 16 - 1 : 0;
        return (address ^ (address >> 7 & mask) << 4) - shared_start;
    }

    // Calls f(global memory, bytes into the box, bytes) for the part of each row that lies inside of the tensor.
    template <class F>
    void each_row(F f) const {
        for (uint32_t row = 0; row < rows(); ++row) {
            uint32_t rest = row;
            uint8_t* global = map.base;
            bool inside = true;
            for (int i = 1; i < map.rank; ++i) {
                const int64_t at = int64_t(place[i]) + rest % map.box[i];
                rest /= map.box[i];
                inside &= at >= 0 && at < map.sizes[i];
                global += at * int64_t(map.strides[i - 1]);
            }
            const int64_t first = std::max<int64_t>(0, -int64_t(place[0]));
            const int64_t last = std::min<int64_t>(map.box[0], int64_t(map.sizes[0]) - place[0]);
            if (inside && first < last)
                f(global + (place[0] + first) * map.element, row * row_bytes() + first * map.element,
                  (last - first) * map.element);
        }
    }

    void load_box() {
        if (source && !source->live)
            fail("bulk_copy of %s reads %s, whose threads have all ended", issuer.c_str(), name(source).c_str());
        box.assign(bytes(), 0);
        each_row([&](const uint8_t* global, uint32_t at, uint32_t n) { memcpy(&box[at], global, n); });
        for (uint32_t i = 0; i < bytes() / 16; ++i) {
            memcpy(block->shared + at(i), &box[16 * i], 16);
            memcpy(block->async + at(i), &box[16 * i], 16);
        }
        if (!block->live)
            fail("TMA: a copy of %s lands in %s, whose threads have all ended", issuer.c_str(), name(block).c_str());
        emulator::complete_tx(block, *barrier, bytes());
    }

    void read_shared() {
        box.resize(bytes());
        for (uint32_t i = 0; i < bytes() / 16; ++i) memcpy(&box[16 * i], block->async + at(i), 16);
        state = read;
    }

    void write() {
        each_row([&](uint8_t* global, uint32_t at, uint32_t n) {
            if (kind == store) {
                memcpy(global, &box[at], (n + 15) / 16 * 16);  // whole chunks of 16 bytes: observed on an H200
                return;
            }
            for (uint32_t i = 0; i < n; i += 4) {
                float sum, term;
                memcpy(&sum, global + i, 4);
                memcpy(&term, &box[at + i], 4);
                sum += term;
                memcpy(global + i, &sum, 4);
            }
        });
        state = written;
    }

    void land_pieces() {
        for (const Piece& piece : copied) memcpy(piece.to, piece.from ? piece.from : &piece.value, 16);
        --barrier->in_flight;
        --barrier->pending;
        complete_phase(block, *barrier);
        state = written;
    }

    void advance(int to) {
        if (kind == pieces && state == issued) return land_pieces();
        if (state < read && to >= read) {
            if (kind == load) {
                load_box();
                state = written;
                return;
            }
            read_shared();
        }
        if (state < written && to >= written) write();
    }
};

static void drop_written() {
    std::erase_if(machine.copies, [](const auto& copy) { return copy->state == Copy::written; });
}

void advance_copy(size_t index) {
    machine.progress = machine.switches;
    const auto copy = machine.copies[index];
    copy->advance(copy->state + 1);
    drop_written();
}

static Map checked(const TensorMap* tensor_map, int dimensions) {
    Map map;
    memcpy(&map, tensor_map, sizeof map);
    if (reinterpret_cast<uintptr_t>(tensor_map) % 64) fail("a tensor map is 64-byte aligned");
    if (memcmp(map.magic, "octile", 6)) fail("this is no tensor map");
    if (map.rank != dimensions) fail("a copy in %d dimensions with a tensor map of %u", dimensions, map.rank);
    return map;
}

static void check_first_coordinate(const Map& map, const int* place) {
    if (int64_t(place[0]) * map.element % 16)  // observed on an H200; in no documentation that we know
        fail("TMA: illegal instruction: the first coordinate %d of elements of %u bytes is no multiple of 16 bytes",
             place[0], map.element);
}

static std::shared_ptr<Copy> new_copy(
    const Map& map, const int* place, Block* block, const void* shared, uint32_t alignment = 128) {
    auto copy = std::make_shared<Copy>();
    check_first_coordinate(map, place);
    copy->map = map;
    std::copy_n(place, map.rank, copy->place);
    copy->block = block;
    copy->issuer = name(me());
    const uint8_t* start = shared_range(me()->home, shared, copy->bytes(), "TMA");
    copy->offset = start - me()->home->shared;
    if ((shared_start + copy->offset) % alignment)
        fail("TMA: shared memory at offset %u is not %u-byte aligned", copy->offset, alignment);
    return copy;
}

static Box box_of(const Map& map, const int* place) {
    Box box{map.base};
    std::copy_n(place, map.rank, box.first);
    return box;
}

void tma_prefetch(const TensorMap* tensor_map, const int* place, int dimensions) {
    may_switch();
    const Map map = checked(tensor_map, dimensions);
    bool inside = true;
    for (int i = 0; i < map.rank; ++i) inside &= place[i] < int64_t(map.sizes[i]) && place[i] + map.box[i] > 0;
    check_first_coordinate(map, place);
    if (inside) machine.prefetched.insert(box_of(map, place));
}

// That no warp wrote these bytes of shared memory by stmatrix without a fence.
static void check_fenced(uint32_t offset, uint32_t bytes) {
    for (uint32_t at = offset; at < offset + bytes; at += 16)
        if (const uint32_t warp = me()->home->unfenced[at / 16])
            fail("stores offset %u of shared memory, which stmatrix of warp %u wrote without fence_proxy_async", at,
                 warp - 1);
}

void tma_load(
    void* to, const TensorMap* tensor_map, uint64_t& state, const int* place, int dimensions, uint32_t blocks) {
    may_switch();
    const Map map = checked(tensor_map, dimensions);
    const Block* own = me()->home;
    if (!blocks || blocks >> own->cluster->size())
        fail("multicast to blocks %x of a cluster of %zu", blocks, own->cluster->size());
    const ptrdiff_t barrier_offset = reinterpret_cast<uint8_t*>(&state) - own->shared;
    for (Block* block : *own->cluster) {
        if (!(blocks >> block->rank & 1)) continue;
        if (!block->live) fail("TMA: multicast to %s, whose threads have all ended", name(block).c_str());
        auto copy = new_copy(map, place, block, to);
        copy->kind = Copy::load;
        copy->barrier = &barrier_of(block, *reinterpret_cast<uint64_t*>(block->shared + barrier_offset));
        if (copy->barrier->fence_due)
            fail("TMA: the mbarrier at offset %u was initialized without fence_mbarrier_init", copy->barrier->offset);
        memset(block->shared + copy->offset, 0xFF, copy->bytes());
        memset(block->async + copy->offset, 0xFF, copy->bytes());
        machine.copies.push_back(copy);
    }
    if (chance(machine.tendencies.copy_early)) advance_copy(machine.copies.size() - 1);
}

// Begins to copy contiguous bytes to a block's shared memory, at the place that `to` has in the caller's.
static std::shared_ptr<Copy> copy_row(
    Block* block, void* to, const void* from, uint32_t bytes, MbarrierState& barrier) {
    Map row{};
    row.base = static_cast<uint8_t*>(const_cast<void*>(from));
    row.sizes[0] = row.box[0] = bytes;
    row.rank = row.element = 1;
    const int place = 0;
    auto copy = new_copy(row, &place, block, to, 16);
    copy->kind = Copy::load;
    copy->barrier = &barrier;
    if (barrier.fence_due)
        fail("TMA: the mbarrier at offset %u was initialized without fence_mbarrier_init", barrier.offset);
    memset(block->shared + copy->offset, 0xFF, bytes);
    memset(block->async + copy->offset, 0xFF, bytes);
    machine.copies.push_back(copy);
    return copy;
}

void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t& state) {
    may_switch();
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) fail("bytes to load are not 16-byte aligned, or long");
    Block* block = me()->home;
    copy_row(block, to, from, bytes, barrier_of(block, state));
    if (chance(machine.tendencies.copy_early)) advance_copy(machine.copies.size() - 1);
}

void bulk_prefetch(const void* from, uint32_t bytes) {
    may_switch();
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) fail("bytes to prefetch are not 16-byte aligned, or long");
    volatile uint8_t read;  // an address outside of the tensor is found
    read = static_cast<const uint8_t*>(from)[0];
    read = static_cast<const uint8_t*>(from)[bytes - 1];
}

void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    may_switch();
    const uint32_t rank = to >> 24, first = to & 0xFFFFFF;
    Block* own = me()->home;
    if (rank != barrier >> 24) fail("bulk_copy: the place and its mbarrier are in two thread blocks");
    if (rank >= own->cluster->size()) fail("there is no block %u in a cluster of %zu", rank, own->cluster->size());
    Block* block = (*own->cluster)[rank];
    if (!block->live) fail("bulk_copy to %s, whose threads have all ended", name(block).c_str());
    if (bytes % 16) fail("bulk_copy of %u bytes, which are no multiple of 16", bytes);
    const uint32_t source = shared_range(own, from, bytes, "bulk_copy") - own->shared;
    if ((shared_start + source) % 16) fail("bulk_copy from offset %u, which is not 16-byte aligned", source);
    check_fenced(source, bytes);
    auto& state = *reinterpret_cast<uint64_t*>(block->shared + ((barrier & 0xFFFFFF) - shared_start));
    copy_row(block, own->shared + (first - shared_start), own->async + source, bytes, barrier_of(block, state))->source = own;
    if (chance(machine.tendencies.copy_early)) advance_copy(machine.copies.size() - 1);
}

void cp_async_16(void* to, const void* from, bool reads) {
    may_switch();
    Block* block = me()->home;
    uint8_t* start = shared_range(block, to, 16, "cp.async");
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        fail("cp.async copies 16 bytes from and to addresses that are multiples of 16");
    memset(start, 0xFF, 16);
    memset(block->async + (start - block->shared), 0xFF, 16);
    if (reads && !chance(machine.tendencies.copy_early))
        me()->pieces.push_back({start, from, {}});
    else
        me()->pieces.push_back({start, nullptr, reads ? *static_cast<const uint4*>(from) : uint4{}});
}

void arrive_after_copies(uint64_t& state) {
    may_switch();
    auto copy = std::make_shared<Copy>();
    copy->kind = Copy::pieces;
    copy->block = me()->home;
    copy->barrier = &barrier_of(me()->home, state);
    copy->issuer = name(me());
    copy->copied = std::move(me()->pieces);
    me()->pieces.clear();
    check_lacks_arrival(copy->block, *copy->barrier);
    ++copy->barrier->in_flight;
    machine.copies.push_back(copy);
    if (chance(machine.tendencies.copy_early)) advance_copy(machine.copies.size() - 1);
}

// What is copied arrives when the thread waits for it.
void copy_async(void* to, const void* from, uint32_t bytes) {
    may_switch();
    Block* block = me()->home;
    uint8_t* start = shared_range(block, to, bytes, "cp.async");
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
        fail("cp.async copies %u bytes from and to addresses that are multiples of as many", bytes);
    memset(start, 0xFF, bytes);
    memset(block->async + (start - block->shared), 0xFF, bytes);
    me()->own_pieces.push_back({start, from, bytes});
}

void copy_async_commit() {
    me()->own_groups.push_back(std::move(me()->own_pieces));
    me()->own_pieces.clear();
}

void copy_async_wait(int groups) {
    may_switch();
    for (auto& waiting = me()->own_groups; waiting.size() > size_t(groups); waiting.pop_front())
        for (const OwnPiece& piece : waiting.front()) memcpy(piece.to, piece.from, piece.bytes);
}

static void begin_store(const std::shared_ptr<Copy>& copy) {
    for (uint32_t i = 0; i < copy->bytes() / 16; ++i) check_fenced(copy->at(i), 16);
    me()->open_group.push_back(copy);
    machine.copies.push_back(copy);
    if (chance(machine.tendencies.copy_early)) advance_copy(machine.copies.size() - 1);
}

void tma_store(const TensorMap* tensor_map, const void* from, const int* place, int dimensions, bool add) {
    may_switch();
    const Map map = checked(tensor_map, dimensions);
    if (add && map.element != 4) fail("tma_reduce_add adds float32, not elements of %u bytes", map.element);
    auto copy = new_copy(map, place, me()->home, from);
    copy->kind = add ? Copy::add : Copy::store;
    machine.stored.insert(box_of(map, place));
    begin_store(copy);
}

void bulk_store(void* to, const void* from, uint32_t bytes) {
    may_switch();
    if (reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16) fail("a row to store is not 16-byte aligned, or long");
    Map row{};
    row.base = static_cast<uint8_t*>(to);
    row.sizes[0] = row.box[0] = bytes;
    row.rank = row.element = 1;
    const int first = 0;
    auto copy = new_copy(row, &first, me()->home, from, 16);
    copy->kind = Copy::store;
    begin_store(copy);
}

void bulk_commit_group() { me()->groups.push_back(std::move(me()->open_group)), me()->open_group.clear(); }

void bulk_wait_group_read(int groups) {
    may_switch();
    Thread* thread = me();
    for (size_t i = 0; i + groups < thread->groups.size(); ++i)
        for (const auto& copy : thread->groups[i]) copy->advance(Copy::read);
    drop_written();
}

// Shared memory is released when the block ends: no copy may still read or write it.
void check_exit(Thread* thread) {
    if (machine.launch.n_written && !thread->has_waited) fail("ends without wait_for_previous");
    if (!thread->open_group.empty()) fail("ends with stores that were not committed");
    if (!thread->pieces.empty()) fail("ends with copies by cp.async for which it did not arrive");
    if (!thread->own_pieces.empty()) fail("ends with copies by cp.async that were not committed");
    for (const auto& group : thread->own_groups)
        if (!group.empty()) fail("ends while its copies may still write shared memory: cp_async_wait_group is missing");
    for (const auto& group : thread->groups)
        for (const auto& copy : group)
            if (copy->state == Copy::issued)
                fail("ends while its stores may still read shared memory: bulk_wait_group_read is missing");
    if (!thread->accumulators.empty()) fail("ends while its wgmmas are in flight: wgmma_wait_group is missing");
}

void check_block_exit(Block* block) {
    for (const auto& copy : machine.copies)
        if ((copy->kind == Copy::load || copy->kind == Copy::pieces) && copy->block == block)
            fail("is the last of its block to end, and a load of %s has not landed yet", copy->issuer.c_str());
    for (const auto& thread : block->threads) {
        const Thread* first = block->threads[thread->index / 128 * 128].get();
        if (thread->register_changes != first->register_changes || thread->registers != first->registers)
            fail("setmaxnreg: warps of warpgroup %u did not all execute the same", thread->index / 128);
    }
}

}  // namespace emulator
