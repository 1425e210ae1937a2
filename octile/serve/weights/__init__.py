"""What is served: the folder of a model, its weights as GEMMs read them, and how large a cache fits with them.

load.py                   a folder to serve: its weights, its tokenizer, and a cache of a size that fits
generation_config.py      what a model's `generation_config.json` gives: ends of texts, and defaults of sampling
weights.py                `ServedWeights`: all weights of a model, and how they are read
live.py                   `LiveWeights`: those of a model in training, updated in place
replaceable.py            `ReplaceableWeights`: those of a folder, which others replace in place
source.py                 where those others are
block_weights.py          the weights of a block, as GEMMs read them, and parts of weights
head_share.py             the weights of some heads of attention
weight_bytes.py           the bytes of all weights, by a configuration alone
exact.py                  exact mode: what it implies for an engine, and what it refuses
routed_shared_experts.py  shared experts that are routed like others
"""
