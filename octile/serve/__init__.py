"""Serving: many requests share one model, its weights and its paged latent cache.

request.py    what a request asks for and what it gets: `Sampling`, `Request`, `Output`
config.py     `EngineConfig`: the limits of an engine
stats.py      `Stats`: what an engine counts
batch.py      the interface between the engine and the model runner: `Batch`, `Results`, `Runner`
generate.py   `octile generate`
"""
