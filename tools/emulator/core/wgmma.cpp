// wgmma: the matrix multiply-accumulate of a warpgroup, on tiles in shared memory.
//
// A thread's accumulator registers contain `poison` from the instruction until the thread has waited for it, and then
// the sum. Each warp reads the tiles for its 16 rows at a random moment: when the last of the 128 threads issues the
// instruction, or when the warp waits. So a missing wait, or a stage released too early, shows in the result.
//
// Source: PTX ISA, "wgmma.mma_async", "Matrix descriptor", "Register fragments and shared memory matrix layouts".
#include "machine.h"
#include "tensor_core.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace emulator {
namespace {

// A signaling NaN: no arithmetic yields it.
constexpr uint32_t poison = 0x7FA5A5A5;
constexpr int instruction_bytes = 32;

float small_float(uint32_t code, int exponent_bits, int mantissa_bits) {
    const int sign = code >> (exponent_bits + mantissa_bits) & 1, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const float fraction = std::ldexp(float(mantissa), -mantissa_bits);
    const float value = exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
    return sign ? -value : value;
}

std::array<float, 256> table(Format format) {
    std::array<float, 256> values;
    for (int code = 0; code < 256; ++code) {
        const int low = code & 0x7F;
        values[code] = format == e4m3 ? small_float(code, 4, 3) : small_float(code, 5, 2);
        if (format == e4m3 ? low == 0x7F : low > 0x7C) values[code] = NAN;
        if (format == e5m2 && low == 0x7C) values[code] = code & 0x80 ? -INFINITY : INFINITY;
    }
    return values;
}
const std::array<float, 256> tables[] = {table(e4m3), table(e5m2)};

float decode(const uint8_t* bytes, Format format) {
    if (format <= e5m2) return tables[format][*bytes];
    uint32_t word = 0;
    memcpy(&word, bytes, format == tf32 ? 4 : 2);
    if (format == bf16) return std::bit_cast<float>(word << 16);
    if (format == tf32) return std::bit_cast<float>(word & 0xFFFFE000);
    if ((word & 0x7C00) != 0x7C00) return small_float(word, 5, 10);
    const float special = word & 0x3FF ? NAN : INFINITY;
    return word & 0x8000 ? -special : special;
}

int width_of(Format format) { return format <= e5m2 ? 1 : format == tf32 ? 4 : 2; }

// A tile that its descriptor names.
struct Tile {
    uint32_t start, leading, stride, span;  // span: bytes of a swizzled row

    explicit Tile(uint64_t descriptor)
        : start((descriptor & 0x3FFF) << 4), leading((descriptor >> 16 & 0x3FFF) << 4),
          stride((descriptor >> 32 & 0x3FFF) << 4) {
        const uint32_t mode = descriptor >> 62;
        if (mode == 0) fail("wgmma: tiles without swizzle are not emulated");
        if (descriptor >> 49 & 7) fail("wgmma: a base offset is not emulated");
        span = mode == 1 ? 128 : mode == 2 ? 64 : 32;
        if (start >> 7 & (span / 16 - 1))
            fail("wgmma: the tile at offset %u does not begin where its %u-byte swizzle does", start - shared_start,
                 span);
    }

