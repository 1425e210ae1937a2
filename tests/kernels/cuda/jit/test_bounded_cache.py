"""Tests of BoundedCache, which evicts the entries that were not used lately."""

from hypothesis import given
from hypothesis import strategies as st

from octile.kernels.cuda.jit.prepared import BoundedCache


@given(keys=st.lists(st.integers(0, 12), max_size=80), most=st.integers(1, 6))
def test_the_cache_holds_the_latest_entries_and_at_most_twice_as_many(keys, most):
    recent: BoundedCache[int] = BoundedCache(most)
    for done, key in enumerate(keys, start=1):
        found = recent[key]
        assert found in (None, -key)
        if found is None:
            recent[key] = -key
        assert len(recent) <= most
        assert len(recent._old) <= most
        last = list(dict.fromkeys(reversed(keys[:done])))[:most]
        assert all(key in recent or key in recent._old for key in last)


def test_entries_in_use_are_never_evicted():
    recent: BoundedCache[str] = BoundedCache(4)
    recent["weights"] = "kept"
    for other in range(1000):
        recent[other] = "new"
        assert recent["weights"] == "kept"


def test_storing_a_key_again_replaces_its_value():
    recent: BoundedCache[int] = BoundedCache(2)
    for value in (1, 2):
        recent["key"] = value
    assert (recent["key"], len(recent)) == (2, 1)
