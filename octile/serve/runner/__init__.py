"""The model runner: it lays the chunks of requests out as rows, keeps the caches, and launches forward passes.

batch.py           the interface between the engine and the model runner: `Batch`, `Results`, `Runner`
model_runner.py    `ModelRunner`: forward passes over batches
batch_check.py     whether the model and its cache have what a batch names
step.py            `Step`: the rows of one forward pass, and what prefill chunks attend to
step_inputs.py     the rows of a batch, laid out for one forward pass
latent_pages.py    the cache of latents
index_pages.py     the cache of the indexer's keys
page_bytes.py      whole pages as bytes, to copy them to another cache
decode_loop.py     decode steps that are launched before the last one is read
decode_graphs.py   CUDA graphs of other steps that decode
prefill_graphs.py  CUDA graphs of steps with prompts
graph_memory.py    the memory in which all of them are captured
warm_up.py         steps at the start, so that no request waits for the compilation of a kernel
step_bytes.py      the bytes that a decode step must move
"""
