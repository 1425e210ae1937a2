// The K highest logits of each row, sorted, for Hopper. A thread block takes one row.
//
// A logit and its column are one 64-bit number, the logit's ordered bits above those of the inverted column, so that no two
// are equal and the choice and its order do not depend on when threads run.
//
// 1. A bound that a little more than K logits reach is guessed from a sample of the row. The row is read once, and the
//    candidates, which reach the bound, go to shared memory. Rows of few columns are candidates as a whole.
// 2. Radix selection finds the K-th highest candidate: a histogram of eleven bits after the other, from the highest down.
//    If the guess was wrong (fewer than K candidates, or more than fit), it is found in the row itself.
// 3. The K numbers are sorted by a bitonic network, four of each thread in registers.
//
// Source of 2: radix selection as in torch.topk; of the sampled bound: Floyd and Rivest, "Expected time bounds for
// selection" (1975); of 3: Batcher, "Sorting networks and their applications" (1968).
#include "warps.cuh"

constexpr int threads = config::threads, warps = threads / 32;
constexpr int sorted = config::sorted;          // numbers that are sorted: a power of two, at least K
constexpr int capacity = config::candidates;    // numbers
constexpr int samples = config::samples, run = 64;  // of a row, in runs of neighbors
constexpr int bins = 2048, own_bins = bins / threads;
constexpr int vector = 16 / config::element_bytes;  // logits in 16 bytes
constexpr int unrolled = 16 / vector, together = 4;  // vectors that a thread loads together, and logits that it compares
static_assert(sorted <= 4 * threads && sorted >= 128 && samples <= capacity && samples % threads == 0);

using Key = unsigned long long;

namespace smem {
constexpr int candidates = 0;
constexpr int chosen = candidates + capacity * 8;
constexpr int histogram = chosen + sorted * 8;
constexpr int of_warps = histogram + bins * 4;
constexpr int found = of_warps + warps * 4;  // bin, numbers above it, numbers in it
constexpr int counters = found + 4 * 4;      // candidates, chosen
constexpr int bytes = counters + 2 * 4;
static_assert(bytes == config::shared_bytes, "top_keys.py computes the same");
}  // namespace smem

// Bits that are ordered as logits are: 0 equals −0, and NaN is the highest.
__device__ __forceinline__ uint32_t ordered(float logit) {
    if (logit != logit) return 0xFFFFFFFF;
    const int bits = __float_as_int(logit + 0.0f);
    return static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7FFFFFFF)) ^ 0x80000000u;
}

__device__ __forceinline__ float from_f16(uint32_t bits) {
    const uint32_t exponent = bits >> 10 & 31, rest = bits & 0x3FF;
    const float magnitude = exponent == 31  ? __int_as_float(0x7F800000 | rest << 13)
                            : exponent == 0 ? rest * 5.9604644775390625e-8f  // 2⁻²⁴
                                            : __int_as_float((exponent + 112) << 23 | rest << 13);
    return bits & 0x8000 ? -magnitude : magnitude;
}

__device__ __forceinline__ Key key_of(uint32_t logit, int column) {
    return static_cast<Key>(logit) << 32 | ~static_cast<uint32_t>(column);
}

// The columns first … end − 1 of a row. All threads call its functions together.
struct Row {
    const uint8_t* logits;  // of column 0
    int first, end;

    __device__ __forceinline__ float element(const uint4& v, int i) const {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        if constexpr (config::element_bytes == 4) return __int_as_float(words[i]);
        const uint32_t half = words[i / 2] >> 16 * (i % 2) & 0xFFFF;
        return config::bfloat16 ? __int_as_float(half << 16) : from_f16(half);
    }

    __device__ __forceinline__ float load(int column) const {
        if constexpr (config::element_bytes == 4) return __ldg(reinterpret_cast<const float*>(logits) + column);
        const uint32_t half = __ldg(reinterpret_cast<const uint16_t*>(logits) + column);
        return config::bfloat16 ? __int_as_float(half << 16) : from_f16(half);
    }

    // Calls f(is_inside[], ordered logits[], their first column) for neighboring columns; those of vectors of 16 bytes may
    // reach over both ends.
    template <class F>
    __device__ __forceinline__ void each_four(F f) const {
        const int64_t address = reinterpret_cast<int64_t>(logits + first * int64_t(config::element_bytes));
        const int before = static_cast<int>(address % 16) / config::element_bytes;
        const int aligned = first - before, count = (end - aligned + vector - 1) / vector;
        const uint4* vectors = reinterpret_cast<const uint4*>(logits + aligned * int64_t(config::element_bytes));
        for (int start = 0; start < count; start += threads * unrolled) {
            uint4 loaded[unrolled];
#pragma unroll
            for (int u = 0; u < unrolled; ++u) {
                const int index = start + u * threads + threadIdx.x;
                loaded[u] = make_uint4(0, 0, 0, 0);
                if (index < count) loaded[u] = __ldg(vectors + index);
            }
#pragma unroll
            for (int u = 0; u < unrolled; ++u) {
                if (start + u * threads >= count) break;
                const int column = aligned + (start + u * threads + static_cast<int>(threadIdx.x)) * vector;
#pragma unroll
                for (int from = 0; from < vector; from += together) {
                    bool is_inside[together];
                    uint32_t values[together];
#pragma unroll
                    for (int i = 0; i < together; ++i) {
                        is_inside[i] = column + from + i >= first && column + from + i < end;
                        values[i] = ordered(element(loaded[u], from + i));
                    }
                    f(is_inside, values, column + from);
                }
            }
        }
    }

