"""Shuffled batches: batch n depends only on (seed, n), so that a run can be resumed at any step.

A text of T tokens has ⌊(T − 1)/S⌋ windows of S + 1 tokens. Neighboring windows share one token, so that every token but
the first is predicted exactly once per epoch. Each epoch visits all windows in another order. Of packed sequences
(`octile.train.data.packed_tokens`) each is a window of its own.

The order is computed, not stored. A Feistel network maps (left, right) → (right, left ⊕ f(right)). This is invertible
for any f, so it permutes all numbers of 2h bits. A result that is not a window is permuted again until it is one
("cycle walking"), which gives a permutation of the windows. Sources: Luby and Rackoff, "How to construct pseudorandom
permutations" (1988); Black and Rogaway, "Ciphers with arbitrary finite domains" (2002) §3.

Shapes: B batch, S sequence, T tokens; N windows of several steps.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from octile.optim.schedule import BatchRamp
from octile.train.data.packed_tokens import PackedTokens
from octile.train.data.streamed_tokens import StreamedTokens
from octile.train.data.token_store import Tokens

ROUNDS = 6
STEPS = 8  # whose windows are permuted together


class Batches:
    """Shuffled windows of a token array, which may be memory-mapped or streamed; a batch reads only its own tokens."""

    def __init__(self, tokens: Tokens, batch_size: int | BatchRamp, sequence_length: int, seed: int, pin: bool = False):
        """
        Args:
            tokens: [T] of any integer dtype, T > sequence_length.
            batch_size, sequence_length: B and S, at least 1; or B as a function of the step.
            seed: at least 0.
            pin: whether batches are written to pinned memory, from which a GPU copies while the host works.
        """
        self.n_windows = count_windows(tokens, sequence_length)
        if isinstance(batch_size, int):
            if batch_size < 1:
                raise ValueError(f"batch_size must be at least 1, not {batch_size}")
            batch_size = BatchRamp(batch_size, batch_size)
        if seed < 0:
            raise ValueError(f"seed must be at least 0, not {seed}")
        self.tokens, self.batch_sizes, self.sequence_length, self.seed = tokens, batch_size, sequence_length, seed
        self._pin = pin
        self._window_numbers: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}  # see `_permuted_from`

    def batch(self, step: int, rank: int = 0, n_ranks: int = 1) -> Tensor:
        """The batch of one step, int64 [B, S + 1]: inputs are all columns but the last, targets all but the first.

        Of packed sequences it is [B, S + 1, 2], each token with its mark.

        If an epoch ends within a batch, the rest of the batch belongs to the next epoch.

        Args:
            step: from 0.
            rank, n_ranks: which of so many parts of the batch, as even as they can be; the others are not read.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        key = step, rank, n_ranks
        numbers = self._window_numbers  # another thread may replace them meanwhile
        if key not in numbers:
            self._window_numbers = numbers = self._permuted_from(*key)
        return read_windows(self.tokens, numbers[key], self.sequence_length, self._pin)

    def _permuted_from(self, step: int, rank: int, n_ranks: int) -> dict[tuple[int, int, int], npt.NDArray[np.int64]]:
        """Return the windows of a rank in STEPS steps, permuted together, by step, rank and number of ranks.

        A thread does this while the host launches steps, and each call of numpy takes Python's lock.
        """
        steps = range(step, step + STEPS)
        sizes, before = self.batch_sizes.size, self.batch_sizes.before
        parts = [before(s) + np.array_split(np.arange(sizes(s)), n_ranks)[rank] for s in steps]
        epoch_N, position_N = np.divmod(np.concatenate(parts), self.n_windows)
        window_N = np.empty_like(position_N)
        for epoch in np.unique(epoch_N):
            in_epoch_N = epoch_N == epoch
            window_N[in_epoch_N] = permute(position_N[in_epoch_N], self.n_windows, (self.seed, int(epoch)))
        windows = np.split(window_N, np.cumsum([len(part) for part in parts[:-1]]))
        return {(s, rank, n_ranks): window_B for s, window_B in zip(steps, windows, strict=True)}


