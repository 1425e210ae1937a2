"""Serving: many requests share one model, its weights and its paged latent cache.

engine/              requests, scheduling, sampling: what happens in a step, without tensors of a model
runner/              batches as rows, caches, and the forward passes over them, in CUDA graphs
model/               the forward pass: attention, experts, GEMMs
weights/             the folder that is served, and its weights as GEMMs read them
ranks/               one model over several ranks
process/             an engine and those who use it, in processes of their own
http/                `octile serve`: OpenAI's protocol over HTTP, in a process of its own
disaggregated/       prefill and decoding in processes of their own
generate.py          the continuation of one prompt: `octile generate`, and the sample of a training run
generate_command.py  the options of `octile generate`
newest_run.py        the run that a command serves where none is named
send.py              copies from host to device that do not block the host
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octile.serve.engine.config import EngineConfig
    from octile.serve.engine.engine import Engine
    from octile.serve.engine.request import FinishReason, Output, Request, Sampling, TokenLogprobs
    from octile.serve.engine.stats import Stats
    from octile.serve.generate import generate_from, generate_text
    from octile.serve.http.sender import send_weights
    from octile.serve.http.stress import Stress, stress_test
    from octile.serve.process.messages import WeightsUpdated
    from octile.serve.ranks.dynamic_redundancy import TooFewActiveError, assign_copies, choose_copies
    from octile.serve.ranks.engine import ExpertParallelEngine
    from octile.serve.ranks.experts import ExpertParallelWeights
    from octile.serve.ranks.placement import rebalance_experts
    from octile.serve.ranks.tensor_parallel import TensorParallel
    from octile.serve.runner.batch import Batch, Chunk, Results, Runner
    from octile.serve.runner.model_runner import ModelRunner
    from octile.serve.weights.head_share import HeadShare
    from octile.serve.weights.live import LiveWeights
    from octile.serve.weights.replaceable import ReplaceableWeights
    from octile.serve.weights.source import BufferSource, FolderSource
    from octile.serve.weights.weights import ServedWeights

_MODULES = {  # the public names of each module, late: the configurations in this room are read without torch
    "octile.serve.engine.config": ("EngineConfig",),
    "octile.serve.engine.engine": ("Engine",),
    "octile.serve.engine.request": ("FinishReason", "Output", "Request", "Sampling", "TokenLogprobs"),
    "octile.serve.engine.stats": ("Stats",),
    "octile.serve.generate": ("generate_from", "generate_text"),
    "octile.serve.http.sender": ("send_weights",),
    "octile.serve.http.stress": ("Stress", "stress_test"),
    "octile.serve.process.messages": ("WeightsUpdated",),
    "octile.serve.ranks.dynamic_redundancy": ("TooFewActiveError", "assign_copies", "choose_copies"),
    "octile.serve.ranks.engine": ("ExpertParallelEngine",),
    "octile.serve.ranks.experts": ("ExpertParallelWeights",),
    "octile.serve.ranks.placement": ("rebalance_experts",),
    "octile.serve.ranks.tensor_parallel": ("TensorParallel",),
    "octile.serve.runner.batch": ("Batch", "Chunk", "Results", "Runner"),
    "octile.serve.runner.model_runner": ("ModelRunner",),
    "octile.serve.weights.head_share": ("HeadShare",),
    "octile.serve.weights.live": ("LiveWeights",),
    "octile.serve.weights.replaceable": ("ReplaceableWeights",),
    "octile.serve.weights.source": ("BufferSource", "FolderSource"),
    "octile.serve.weights.weights": ("ServedWeights",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'octile.serve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
