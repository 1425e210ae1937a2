"""What tools/measure_memory.py reads of torch's allocator."""

from tools.measure_memory import GIB, lines_at_peak, pools


def event(action: str, address: int, gib: float, line: int = 0) -> dict[str, object]:
    frames = [{"filename": "/torch/a.py", "line": 1}, {"filename": "/somewhere/octile/nn/mla.py", "line": line}]
    return {"action": action, "addr": address, "size": int(gib * GIB), "frames": frames}


def test_the_allocations_at_the_peak_are_listed_by_line():
    events = [
        event("alloc", 1, 4, 7),
        event("alloc", 2, 1, 8),
        event("free_requested", 1, 4),
        event("free_completed", 1, 4),
        event("alloc", 1, 2, 9),
        event("alloc", 3, 3, 9),
        event("free_completed", 2, 1),
    ]
    assert [line.split() for line in lines_at_peak(events, after=15 * GIB)] == [
        ["at", "the", "peak", "6.00", "more", "than", "at", "the", "begin,", "10.00:"],
        ["5.000", "in", "2:", "nn/mla.py:9"],
        ["1.000", "in", "1:", "nn/mla.py:8"],
        ["6.000", "in", "3:", "all"],
    ]


def test_reserved_and_free_memory_are_added_by_pool():
    def segment(pool: tuple[int, int], *blocks: tuple[str, int]) -> dict[str, object]:
        found = [{"state": state, "size": size * GIB} for state, size in blocks]
        total = sum(size for _, size in blocks) * GIB
        return {"segment_pool_id": pool, "segment_type": "large", "total_size": total, "blocks": found}

    segments = [
        segment((1, 0), ("inactive", 8)),
        segment((0, 0), ("active_allocated", 3), ("inactive", 2)),
        segment((0, 0), ("inactive", 1), ("active_allocated", 1)),
    ]
    assert pools(segments) == [
        "pool (0, 0), large: 2 segments, reserved 7.00, of which free 3.00, the largest block 2.00",
        "pool (1, 0), large: 1 segments, reserved 8.00, of which free 8.00, the largest block 8.00",
    ]
