"""Serving: many requests share one model, its weights and its paged latent cache.

Requests and steps
    request.py                what a request asks for and what it gets: `Sampling`, `Request`, `Output`
    generation_config.py      what a model's `generation_config.json` gives: ends of texts, and defaults of sampling
    config.py                 `EngineConfig`: the limits of an engine
    engine.py                 `Engine`: add a request, cancel it, step
    scheduler.py              which requests take part in the next forward pass, and with how many tokens
    pages.py                  which pages of the cache are free, and which hold a prefix that requests share
    batch.py                  the interface between the engine and the model runner: `Batch`, `Results`, `Runner`
    sampler.py                the next tokens of a batch
    token_choice.py           the choice of the tokens of several requests, and what an exception ends
    drafts.py                 speculative decoding with the multi-token prediction layer
    text.py                   from tokens to pieces of text, and stop strings
    stats.py                  `Stats`: what an engine counts

The model runner
    model_runner.py           `ModelRunner`: forward passes over batches
    warm_up.py                steps at the start, so that no request waits for the compilation of a kernel
    batch_check.py            whether the model and its cache have what a batch names
    step_inputs.py            the rows of a batch, laid out for one forward pass
    step.py                   `Step`: these rows, and what prefill chunks attend to
    decode_loop.py            decode steps that are launched before the last one is read
    decode_graphs.py          CUDA graphs of other steps that decode
    prefill_graphs.py         CUDA graphs of steps with prompts
    graph_memory.py           the memory in which all of them are captured
    latent_pages.py           the cache of latents
    index_pages.py            the cache of the indexer's keys
    page_bytes.py             whole pages as bytes, to copy them to another cache
    step_bytes.py             the bytes that a decode step must move

The forward pass
    forward.py                `Forward`: embedding, blocks and head
    attention.py              attention: queries, latents, and the absorbed form
    naive_attention.py        attention of prefill chunks in the naive form
    chosen_keys.py            the positions that a row attends to, chosen by an indexer
    feed_forward.py           SwiGLU layers and mixtures of experts
    shared_experts_stream.py  the stream of shared experts, while rows travel between GPUs
    gemms.py                  GEMMs by the formats of weights
    few_rows.py               the forward pass of decode steps of few rows
    few_rows_support.py       why such steps lack kernels on Hopper

Weights
    load.py                   a folder to serve: its weights, its tokenizer, and a cache that fits
    weights.py                `ServedWeights`: all weights of a model, and how they are read
    block_weights.py          the weights of a block, as GEMMs read them
    head_share.py             the weights of some heads of attention
    weight_part.py            a range of rows or columns of a weight

Ranks
    spread_experts.py         experts spread over ranks, with redundant copies that move between steps
    expert_moves.py           the move of experts to other slots
    routed_shared_experts.py  shared experts that are routed like others
    expert_load.py            live statistics: the tokens of each expert in the last steps
    expert_balance.py         `rebalance_experts`: copies of experts and the GPUs that hold them
    dynamic_redundancy.py     which of an expert's copies serve its tokens in a step
    tensor_parallel.py        ranks that share the rows of a step and the heads of attention
    spread_engine.py          steps of all ranks together
    front_engine.py           the engines of all ranks as one, to which rank 0 hands requests

Processes
    async_engine.py           an engine in a thread of its own, whose outputs an event loop reads
    sent_requests.py          the requests that another process has sent, by its numbers
    commands.py               commands of other threads for the thread that steps an engine
    engine_end.py             the end of a pipe at which an engine is stepped
    pipe_engine.py            the other end, which is an engine for another process
    messages.py               what the two ends send
    waker.py                  what wakes a thread that waits for files
    http/                     `octile serve`: OpenAI's protocol over HTTP, in a process of its own
    disaggregated/            prefill and decoding in processes of their own
    generate.py               `octile generate`
    load_test.py              many clients that stream completions and time them
    garbage.py                collections of a running server, which leave out what was loaded before
    signals.py                signals of processes that another one ends
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
