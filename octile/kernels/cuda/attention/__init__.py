"""Hopper's kernels of attention: of decoding over the latent cache, sparse attention, and the indexer's logits."""
