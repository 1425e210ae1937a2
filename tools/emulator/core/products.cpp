// wgmma: a warpgroup's product of two tiles in shared memory.
//
// Each thread leaves its accumulator registers at the instruction, finds `poison` in them until it has waited, and gets
// the sum at the wait. Each warp reads the tiles for its 16 rows at a random moment: when the last of the 128 threads
// issues, or when the warp waits. So a wait that is missing, or a tile that is given back too early, shows in the
// result.
//
// Source: PTX ISA, "wgmma.mma_async", "Matrix descriptor", "Register fragments and shared memory matrix layouts".
#include "machine.h"
#include "sums.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace emulator {
namespace {

// A signalling NaN: no product yields it, and arithmetic does not leave it as it is.
constexpr uint32_t poison = 0x7FA5A5A5;
constexpr int step_bytes = 32;

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

// The rows of a K-major tile that its descriptor names, 32 bytes of each, as numbers: [rows][k].
void read_tile(const Block* block, uint64_t descriptor, int first, int rows, Format format, float* to) {
    const uint32_t start = (descriptor & 0x3FFF) << 4, group = (descriptor >> 32 & 0x3FFF) << 4;
    const uint32_t mode = descriptor >> 62;
    if (mode == 0) fail("wgmma: tiles without swizzle are not emulated");
    if (descriptor >> 49 & 7) fail("wgmma: a base offset is not emulated");
    const uint32_t span = mode == 1 ? 128 : mode == 2 ? 64 : 32;
    if (start >> 7 & (span / 16 - 1))
        fail("wgmma: the tile at offset %u does not begin where its %u-byte swizzle does", start - shared_start, span);
    const int width = width_of(format);
    for (int row = first; row < first + rows; ++row)
        for (uint32_t byte = 0; byte < step_bytes; byte += 16) {
            uint32_t address = start + row / 8 * group + row % 8 * span + byte;
            address ^= (address >> 7 & (span / 16 - 1)) << 4;
            const uint8_t* chunk = block->async + (address - shared_start);
            if (address < shared_start || address + 16 > shared_start + machine.launch.shared_bytes)
                fail("wgmma: row %d of a tile lies at offset %d, outside of shared memory", row,
                     int(address - shared_start));
            for (int i = 0; i < 16; i += width) *to++ = decode(chunk + i, format);
        }
}

// ---- Moments -----------------------------------------------------------------------------------------------------

// A warp's 16 rows of a product.
void execute(const Block* block, const Product& product, int warp) {
    static float tile[256 * 32];
    constexpr int least_exponents[] = {-6, -14, -14, -126, -126};
    const auto a_format = Format(product.a_format), b_format = Format(product.b_format);
    const int n = operands.n = product.n, k = operands.k = step_bytes / width_of(a_format);
    read_tile(block, product.a, 16 * warp, 16, a_format, operands.a);
    read_tile(block, product.b, 0, n, b_format, tile);
    for (int column = 0; column < n; ++column)
        for (int i = 0; i < k; ++i) operands.b[i * n + column] = tile[column * k + i];
    if (machine.launch.hopper) {
        for (int i = 0; i < 16 * k; ++i)
            operands.a_exponents[i] = exponent_of(operands.a[i], least_exponents[a_format]);
        for (int i = 0; i < n * k; ++i) operands.b_exponents[i] = exponent_of(operands.b[i], least_exponents[b_format]);
    }
    for (int row = 0; row < 16; ++row) {
        float* d = &product.flight->matrix[(16 * warp + row) * n];
        if (!product.accumulate) std::fill_n(d, n, 0.0f);
        machine.launch.hopper ? sum_as_hopper(d, row, a_format <= e5m2) : sum_plain(d, row);
    }
}

// Does what a warp has to do of all that is fully issued, up to product `end`. True: nothing before `end` is left.
bool execute_until(const Block* block, Warpgroup& group, int warp, size_t end) {
    size_t& done = group.done[warp];
    for (; done < end && done < group.products.size() && group.products[done].issued == 128; ++done) {
        Product& product = group.products[done];
        execute(block, product, warp);
        if (++product.done == 4) product.flight.reset();
    }
    return done >= end;
}

// The place in d[64, n] of register i of a thread.
float& element(Flight& flight, uint32_t thread, int i) {
    const int row = 16 * (thread / 32) + 8 * (i / 2 % 2) + thread % 32 / 4, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    return flight.matrix[row * flight.n + column];
}

void check_poison(const float* d, int count) {
    for (int i = 0; i < count; ++i)
        if (std::bit_cast<uint32_t>(d[i]) != poison)
            fail("accumulator register %d was written while wgmma was under way to it", i);
}

}  // namespace

