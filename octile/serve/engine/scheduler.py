"""Which requests take part in the next forward pass, and with how many tokens.

Continuous batching (Yu et al., Orca, OSDI 2022): after every step finished requests leave and waiting ones join. A step
has a budget of tokens. Requests that decode come first, so that a long prompt does not hold them up; the rest of the
budget prefills prompts in chunks (Agrawal et al., Sarathi-Serve, arXiv 2403.02310), the oldest first.

A request is admitted when pages for all its tokens are free, in the order of arrival: a request that does not fit
holds back those behind it, so that it cannot starve. A request whose next page is computed in the same step for another
one, such as a second choice of one prompt, is held back until all such pages are computed, and shares them. As many
waiting requests are looked at in a step as there are slots in the batch, and no further ones after MAX_HASHED pages.

When a request that decodes needs a page and none is free, the newest request is preempted: it waits in front of the
others. It keeps its tokens and frees its pages; when it is admitted again, its latents are computed anew, but for the
prefix that is still cached. The oldest request is never preempted, so one always advances.

When the weights are updated, cached pages are forgotten. Requests in flight, which run or were preempted, end before
it, or are preempted, or go on with their latents, which are then shared with nobody.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from octile.serve.engine.config import EngineConfig
from octile.serve.engine.pages import NO_KEY, PageAllocator, page_key
from octile.serve.engine.request import Request

MAX_HASHED = 2048  # pages of waiting requests in a step, some 5 ms


class Scheduled(NamedTuple):
    """A request and how many of its tokens the next forward pass computes, after the first `request.n_computed`.

    Tokens beyond `request.tokens` are the first of `request.drafts`.
    """

    request: Request
    n_tokens: int


class Scheduler:
    """The queues of an engine.

    Args:
        pages: the allocator of the cache's pages.
        page_size: positions per page.
        config: the limits of a step.

    Attributes:
        waiting: requests without pages, the next one first.
        running: id → request that has pages for its tokens.
        preemptions, shared_tokens, prompt_tokens: as in `Stats`.
        admits_new: whether requests are admitted that have not run before.
    """

    def __init__(self, pages: PageAllocator, page_size: int, config: EngineConfig):
        self.pages, self.page_size, self.config = pages, page_size, config
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.preemptions = self.prompt_tokens = self.shared_tokens = 0
        self.admits_new = True

    def add(self, request: Request) -> None:
        """Append a request to those that wait."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Free the pages of a request that has ended, wherever it is."""
        if request.id in self.running:
            del self.running[request.id]
            self._free(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> list[Scheduled]:
        """Choose the chunks of the next forward pass; pages for all of them are allocated."""
        preemptions = self.preemptions
        budget = self.config.max_step_tokens
        scheduled, prefilling = [], []
        for request in list(self.running.values()):
            if len(request.tokens) == request.max_length:
                continue  # the pass that is launched chooses its last token
            if request.n_pending > 1:
                prefilling.append(request)
            elif n_tokens := self._grow(request):
                scheduled.append(Scheduled(request, n_tokens))
                budget -= n_tokens
        if preemptions != self.preemptions:
            budget += sum(s.n_tokens for s in scheduled if s.request.id not in self.running)
            scheduled = [s for s in scheduled if s.request.id in self.running]
            prefilling = [request for request in prefilling if request.id in self.running]
        being_computed = set[bytes]()
        for request in prefilling:
            if budget:
                scheduled.append(self._prefill(request, budget, being_computed))
                budget -= scheduled[-1].n_tokens
        held_back = []
        n_hashed = 0
        for _ in range(min(len(self.waiting), self.config.max_batch - len(self.running))):
            if not budget or preemptions != self.preemptions or n_hashed >= MAX_HASHED:
                break
            request = self.waiting[0]
            if not self._may_admit(request):
                break
            n_hashed -= len(request.page_keys)
            shared, next_key = self._shareable(request)
            n_hashed += len(request.page_keys)
            if next_key in being_computed:
                held_back.append(self.waiting.popleft())
            elif self._admit(request, shared):
                self.running[request.id] = self.waiting.popleft()
                scheduled.append(self._prefill(request, budget, being_computed))
                budget -= scheduled[-1].n_tokens
            else:
                break
        self.waiting.extendleft(reversed(held_back))
        return scheduled

    def can_admit(self) -> bool:
        """Whether the first waiting request could be admitted now, while all that run decode: none holds it back."""
        if not self.waiting or len(self.running) >= self.config.max_batch:
            return False
        request = self.waiting[0]
        return self._may_admit(request) and self._has_room(request, self._shareable(request)[0])

    @property
    def has_in_flight(self) -> bool:
        """Whether a request runs or was preempted. Those that were wait in front."""
        return bool(self.running) or (bool(self.waiting) and self.waiting[0].was_admitted)

    def recompute(self, requests: Iterable[Request]) -> None:
        """Preempt running requests, whose latents are to be computed anew; `preemptions` does not count them."""
        for request in sorted(requests, key=lambda request: request.id, reverse=True):
            self._preempt(request)

    def forget_latents(self) -> None:
        """Share no latents that are there now: the weights change."""
        self.pages.forget_keys()
        for request in self.running.values():
            request.has_old_latents = request.n_computed > 0
        for request in self.waiting:
            if request.latents is not None:
                request.latents.release()
                request.latents = None

    def advance(self, request: Request, n_computed: int) -> None:
        """Record that the latents of a request's first n_computed tokens are in its pages, and share full pages."""
        before, request.n_computed = request.n_computed, n_computed
        self.share(request, before, n_computed)

    def share(self, request: Request, before: int, n_computed: int) -> None:
        """Share the full pages of a request among its first n_computed positions, but for those before `before`."""
        if not request.has_old_latents:
            for i in range(before // self.page_size, n_computed // self.page_size):
                self.pages.cache(request.pages[i], self._key(request, i))

    def unshare(self, request: Request) -> None:
        """Share no full page of a request any more, also if it was preempted: its latents may be wrong."""
        self.pages.forget(request.page_keys)

    def extend(self, request: Request, n_tokens: int) -> bool:
        """Allocate free pages for a running request's first n_tokens positions; return whether it has them."""
        missing = self.n_missing(request, n_tokens)
        if missing > self.pages.n_free:
            return False
        if missing:
            request.pages.extend(self.pages.allocate(missing))
        return True

    def n_missing(self, request: Request, n_tokens: int) -> int:
        """The pages that a running request does not have yet for its first n_tokens positions."""
        return max(0, self._n_pages(n_tokens) - len(request.pages))

    def _grow(self, request: Request) -> int:
        """Allocate the page that the next token needs; leave out drafts that do not fit, and preempt newer requests.

        Returns:
            how many tokens the pass computes; 0 if the request itself was preempted.
        """
        if not request.drafts and len(request.tokens) <= len(request.pages) * self.page_size:
            return 1 if request.id in self.running else 0
        if request.drafts and not self.extend(request, len(request.tokens) + len(request.drafts)):
            request.drafts = []
        while request.id in self.running:
            if self.extend(request, len(request.tokens)):
                return 1 + len(request.drafts)
            self._preempt(self.running[max(self.running)])
            self.preemptions += 1
        return 0

    def _preempt(self, request: Request) -> None:
        del self.running[request.id]
        self._free(request)
        request.n_computed = 0
        request.drafts = []
        request.has_old_latents = False
        self.waiting.appendleft(request)

    def _may_admit(self, request: Request) -> bool:
        return self.admits_new or request.was_admitted

    def _prefill(self, request: Request, budget: int, being_computed: set[bytes]) -> Scheduled:
        """Schedule the next chunk of a request's tokens, and add the keys of the pages that it completes."""
        n_tokens, size = min(request.n_pending, budget), self.page_size
        pages = range(request.n_computed // size, (request.n_computed + n_tokens) // size)
        being_computed.update(self._key(request, i) for i in pages)
        return Scheduled(request, n_tokens)

    def _shareable(self, request: Request) -> tuple[list[int], bytes | None]:
        """Find the cached pages of a request's prefix, and the key of the page after them if it can be shared, too.

        At least one token is left to compute, whose logits choose the next one. The cache has no logits: of a prompt
        whose log-probabilities are asked for, a position is shared only if that of the token after it is known.
        """
        most = len(request.prompt_logprobs) if request.needs_prompt_logprobs else len(request.tokens) - 1
        n_pages = most // self.page_size
        pages = self.pages.find(self._key(request, i) for i in range(n_pages))  # computes no key after the first miss
        return pages, self._key(request, len(pages)) if len(pages) < n_pages else None

    def _admit(self, request: Request, shared: list[int]) -> bool:
        """Allocate the pages of a request's tokens besides the shared ones of its prefix, if there are enough."""
        if not self._has_room(request, shared):
            return False
        self.pages.share(shared)
        request.pages.extend(shared)
        request.pages.extend(self.pages.allocate(self.n_missing(request, len(request.tokens))))
        request.n_computed = len(shared) * self.page_size
        if not request.was_admitted:
            self.prompt_tokens += len(request.prompt)
            self.shared_tokens += request.n_computed
            if request.latents is None:  # otherwise the engine that has prefilled it knows
                request.n_cached = request.n_computed
                request.admitted = time.perf_counter()
            request.was_admitted = True
        if request.latents is not None:
            request.latents.write(request.pages, len(shared))
            request.latents = None
            self.advance(request, len(request.prompt))
        return True

    def _has_room(self, request: Request, shared: list[int]) -> bool:
        """Whether there are pages for a request's tokens besides the shared ones of its prefix.

        One page per running request stays free, so that admitting does not preempt requests at once.
        """
        missing = self._n_pages(len(request.tokens)) - len(shared)
        return missing + len(self.running) <= self.pages.n_free_without(shared)

    def _free(self, request: Request) -> None:
        self.pages.free(request.pages)
        del request.pages[:]

    def _n_pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def _key(self, request: Request, i: int) -> bytes:
        """The key of the request's page i, which is full. Keys are computed once, in order."""
        keys, size = request.page_keys, self.page_size
        while len(keys) <= i:
            n = len(keys)
            keys.append(page_key(keys[-1] if keys else NO_KEY, request.tokens[n * size : (n + 1) * size]))
        return keys[i]
