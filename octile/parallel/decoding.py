"""Dispatch and combine for decoding: few tokens on each rank, in a fixed layout, with few launches.

    dispatch    rows in 1×128 tiles with their scales → [experts, ranks · capacity, D] and the counts of the experts,
                as `octile.ops.grouped.masked_grouped_matmul_nt` reads them
    combine     results of that layout → the weighted sums of the ranks' own tokens

Five launches for both and one for the sums, and nothing waits for the host: a decoding step can be captured in a CUDA
graph. The rows of an expert are sorted by the rank and the position of their tokens, and a token's results are summed
in the order of its experts, so the bits are those of one process.

Shapes: W ranks, T tokens of this rank, C the most tokens of a rank, K chosen experts, D model, G experts of a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels.memory_layout import new_scale, padded
from octile.ops.permute import unpermute
from octile.parallel.experts import check_agreement, check_divisible
from octile.parallel.symmetric_memory import PeerMemory
from octile.scaled import ScaledTensor

MAX_TOKENS = 128  # of a rank


class Dispatched(NamedTuple):
    """Rows at their experts.

    Attributes:
        rows: [G, W·C, D] in 1×128 tiles; those from counts[g] on are not written.
        counts: int32 [G], how many rows each expert has.
        entries: int32 [G, W·C], the rank, the token and the expert of each row, as one number.
        n_tokens: T, how many tokens this rank has dispatched.
    """

    rows: ScaledTensor
    counts: Tensor
    entries: Tensor
    n_tokens: int


class DecodingExchange:
    """Dispatch and combine of few tokens between ranks of one host. Each dispatch is followed by its combine.

    Args:
        n_experts: E, of all ranks together; rank w has the experts from w · E/W to (w + 1) · E/W, exclusive.
        n_chosen: K. The experts of a token differ.
        hidden_size: D.
        memory: of the ranks, used by this exchange, or others of the same sizes, only.
        max_tokens: C, at most 128.

    Raises:
        ValueError: a size does not fit, or the ranks disagree about one.
    """

    def __init__(self, n_experts: int, n_chosen: int, hidden_size: int, memory: PeerMemory, max_tokens: int):
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens must be from 1 to {MAX_TOKENS}, not {max_tokens}")
        sizes = f"{n_experts} experts, {n_chosen} of them chosen, hidden_size {hidden_size}, max_tokens {max_tokens}"
        check_agreement("the sizes of decoding", sizes, [memory.group])
        check_divisible(n_experts, [memory.group])
        self.memory, self.max_tokens, self.n_chosen, self.hidden_size = memory, max_tokens, n_chosen, hidden_size
        self.place = torch.arange(max_tokens * n_chosen, dtype=torch.int32).view(max_tokens, n_chosen)
        self.local = n_experts // memory.group.size()
        tokens = memory.group.size() * max_tokens
        self.scales_at = padded(tokens * hidden_size)
        self.experts_at = padded(self.scales_at + tokens * -(-hidden_size // TILE[1]) * 4)
        self.results_at = padded(self.experts_at + tokens * n_chosen * 4)
        self.n_bytes = self.results_at + max_tokens * n_chosen * hidden_size * 4

    def dispatch(self, x_TD: ScaledTensor, experts_TK: Tensor) -> Dispatched:
        """Send each row once to every rank that has one of its experts, and copy it to them.

        Args:
            x_TD: E4M3 rows in 1×128 tiles.
            experts_TK: int64 or int32, the chosen experts of each token.

        Raises:
            ValueError: there are more tokens than max_tokens, or the shapes do not fit.
        """
        from octile.kernels.triton import decode_rows

        tokens, ranks = len(experts_TK), self.memory.group.size()
        expected = (tokens, self.hidden_size), (tokens, self.n_chosen)
        if (x_TD.data.shape, experts_TK.shape) != expected:
            found = f"{tuple(x_TD.data.shape)} and {tuple(experts_TK.shape)}"
            raise ValueError(f"x and experts must be {expected[0]} and {expected[1]}, not {found}")
        if tokens > self.max_tokens:
            raise ValueError(f"a rank must have at most max_tokens = {self.max_tokens} tokens, not {tokens}")
        data, m = x_TD.data.contiguous(), ranks * self.max_tokens
        self.memory.reserve(self.n_bytes, data.device)
        self.place = self.place.to(data.device)
        peers, buffer = self.memory.peers, self.memory.buffer
        self.memory.wait(
            decode_rows.launch_send(
                data.view(torch.uint8), x_TD.scale, experts_TK.contiguous(), self.local, self.max_tokens,
                self.scales_at, self.experts_at, peers,
            )
        )  # fmt: skip
        rows = buffer[: m * self.hidden_size].view(m, self.hidden_size)
        scales = buffer[self.scales_at : self.experts_at].view(torch.float32)[: m * x_TD.scale.shape[1]].view(m, -1)
        experts = buffer[self.experts_at : self.results_at].view(torch.int32)[: m * self.n_chosen].view(m, -1)
        out = data.new_empty(self.local, m, self.hidden_size)
        out_scale = new_scale(out, *TILE)
        entries = experts.new_empty(self.local, m)
        counts = experts.new_empty(self.local)
        decode_rows.launch_place(
            rows, scales, experts, peers.rank * self.local, out.view(torch.uint8), out_scale, entries, counts
        )
        return Dispatched(ScaledTensor(out, out_scale, TILE), counts, entries, tokens)

    def combine(
        self, y_GMD: Tensor, dispatched: Dispatched, weights_TK: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """Sum the results of each token of this rank, times their float32 weights, and add [T, D]: [T, D].

        Args:
            y_GMD: [G, W·C, D], float32, bfloat16 or float16, of which `dispatched.counts` rows are used.
            dispatched: what `dispatch` has returned.
            weights_TK: of the tokens that were dispatched; None: ones.
            add: in y's dtype, to the same tokens; None: zeros.

        Raises:
            ValueError: a shape does not fit.
        """
        from octile.kernels.triton import decode_rows

        tokens, results = dispatched.n_tokens, self.max_tokens * self.n_chosen
        rows = (self.local, self.memory.group.size() * self.max_tokens, self.hidden_size)
        shapes = ("y_GMD", y_GMD, rows), ("weights_TK", weights_TK, (tokens, self.n_chosen)), (
            "add", add, (tokens, self.hidden_size)
        )  # fmt: skip
        for name, tensor, shape in shapes:
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} must be {shape}, not {tuple(tensor.shape)}")
        y_bytes = y_GMD.contiguous().view(torch.uint8)
        self.memory.wait(
            decode_rows.launch_return(
                y_bytes, dispatched.entries, dispatched.counts, results, self.results_at, self.memory.peers
            )
        )
        found = self.memory.buffer[self.results_at :][: tokens * self.n_chosen * y_bytes.shape[2]].view(y_GMD.dtype)
        return unpermute(found.view(-1, self.hidden_size), self.place[:tokens], add, weights_TK)
