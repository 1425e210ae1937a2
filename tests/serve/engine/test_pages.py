"""Tests of the page allocator: a state machine compares it with a plain model of who holds what."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octile.serve.engine.pages import NO_KEY, PageAllocator, page_key

N_PAGES, PAGE = 7, 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def keys_of(tokens):
    keys = [NO_KEY]
    for end in range(PAGE, len(tokens) + 1, PAGE):
        keys.append(page_key(keys[-1], array("q", tokens[end - PAGE : end])))
    return keys[1:]


class Holders(RuleBasedStateMachine):
    """Requests come, share, write full pages and go; `content` is what the pages would hold."""

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(N_PAGES)
        self.requests: list[list] = []  # [tokens, pages, full pages written]
        self.content: dict[int, list[int]] = {}  # page → the tokens up to its end

    @rule(tokens=PROMPTS)
    def admit(self, tokens):
        shared = self.pages.find(keys_of(tokens))
        for i, page in enumerate(shared):
            assert self.content[page] == tokens[: (i + 1) * PAGE], "a shared page holds another prefix"
        needed = -(-len(tokens) // PAGE) - len(shared)
        if needed > self.pages.n_free_without(shared):
            return
        self.pages.share(shared)
        new = self.pages.allocate(needed)
        for page in new:
            self.content.pop(page, None)
        self.requests.append([tokens, shared + new, len(shared)])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def write(self, data):
        request = data.draw(st.sampled_from(self.requests))
        tokens, held, n = request
        if n < len(tokens) // PAGE:
            self.content[held[n]] = tokens[: (n + 1) * PAGE]
            self.pages.cache(held[n], keys_of(tokens)[n])
            request[2] += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        _, held, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pages.free(held)

    @rule(tokens=PROMPTS)
    def forget(self, tokens):
        forgotten = self.pages.find(keys_of(tokens))
        self.pages.forget(keys_of(tokens))
        assert not self.pages.find(keys_of(tokens))
        for page in forgotten:
            self.content.pop(page, None)
        for request in self.requests:
            if set(request[1]) & set(forgotten):
                request[2] = len(request[0])

    @rule()
    def forget_keys(self):
        self.pages.forget_keys()
        self.content.clear()
        for request in self.requests:
            request[2] = len(request[0])  # full pages that were written before are not cached any more

    @invariant()
    def no_page_is_leaked_or_free_while_it_is_held(self):
        held = {page for _, pages, _ in self.requests for page in pages}
        assert self.pages.n_free == N_PAGES - len(held)

    @invariant()
    def a_page_of_two_requests_is_in_a_common_prefix(self):
        for tokens, held, _ in self.requests:
            for other, others, _ in self.requests:
                for i, page in enumerate(held):
                    if page in others:
                        assert others[i] == page
                        assert tokens[: (i + 1) * PAGE] == other[: (i + 1) * PAGE]

    def teardown(self):
        for _, held, _ in self.requests:
            self.pages.free(held)
        assert sorted(self.pages.allocate(N_PAGES)) == list(range(N_PAGES)), "pages were leaked"


class TestHolders(Holders.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)


def test_the_key_of_a_page_depends_on_the_pages_before_it():
    first, other, next_page = (array("q", tokens) for tokens in ([1, 2], [2, 1], [3, 4]))
    assert page_key(page_key(NO_KEY, first), next_page) != page_key(page_key(NO_KEY, other), next_page)


def test_shared_pages_are_not_free_any_more_unless_another_request_holds_them():
    pages, keys = PageAllocator(5), keys_of([1, 2, 3, 4])
    held = pages.allocate(2)
    for page, key in zip(held, keys, strict=True):
        pages.cache(page, key)
    assert pages.n_free_without(held) == pages.n_free == 3
    pages.free(held[1:])
    assert (pages.n_free_without(held), pages.n_free_without(held[:1]), pages.n_free) == (3, 4, 4)
    pages.share(held)
    assert pages.n_free == 3


def test_a_prefix_stays_cached_after_its_request():
    pages, keys = PageAllocator(4), keys_of([1, 2, 3, 4])
    held = pages.allocate(2)
    for page, key in zip(held, keys, strict=True):
        pages.cache(page, key)
    pages.free(held)
    assert pages.find(keys) == held
    assert (pages.n_free, pages.n_cached) == (4, 2)


def test_the_page_unused_for_the_longest_time_loses_its_content():
    pages, keys = PageAllocator(3), [bytes([i]) for i in range(3)]
    for key in keys:
        (page,) = pages.allocate(1)
        pages.cache(page, key)
        pages.share([page])  # two holders, so that none is free until both are gone
    for page in (0, 1, 2):
        pages.free([page])
    for page in (1, 0, 2):
        pages.free([page])
    assert pages.allocate(1) == [1]
    assert [pages.find([key]) for key in keys] == [[0], [], [2]]


def test_the_last_page_of_a_prefix_is_reused_before_the_first():
    pages, keys = PageAllocator(3), keys_of([1, 2, 3, 4, 5, 6])
    held = pages.allocate(3)
    for page, key in zip(held, keys, strict=True):
        pages.cache(page, key)
    pages.free(held)
    pages.allocate(1)
    assert pages.find(keys) == held[:2]


def test_a_page_cannot_be_freed_twice():
    pages = PageAllocator(2)
    (page,) = pages.allocate(1)
    pages.free([page])
    with pytest.raises(ValueError, match=f"page {page} is free already"):
        pages.free([page])


def test_more_pages_than_are_free_are_refused():
    pages = PageAllocator(2)
    pages.allocate(1)
    with pytest.raises(ValueError, match="n must be from 0 to the 1 free pages, not 2"):
        pages.allocate(2)