    // Calls f(is_inside, key) for each column.
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        each_four([&](const bool(&is_inside)[together], const uint32_t(&values)[together], int column) {
#pragma unroll
            for (int i = 0; i < together; ++i) f(is_inside[i], key_of(values[i], column + i));
        });
    }
};

// Numbers in shared memory.
struct Numbers {
    const Key* keys;
    int count;

    template <class F>
    __device__ __forceinline__ void each(F f) const {
        for (int start = 0; start < count; start += threads) {
            const int index = start + threadIdx.x;
            f(index < count, index < count ? keys[index] : 0);
        }
    }
};

// Appends those of a warp's n keys a lane that are chosen; `counter` also counts those that do not fit.
template <int n, class KeyOf>
__device__ __forceinline__ void append(const bool (&is_chosen)[n], KeyOf key_of, Key* to, int most, int* counter) {
    uint32_t lanes[n];
    int total = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
        lanes[i] = __ballot_sync(all_lanes, is_chosen[i]);
        total += __popc(lanes[i]);
    }
    if (total == 0) return;
    int next = 0;
    if (ptx::lane_id() == 0) next = atomicAdd(counter, total);
    next = __shfl_sync(all_lanes, next, 0);
#pragma unroll
    for (int i = 0; i < n; ++i) {
        const int index = next + __popc(lanes[i] & ((1u << ptx::lane_id()) - 1));
        if (is_chosen[i] && index < most) to[index] = key_of(i);
        next += __popc(lanes[i]);
    }
}

// Counts a number in its bin; `bin` is −1 where there is none. Lanes of one bin count together, as they do in a row of
// equal logits.
__device__ __forceinline__ void count_in(int* histogram, int bin) {
    const int of_first = __shfl_sync(all_lanes, bin, 0);
    if (__all_sync(all_lanes, bin == of_first)) {
        if (ptx::lane_id() == 0 && bin >= 0) atomicAdd(&histogram[bin], 32);
    } else if (bin >= 0) {
        atomicAdd(&histogram[bin], 1);
    }
}

// Returns a bound that exactly `count` numbers of a source with at least as many reach; or some more, if it ends before as
// many bits as asked are known.
template <class Source>
__device__ __forceinline__ Key bound_of(const Source& source, int count, uint8_t* shared, int bits = 64) {
    int* histogram = reinterpret_cast<int*>(shared + smem::histogram);
    int* of_warps = reinterpret_cast<int*>(shared + smem::of_warps);
    int* found = reinterpret_cast<int*>(shared + smem::found);
    const int thread = threadIdx.x, warp = thread / 32, lane = ptx::lane_id();
    Key bound = 0;
    int unknown = 64;  // low bits
    while (true) {
        const int digits = unknown % 32 == 10 ? 10 : 11, shift = unknown - digits;  // 11, 11 and 10 of each half
        for (int i = thread; i < bins; i += threads) histogram[i] = 0;
        __syncthreads();
        source.each([&](bool is_valid, Key key) {
            const bool counts = is_valid && (unknown == 64 || (key ^ bound) >> unknown == 0);
            count_in(histogram, counts ? static_cast<int>(key >> shift) & ((1 << digits) - 1) : -1);
        });
        __syncthreads();
        // How many numbers are in higher bins than this thread's.
        int own = 0;
#pragma unroll
        for (int i = 0; i < own_bins; ++i) own += histogram[thread * own_bins + i];
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_down_sync(all_lanes, sum, distance);
            if (lane + distance < 32) sum += other;
        }
        if (lane == 0) of_warps[warp] = sum;
        __syncthreads();
        const int of_warp = lane > warp && lane < warps ? of_warps[lane] : 0;
        int above = sum - own + static_cast<int>(__reduce_add_sync(all_lanes, static_cast<uint32_t>(of_warp)));
        if (above < count && count <= above + own) {
            for (int i = own_bins - 1; i >= 0; --i) {
                const int bin = thread * own_bins + i, in_bin = histogram[bin];
                if (count <= above + in_bin) {
                    found[0] = bin, found[1] = above, found[2] = in_bin;
                    break;
                }
                above += in_bin;
            }
        }
        __syncthreads();
        bound |= static_cast<Key>(found[0]) << shift;
        unknown = shift;
        count -= found[1];
        if (count == found[2] || unknown <= 64 - bits) return bound;
    }
}