void wgmma_fence() {
    may_switch();
    me()->fenced = true;
}

void wgmma(float* d, int count, uint64_t a, uint64_t b, bool accumulate, int a_format, int b_format) {
    may_switch();
    Thread* thread = me();
    Warpgroup& group = *thread->warpgroup;
    const uint32_t index = thread->index % 128;
    const int n = 2 * count;
    if (n % 8 || n > 256) fail("there is no wgmma with n = %d", n);
    if (thread->home->threads.size() < (thread->index / 128 + 1) * 128)
        fail("wgmma takes a whole warpgroup of 128 threads");
    if (thread->issued == group.products.size())
        group.products.push_back({a, b, accumulate, n, a_format, b_format, 0, 0, nullptr});
    Product& product = group.products[thread->issued];
    if (product.a != a || product.b != b || product.accumulate != accumulate || product.n != n)
        fail("wgmma: threads of its warpgroup gave other descriptors (a %llx and %llx, b %llx and %llx)",
             static_cast<unsigned long long>(a), static_cast<unsigned long long>(product.a),
             static_cast<unsigned long long>(b), static_cast<unsigned long long>(product.b));

    auto flying = std::find_if(thread->flights.begin(), thread->flights.end(),
                               [&](const auto& f) { return f.flight->homes[index] == d; });
    if (flying == thread->flights.end()) {
        if (!thread->fenced) fail("wgmma without wgmma_fence, though its accumulator registers were its own before");
        if (!product.flight) {
            product.flight = std::make_shared<Flight>(Flight{n, {}, {}});
            product.flight->matrix.resize(64 * n);
        }
        Flight& flight = *product.flight;
        flight.homes[index] = d;
        for (int i = 0; i < count; ++i) {
            if (accumulate) element(flight, index, i) = d[i];
            d[i] = std::bit_cast<float>(poison);
        }
        thread->flights.push_back({product.flight, thread->issued});
    } else {
        if (product.flight && product.flight != flying->flight)
            fail("wgmma: threads of its warpgroup gave other accumulators");
        if (flying->flight->n != n) fail("wgmma: an accumulator of another width is under way");
        check_poison(d, count);
        product.flight = flying->flight;
        flying->last = thread->issued;
    }
    ++thread->issued;
    if (++product.issued < 128) return;
    for (int warp = 0; warp < 4; ++warp)
        if (chance(machine.leaning.product_early)) execute_until(thread->home, group, warp, thread->issued);
    wake(group.waiters);
}

void wgmma_commit_group() {
    Thread* thread = me();
    auto& commits = thread->warpgroup->commits;
    if (thread->commits == commits.size()) commits.push_back(thread->issued);
    if (commits[thread->commits++] != thread->issued) fail("wgmma_commit_group: threads of its warpgroup have other groups");
}

void wgmma_wait_group(int groups) {
    meet(Meeting::sync, ~0u, 0);  // the lanes of a warp wait together
    Thread* thread = me();
    Warpgroup& group = *thread->warpgroup;
    const int warp = thread->index / 32 % 4;
    if (thread->commits <= size_t(groups)) return;
    const size_t end = group.commits[thread->commits - groups - 1];
    while (!execute_until(thread->home, group, warp, end)) {
        group.waiters.push_back(thread);
        const size_t& done = group.done[warp];
        park([&] {
            return text("waits for its warpgroup: %u of 128 threads have issued wgmma %zu", group.products[done].issued,
                        done);
        });
    }
    std::erase_if(thread->flights, [&](const Thread::InFlight& f) {
        if (f.last >= end) return false;
        float* d = f.flight->homes[thread->index % 128];
        check_poison(d, f.flight->n / 2);
        for (int i = 0; i < f.flight->n / 2; ++i) d[i] = element(*f.flight, thread->index % 128, i);
        thread->fenced = false;
        return true;
    });
    may_switch();
}

}  // namespace emulator
