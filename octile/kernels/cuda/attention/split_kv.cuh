// How the pages of all rows are divided among thread blocks, and where each division's results are stored.
//
// Of one row after the other the pages form one line, which is cut into equal ranges, one for each thread block (or for each
// head block of each), so that all of them end at the same time for any lengths.
//
// Without parts a range begins and ends anywhere: a thread block finishes some rows alone and shares its first and its last
// one. Partial results of a row have slots one after the other: the number of the row's first range, in which no other
// shared row begins, plus that of the range.
//
// With parts each row is cut at multiples of `part_pages` pages, wherever other rows end, which keeps its bits independent of
// them. A range has the parts that begin in it, so that ranges differ by a part at most. Each part has a slot.
//
// Several queries of one text, as where drafts are verified, are one row here, with the heads of all of them: its pages are
// those of the longest query, and each head attends to the positions of its own.
#pragma once
#include "warps.cuh"

constexpr int page_rows = 64;  // positions of a page
constexpr bool has_parts = config::part_pages > 0;
constexpr int part_pages = has_parts ? config::part_pages : 1;

struct Lengths {
    const int* lengths;
    int step;  // elements between the lengths of two queries

    __device__ __forceinline__ int of_query(int row, int query) const {
        return lengths[(static_cast<int64_t>(row) * config::queries + query) * step];
    }
    // Of head `head` of the n_heads of all queries of a row.
    __device__ __forceinline__ int of_head(int row, int head, int n_heads) const {
        return of_query(row, min(head / (n_heads / config::queries), config::queries - 1));
    }
    __device__ __forceinline__ int of(int row) const {
        int longest = of_query(row, 0);
        for (int query = 1; query < config::queries; ++query) longest = max(longest, of_query(row, query));
        return longest;
    }
    __device__ __forceinline__ int pages(int row) const { return max((of(row) + page_rows - 1) / page_rows, 0); }
};

// The pages of a range. Where all rows have the same number, ranges are whole rows, or equal parts of one, if they are not
// much longer so: no row is then begun and merged needlessly.
__device__ __forceinline__ int pages_of_range(int total, int ranges, int shortest, int longest) {
    const int least = max((total + ranges - 1) / ranges, config::min_pages);
    if (shortest != longest) return least;
    const int parts = max(longest / least, 1), rows = (least + longest - 1) / longest;
    const int aligned = parts > 1 ? longest / parts : rows * longest;
    const bool is_exact = parts == 1 || longest % parts == 0;
    return is_exact && aligned - least <= min(least / config::spare_part, config::spare_pages) ? aligned : least;
}

// Pages of a row that a thread block attends to.
struct Item {
    int row, first_page, n_pages, length;
    int slot;    // of its partial result
    bool whole;  // all pages of the row: its result is final
};

// The items of one thread block. All lanes of a warp compute the same.
struct Items {
    const Lengths lengths;
    const int rows, max_parts, ranges, range;
    int row = 0, offset = 0, left = 0;  // the next page, and the pages up to the end of the range
    int first_range = range;            // without parts: in which the next row begins

    // max_parts: of a row. starts: [rows + 1], the pages before each row and then those of a range; written if not null.
    __device__ __forceinline__ Items(Lengths lengths, int rows, int max_parts, int ranges, int range, int* starts)
        : lengths(lengths), rows(rows), max_parts(max_parts), ranges(ranges), range(range) {
        const int lane = ptx::lane_id(), rows_of_lane = (rows + 31) / 32;
        const int first = min(lane * rows_of_lane, rows), end = min(first + rows_of_lane, rows);
        constexpr int at_once = 8;  // lengths that are loaded together
        int own = 0, least = 0x7FFFFFFF, most = 0;  // pages in all, of the shortest row that has any, of the longest
        for (int r = first; r < end; r += at_once) {
            int pages[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) pages[i] = lengths.pages(min(r + i, end - 1));
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                own += r + i < end ? pages[i] : 0;
                least = min(least, pages[i] > 0 ? pages[i] : least);
                most = max(most, pages[i]);
            }
        }
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(all_lanes, sum, distance);
            if (lane >= distance) sum += other;
        }
        const int total = __shfl_sync(all_lanes, sum, 31), before = sum - own;
        const int of_range =
            has_parts ? max((total + ranges - 1) / ranges, 1)
                      : pages_of_range(total, ranges, __reduce_min_sync(all_lanes, least),
                                       __reduce_max_sync(all_lanes, most));
        if (starts != nullptr) {
            int start = before;
            for (int r = first; r < end; ++r) {
                starts[r] = start;
                start += lengths.pages(r);
            }
            if (lane == 0) starts[rows] = of_range;
        }
        const int begin = range * of_range;
        left = min(of_range, total - begin);
        if (left <= 0) return;
        const int owner = __ffs(__ballot_sync(all_lanes, begin >= before && begin < sum)) - 1;
        row = owner * rows_of_lane;
        offset = begin - __shfl_sync(all_lanes, before, owner);
        for (int n = lengths.pages(row); offset >= n; n = lengths.pages(row)) {
            offset -= n;
            ++row;
        }
        first_range = (begin - offset) / of_range;
        if constexpr (has_parts) {  // the part before, which has begun in another range, has the first pages
            const int n = lengths.pages(row);
            const int next = min((offset + part_pages - 1) / part_pages * part_pages, n);
            left -= next - offset;
            offset = next;
        }
    }

    // Whether there is another item.
    __device__ __forceinline__ bool next(Item& item) {
        if constexpr (has_parts) {
            while (left > 0) {
                const int length = lengths.of(row), n = (length + page_rows - 1) / page_rows;
                const int count = min(n - offset, part_pages);
                if (count <= 0) {
                    offset = 0;
                    ++row;
                    continue;
                }
                item = {row, offset, count, length, row * max_parts + offset / part_pages, count == n};
                left -= count;
                offset += count;
                return true;
            }
            return false;
        } else {
            while (left > 0) {
                const int length = lengths.of(row), n = lengths.pages(row), count = min(n - offset, left);
                item = {row, offset, count, length, first_range + range, count == n};
                left -= count;
                offset = 0;
                first_range = range;
                ++row;
                if (count > 0) return true;
            }
            return false;
        }
    }
};
