"""Small models for tests of serving, and batches of their chunks."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.kernels.triton.launch_config import DECODE_ROWS
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve.engine.request import Request, RequestFactory, Sampling
from octile.serve.process.server import StepEngine
from octile.serve.runner import decode_loop
from octile.serve.runner.batch import Batch, Chunk
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import Tokenizer
from tests.parallel.expert_cases import peers_on_cpu

# a dense layer, a mixture and a prediction layer; a latent of a partial tile; sides that are no multiples of 128
CONFIG = ModelConfig(
    vocab_size=200,
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=96,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    max_position_embeddings=512,
    rope_scaling=None,
    initializer_range=0.08,
)


# of a size that the recipe `exact` takes: experts that are fused, and a dense layer that is not
EXACT = replace(CONFIG, intermediate_size=200, moe_intermediate_size=128)


def exact_model(dtype: torch.dtype = torch.float32, recipe: Recipe | None = None, **changes: Any) -> DeepseekV3:
    """Make a model of a batch-invariant recipe, with other numbers in its configuration."""
    torch.manual_seed(0)
    model = DeepseekV3(replace(EXACT, **changes)).to(dtype).eval()
    return apply_recipe(model, recipe or Recipe.exact())  # type: ignore[return-value]


def new_model(fp8: bool, dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> DeepseekV3:
    """Make a model, with FP8 layers or without."""
    torch.manual_seed(0)
    model = DeepseekV3(config).to(dtype).eval()
    return apply_recipe(model) if fp8 else model  # type: ignore[return-value]


def text(n: int, seed: int = 0, vocab_size: int = CONFIG.vocab_size) -> list[int]:
    """Draw n tokens."""
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


EXCHANGED_ROWS = 4  # of a step launched ahead, of which two are padding: Triton's interpreter takes a while for each


@contextmanager
def exchanges_on_cpu(folder: Path) -> Iterator[None]:
    """Let ranks on a CPU exchange rows as GPUs do, in files of a folder, and launch ahead steps of a few rows."""
    with peers_on_cpu(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_loop, "BLOCK_ROWS", EXCHANGED_ROWS)
        patch.setitem(DECODE_ROWS, "splits", 1)  # an interpreter runs the programs of an expert one after the other
        yield


class Texts:
    """Texts that a runner reads, each with pages of its own in a scattered order.

    Attributes:
        logits: of each text, float32 [positions read, V].
    """

    def __init__(self, runner: ModelRunner, texts: Sequence[Sequence[int]], seed: int = 0):
        self.runner, self.texts = runner, texts
        self.logits = [torch.empty(0, runner.vocab_size) for _ in texts]
        self.hidden = torch.empty(0)  # of the last batch
        free = iter(torch.randperm(runner.n_pages, generator=torch.Generator().manual_seed(seed)).tolist())
        self.pages = [array("i", [next(free) for _ in range(-(-len(tokens) // 64))]) for tokens in texts]

    def run(self, *sizes: int) -> "Texts":
        """Read the next tokens of each text, so many; 0 leaves a text out."""
        chunks = []
        for tokens, pages, logits, size in zip(self.texts, self.pages, self.logits, sizes, strict=True):
            start, end = len(logits), len(logits) + size
            if size:
                chunks.append(Chunk(tokens[start:end], start, pages[: -(-end // 64)], size))
        results = self.runner.run(Batch(chunks))
        self.hidden = results.hidden
        for i, logits in enumerate(results.logits.cpu().split([*sizes])):
            self.logits[i] = torch.cat((self.logits[i], logits))
        return self

    def draft(self, *sizes: int) -> torch.Tensor:
        """Read tokens as `run`, of texts that have one more each; return the logits of the drafts after each."""
        starts = [len(logits) for logits in self.logits]
        hidden = self.run(*sizes).hidden
        chunks = [
            Chunk(tokens[start + 1 : start + size + 1], start, pages, size)
            for tokens, start, pages, size in zip(self.texts, starts, self.pages, sizes, strict=True)
            if size
        ]
        return self.runner.draft(Batch(chunks), hidden).logits.clone()  # a graph's results last until the next one


def save_untrained(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> Path:
    """Save a model that is not trained, in FP8, and its tokenizer, as `octile serve` reads them; return the folder."""
    torch.manual_seed(0)
    save(DeepseekV3(config), folder, weights="fp8")
    tokenizer.save(folder)
    return folder


def adding(engine: StepEngine) -> Callable[[Sequence[int], Sampling], Request]:
    """A function that adds a request to an engine; the first one has the id 0."""
    factory = RequestFactory(vocab_size=10**6, max_position=10**6)

    def add(prompt: Sequence[int], sampling: Sampling) -> Request:
        (request,) = factory.make(prompt, sampling)
        engine.submit(request)
        return request

    return add
