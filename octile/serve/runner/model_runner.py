"""The model runner: forward passes over batches of chunks of several requests, with a paged latent cache.

A chunk of up to 8 tokens is decoded: its rows attend in the absorbed form. A longer one is prefill and attends in the
naive form, over what the pages hold. On a GPU a batch of decode rows alone replays a CUDA graph of a padded size
(`octile.serve.runner.graphs`), and the host waits for nothing.

Shapes: T rows, L logits, V vocabulary, D model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from octile.models.config import tokens_of
from octile.models.deepseek_v3 import DeepseekV3
from octile.ops.latent_cache import PAGE
from octile.parallel.gpu_events import wait_for
from octile.parallel.symmetric_memory import PeerDispatcher
from octile.serve.engine.config import EngineConfig, IndexFormat, check_expert_window
from octile.serve.engine.drafts import check_can_draft
from octile.serve.engine.sampler import ChosenTokens
from octile.serve.model.feed_forward import ExpertLoad
from octile.serve.model.forward import Forward
from octile.serve.model.small_batch import is_small_batch
from octile.serve.model.top_k_keys import why_not_captured
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.tensor_parallel import ALONE
from octile.serve.runner.batch import Batch, DecodedTokens, DecodeRequest, Results
from octile.serve.runner.decode_loop import DecodeLoop
from octile.serve.runner.graphs import FILL_ROWS, MAX_ROWS, DecodeGraphs, GraphMemory, PrefillGraphs, padded_rows
from octile.serve.runner.kv_cache import (
    CacheFormat,
    IndexCache,
    KVCache,
    PageBytes,
    bytes_per_key,
    bytes_per_row,
    check_index_format,
    needs_index,
)
from octile.serve.runner.step import (
    BLOCK_ROWS,
    MAX_DECODE_TOKENS,
    BatchCheck,
    Layout,
    Step,
    mixed_step,
    padded_size,
)
from octile.serve.runner.step_costs import StepCosts
from octile.serve.runner.warm_up import SAMPLED, warm_up_batches
from octile.serve.send import send
from octile.serve.weights.live import LiveWeights
from octile.serve.weights.replaceable import ReplaceableWeights
from octile.serve.weights.routed_shared_experts import check_batch_invariant
from octile.serve.weights.weights import ServedWeights


class ModelRunner:
    """Runs a model over a paged cache; implements `octile.serve.runner.batch.Runner`.

    Args:
        model: a model, the `LiveWeights` of one that is trained, the `ReplaceableWeights` of a folder, weights that
            `ServedWeights.read` has read, or weights whose experts are spread over ranks. Then all ranks run as many
            steps (`octile.serve.ranks.experts`), and have the same CUDA graphs.
        n_pages: pages of 64 positions.
        cache_format: format of the cache: "fp8", "bf16" or "float32"; None: the dtype of the activations.
        max_batch: requests of the largest CUDA graphs of decoding, on a GPU; larger batches replay the graphs of steps
            with prompts, if there are any. 0: none is captured.
        batch_invariant: whether a request's logits have the same bits whatever else is in the batch and however its
            prompt is divided into chunks. Slower: every row attends in the absorbed form.
        n_drafts: drafts of each request that decodes, at most.
        max_step_tokens: tokens of the largest CUDA graphs of steps with prompts, on a GPU, at most 8192; larger steps
            run without one. 0: none is captured.
        micro_batches: 1 or 2, into which CUDA graphs of steps with prompts divide the rows that other ranks compute, of
            which one travels while the other is computed.
        index_format: format of the indexer's queries and keys, if the model has an indexer; see `EngineConfig`.
        expert_window: steps over which the tokens of each expert are counted; a multiple of 8. 0: they are not counted.

    Attributes:
        updatable_weights: the weights, if they can be updated.
        n_steps, n_draft_passes: passes of the main model, and of the multi-token prediction layer, so far.
        min_decode: requests for which the graph of a decode step has room at least; set by `ExpertParallelEngine`.
        max_rank_rows: the most rows of a step on any rank, or on any group of ranks; set by it, too. 0: not known.
        timeout: seconds for which the host waits for its GPU, which may wait for that of another rank; set by it, too.

    Raises:
        TypeError, ValueError: as `ServedWeights.of_model` or `KVCache`, max_batch or max_step_tokens is negative,
            the model cannot draft or has no indexer to compute in FP32, or expert_window is no multiple of 8. Or two
            micro-batches are wanted of ranks that share their rows, or shared experts cannot be routed: with
            batch_invariant several of them, or none on GPUs whose steps are not launched ahead.
    """

    page_size = PAGE

    def __init__(
        self,
        model: DeepseekV3 | LiveWeights | ReplaceableWeights | ServedWeights | ExpertParallelWeights,
        n_pages: int,
        cache_format: CacheFormat | None = None,
        max_batch: int = 256,
        batch_invariant: bool = False,
        n_drafts: int = 0,
        expert_window: int = 0,
        max_step_tokens: int = 2048,
        micro_batches: int = 1,
        index_format: IndexFormat = "e4m3",
    ):
        if micro_batches not in (1, 2):
            raise ValueError(f"micro_batches must be 1 or 2, not {micro_batches}")
        for name, value in (("max_batch", max_batch), ("max_step_tokens", max_step_tokens)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, not {value}")
        if batch_invariant and isinstance(model, ExpertParallelWeights) and model.n_shared:
            check_batch_invariant(model.weights.config, "batch_invariant")
        check_expert_window(expert_window)
        self.expert_parallel = model if isinstance(model, ExpertParallelWeights) else None
        self.tp = ALONE if self.expert_parallel is None else self.expert_parallel.tp
        if self.tp.size > 1 and micro_batches > 1:
            raise ValueError("micro_batches must be 1, not 2, if ranks share the rows of a step (tensor parallelism)")
        self.updatable_weights = model if isinstance(model, LiveWeights | ReplaceableWeights) else None
        if isinstance(model, ExpertParallelWeights | LiveWeights | ReplaceableWeights):
            model = model.weights
        weights = model if isinstance(model, ServedWeights) else ServedWeights.of_model(model)
        c = weights.config
        cache_format = cache_format or ("float32" if weights.dtype == torch.float32 else "bf16")
        self.n_pages, self.vocab_size, self.can_draft = n_pages, c.vocab_size, weights.mtp is not None
        self.end_tokens = tokens_of(c.eos_token_id)
        check_can_draft(n_drafts, self.can_draft)
        check_index_format(index_format, c.has_indexer)
        if batch_invariant and index_format != "e4m3":
            raise ValueError(f"index_format must be e4m3, not {index_format}, with batch_invariant")
        self.max_position = min(c.max_position_embeddings, n_pages * PAGE)
        self.device, self.batch_invariant = weights.device, batch_invariant
        n_layers = _n_layers(weights)
        self.cache = KVCache(n_layers, n_pages, c.kv_lora_rank, c.qk_rope_head_dim, cache_format, self.device)
        self.index: IndexCache | None = None
        if needs_index(c, self.max_position):
            assert c.index_head_dim is not None
            layers = [layer for layer in range(n_layers) if c.has_own_indexer(layer)]
            self.index = IndexCache(layers, n_pages, c.index_head_dim, self.device, index_format)
        self.expert_load: ExpertLoad | None = None
        if expert_window:
            layers = [layer for layer in range(n_layers) if c.is_moe(layer)]
            self.expert_load = ExpertLoad(layers, c.n_routed_experts, expert_window, self.device)
        self.n_steps = self.n_draft_passes = self.min_decode = self.max_rank_rows = 0
        self.timeout = math.inf
        self.forward = Forward.make(
            weights, self.cache, self.max_position, batch_invariant, self.expert_load, self.expert_parallel, self.index
        )
        self._step_costs = StepCosts.of(self.forward) if self.can_draft else None
        self._check = BatchCheck(self.vocab_size, self.max_position, n_pages)
        self.n_drafts, self._max_batch, self._max_step_tokens = n_drafts, max_batch, max_step_tokens
        if self._waits_for_index() and (max_batch or max_step_tokens):
            in_fp32 = " in FP32" if index_format == "float32" else ""
            why = f"{c.index_n_heads} heads of {c.index_head_dim} channels of the indexer{in_fp32} have no kernel"
            warnings.warn(f"steps are computed without CUDA graphs: {why}", RuntimeWarning, stacklevel=2)
            max_batch = max_step_tokens = 0
        captures_all = self.device.type == "cuda" and self.expert_parallel is None  # otherwise what kernels exchange
        self._max_rows = max_batch * (1 + n_drafts) if captures_all else 0
        self.max_ahead = max_batch if self._max_rows else 0
        self.runs_ahead = captures_all and not self._waits_for_index()
        self.graphs: DecodeGraphs | None = None
        self.draft_graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self.loop: DecodeLoop | None = None
        self._with_peers = self.forward
        routes_shared = self.expert_parallel is not None and self.expert_parallel.n_shared > 0
        self._decoding = self.forward.with_feed_forward(routes_shared=routes_shared)
        if routes_shared and self.device.type == "cpu":  # in steps that are launched ahead
            self.max_ahead = self._max_batch
        if self.device.type == "cuda" and (max_batch or max_step_tokens):
            memory = GraphMemory(self.device)
            if self.expert_parallel is None:
                self._capture(memory, max_step_tokens)
            else:
                self._capture_expert_parallel(self.expert_parallel, memory, max_step_tokens, micro_batches)
        if routes_shared and self._max_batch and not self.max_ahead:
            raise ValueError(
                "parallel.shared_experts must be replicated, not routed: these GPUs launch no decode step ahead"
            )

    def _waits_for_index(self) -> bool:
        """Whether the host waits for the indexer's logits in each step, on a GPU."""
        c = self.forward.weights.config
        if self.device.type != "cuda" or self.index is None or not c.index_n_heads or not c.index_head_dim:
            return False
        return (
            self.index.dtype == torch.float32
            or why_not_captured(c.index_n_heads, c.index_head_dim, self.device) is not None
        )

    def _capture(self, memory: GraphMemory, max_step_tokens: int) -> None:
        """Capture the graphs of all steps, so that no step of a running server waits for it."""
        max_pages = -(-self.max_position // PAGE)
        if max_step_tokens:
            rows = self._max_decode_rows
            self.prefill_graphs = PrefillGraphs(self.forward, memory, max_step_tokens, max_decode_rows=rows)
        if self._max_rows:
            self.graphs = DecodeGraphs(self.forward, memory, self._max_rows, max_pages)
            if self.n_drafts:
                self.draft_graphs = DecodeGraphs(self.forward, memory, self._max_rows, max_pages, drafts=True)
            self.loop = self._new_loop(memory)
        if max_step_tokens:
            self.warm_up()
        torch.cuda.empty_cache()  # what was computed before each capture

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compute a step of each kind that a server computes, so that none of its own waits for a kernel's compilation.

        No row is written to the cache, and no step and no token is counted. With expert parallelism all ranks call it.

        Raises:
            TimeoutError: as in `run`.
        """
        short_prompt = min(self._max_step_tokens, MAX_DECODE_TOKENS)  # whose rows attend as those that decode
        rows = max(self._max_batch * (1 + self.n_drafts), short_prompt)
        n_requests = self._max_batch or EngineConfig.max_batch  # a prefill process captures no graphs of its requests
        short_rows = min(n_requests * MAX_DECODE_TOKENS, self._max_step_tokens)
        index_topk = None if self.index is None else self.forward.weights.config.index_topk
        graphs = self.prefill_graphs
        in_graphs = 0 if graphs is None else graphs.max_positions
        kinds = self._max_step_tokens, rows, short_rows, self.max_position, self.vocab_size, index_topk, in_graphs
        ways = [graphs]
        if graphs is not None and (self._max_step_tokens > MAX_ROWS or not graphs.has_all):
            ways = [graphs.without_attention(), graphs]  # first as in steps of as many rows as no graph has
        for self.prefill_graphs in ways:
            for batch in warm_up_batches(*kinds):
                layout = self._layout(batch)
                if self.graphs is None or not self._has_graph(layout):
                    self._compute_unwritten(layout)
        if self.expert_parallel is not None and self.max_ahead:
            self.loop = self.loop or self._new_loop()
            for size, n_drafts in product(self.loop.sizes, range(self.n_drafts + 1)):
                self.loop.run((), n_drafts, size, self.timeout).wait()

    def _compute_unwritten(self, layout: Layout) -> None:
        """Compute a step and the drafts after it, as of a request that samples, and write nothing to the cache."""
        self.max_rank_rows = sum(len(chunk.tokens) for chunk in layout.chunks)  # of each rank
        step = self._step(layout, torch.zeros(1, dtype=torch.int64, device=self.device) if self.runs_ahead else None)
        step = step._replace(slots=torch.full_like(step.slots, -1))
        h_TD = self._hidden(step)
        passes = [self._in_order(h_TD, layout)]
        if self.n_drafts:
            passes.append(self._in_order(self._sized_forward().draft(step, h_TD), layout))
        results = [self._results(hidden_TD, layout) for hidden_TD in passes]
        self._wait_for(results[-1])  # `ChosenTokens` waits without a timeout
        for logits, _ in results:
            for row in SAMPLED:
                ChosenTokens(logits, [row] * len(logits)).wait()
        self.max_rank_rows = 0

    def _capture_expert_parallel(
        self, weights: ExpertParallelWeights, memory: GraphMemory, max_step_tokens: int, micro_batches: int
    ) -> None:
        """Capture the steps of experts over ranks, if kernels can exchange their rows."""
        if (why_not := weights.why_not_peers()) is not None:
            what = f"steps are computed without CUDA graphs, and the host waits in each layer: {why_not}"
            warnings.warn(what, RuntimeWarning, stacklevel=3)
            return
        if max_step_tokens:
            self.use_peers(weights.peer_dispatcher(self.tp.n_own(padded_rows(min(max_step_tokens, MAX_ROWS)))))
            if not self.batch_invariant:
                self.prefill_graphs = PrefillGraphs(
                    self._with_peers, memory, max_step_tokens, micro_batches, self._max_decode_rows
                )
        rows = self._max_batch * (1 + self.n_drafts)
        exchange = weights.decoding_exchange(self.tp.n_own(rows)) if rows else None
        if exchange is not None:
            self._decoding, self.max_ahead = self._decoding.with_feed_forward(exchange=exchange), self._max_batch
            self.loop = self._new_loop(memory)
            torch.cuda.empty_cache()

    def use_peers(self, dispatcher: PeerDispatcher) -> None:
        """Exchange the rows of steps that are not launched ahead by kernels, if they fit."""
        self._with_peers = self.forward.with_feed_forward(dispatcher=dispatcher)

    @property
    def _max_decode_rows(self) -> int:
        """The most rows of a step that attend as decode rows: also those of a short prompt, or of the rest of one."""
        return self._max_batch * (1 + self.n_drafts) + MAX_DECODE_TOKENS

    def _new_loop(self, memory: GraphMemory | None = None) -> DecodeLoop:
        max_pages = -(-self.max_position // PAGE)
        return DecodeLoop(self._decoding, self._max_batch, max_pages, self.n_drafts, memory, self.runs_ahead)

    @staticmethod
    def bytes_per_page(
        model: DeepseekV3 | ServedWeights,
        cache_format: CacheFormat,
        max_position: int,
        index_format: IndexFormat = "e4m3",
    ) -> int:
        """Return the bytes that a page takes in all layers and indexers, by which an engine chooses n_pages.

        Args:
            model: its weights.
            cache_format: format of the latents.
            max_position: positions of a text at most; with few positions there are no indexer's keys (`needs_index`).
            index_format: format of these keys.
        """
        c, n_layers, n_indexers = model.config, _n_layers(model), 0
        if needs_index(c, max_position):
            n_indexers = sum(c.has_own_indexer(layer) for layer in range(n_layers))
        latents = n_layers * bytes_per_row(c.kv_lora_rank, c.qk_rope_head_dim, cache_format)
        return PAGE * (latents + n_indexers * bytes_per_key(c.index_head_dim or 0, index_format))

    @staticmethod
    def bytes_of_graphs(model: DeepseekV3 | ServedWeights, max_batch: int, n_drafts: int, max_position: int) -> int:
        """Return the bytes of the logits in the CUDA graphs of decoding, their largest memory.

        Those of steps that are not launched ahead hold logits in FP32 of all their sizes, which halve from one to the
        next, and so do those of multi-token prediction. What all graphs share has one step's in BF16, and after another
        as many weights of tokens that may be left out, and logits in FP32 for log-probabilities. If texts of up to
        max_position positions need an indexer's keys, there are graphs of both kinds of attention, and what they share
        has the indexer's logits in FP32.
        """
        c, rows = model.config, max_batch * (1 + n_drafts)
        held, shared = 2 if n_drafts else 1, 2 + 4
        if not needs_index(c, max_position):
            return rows * c.vocab_size * (held * 2 * 4 + shared)
        return rows * (c.vocab_size * (2 * held * 2 * 4 + shared) + 4 * max_position)

    def close(self) -> None:
        """Free the CUDA graphs; no step follows. NCCL ends no communicator whose collectives a graph has."""
        self.loop = self.prefill_graphs = self.graphs = self.draft_graphs = None

    @property
    def pages(self) -> PageBytes:
        """All that a page holds, to copy it to the cache of another runner of this model."""
        return PageBytes([store.bytes_LPQ for store in (self.cache, self.index) if store is not None])

    @property
    def expert_tokens(self) -> Mapping[int, tuple[int, ...]] | None:
        """The tokens of each expert in the window, by layer; see `octile.serve.runner.batch.Runner`."""
        return None if self.expert_load is None else self.expert_load.in_window

    def step_costs(self, n_requests: int, n_drafts: int) -> Sequence[float]:
        """Return how long decode steps with drafts take; see `octile.serve.runner.batch.Runner`."""
        assert self._step_costs is not None  # the engine drafts only if the model can
        return self._step_costs.relative(n_requests, n_drafts)

    def check_weights(self) -> None:
        """Check that `update_weights` can be called now; see `octile.serve.runner.batch.Runner`.

        Raises:
            ValueError: the runner has neither `LiveWeights` nor `ReplaceableWeights`, or as their `check`.
        """
        self._updated_weights().check()

    def update_weights(self) -> None:
        """Take over the model's new weights, after `check_weights`, at the same addresses.

        CUDA graphs stay valid. `Engine.update_weights` calls it, and takes care of the latents of old weights.

        Raises:
            ValueError: the runner has neither `LiveWeights` nor `ReplaceableWeights`.
        """
        self._updated_weights().update()

    def _updated_weights(self) -> LiveWeights | ReplaceableWeights:
        if self.updatable_weights is None:
            found = "spread over ranks" if self.expert_parallel is not None else "of another kind"
            raise ValueError(
                f"runner must be of LiveWeights or ReplaceableWeights to update its weights, which are {found}"
            )
        return self.updatable_weights

    @torch.no_grad()
    def run(self, batch: Batch) -> Results:
        """Run the main model over a batch; see `octile.serve.runner.batch.Runner`.

        Raises:
            ValueError: the batch is empty, a chunk has no tokens or too many logits, a token is not in the vocabulary,
                a position is not below max_position, or a page is missing or not in the cache.
            TimeoutError: the GPU did not compute logits in time, because it waits for the GPU of another rank.
        """
        layout = self._layout(batch)
        if self.graphs is not None and self._has_graph(layout):
            results = self._replay(self.graphs, layout, chosen=batch.chosen)
        else:
            h_TD = self._in_order(self._hidden(self._step(layout, batch.chosen)), layout)
            results = self._results(h_TD, layout)
        self._end_step()
        self._wait_for(results)
        return results

    @torch.no_grad()
    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Compute the logits of rows of `Results.hidden`; see `octile.serve.runner.batch.Runner`.

        Raises:
            TimeoutError: as in `run`.
        """
        results = Results(self._padded_logits(hidden_TD, list(range(len(hidden_TD)))), hidden_TD)
        self._wait_for(results)
        return results.logits

    @torch.no_grad()
    def draft(self, batch: Batch, hidden_TD: Tensor) -> Results:
        """Run the multi-token prediction layer over a batch; see `octile.serve.runner.batch.Runner`.

        Raises:
            ValueError: as in `run`; the model has no such layer, or hidden_TD has another shape.
            TimeoutError: as in `run`.
        """
        if not self.can_draft:
            raise ValueError("the model has no multi-token prediction layer, so it drafts nothing")
        layout = self._layout(batch)
        self.n_draft_passes += 1
        n_rows = sum(len(chunk.tokens) for chunk in layout.chunks)
        if hidden_TD.shape != (n_rows, self.forward.weights.config.hidden_size):
            width = self.forward.weights.config.hidden_size
            raise ValueError(f"hidden must be {(n_rows, width)}, a row for each token, not {tuple(hidden_TD.shape)}")
        if self.draft_graphs is not None and self._has_graph(layout):
            return self._replay(self.draft_graphs, layout, hidden_TD)
        step, rows = self._step(layout), layout.rows()
        if rows is not None:
            n_rows = len(step.tokens)
            hidden_TD = hidden_TD.new_zeros(n_rows, hidden_TD.shape[1]).index_copy_(0, self._index(rows), hidden_TD)
        padding = len(step.tokens) - n_rows
        if padding:
            hidden_TD = torch.cat((hidden_TD, hidden_TD.new_zeros(padding, hidden_TD.shape[1])))
        results = self._results(self._in_order(self._sized_forward().draft(step, hidden_TD), layout), layout)
        self._wait_for(results)
        return results

    @torch.no_grad()
    def decode(
        self,
        requests: Sequence[DecodeRequest],
        n_drafts: int,
        log_probs: bool = False,
        chosen: Tensor | None = None,
    ) -> DecodedTokens:
        """Launch a decode step; see `octile.serve.runner.batch.Runner`.

        Raises:
            ValueError: log_probs or chosen are given, and requests may have drafts, or n_drafts is above the runner's.
        """
        if self.loop is None:  # on a CPU
            self.loop = self._new_loop()
        decoded = self.loop.run(requests, n_drafts, self.min_decode, self.timeout, log_probs, chosen)
        self._end_step()
        return decoded

    @torch.no_grad()
    def decode_logits(self, requests: Sequence[DecodeRequest], n_drafts: int) -> Tensor:
        """Launch a decode step up to its logits; see `octile.serve.runner.batch.Runner`.

        Raises:
            ValueError: n_drafts is above the runner's.
        """
        if self.loop is None:  # on a CPU
            self.loop = self._new_loop()
        logits = self.loop.logits(requests, n_drafts, self.timeout)
        self._end_step()
        return logits

    @torch.no_grad()
    def decode_chosen(self, chosen: Tensor) -> DecodedTokens:
        """Launch the rest of a decode step; see `octile.serve.runner.batch.Runner`."""
        assert self.loop is not None  # of `decode_logits`
        return self.loop.record(chosen)

    @torch.no_grad()
    def take_part(self, n_drafts: int | None = None) -> None:
        """Run a step of padding alone, in which the experts of this rank compute the rows of others.

        Args:
            n_drafts: argument of `decode`, if the others launch a decode step; None: they launch another one.
        """
        if n_drafts is not None:
            self.decode((), n_drafts)
            return
        self._hidden(self._padding())
        self._end_step()

    @torch.no_grad()
    def take_part_in_drafts(self, passes: int) -> None:
        """Run so many passes of the multi-token prediction layer, as `take_part` runs a step."""
        width = self.forward.weights.config.hidden_size
        for _ in range(passes):
            step = self._padding()
            self._sized_forward().draft(step, self.forward.weights.head.new_zeros(len(step.tokens), width))
            self.n_draft_passes += 1

    def _padding(self) -> Step:
        return self._step(Layout((), (), (), 1))

    def _wait_for(self, results: Results) -> None:
        """Wait for logits, from which the host reads tokens next, no longer than the timeout if there is one."""
        if self.timeout < math.inf and self.device.type == "cuda" and len(results.logits):
            computed = torch.cuda.Event()
            computed.record(torch.cuda.current_stream(self.device))
            wait_for(computed, self.timeout)

    def _end_step(self) -> None:
        self.n_steps += 1
        if self.expert_load is not None:
            self.expert_load.end_step()

    def _hidden(self, step: Step) -> Tensor:
        graphs = self.prefill_graphs
        if graphs is None or (self.expert_parallel is not None and not self._has_peers):
            return self._sized_forward().hidden(step)
        if self.graphs is not None and self.forward.small_batches and is_small_batch(step, self.batch_invariant):
            return self.forward.hidden(step)  # it has kernels of its own; the graphs of prompts compute 256 rows
        return graphs.hidden(step, self.max_rank_rows)

    def _sized_forward(self) -> Forward:
        """The pass of a step whose rows fit into graphs, or of one without."""
        return self._with_peers.for_rows(padded_rows(self.max_rank_rows)) if self._has_peers else self.forward

    @property
    def _has_peers(self) -> bool:
        """Whether kernels exchange the rows of a step, the same on all ranks."""
        dispatcher = self._with_peers.feed_forward.dispatcher
        return isinstance(dispatcher, PeerDispatcher) and 0 < self.tp.n_own(self.max_rank_rows) <= dispatcher.max_tokens

    def _has_graph(self, layout: Layout) -> bool:
        return layout.n_decode <= self._max_rows and not layout.prefill

    def _replay(
        self, graphs: DecodeGraphs, layout: Layout, hidden_TD: Tensor | None = None, chosen: Tensor | None = None
    ) -> Results:
        h_TD, logits = graphs.run(layout, hidden_TD, chosen)
        wanted = layout.logit_rows()
        return Results(logits if wanted is None else self._take(logits, wanted), h_TD)

    def _layout(self, batch: Batch) -> Layout:
        self._check(batch)
        shares_blocks = self.batch_invariant and self.expert_parallel is None  # whose exchanges have room for tokens
        return Layout.of(batch.chunks, self.batch_invariant, shares_blocks)

    def _step(self, layout: Layout, chosen: Tensor | None = None) -> Step:
        pads = self.batch_invariant and self.device.type == "cpu"
        index_topk = None if self.index is None else self.forward.weights.config.index_topk
        is_sparse = self.forward.attention.is_sparse(layout.longest)
        block = BLOCK_ROWS * self.tp.size if pads else 1  # each rank of a group has whole blocks
        return mixed_step(layout, block, self.device, index_topk, is_sparse, FILL_ROWS if self._fills else 1, chosen)

    @property
    def _fills(self) -> bool:
        """Whether rows are padded so that GEMMs have few sizes: not if their padding would travel to experts."""
        pads = self.expert_parallel is None or (self.prefill_graphs is not None and self._has_peers)
        return self.device.type == "cuda" and not self.batch_invariant and pads

    def _in_order(self, h_TD: Tensor, layout: Layout) -> Tensor:
        """Return rows in the batch's order, without padding."""
        rows = layout.rows()
        if rows is not None:
            return self._take(h_TD, rows)
        return h_TD[: sum(len(chunk.tokens) for chunk in layout.chunks)]

    def _results(self, h_TD: Tensor, layout: Layout) -> Results:
        wanted = layout.logit_rows()
        if wanted is None:
            return Results(self.forward.logits(h_TD), h_TD)
        return Results(self._padded_logits(h_TD, wanted), h_TD)

    def _padded_logits(self, h_TD: Tensor, rows: list[int]) -> Tensor:
        """Compute the logits of some rows; GEMMs have few sizes."""
        padding = padded_size(len(rows)) - len(rows) if self._fills else 0
        return self.forward.logits(self._take(h_TD, rows + [0] * padding))[: len(rows)]

    def _take(self, t: Tensor, rows: list[int]) -> Tensor:
        return t.index_select(0, self._index(rows))

    def _index(self, rows: list[int]) -> Tensor:
        return send(torch.tensor(rows, dtype=torch.int64), self.device)


def _n_layers(model: DeepseekV3 | ServedWeights) -> int:
    """The layers that are served, each with a cache: those of the model, and of multi-token prediction if it has it."""
    c = model.config
    has_mtp = model.mtp is not None if isinstance(model, ServedWeights) else c.num_nextn_predict_layers > 0
    return c.num_hidden_layers + has_mtp