class PreparedBatches:
    """Batches that a thread prepares before they are asked for, one after the other.

    A step that does not follow the last one is prepared when it is asked for, and the thread continues from there. The
    thread never waits, so that a process can end at any time. It prepares further ones when `prepare` is called or none
    is left, and not before: while steps are launched it would take turns with the launches, as both need Python's lock.
    """

    def __init__(self, batch: Callable[[int], Tensor], ahead: int):
        """
        Args:
            batch: batch(step), such as `Batches.batch`.
            ahead: how many are prepared; 0: there is no thread.
        """
        if ahead < 0:
            raise ValueError(f"ahead must be at least 0, not {ahead}")
        self._batch, self._ahead = batch, ahead
        self._thread: ThreadPoolExecutor | None = None
        self._next = 0  # the step of the first of the prepared batches
        self._prepared: deque[Future[Tensor]] = deque()

    def batch(self, step: int) -> Tensor:
        """The batch of one step. Raises what preparing it raised."""
        if not self._ahead:
            return self._batch(step)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octile-batches")
        if step != self._next:
            self._drop()
            self._next = step
        if not self._prepared:
            self._submit(self._ahead)
        self._next += 1
        return self._prepared.popleft().result()

    def prepare(self) -> None:
        """Have the thread prepare the batches after the last one, if there is a thread."""
        self._submit(self._ahead)

    def _submit(self, n: int) -> None:
        """Submit batches until there are n."""
        while self._thread is not None and len(self._prepared) < n:
            self._prepared.append(self._thread.submit(self._batch, self._next + len(self._prepared)))

    def close(self) -> None:
        """Drop the prepared batches, and end the thread; a later call of `batch` starts another."""
        self._drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _drop(self) -> None:
        for future in self._prepared:
            future.cancel()
        self._prepared.clear()


def validation_windows(tokens: Tokens, sequence_length: int, n: int) -> Tensor:
    """The same `n` evenly spaced windows of held-out tokens, or all if there are fewer: int64 [n, S + 1].

    Of packed sequences they are [n, S + 1, 2].
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    return read_windows(tokens, evenly_spaced(count_windows(tokens, sequence_length), n), sequence_length)


def evenly_spaced(n_windows: int, n: int) -> npt.NDArray[np.int64]:
    """The numbers of `n` evenly spaced windows, or of all `n_windows` if they are fewer."""
    n = min(n, n_windows)
    return np.arange(n) * n_windows // n


def count_windows(tokens: Tokens, sequence_length: int) -> int:
    """The number of windows of a token array [T]. Raises ValueError if there is none."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    if tokens.ndim != 1 or len(tokens) <= sequence_length:
        raise ValueError(f"tokens must be [T] with T > sequence_length = {sequence_length}, not {list(tokens.shape)}")
    if isinstance(tokens, PackedTokens):
        return len(tokens) // tokens.sequence_length
    return (len(tokens) - 1) // sequence_length


def read_windows(tokens: Tokens, window_B: npt.NDArray[np.int64], sequence_length: int, pin: bool = False) -> Tensor:
    """Read windows by their numbers: int64 [B, S + 1], or [B, S + 1, 2] of packed sequences.

    Args:
        tokens: [T].
        window_B: the numbers.
        sequence_length: S.
        pin: whether they are written to pinned memory.
    """
    if isinstance(tokens, PackedTokens):
        return tokens.sequences(window_B, pin)
    begin_B = window_B * sequence_length
    if isinstance(tokens, StreamedTokens):
        windows_BS = tokens.windows(begin_B, sequence_length + 1)
    else:  # rows of a view are copied whole, not token by token
        windows_BS = sliding_window_view(tokens, sequence_length + 1)[begin_B]
    # written once: pinned memory is used again, and an int64 array in between would be allocated for each batch
    batch_BS = torch.empty(windows_BS.shape, dtype=torch.int64, pin_memory=pin)
    batch_BS.numpy()[...] = windows_BS
    return batch_BS


def permute(index: npt.NDArray[np.int64], n: int, seed: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Apply a pseudo-random permutation of range(n) to each index. Memory and time do not depend on n."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def network(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return left << half | right

    x = network(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = network(x[outside])
    return x.astype(np.int64)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of a word (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
