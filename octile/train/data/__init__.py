"""From text to batches of tokens, in the order in which text becomes one.

corpus.py           documents from a folder, files, the standard library or a hub dataset
filter.py           what of the installed packages is text to train on
corpus_index.py     a first pass over a corpus: duplicates, and which documents are held out
spans.py            spans of held-out text that are cut out of the training text
prepare.py          from text to tokens on disk, by the files above
examples.py         rows of JSONL to fine-tune on: conversations, prompts with completions, texts
packed_tokens.py    sequences that several texts share
prepare_examples.py from rows of JSONL to packed sequences on disk, by the two files above
token_store.py      a folder of tokens, memory-mapped
streamed_tokens.py  the tokens of a store under a URL, read by ranges
token_cache.py      token stores that runs share
batches.py          the order of training, a function of seed and step; batches that a thread prepares
"""
