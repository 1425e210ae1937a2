"""Hopper's kernels of attention in serving: of decoding over the latent cache, and the lightning indexer's logits."""
