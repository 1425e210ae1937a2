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

from typing import TYPE_CHECKING

from octile.lazy import attach

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

__getattr__, __dir__, __all__ = attach(
    __name__,
    {  # the configurations in this room are read without torch
        "engine.config": ("EngineConfig",),
        "engine.engine": ("Engine",),
        "engine.request": ("FinishReason", "Output", "Request", "Sampling", "TokenLogprobs"),
        "engine.stats": ("Stats",),
        "generate": ("generate_from", "generate_text"),
        "http.sender": ("send_weights",),
        "http.stress": ("Stress", "stress_test"),
        "process.messages": ("WeightsUpdated",),
        "ranks.dynamic_redundancy": ("TooFewActiveError", "assign_copies", "choose_copies"),
        "ranks.engine": ("ExpertParallelEngine",),
        "ranks.experts": ("ExpertParallelWeights",),
        "ranks.placement": ("rebalance_experts",),
        "ranks.tensor_parallel": ("TensorParallel",),
        "runner.batch": ("Batch", "Chunk", "Results", "Runner"),
        "runner.model_runner": ("ModelRunner",),
        "weights.head_share": ("HeadShare",),
        "weights.live": ("LiveWeights",),
        "weights.replaceable": ("ReplaceableWeights",),
        "weights.source": ("BufferSource", "FolderSource"),
        "weights.weights": ("ServedWeights",),
    },
)
