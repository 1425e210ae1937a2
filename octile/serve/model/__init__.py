"""The forward pass of the served model over the rows of a step.

forward.py       `Forward`: embedding, blocks and head
attention.py     attention: queries, latents, the absorbed form, and the naive form of prefill chunks
top_k_keys.py    the positions that a row attends to, by the top-k keys of an indexer
feed_forward.py  SwiGLU layers and mixtures of experts, whose tokens are counted
gemms.py         GEMMs by the formats of weights
small_batch.py   the forward pass of small-batch decode steps, and why it may lack kernels
"""
