"""The order of training: batch n is a function of (seed, n) and of nothing else, so a run resumes at any step.

Text of T tokens has ⌊(T − 1)/S⌋ windows of S + 1 tokens; neighbours share one token, so that every token but the first
is predicted exactly once an epoch. Each epoch visits all of them in another order.

The order is computed, not stored. A Feistel network maps (left, right) → (right, left ⊕ f(right)): whatever f is, this
can be undone, so it permutes all numbers of 2h bits. A result that is no window is permuted again until it is one
("cycle walking"), which leaves a permutation of the windows. Sources: Luby and Rackoff, "How to construct pseudorandom
permutations" (1988); Black and Rogaway, "Ciphers with arbitrary finite domains" (2002) §3.

Shapes: B batch, S sequence, T tokens.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.unsignedinteger]

ROUNDS = 6


class Batches:
    """Shuffled windows of a token array, which may be memory-mapped: a batch reads only what it returns."""

    def __init__(self, tokens: Tokens, batch_size: int, sequence_length: int, seed: int):
        """
        Args:
            tokens: [T], any integer dtype, at least sequence_length + 1 of them.
            batch_size, sequence_length: B and S, at least 1.
            seed: at least 0.
        """
        self.n_windows = count_windows(tokens, sequence_length)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, not {seed}")
        self.tokens, self.batch_size, self.sequence_length, self.seed = tokens, batch_size, sequence_length, seed

    def batch(self, step: int) -> Tensor:
        """The batch of one step, int64 [B, S + 1]: inputs are all columns but the last, targets all but the first.

        Where the epoch ends within a batch, the rest of it belongs to the next epoch.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        epoch_B, place_B = np.divmod(step * self.batch_size + np.arange(self.batch_size), self.n_windows)
        window_B = np.empty_like(place_B)
        for epoch in np.unique(epoch_B):
            now_B = epoch_B == epoch
            window_B[now_B] = permute(place_B[now_B], self.n_windows, (self.seed, int(epoch)))
        return _windows(self.tokens, window_B, self.sequence_length)


def validation_windows(tokens: Tokens, sequence_length: int, n: int) -> Tensor:
    """`n` windows of held-out tokens, or all if there are fewer: always the same, spread evenly. int64 [n, S + 1]."""
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    n_windows = count_windows(tokens, sequence_length)
    n = min(n, n_windows)
    return _windows(tokens, np.arange(n) * n_windows // n, sequence_length)


def count_windows(tokens: Tokens, sequence_length: int) -> int:
    """How many windows a token array [T] has. Raises ValueError if there is none."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    if tokens.ndim != 1 or len(tokens) <= sequence_length:
        raise ValueError(f"tokens must be [T] with T > sequence_length = {sequence_length}, not {list(tokens.shape)}")
    return (len(tokens) - 1) // sequence_length


def _windows(tokens: Tokens, window_B: npt.NDArray[np.int64], sequence_length: int) -> Tensor:
    position_BS = window_B[:, None] * sequence_length + np.arange(sequence_length + 1)
    return torch.from_numpy(tokens[position_BS].astype(np.int64))


def permute(index: npt.NDArray[np.int64], n: int, seed: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Where a pseudo-random permutation of range(n) sends each index. Memory and time do not depend on n."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << half | right

    x = network(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = network(x[outside])
    return x.astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatters every bit over the word (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
