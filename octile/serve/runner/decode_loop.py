"""Decode steps that need nothing from the host but which requests take part: each continues the tokens of the last.

A step reads each request's last token and its drafts, chooses the tokens after them, counts the accepted drafts, and
drafts anew. Tokens, positions and drafts stay on the device, so the next step can be launched before the host knows
what this one has chosen (asynchronous scheduling): the GPU does not wait for the host. On a GPU a step is one CUDA
graph, of 1, 2, 4, 8, … requests, padded. There is one of each size for each number of drafts up to the most, which all
requests of a step have rows for and get anew. Without drafts there is a second one of each size, which computes the
log-probabilities of the chosen tokens, too.

    tokens of the step before → forward pass → sampling → accepted drafts → multi-token prediction → drafts

With drafts a step can be launched in two parts, each a graph, between which the engine chooses its tokens: those of a
request with a grammar depend on the text, which the host knows once the step before is computed.

Kernels read a step's numbers from the host's memory, and write its results there. Of both there are two buffers, which
steps use in turn: the host writes the numbers of the next step while this one is computed. Log-probabilities are copied
to two buffers, too. Nothing is allocated, and no event made, between a step's launch and the record of its event.

Rows of drafts that are not accepted write latents at positions that later steps write again, and no row attends to
positions after its own. Rows beyond the drafts of a request are padding. A step that makes no drafts, where others do,
writes the latents of multi-token prediction, to which later drafts attend.

Source: asynchronous scheduling: NanoFlow (arXiv 2408.12757) §4.2.2; drafts: `octile.serve.engine.drafts`.
Shapes: B requests, n drafts of a step, T = B · (1 + n) rows, M pages of a text at most, V vocabulary.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octile.ops.decode_step import FIELDS, TEMPERATURE, accepted_rows, continued_tokens, record_choices, text_rows
from octile.parallel.gpu_events import wait_for
from octile.serve.model.forward import Forward
from octile.serve.runner.batch import DecodedTokens, DecodeRequest
from octile.serve.runner.graphs import GraphMemory, graph_sizes
from octile.serve.runner.step import BLOCK_ROWS, PageTable, Step


@dataclass(eq=False)
class _LaunchedSteps:
    """The last steps of a loop, by the buffer that they use, and all buffers."""

    buffers: tuple[Tensor, ...]
    steps: list[DecodedTokens | None] = field(default_factory=lambda: [None, None])

    @property
    def are_computed(self) -> bool:
        return all(step is None or step.is_computed for step in self.steps)


class _Computed(NamedTuple):
    """What a step has computed before its tokens are chosen.

    Attributes:
        rows: its rows.
        hidden: what the head reads, [T, D].
        tokens: int64 [B, 1 + n], the last token of each request and its drafts.
        first: int64 [B], the position of the first of them.
        numbers: numbers of the requests, as `continued_tokens` returns them.
        temperature: float32 [B].
    """

    rows: Step
    hidden: Tensor
    tokens: Tensor
    first: Tensor
    numbers: Tensor
    temperature: Tensor


class _Parts(NamedTuple):
    """The graphs of a step that is launched in two parts, and what the first one computes."""

    compute: Callable[[], object]
    computed: _Computed
    record: Callable[[], object]


_unfinished: set[_LaunchedSteps] = set()  # whose loops have ended


class DecodeLoop:
    """The buffers and graphs of decode steps.

    Attributes:
        sizes: numbers of requests; a step is padded to the smallest that is no less than its own.

    Args:
        forward: the model's forward pass.
        max_requests: requests of a step at most.
        max_pages: M.
        n_drafts: the largest n.
        memory: memory of the graphs; None on a CPU.
        divides_steps: whether steps with drafts may be launched in two parts, which have graphs of their own.
    """

    def __init__(
        self,
        forward: Forward,
        max_requests: int,
        max_pages: int,
        n_drafts: int,
        memory: GraphMemory | None = None,
        divides_steps: bool = False,
    ):
        _drop_computed()
        self.forward, self.n_drafts = forward, n_drafts
        device = forward.weights.device
        self._on_gpu = memory is not None
        if self._on_gpu:
            self.sizes = graph_sizes(max_requests)
        else:
            block = BLOCK_ROWS * forward.tp.size  # so that each rank of a group has whole blocks
            max_requests = -(-max_requests // block) * block
            self.sizes = [*range(block, max_requests + 1, block)]
        numbers, results = FIELDS + 1 + n_drafts, max_requests * (2 + 2 * n_drafts)
        self._host = torch.zeros(2, numbers, max_requests, dtype=torch.int64, pin_memory=self._on_gpu)
        self._results = torch.zeros(2, results, dtype=torch.int64, pin_memory=self._on_gpu)
        self._fields = self._host.numpy()
        self._host_log_probs = torch.zeros(2, max_requests, dtype=torch.float32, pin_memory=self._on_gpu)
        self._launched, self._n_steps = _LaunchedSteps((self._host, self._results)), 0
        # not at exit: nothing else gets the memory then, and no event can be looked at
        weakref.finalize(self, _outlive_steps, self._launched).atexit = False
        self._table = PageTable(max_requests, max_pages, pinned=self._on_gpu)
        self._pages = torch.zeros(max_requests, max_pages, dtype=torch.int32, device=device)
        # what a step leaves to the next one: the last token and its drafts, how many positions it has advanced, and
        # which buffers follow
        self._tokens = torch.zeros(max_requests, 1 + n_drafts, dtype=torch.int64, device=device)
        self._advance = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._parity = torch.zeros(2, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(max_requests, dtype=torch.float32, device=device)
        # of a step that is launched in two parts: what is chosen between them, and then its results and the second one
        self._chosen = torch.zeros(max_requests * (1 + n_drafts), dtype=torch.int64, device=device)
        self._begun: tuple[DecodedTokens, Callable[[], object]] | None = None
        if memory is not None:
            stream = torch.cuda.current_stream(device)
            events = [torch.cuda.Event() for _ in range(3)]
            for event in events:
                event.record(stream)  # CUDA's event is made here, not in a step
            self._pages_copied, *self._computed = events
            is_sparse = (False, True) if forward.attention.index is not None else (False,)
            has_log_probs = (False,) if n_drafts else (False, True)
            counts = range(n_drafts, -1, -1)  # the largest first: others use its memory again
            # the texts have no positions
            try:
                self._graphs = {
                    way: memory.capture_sizes(self.sizes, partial(self._step, *way))
                    for way in product(counts, is_sparse, has_log_probs)
                }
                ways = product(counts, is_sparse, reversed(self.sizes)) if divides_steps and n_drafts else ()
                self._parts = {way: self._capture_parts(memory, *way) for way in ways}
            finally:  # each capture has computed a step, which the buffers must outlast, also after an error
                self._launched.steps[0] = DecodedTokens(self._results[0], self._computed[0], 0)
                self._computed[0].record(stream)
            self._parity.zero_()

    def run(
        self,
        requests: Sequence[DecodeRequest],
        n_drafts: int,
        at_least: int = 0,
        timeout: float = math.inf,
        log_probs: bool = False,
        chosen: Tensor | None = None,
    ) -> DecodedTokens:
        """Launch a step; see `octile.serve.runner.batch.Runner.decode`.

        Args:
            requests: requests of the step.
            n_drafts: n.
            at_least: requests, for which it has room: ranks that exchange rows have steps of one size.
            timeout: seconds for which the host waits for the GPU, which may wait for that of another rank.
            log_probs: whether the log-probabilities of the chosen tokens are computed, too.
            chosen: tokens that a pass has chosen, which are continued instead of those of the step before.

        Raises:
            ValueError: log_probs or chosen are given, and requests may have drafts, or n_drafts is above the largest n.
            TimeoutError: the GPU has not computed the step before the last one in time.
        """
        if log_probs and self.n_drafts:
            raise ValueError(f"log_probs must be False in decode steps with drafts, and n_drafts is {self.n_drafts}")
        if chosen is not None and self.n_drafts:
            raise ValueError(f"chosen must be None in decode steps with drafts, and n_drafts is {self.n_drafts}")
        buffer, n = self._n_steps % 2, len(requests)
        chosen_log_probs = self._host_log_probs[buffer, :n] if log_probs else None
        decoded, is_sparse, size = self._begin(requests, n_drafts, at_least, timeout, chosen_log_probs)
        if chosen is not None:
            self._tokens[: len(chosen), 0] = chosen
            self._advance[: len(chosen)] = 1
        if self._on_gpu:
            replay, _ = self._graphs[n_drafts, is_sparse, log_probs][size]
            replay()
        else:
            self._step(n_drafts, is_sparse, log_probs, size)
        self._n_steps += 1
        if chosen_log_probs is not None:
            chosen_log_probs.copy_(self._log_probs[:n], non_blocking=True)
        self._end(decoded, buffer)
        return decoded

    def logits(self, requests: Sequence[DecodeRequest], n_drafts: int, timeout: float = math.inf) -> Tensor:
        """Launch a step up to its logits; `record` launches the rest. See `octile.serve.runner.batch.Runner`.

        Args:
            requests, n_drafts, timeout: arguments of `run`.

        Returns:
            float32 [B · (1 + n), V].

        Raises:
            ValueError: n_drafts is above the largest n.
            TimeoutError: as in `run`.
        """
        decoded, is_sparse, size = self._begin(requests, n_drafts, 0, timeout, None)
        if self._on_gpu:
            compute, computed, record = self._parts[n_drafts, is_sparse, size]
            compute()
        else:
            computed = self._compute(n_drafts, is_sparse, size)
            record = partial(self._record, computed, self._chosen_of(size, n_drafts))
        self._end(decoded, self._n_steps % 2)  # its numbers are read until then, also if no rest follows
        self._begun = decoded, record
        return self.forward.logits(computed.hidden)[: len(requests) * (1 + n_drafts)]

    def record(self, chosen: Tensor) -> DecodedTokens:
        """Launch the rest of the step of the last call, which was of `logits`.

        Args:
            chosen: int64 [B · (1 + n)], what each row has chosen.
        """
        assert self._begun is not None
        decoded, record = self._begun
        self._chosen[: len(chosen)] = chosen
        record()
        buffer = self._n_steps % 2
        self._n_steps += 1
        self._end(decoded, buffer)
        return decoded

    def _begin(
        self,
        requests: Sequence[DecodeRequest],
        n_drafts: int,
        at_least: int,
        timeout: float,
        log_probs: Tensor | None,
    ) -> tuple[DecodedTokens, bool, int]:
        """Write the numbers of a step; return its results, whether it is sparse, and of how many requests it is."""
        if not 0 <= n_drafts <= self.n_drafts:
            raise ValueError(f"n_drafts must be from 0 to {self.n_drafts}, the runner's, not {n_drafts}")
        size = next(size for size in self.sizes if size >= max(len(requests), at_least))
        buffer, n = self._n_steps % 2, len(requests)
        if (before := self._launched.steps[buffer]) is not None:
            before.release_buffer(timeout)
        if self._on_gpu:
            # the step before the last one is computed, so this waits for the copy of pages alone
            wait_for(self._pages_copied, timeout)
        ready = self._computed[buffer] if self._on_gpu else None
        results = self._results_of(n, n_drafts)[buffer]
        decoded = DecodedTokens(results, ready, n_drafts, timeout, log_probs, self._tokens[:n, 0])
        longest = max((self._reach(request, n_drafts) for request in requests), default=0)
        first, end = self._fill(requests, size, self._fields[buffer])
        if first < end:
            self._pages[first:end].copy_(self._table.host[first:end], non_blocking=True)
            if self._on_gpu:
                self._pages_copied.record(self._stream)
        return decoded, self.forward.attention.is_sparse(longest), size

    def _end(self, decoded: DecodedTokens, buffer: int) -> None:
        """Record the event of what was launched, after which the buffer is not used any more."""
        if self._on_gpu:
            self._computed[buffer].record(self._stream)
        self._launched.steps[buffer] = decoded

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._pages.device)  # of the model's GPU

    def _fill(self, requests: Sequence[DecodeRequest], size: int, fields: np.ndarray) -> tuple[int, int]:
        """Write the host's buffers, and return the first and the end of the requests whose pages have changed."""
        n = len(requests)
        *numbers, texts, pages_of = tuple(zip(*requests, strict=True)) or (FIELDS + 2) * ((),)
        for row, column in enumerate(numbers[:TEMPERATURE]):
            fields[row, :n] = column
        fields[TEMPERATURE:FIELDS, :n] = np.array(numbers[TEMPERATURE:], dtype=np.float64).view(np.int64)
        for i, tokens in enumerate(texts):
            if tokens:
                fields[FIELDS : FIELDS + len(tokens), i] = tokens
        fields[:, n:size] = ((-1,), *(FIELDS + self.n_drafts) * ((0,),))  # padding: its text has no positions
        first, end = size, 0
        for i, pages in enumerate(pages_of):
            if self._table.write(i, pages):
                first, end = min(first, i), i + 1
        return first, end

    def _reach(self, request: DecodeRequest, n_drafts: int) -> int:
        """Return the positions that a row of a request attends to at most, with its drafts and theirs."""
        first = request.position + (1 + self.n_drafts if request.source >= 0 else 0)
        return min(request.end, first + 1 + max(n_drafts, 2 * n_drafts - 1))

    def _results_of(self, n_requests: int, n_drafts: int) -> Tensor:
        """Both buffers of the results of so many requests of a step, [2, B, 2 + 2·n]."""
        width = 2 + 2 * n_drafts
        return self._results[:, : n_requests * width].unflatten(1, (n_requests, width))

    def _chosen_of(self, n_requests: int, n_drafts: int) -> Tensor:
        """What the engine has chosen for so many requests of a step, [B, 1 + n]."""
        return self._chosen[: n_requests * (1 + n_drafts)].unflatten(0, (n_requests, 1 + n_drafts))

    def _capture_parts(self, memory: GraphMemory, n: int, is_sparse: bool, size: int) -> _Parts:
        """Capture the two parts of a step; nothing else is replayed between them."""
        compute, computed = memory.capture(partial(self._compute, n, is_sparse, size))
        compute()  # the second part is computed once before it is captured
        record, _ = memory.capture(partial(self._record, computed, self._chosen_of(size, n)))
        return _Parts(compute, computed, record)

    def _step(self, n: int, is_sparse: bool, log_probs: bool, size: int) -> None:
        """Compute a step of the requests that the buffers describe; is_sparse as in `Step`, log_probs as in `run`."""
        computed = self._compute(n, is_sparse, size)
        numbers, temperature_B = computed.numbers, computed.temperature
        numbers_T, temperature_T = (t[..., None].expand(*t.shape, 1 + n).flatten(-2) for t in (numbers, temperature_B))
        how = _how_to_sample(numbers_T, computed.rows.positions + 1, temperature_T)
        chosen_T = self.forward.sample(computed.hidden, how, self._log_probs[:size] if log_probs else None)
        self._record(computed, chosen_T.view(size, 1 + n))

    def _compute(self, n: int, is_sparse: bool, size: int) -> _Computed:
        """Compute a step up to what the head reads."""
        forward = self.forward.for_rows(size * (1 + n))
        host = self._host[:, : FIELDS + 1 + n, :size]
        *continued, numbers = continued_tokens(host, self._parity, self._tokens, self._advance)
        tokens_Bn, first_B, drafts_end_B, temperature_B = continued
        step = self._rows(tokens_Bn, first_B, drafts_end_B, is_sparse)
        return _Computed(step, forward.hidden(step), tokens_Bn, first_B, numbers, temperature_B)

    def _record(self, computed: _Computed, chosen_Bn: Tensor) -> None:
        """Count accepted drafts, draft anew, and record both and what was chosen."""
        step, h_TD, tokens_Bn, first_B, numbers, temperature_B = computed
        size, n, end_B, is_sparse = len(tokens_Bn), tokens_Bn.shape[1] - 1, numbers[2], step.is_sparse
        forward = self.forward.for_rows(size * (1 + n))
        drafts: list[Tensor] = []
        if not n and self.n_drafts:
            forward.write_draft_latents(step._replace(tokens=chosen_Bn[:, 0].clamp(min=0)), h_TD)
        if n:
            chosen_T, last_B, rows_B = accepted_rows(chosen_Bn, tokens_Bn, first_B)
            h_TD = forward.draft(step._replace(tokens=chosen_T), h_TD).index_select(0, rows_B)
            drafts = [forward.sample(h_TD, _how_to_sample(numbers, last_B + 2, temperature_B))]
            for i in range(1, n):
                h_TD = forward.draft(self._rows(drafts[-1][:, None], last_B + i, end_B, is_sparse), h_TD)
                drafts.append(forward.sample(h_TD, _how_to_sample(numbers, last_B + i + 2, temperature_B)))
        new_Bn = torch.stack(drafts, dim=1) if n else tokens_Bn[:, :0]
        left = self._parity, self._tokens[:size, : 1 + n], self._advance[:size], self._results_of(size, n)
        record_choices(chosen_Bn, tokens_Bn, new_Bn, *left)

    def _rows(self, tokens_Bk: Tensor, first_B: Tensor, end_B: Tensor, is_sparse: bool) -> Step:
        """Make a step of k rows per request, from a first position on."""
        size, k = tokens_Bk.shape
        pages_BM = self._pages[:size]
        tokens_T, positions_T, slots_T, lengths_T = text_rows(tokens_Bk, first_B, end_B, pages_BM)
        pages_TM = pages_BM if k == 1 else pages_BM[:, None].expand(-1, k, -1).flatten(0, 1)
        rows = tokens_T, positions_T, slots_T, pages_TM, lengths_T
        return Step(*rows, None, (), is_sparse=is_sparse, rows_per_text=k)


def _how_to_sample(numbers: Tensor, positions: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of `sample_tokens` after the logits, of numbers as `continued_tokens` returns them."""
    top_p, min_p = numbers[TEMPERATURE + 1 : FIELDS].view(torch.float64)
    return numbers[3], positions, temperature, numbers[4], top_p, min_p


def _outlive_steps(launched: _LaunchedSteps) -> None:
    """Hold memory that steps still read and write: its allocator does not know of them."""
    _unfinished.add(launched)
    _drop_computed()


def _drop_computed() -> None:
    """Drop the buffers of ended loops whose steps are computed."""
    _unfinished.difference_update([launched for launched in tuple(_unfinished) if launched.are_computed])