// Sorts the numbers in shared memory from the highest down: thread t < sorted/4 gets 4t … 4t + 3.
__device__ __forceinline__ void sort(Key* numbers, Key (&own)[4]) {
    const int first = 4 * threadIdx.x;
    const bool takes_part = first < sorted;
    if (takes_part)
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = numbers[first + i];
    for (int size = 2; size <= sorted; size *= 2) {
        for (int distance = size / 2; distance >= 4; distance /= 2) {
            const bool keeps_higher = ((first & distance) == 0) == ((first & size) == 0);
            Key other[4];
            if (distance >= 128) {
                __syncthreads();  // the numbers before have been read
                if (takes_part)
#pragma unroll
                    for (int i = 0; i < 4; ++i) numbers[first + i] = own[i];
                __syncthreads();
                if (takes_part)
#pragma unroll
                    for (int i = 0; i < 4; ++i) other[i] = numbers[(first ^ distance) + i];
            } else if (takes_part) {
#pragma unroll
                for (int i = 0; i < 4; ++i) other[i] = __shfl_xor_sync(all_lanes, own[i], distance / 4);
            }
            if (takes_part)
#pragma unroll
                for (int i = 0; i < 4; ++i) own[i] = (own[i] > other[i]) == keeps_higher ? own[i] : other[i];
        }
        if (!takes_part) continue;
        const bool descends = (first & size) == 0;  // for size ≥ 4; pairs alternate
        auto exchange = [&](int a, int b, bool higher_first) {
            const Key high = own[a] > own[b] ? own[a] : own[b], low = own[a] > own[b] ? own[b] : own[a];
            own[a] = higher_first ? high : low;
            own[b] = higher_first ? low : high;
        };
        if (size >= 4) exchange(0, 2, descends), exchange(1, 3, descends);
        exchange(0, 1, size == 2 || descends);
        exchange(2, 3, size == 2 ? false : descends);
    }
}

// logits: rows of `row_bytes`. starts, ends: of each row. chosen: [rows, k].
extern "C" __global__ void __launch_bounds__(threads, config::blocks)
top_keys(const uint8_t* logits, int64_t row_bytes, const int* starts, const int* ends, int* chosen, int width, int k,
         int start_step, int end_step, int target) {
    uint8_t* shared = ptx::dynamic_shared();
    Key* candidates = reinterpret_cast<Key*>(shared + smem::candidates);
    Key* highest = reinterpret_cast<Key*>(shared + smem::chosen);
    int* counters = reinterpret_cast<int*>(shared + smem::counters);
    const int64_t r = blockIdx.x;
    const int first = max(starts[r * start_step], 0), end = min(max(ends[r * end_step], 0), width);
    const Row row{logits + r * row_bytes, first, end};
    const int n = max(end - first, 0), count = min(n, k);
    int* out = chosen + r * k;
    for (int i = max(count, 0) + threadIdx.x; i < k; i += threads) out[i] = -1;
    if (n == 0) return;
    for (int i = threadIdx.x; i < sorted; i += threads) highest[i] = 0;  // less than any number
    if (threadIdx.x < 2) counters[threadIdx.x] = 0;
    __syncthreads();

    Key bound = 0;
    bool is_complete = n <= capacity;  // all numbers that reach the bound are candidates
    if (!is_complete) {
        const int step = (n - run) / (samples / run - 1);
        float logits_of[samples / threads];
#pragma unroll
        for (int i = 0; i < samples / threads; ++i) {
            const int sample = i * threads + threadIdx.x;
            logits_of[i] = row.load(first + sample / run * step + sample % run);
        }
#pragma unroll
        for (int i = 0; i < samples / threads; ++i) {
            const int sample = i * threads + threadIdx.x;
            candidates[sample] = key_of(ordered(logits_of[i]), sample);
        }
        __syncthreads();
        const int in_sample = max(static_cast<int>(int64_t(target) * samples / n), 1);
        bound = bound_of(Numbers{candidates, samples}, in_sample, shared, 22) >> 32 << 32;  // of the logit alone
        __syncthreads();
    }
    const uint32_t least = static_cast<uint32_t>(bound >> 32);
    row.each_four([&](const bool(&is_inside)[together], const uint32_t(&values)[together], int column) {
        bool is_candidate[together];
#pragma unroll
        for (int i = 0; i < together; ++i) is_candidate[i] = is_inside[i] && values[i] >= least;
        append(is_candidate, [&](int i) { return key_of(values[i], column + i); }, candidates, capacity, &counters[0]);
    });
    __syncthreads();
    const int n_candidates = counters[0];
    is_complete = n_candidates >= count && n_candidates <= capacity;
    auto take = [&](bool is_valid, Key key) {
        const bool is_taken[1] = {is_valid && key >= bound};
        append(is_taken, [&](int) { return key; }, highest, sorted, &counters[1]);
    };
    if (is_complete) {
        const Numbers found{candidates, n_candidates};
        bound = n_candidates > count ? bound_of(found, count, shared) : 0;
        found.each(take);
    } else {
        bound = bound_of(row, count, shared);
        row.each(take);
    }
    __syncthreads();
    Key own[4];
    sort(highest, own);
    const int place = 4 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (place + i < count) out[place + i] = static_cast<int>(~static_cast<uint32_t>(own[i]));
}
