"""Load a model to serve it: its weights, its tokenizer, and a cache that fits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from octile.checkpoint.files import GENERATION_CONFIG
from octile.checkpoint.hugging_face import checkpoint_folder, open_folder, read_model_config
from octile.models.config import ModelConfig
from octile.ops.latent_cache import PAGE
from octile.recipe import Recipe
from octile.serve.engine.config import REBALANCE_SECONDS, CacheConfig, EngineConfig, ParallelConfig, window_of
from octile.serve.engine.drafts import check_can_draft
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model.small_batch import why_kernels_lack
from octile.serve.ranks.dynamic_redundancy import TooFewActiveError, choose_copies
from octile.serve.ranks.engine import ExpertParallelEngine
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.placement import rebalance_experts
from octile.serve.ranks.tensor_parallel import TensorParallel
from octile.serve.runner.kv_cache import CacheFormat, check_index_format, needs_index
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.exact import check_fp8, exact_options
from octile.serve.weights.generation_config import GenerationConfig, read_generation_config
from octile.serve.weights.head_share import check_heads, is_of_heads
from octile.serve.weights.replaceable import ReplaceableWeights
from octile.serve.weights.routed_shared_experts import check_batch_invariant, check_shared, with_shared_load
from octile.serve.weights.weights import ServedWeights, has_fp8, is_of_routed, is_of_shared
from octile.tokenizer import Tokenizer

CPU_CACHE_BYTES = 2**30
FREE_SHARE = 0.8  # of the GPU memory that weights and the logits of CUDA graphs leave free; the rest: activations

Phase = Literal["prefill", "decode"]  # what a process does that does not do both


@dataclass(frozen=True)
class Folder:
    """A folder to serve, whose small files are read and whose weights are not.

    Attributes:
        path: the Hugging Face folder.
        model: its configuration.
        tokenizer: its tokenizer.
        generation: what its `generation_config.json` gives.
        unused: fields of that file that would change a text and are not used, with their values.
    """

    path: Path
    model: ModelConfig
    tokenizer: Tokenizer
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    unused: Sequence[str] = ()

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a run folder or a Hugging Face folder.

        Raises:
            FileNotFoundError: there is no model or no tokenizer.
            ValueError: a file is damaged, or the tokenizer is that of another model.
        """
        inside = checkpoint_folder(path)
        model, tokenizer = read_model_config(path), Tokenizer.load(inside)
        if tokenizer.vocab_size > model.vocab_size:
            raise ValueError(
                f"{inside} has a tokenizer of {tokenizer.vocab_size} tokens, but the model's vocabulary has "
                f"{model.vocab_size}: the tokenizer is that of another model"
            )
        return cls(inside, model, tokenizer, *read_generation_config(inside, model.vocab_size))

    def sampling(self, **given: Any) -> Sampling:
        """Make a `Sampling` of fields, where those that are not given are as `generation_config.json` says.

        Raises:
            TypeError, ValueError: as `Sampling`.
        """
        return Sampling(**{**self.generation.sampling, **given})

    def warn_of_unused(self) -> None:
        """Warn of the fields of `generation_config.json` that would change a text and are not used."""
        if self.unused:
            what = f"{GENERATION_CONFIG} of {self.path} has fields that are not used: {', '.join(self.unused)}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def read_weights(self, device: torch.device, drafts: bool) -> ServedWeights:
        """Read the weights. Activations are BF16 on a GPU and FP32 on a CPU.

        Args:
            device: device of the weights.
            drafts: whether to read the multi-token prediction layer, if the model has one.

        Raises:
            ValueError: a file is damaged.
        """
        return ServedWeights.read(self.path, _activations(device), device, drafts=drafts)

    def load(
        self, device: torch.device, engine: EngineConfig, cache: CacheConfig, phase: Phase | None = None
    ) -> tuple[Engine, ModelRunner]:
        """Read the weights and allocate the cache.

        Args:
            device: device of the model.
            engine, cache: as configured.
            phase: None for an engine that prefills and decodes; only the CUDA graphs of this phase are captured. For
                "prefill" the free memory holds the pages of one of the longest texts besides the cache, unless `cache`
                gives its size.

        Raises:
            ValueError: a file is damaged, the cache cannot hold a page, or the model has no layer for drafts or no
                indexer, and the engine is to use it.
            MemoryError: the weights leave no memory for a cache.
        """
        self._check_engine(engine)
        engine, cache = self.exact_options(engine, cache, None, device)
        weights = ReplaceableWeights(self.path, _activations(device), device, engine.n_drafts > 0)
        stored = cache.format or usual_cache_format(device)
        n_pages = self._n_pages(weights.weights, stored, engine, cache.gib, phase)
        runner = _runner(weights, n_pages, stored, engine, phase=phase)
        return Engine(runner, self.tokenizer, engine, self.generation.end_tokens), runner

    def _check_engine(self, engine: EngineConfig) -> None:
        """Raise ValueError if the model has no layer that drafts, or no indexer, and the engine is to use it."""
        check_can_draft(engine.n_drafts, self.model.num_nextn_predict_layers > 0, "engine.n_drafts")
        check_index_format(engine.index_format, self.model.has_indexer, "engine.index_format")

    def is_exact(self) -> bool:
        """Whether the weights are of a recipe that exact mode serves.

        Raises:
            ValueError: config.json names such a recipe, but a weight that it quantizes is not in FP8.
        """
        recipe = self._fp8_recipe()
        return recipe is not None and recipe.batch_invariant

    def _fp8_recipe(self) -> Recipe | None:
        """Return the recipe of the weights, if any of them are in FP8."""
        folder = open_folder(self.path)
        if not folder.has_fp8_weights:
            return None
        recipe = folder.recipe()
        if recipe.batch_invariant:
            check_fp8(folder.shards.specs)
        return recipe

    def exact_options(
        self, engine: EngineConfig, cache: CacheConfig, parallel: ParallelConfig | None, device: torch.device
    ) -> tuple[EngineConfig, CacheConfig]:
        """Return options with what exact mode implies, if they ask for it: `octile.serve.weights.exact`.

        Raises:
            ValueError: the weights or another option have other bits than training.
        """
        if not engine.exact:
            return engine, cache
        return exact_options(engine, cache, parallel, self._fp8_recipe(), _activations(device))

    def check_parallel(self, parallel: ParallelConfig, batch_invariant: bool = False) -> None:
        """Check that the model's experts can be spread over the ranks, and its heads over those of a group.

        Raises:
            ValueError: it has no experts; the ranks do not divide them and their further copies, or have more slots
                than they need for a copy of each expert on each rank. Or another number of copies must be active, or as
                `check_heads`, `check_shared` or `check_batch_invariant`.
        """
        c = self.model
        if parallel.ep > 1 and not any(c.is_moe(layer) for layer in range(c.num_hidden_layers)):
            raise ValueError(f"parallel.ep must be 1, not {parallel.ep}: the model has no experts to spread over ranks")
        copies, shared = self._n_copies(parallel), c.n_shared_experts if parallel.routes_shared else 0
        if parallel.ep > 1 and copies % parallel.ep:
            routed = f"{c.n_routed_experts} experts" + (f" + {shared} that are shared" if shared else "")
            raise ValueError(
                f"parallel.ep must divide the copies of experts, but {parallel.ep} ranks do not divide "
                f"{routed} + {parallel.redundant_experts} (parallel.redundant_experts)"
            )
        useful = (parallel.ep - 1) * (c.n_routed_experts + shared)
        if parallel.redundant_experts > useful:
            raise ValueError(
                f"parallel.redundant_experts must be at most {useful}, with which each of the {parallel.ep} ranks has "
                f"each expert, not {parallel.redundant_experts}"
            )
        if parallel.active_experts is not None:
            self._check_active(parallel, parallel.active_experts)
        if parallel.tp > 1 or parallel.routes_shared:
            specs = open_folder(self.path).shards.specs
            check_heads(c, parallel.tp, has_fp8(specs, is_of_heads))
            if parallel.routes_shared:
                check_shared(c, has_fp8(specs, is_of_shared), has_fp8(specs, is_of_routed))
                if batch_invariant:
                    check_batch_invariant(c, "engine.batch_invariant")

    def _check_active(self, parallel: ParallelConfig, n_active: int) -> None:
        """Check that a rank has so many copies, and that with them all experts of a layer can be active together.

        Raises:
            ValueError: it has fewer, or they cannot.
        """
        n_experts, n_slots = self.model.n_routed_experts, self._n_copies(parallel) // parallel.ep
        placement, one_each = self._placement(parallel, 1)[0], torch.ones(n_experts, dtype=torch.int64)

        def suffices(n: int) -> bool:
            try:
                choose_copies(one_each, placement, parallel.ep, n)
            except TooFewActiveError:
                return False
            return True

        least = next(n for n in range(-(-n_experts // parallel.ep), n_slots + 1) if suffices(n))
        if not least <= n_active <= n_slots:
            raise ValueError(
                f"parallel.active_experts must be from {least}, with which all {n_experts} experts of a layer can be "
                f"active together, to {n_slots}, the copies of a rank, not {n_active}"
            )

    def _n_copies(self, parallel: ParallelConfig) -> int:
        """Return the slots of all ranks for experts of a layer."""
        shared = self.model.n_shared_experts if parallel.routes_shared else 0
        return self.model.n_routed_experts + shared + parallel.redundant_experts

    def _placement(self, parallel: ParallelConfig, n_layers: int) -> Tensor:
        """Place experts of equal loads: the expert in each slot of all ranks, [n_layers, slots]."""
        c = self.model
        even_LE, groups = torch.ones(n_layers, c.n_routed_experts), c.n_group
        if parallel.routes_shared:  # which are of no group
            even_LE, groups = with_shared_load(even_LE, c.n_shared_experts, c.num_experts_per_tok), 1
        n_copies, is_dynamic = self._n_copies(parallel), parallel.active_experts is not None
        sizes = n_copies, groups, _count_nodes(), parallel.ep
        return rebalance_experts(even_LE, *sizes, distinct_copies=is_dynamic)[0]

    def load_expert_parallel(
        self,
        device: torch.device,
        engine: EngineConfig,
        cache: CacheConfig,
        parallel: ParallelConfig,
        control: dist.ProcessGroup,
    ) -> tuple[ExpertParallelEngine, ModelRunner]:
        """Read the weights of this rank and allocate its cache; all ranks call it. The caches have the same size.

        Args:
            device, engine, cache: device and options of this rank.
            parallel: all ranks, which `check_parallel` accepts.
            control: their group, by gloo.

        Raises:
            ValueError, MemoryError: as `load` or `window_of`.
        """
        self._check_engine(engine)
        engine, cache = self.exact_options(engine, cache, parallel, device)
        engine = replace(engine, expert_window=window_of(engine, parallel))
        seconds = REBALANCE_SECONDS if parallel.rebalance is None else parallel.rebalance
        c, drafts = self.model, engine.n_drafts > 0
        n_layers = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers + drafts))
        experts = ExpertParallelWeights.read(
            self.path,
            self._placement(parallel, n_layers),
            _activations(device),
            device,
            num_active=parallel.active_experts,
            num_nodes=_count_nodes(),
            drafts=drafts,
            routes_shared=parallel.routes_shared,
            tp=TensorParallel.of_consecutive(parallel.tp, timedelta(seconds=parallel.timeout)),
        )
        stored = cache.format or usual_cache_format(device)
        n_pages = torch.tensor(self._n_pages(experts.weights, stored, engine, cache.gib))
        dist.all_reduce(n_pages, dist.ReduceOp.MIN, control)
        runner = _runner(experts, int(n_pages), stored, engine, parallel.micro_batches)
        own = Engine(runner, self.tokenizer, engine, self.generation.end_tokens)
        return ExpertParallelEngine(own, runner, seconds, control, parallel.timeout), runner

    def _n_pages(
        self,
        weights: ServedWeights,
        stored: CacheFormat,
        engine: EngineConfig,
        gib: float | None,
        phase: Phase | None = None,
    ) -> int:
        """The pages that the memory for the cache holds, and no more than a full batch of the longest texts needs."""
        c, longest = self.model, self.model.max_position_embeddings
        text_pages, decoding = -(-longest // PAGE), (0 if phase == "prefill" else engine.max_batch, engine.n_drafts)

        def count(max_position: int) -> int:
            """The pages of a cache for texts of so many positions, of which it may have fewer."""
            size = ModelRunner.bytes_per_page(weights, stored, max_position, engine.index_format)
            if gib is not None:
                n_bytes = int(gib * 2**30)
            elif weights.device.type == "cuda":
                graphs = ModelRunner.bytes_of_graphs(weights, *decoding, max_position)
                n_bytes = max(0, int(FREE_SHARE * (torch.cuda.mem_get_info(weights.device)[0] - graphs)))
            else:
                n_bytes = CPU_CACHE_BYTES
            if n_bytes < size and gib is not None:
                raise ValueError(f"cache.gib must have room for one page of {size / 2**30:.3g} GiB, not {gib:g}")
            if n_bytes < size:
                raise MemoryError(f"the cache has {n_bytes / 2**30:.3g} GiB, but one page takes {size / 2**30:.3g} GiB")
            if phase == "prefill" and gib is None:
                return max(
                    n_bytes // size - text_pages, -(-(n_bytes // size) // 2)
                )  # texts are no longer than the cache
            return n_bytes // size

        n_pages = count(0)  # without the indexer's keys, which texts of at most index_topk positions do not need
        if needs_index(c, min(longest, n_pages * PAGE)):
            n_pages = max(count(longest), (c.index_topk or 0) // PAGE)
        return min(n_pages, engine.max_batch * text_pages)


def _activations(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _count_nodes() -> int:
    """Return the number of machines on which torchrun has started ranks."""
    return int(os.environ.get("GROUP_WORLD_SIZE") or 1)


def usual_cache_format(device: torch.device) -> CacheFormat:
    """Return the format of a cache for which none is given."""
    return "bf16" if device.type == "cuda" else "float32"


def _runner(
    weights: ReplaceableWeights | ExpertParallelWeights,
    n_pages: int,
    stored: CacheFormat,
    engine: EngineConfig,
    micro_batches: int = 1,
    phase: Phase | None = None,
) -> ModelRunner:
    runner = ModelRunner(
        weights,
        n_pages,
        stored,
        0 if phase == "prefill" else engine.max_batch,
        engine.batch_invariant,
        engine.n_drafts,
        engine.expert_window or 0,
        0 if phase == "decode" else engine.max_step_tokens,
        micro_batches,
        engine.index_format,
    )
    forward = runner.forward
    parts = forward.weights, forward.attention, forward.feed_forward
    if phase != "prefill" and (why_not := why_kernels_lack(*parts, engine.n_drafts > 0)) is not None:
        what = f"small-batch decode steps do not have all of Hopper's kernels: {why_not}"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
    return runner
