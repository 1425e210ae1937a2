"""Hopper's kernels of attention in serving: the logits of the lightning indexer."""
