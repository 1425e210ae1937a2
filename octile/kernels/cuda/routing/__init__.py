"""The Hopper kernels that count experts, sort rows by expert and compute the balance of sequences."""
