"""The engine, which knows requests and no tensors: what takes part in a step, and what becomes of its tokens.

request.py         what a request asks for and what it gets: `Sampling`, `Request`, `Output`
config.py          `EngineConfig`: the limits of an engine
engine.py          `Engine`: add a request, cancel it, step
launched_steps.py  the steps that are launched and not collected yet, and which may be launched ahead of which
scheduler.py       which requests take part in the next forward pass, and with how many tokens
pages.py           which pages of the cache are free, and which hold a prefix that requests share
sampler.py         the next tokens of a batch, and what an exception ends
penalties.py       changes of logits before a token is chosen
history.py         which tokens a text has so far
bad_words.py       the sequences of tokens that are a forbidden word
grammar.py         texts that follow a schema, a pattern, choices or a grammar
drafts.py          speculative decoding with the multi-token prediction layer
draft_count.py     how many drafts a request has, by the share of its own that were accepted
text.py            from tokens to pieces of text, and stop strings
stats.py           `Stats`: what an engine counts
"""