    // The 16 bytes at an address before the swizzle.
    const uint8_t* chunk(const Block* block, uint32_t address, int row) const {
        address ^= (address >> 7 & (span / 16 - 1)) << 4;
        if (address < shared_start || address + 16 > shared_start + machine.launch.shared_bytes)
            fail("wgmma: row %d of a tile lies at offset %d, outside of shared memory", row,
                 int(address - shared_start));
        return block->async + (address - shared_start);
    }
};

// The rows of a K-major tile, 32 bytes of each, as numbers: [rows][k].
void read_tile(const Block* block, uint64_t descriptor, int first, int rows, Format format, float* to) {
    const Tile tile(descriptor);
    const int width = width_of(format);
    for (int row = first; row < first + rows; ++row)
        for (uint32_t byte = 0; byte < instruction_bytes; byte += 16) {
            const uint8_t* chunk = tile.chunk(block, tile.start + row / 8 * tile.stride + row % 8 * tile.span + byte, row);
            for (int i = 0; i < 16; i += width) *to++ = decode(chunk + i, format);
        }
}

// The same of a transposed tile of 16-bit elements: [k][rows] in memory, spans of 64 rows are `leading` bytes apart.
void read_transposed(const Block* block, uint64_t descriptor, int first, int rows, Format format, float* to) {
    const Tile tile(descriptor);
    if (tile.span != 128) fail("wgmma: transposed tiles are emulated with the 128-byte swizzle only");
    for (int row = first; row < first + rows; row += 8)
        for (int k = 0; k < 16; ++k) {
            const uint8_t* chunk = tile.chunk(
                block, tile.start + row / 64 * tile.leading + k / 8 * tile.stride + k % 8 * 128 + row % 64 * 2, row);
            for (int i = 0; i < 8; ++i) to[(row - first + i) * 16 + k] = decode(chunk + 2 * i, format);
        }
}

// ---- Execution -----------------------------------------------------------------------------------------------------

// Executes a wgmma for the 16 rows of one warp.
void execute(const Block* block, const Wgmma& call, int warp) {
    static float tile[256 * 32];
    constexpr int least_exponents[] = {-6, -14, -14, -126, -126};
    const auto a_format = Format(call.a_format), b_format = Format(call.b_format);
    const int n = operands.n = call.n, k = operands.k = instruction_bytes / width_of(a_format);
    if (call.a_values.empty())
        (call.a_transposed ? read_transposed : read_tile)(block, call.a, 16 * warp, 16, a_format, operands.a);
    else
        std::copy_n(&call.a_values[16 * warp * k], 16 * k, operands.a);
    (call.b_transposed ? read_transposed : read_tile)(block, call.b, 0, n, b_format, tile);
    for (int column = 0; column < n; ++column)
        for (int i = 0; i < k; ++i) operands.b[i * n + column] = tile[column * k + i];
    if (machine.launch.hopper) find_exponents(least_exponents[a_format], least_exponents[b_format]);
    for (int row = 0; row < 16; ++row) {
        float* d = &call.accumulator->matrix[(16 * warp + row) * n];
        if (!call.accumulate) std::fill_n(d, n, 0.0f);
        machine.launch.hopper ? sum_hopper_row(d, row, a_format <= e5m2) : sum_exact(d, row);
    }
}

// Executes a warp's part of the wgmmas that all 128 threads have issued, up to number `end`; true where all before it
// are done.
bool execute_until(const Block* block, Warpgroup& group, int warp, size_t end) {
    size_t& done = group.done[warp];
    for (; done < end && done < group.wgmmas.size() && group.wgmmas[done].issued == 128; ++done) {
        Wgmma& call = group.wgmmas[done];
        execute(block, call, warp);
        if (++call.done == 4) call.accumulator.reset();
    }
    return done >= end;
}

// The place in d[64, n] of register i of a thread.
float& element(InFlight& accumulator, uint32_t thread, int i) {
    const int row = 16 * (thread / 32) + 8 * (i / 2 % 2) + thread % 32 / 4, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    return accumulator.matrix[row * accumulator.n + column];
}

void check_poison(const float* d, int count) {
    for (int i = 0; i < count; ++i)
        if (std::bit_cast<uint32_t>(d[i]) != poison)
            fail("accumulator register %d was written while a wgmma to it was in flight", i);
}

}  // namespace

void wgmma_fence() {
    may_switch();
    me()->fenced = true;
}

