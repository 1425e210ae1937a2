"""Serving: many requests share one model, its weights and its paged latent cache.

request.py    what a request asks for and what it gets: `Sampling`, `Request`, `Output`
config.py     `EngineConfig`: the limits of an engine
engine.py     `Engine`: add a request, cancel it, step
scheduler.py  which requests take part in the next forward pass, and with how many tokens
pages.py      which pages of the cache are free, and which hold a prefix that requests share
batch.py      the interface between the engine and the model runner: `Batch`, `Results`, `Runner`
sampler.py    the next tokens of a batch
decode_loop.py  decode steps that are launched before the last one is read
decode_graphs.py  CUDA graphs of other steps that decode
prefill_graphs.py  CUDA graphs of steps with prompts
graph_memory.py  the memory in which all of them are captured
few_rows.py   the forward pass of decode steps of few rows
few_rows_support.py  why such steps lack kernels on Hopper
drafts.py     speculative decoding with the multi-token prediction layer
text.py       from tokens to pieces of text, and stop strings
stats.py      `Stats`: what an engine counts
signals.py    signals of processes that another one ends
async_engine.py  an engine in a thread of its own, whose outputs an event loop reads
load_test.py  many clients that stream completions and time them
disaggregated/  prefill and decoding in processes of their own
http/         `octile serve`: OpenAI's protocol over HTTP
load.py       a folder to serve: its weights, its tokenizer, and a cache that fits
expert_load.py  live statistics: the tokens of each expert in the last steps
expert_balance.py  `rebalance_experts`: copies of experts and the GPUs that hold them
spread_experts.py  experts spread over ranks, with redundant copies that move between steps
spread_engine.py  steps of all ranks together
front_engine.py  the engines of all ranks as one, to which rank 0 hands requests
dynamic_redundancy.py  which of an expert's copies serve its tokens in a step
generate.py   `octile generate`
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octile.serve.expert_balance import rebalance_experts

__all__ = ["rebalance_experts"]


def __getattr__(name: str) -> object:
    if name in __all__:  # late: the configurations in this room are read without torch
        from octile.serve import expert_balance

        return getattr(expert_balance, name)
    raise AttributeError(f"module 'octile.serve' has no attribute {name!r}")
