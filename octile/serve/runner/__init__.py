"""The model runner: it lays the chunks of requests out as rows, keeps the caches, and launches forward passes.

batch.py             the interface between the engine and the model runner: `Batch`, `Results`, `Runner`
model_runner.py      `ModelRunner`: forward passes over batches
step.py              `Step`: a batch, checked and laid out as rows, and what prefill chunks attend to
kv_cache.py          the paged caches: latents, and the keys of indexers
decode_loop.py       decode steps that are launched before the last one is read
step_costs.py        how long a decode step with drafts takes, relative to one without
graphs.py            CUDA graphs of decode steps and of steps with prompts
attention_graphs.py  of these, the graphs of attention from decode rows, and of keys and values of cached positions
warm_up.py           steps at the start, so that no request waits for the compilation of a kernel
"""
