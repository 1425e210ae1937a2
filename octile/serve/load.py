"""Load a model to serve it: its weights, its tokenizer, and a cache that fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from octile.checkpoint.hugging_face import checkpoint_folder, read_model_config
from octile.models.config import ModelConfig
from octile.serve.config import CacheConfig, EngineConfig
from octile.serve.engine import Engine
from octile.serve.latent_pages import CacheFormat
from octile.serve.model_runner import ModelRunner
from octile.serve.weights import ServedWeights
from octile.tokenizer import Tokenizer

CPU_CACHE_BYTES = 2**30
FREE_SHARE = 0.8  # of the GPU memory that weights and the logits of CUDA graphs leave free; the rest: activations


@dataclass(frozen=True)
class Folder:
    """A folder to serve, whose small files are read and whose weights are not.

    Attributes:
        path: the Hugging Face folder.
        model: its configuration.
        tokenizer: its tokenizer.
    """

    path: Path
    model: ModelConfig
    tokenizer: Tokenizer

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
        return cls(inside, model, tokenizer)

    def read_weights(self, device: torch.device) -> ServedWeights:
        """Read the weights. Activations are BF16 on a GPU and FP32 on a CPU.

        Raises:
            ValueError: a file is damaged.
        """
        return ServedWeights.read(self.path, torch.bfloat16 if device.type == "cuda" else torch.float32, device)

    def load(self, device: torch.device, engine: EngineConfig, cache: CacheConfig) -> tuple[Engine, ModelRunner]:
        """Read the weights and allocate the cache.

        Raises:
            ValueError: a file is damaged, the cache has no place for a page, or the model cannot draft.
            MemoryError: the weights leave no place for a cache.
        """
        stored = cache.format or ("bf16" if device.type == "cuda" else "float32")
        weights = self.read_weights(device)
        n_pages = self._n_pages(weights, stored, engine.max_batch, engine.n_drafts, cache.gib)
        runner = ModelRunner(
            weights, n_pages, stored, engine.max_batch, engine.batch_invariant, engine.n_drafts, engine.expert_window
        )
        return Engine(runner, self.tokenizer, engine), runner

    def _n_pages(
        self, weights: ServedWeights, stored: CacheFormat, max_batch: int, n_drafts: int, gib: float | None
    ) -> int:
        """The pages that the memory for the cache holds, and no more than a full batch of the longest texts needs."""
        size = ModelRunner.bytes_per_page(weights, stored)
        if gib is not None:
            places = int(gib * 2**30)
        elif weights.device.type == "cuda":
            graphs = ModelRunner.bytes_of_graphs(weights, max_batch, n_drafts)
            places = max(0, int(FREE_SHARE * (torch.cuda.mem_get_info(weights.device)[0] - graphs)))
        else:
            places = CPU_CACHE_BYTES
        if places < size:
            raise MemoryError(f"the cache has {places / 2**30:.3g} GiB, but one page takes {size / 2**30:.3g} GiB")
        return min(places // size, max_batch * -(-self.model.max_position_embeddings // ModelRunner.page_size))