void wgmma(float* d, int count, uint64_t a, uint64_t b, bool accumulate, int a_format, int b_format,
           const uint32_t* a_registers, bool a_transposed, bool b_transposed) {
    may_switch();
    Thread* thread = me();
    Warpgroup& group = *thread->warpgroup;
    const uint32_t index = thread->index % 128;
    const int n = 2 * count;
    if (n % 8 || n > 256) fail("there is no wgmma with n = %d", n);
    if (thread->home->threads.size() < (thread->index / 128 + 1) * 128)
        fail("wgmma takes a whole warpgroup of 128 threads");
    if (thread->issued == group.wgmmas.size())
        group.wgmmas.push_back({a, b, accumulate, n, a_format, b_format, 0, 0, nullptr, a_transposed, b_transposed, {}});
    Wgmma& call = group.wgmmas[thread->issued];
    if (call.a != a || call.b != b || call.accumulate != accumulate || call.n != n ||
        call.a_transposed != a_transposed || call.b_transposed != b_transposed)
        fail("wgmma: threads of its warpgroup gave other descriptors (a %llx and %llx, b %llx and %llx)",
             static_cast<unsigned long long>(a), static_cast<unsigned long long>(call.a),
             static_cast<unsigned long long>(b), static_cast<unsigned long long>(call.b));

    if (a_registers) {
        // Registers hold four bytes of the rows r and r + 8, then of the same rows 16 bytes further on.
        const int width = width_of(Format(a_format)), columns = instruction_bytes / width;
        call.a_values.resize(64 * columns);
        for (int i = 0; i < 16; i += width) {
            const int row = 16 * (index / 32) + 8 * (i / 4 % 2) + index % 32 / 4, byte = i / 8 * 16 + index % 4 * 4 + i % 4;
            const uint8_t* element = reinterpret_cast<const uint8_t*>(a_registers) + i;
            call.a_values[row * columns + byte / width] = decode(element, Format(a_format));
        }
    }

    auto flying = std::find_if(thread->accumulators.begin(), thread->accumulators.end(),
                               [&](const auto& f) { return f.registers->homes[index] == d; });
    if (flying == thread->accumulators.end()) {
        if (!thread->fenced) fail("wgmma without wgmma_fence, though its accumulator registers were its own before");
        if (!call.accumulator) {
            call.accumulator = std::make_shared<InFlight>(InFlight{n, {}, {}});
            call.accumulator->matrix.resize(64 * n);
        }
        InFlight& flight = *call.accumulator;
        flight.homes[index] = d;
        for (int i = 0; i < count; ++i) {
            if (accumulate) element(flight, index, i) = d[i];
            d[i] = std::bit_cast<float>(poison);
        }
        thread->accumulators.push_back({call.accumulator, thread->issued});
    } else {
        if (call.accumulator && call.accumulator != flying->registers)
            fail("wgmma: threads of its warpgroup gave other accumulators");
        if (flying->registers->n != n) fail("wgmma: an accumulator of another width is in flight");
        check_poison(d, count);
        call.accumulator = flying->registers;
        flying->last = thread->issued;
    }
    ++thread->issued;
    if (++call.issued < 128) return;
    for (int warp = 0; warp < 4; ++warp)
        if (chance(machine.tendencies.wgmma_early)) execute_until(thread->home, group, warp, thread->issued);
    wake(group.waiters);
}

void wgmma_commit_group() {
    Thread* thread = me();
    auto& commits = thread->warpgroup->commits;
    if (thread->commits == commits.size()) commits.push_back(thread->issued);
    if (commits[thread->commits++] != thread->issued)
        fail("wgmma_commit_group: threads of its warpgroup have other groups");
}

void wgmma_wait_group(int groups) {
    warp_primitive(WarpPrimitive::sync, ~0u, 0);  // the lanes of a warp wait together
    Thread* thread = me();
    Warpgroup& group = *thread->warpgroup;
    const int warp = thread->index / 32 % 4;
    if (thread->commits <= size_t(groups)) return;
    const size_t end = group.commits[thread->commits - groups - 1];
    while (!execute_until(thread->home, group, warp, end)) {
        group.waiters.push_back(thread);
        const size_t& done = group.done[warp];
        park([&] {
            return text("waits for its warpgroup: %u of 128 threads have issued wgmma %zu", group.wgmmas[done].issued,
                        done);
        });
    }
    std::erase_if(thread->accumulators, [&](const Thread::Accumulator& f) {
        if (f.last >= end) return false;
        float* d = f.registers->homes[thread->index % 128];
        check_poison(d, f.registers->n / 2);
        for (int i = 0; i < f.registers->n / 2; ++i) d[i] = element(*f.registers, thread->index % 128, i);
        thread->fenced = false;
        return true;
    });
    may_switch();
}

}  // namespace emulator
