"""Dispatch and combine for decoding: few tokens on each rank, in a fixed layout, with few launches.

    send, receive    rows, quantized or not, with the weights of their experts → [ranks · capacity · K, D], sorted by
                     expert, and where each expert's rows end, as `octile.ops.grouped.grouped_matmul_nt` reads them
    combine          results of that layout → one row for each of this rank's tokens

Four launches, of which two wait for the other ranks, and nothing waits for the host: a decoding step can be captured in
a CUDA graph. The rows of an expert are sorted by the rank and the position of their tokens, and a token's results are
summed in the order of its experts, so the bits are those of one process.

Shapes: W ranks, T tokens of this rank, C the most tokens of a rank, K chosen experts, D model, E experts, G of them on
a rank, R = W · C · K.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.kernels.memory_layout import new_scale, padded
from octile.nn.dispatcher import InFlight
from octile.ops.quantize import check_input_dtype
from octile.parallel.experts import check_agreement, check_divisible
from octile.parallel.symmetric_memory import PeerMemory
from octile.scaled import ScaledTensor

MAX_ENTRIES = 8192  # chosen experts of all ranks' tokens, which each program of a kernel reads


class SortedRows(NamedTuple):
    """Rows at their experts, sorted by expert.

    Attributes:
        rows: [R, D], in 1×128 tiles or in high precision; those after the last expert's are not written.
        weights: float32 [R], the weight that each row's token gives its expert; not written where the rows are not.
        offs: int32 [G], where the rows of each expert end.
        entries: int32 [R], the rank, the token and the expert of each row, as one number.
        n_tokens: T, how many tokens this rank has dispatched.
    """

    rows: ScaledTensor | Tensor
    weights: Tensor
    offs: Tensor
    entries: Tensor
    n_tokens: int


class SortedExchange:
    """Dispatch and combine of few tokens between ranks of one host, with rows sorted by expert.

    `send`, `receive` and `combine` follow each other; what is launched between the first two overlaps with the way of
    the rows.

    Args:
        n_experts: E, the experts of all ranks; rank w has those from w · E/W to (w + 1) · E/W, exclusive.
        n_chosen: K. The experts of a token differ.
        hidden_size: D.
        dtype: dtype of the rows: float8_e4m3fn in 1×128 tiles, bfloat16 or float32.
        memory: the ranks' buffers, used by this exchange, or others of the same sizes, only.
        max_tokens: C; all ranks together choose at most 8,192 experts.
        device: device of the rows; None: torch's default device.

    Raises:
        ValueError: a size does not fit, or the ranks disagree about one.
    """

    def __init__(
        self,
        n_experts: int,
        n_chosen: int,
        hidden_size: int,
        dtype: torch.dtype,
        memory: PeerMemory,
        max_tokens: int,
        device: torch.device | None = None,
    ):
        ranks = memory.group.size()
        most = max_rank_tokens(ranks, n_chosen)
        if not 1 <= max_tokens <= most:
            raise ValueError(f"max_tokens must be from 1 to {most} of {ranks} ranks, not {max_tokens}")
        sizes = f"{n_experts} experts, {n_chosen} of them chosen, {hidden_size} of {dtype}, max_tokens {max_tokens}"
        check_agreement("the sizes of decoding", sizes, [memory.group])
        check_divisible(n_experts, [memory.group])
        self.memory, self.max_tokens, self.n_chosen, self.hidden_size = memory, max_tokens, n_chosen, hidden_size
        self.dtype, self.local = dtype, n_experts // ranks
        tokens, self.row_bytes = ranks * max_tokens, hidden_size * dtype.itemsize
        self.tiles = -(-hidden_size // TILE[1]) if dtype == torch.float8_e4m3fn else 0
        self.scales_at = padded(tokens * self.row_bytes)
        self.experts_at = padded(self.scales_at + tokens * self.tiles * 4)
        self.weights_at = padded(self.experts_at + tokens * n_chosen * 4)
        self.results_at = padded(self.weights_at + tokens * n_chosen * 4)
        self.n_bytes = self.results_at + max_tokens * n_chosen * hidden_size * 4

    def with_max_tokens(self, max_tokens: int) -> SortedExchange:
        """Return this exchange for at most so many tokens of any rank, in the same memory: fewer rows R.

        All ranks must use the same one of them.

        Raises:
            ValueError: this exchange is of fewer tokens.
        """
        if not 1 <= max_tokens <= self.max_tokens:
            raise ValueError(f"max_tokens must be from 1 to {self.max_tokens}, not {max_tokens}")
        smaller = copy(self)  # the parts of the buffer stay where they are: ranks may still read those of a larger one
        smaller.max_tokens = max_tokens
        return smaller

    def send(
        self,
        x_TD: ScaledTensor | Tensor,
        experts_TK: Tensor,
        weights_TK: Tensor,
        slots: tuple[Tensor, Tensor] | None = None,
        positions_T: Tensor | None = None,
    ) -> int:
        """Send each row once to every rank that has one of its experts.

        Args:
            x_TD: rows of the dtype.
            experts_TK: int64 or int32, the chosen experts of each token; −1: none.
            weights_TK: float32, theirs.
            slots: int64 [E, N] and [E]: the slots of each expert that is chosen, of which there are `n_experts`, and
                how many it has; tokens go to them round-robin. None: each expert has its own.
            positions_T: int64; tokens that have a negative one go nowhere. None: all go to their experts.

        Returns:
            what `receive` waits for.

        Raises:
            ValueError: there are more tokens than max_tokens, or the shapes or the dtype do not fit.
        """
        from octile.kernels.triton import decode_rows

        data, scale = (x_TD.data, x_TD.scale) if isinstance(x_TD, ScaledTensor) else (x_TD, None)
        tokens = len(experts_TK)
        expected = (tokens, self.hidden_size), self.dtype, (tokens, self.n_chosen), (tokens, self.n_chosen)
        found = tuple(data.shape), data.dtype, tuple(experts_TK.shape), tuple(weights_TK.shape)
        if found != expected:
            raise ValueError(f"x, its dtype, experts and weights must be {expected}, not {found}")
        if tokens > self.max_tokens:
            raise ValueError(f"a rank must have at most max_tokens = {self.max_tokens} tokens, not {tokens}")
        data = data.contiguous()
        self.memory.reserve(self.n_bytes, data.device)
        return decode_rows.launch_send(
            data.view(torch.uint8), scale, experts_TK.contiguous(), self.local, self.max_tokens, self.scales_at,
            self.experts_at, self.memory.peers, weights_TK.contiguous(), self.weights_at, slots, positions_T,
        )  # fmt: skip

    def receive(self, sent: int, n_tokens: int) -> SortedRows:
        """Wait for the rows of all ranks, and copy them to their experts.

        Args:
            sent: what `send` has returned.
            n_tokens: T.
        """
        from octile.kernels.triton import decode_rows

        buffer, m = self.memory.buffer, self.memory.group.size() * self.max_tokens
        rows = buffer[: m * self.row_bytes].view(m, self.row_bytes)
        scales = buffer[self.scales_at :].view(torch.float32)[: m * self.tiles].view(m, -1) if self.tiles else None
        experts = buffer[self.experts_at :].view(torch.int32)[: m * self.n_chosen].view(m, -1)
        weights = buffer[self.weights_at :].view(torch.float32)[: m * self.n_chosen].view(m, -1)
        out = torch.empty(experts.numel(), self.hidden_size, dtype=self.dtype, device=buffer.device)
        out_scale = new_scale(out, *TILE) if self.tiles else None
        out_weights, entries = weights.new_empty(len(out)), experts.new_empty(len(out))
        offs = experts.new_empty(self.local)
        peers = self.memory.peers
        decode_rows.launch_sort(
            sent, peers, rows, scales, experts, weights, peers.rank * self.local, out.view(torch.uint8), out_scale,
            out_weights, entries, offs,
        )  # fmt: skip
        sorted_rows = out if out_scale is None else ScaledTensor(out, out_scale, TILE)
        return SortedRows(sorted_rows, out_weights, offs, entries, n_tokens)

    def combine(
        self,
        y_RD: Tensor,
        at_experts: SortedRows,
        add: Tensor | InFlight[Tensor] | None = None,
        weights_TK: Tensor | None = None,
        to_TD: Tensor | None = None,
    ) -> Tensor:
        """Sum the results of each token of this rank, and add [T, D]: [T, D].

        Args:
            y_RD: [R, D], float32, bfloat16 or float16, of which the rows up to the last of `at_experts.offs` are used.
            at_experts: what `receive` has returned.
            add: in y's dtype, to the same tokens; what is in flight is waited for while the results travel;
                None: zeros.
            weights_TK: float32, by which results are multiplied; None: ones.
            to_TD: in y's dtype, contiguous, to which the sums are added after they are rounded, and which is returned;
                None: they are returned as a new tensor.

        Raises:
            TypeError: a tensor has another dtype.
            ValueError: a shape does not fit, or to_TD is not contiguous.
        """
        from octile.kernels.triton import decode_rows

        tokens, results = at_experts.n_tokens, self.max_tokens * self.n_chosen
        added = add.result if isinstance(add, InFlight) else add
        rows, token_tensors = (len(at_experts.entries), self.hidden_size), {"add": added, "to_TD": to_TD}
        _check_results("y_RD", y_RD, rows, tokens, self.n_chosen, weights_TK, token_tensors)
        if to_TD is not None and not to_TD.is_contiguous():
            raise ValueError(f"to_TD must be contiguous, not have strides {to_TD.stride()}")
        y_bytes = y_RD.contiguous().view(torch.uint8)
        returned = decode_rows.launch_return(
            y_bytes, at_experts.entries, at_experts.offs, results, self.results_at, self.memory.peers
        )
        if isinstance(add, InFlight):
            add.wait(switches=False)
        adds_to = to_TD is not None
        to_TD = y_RD.new_empty(tokens, self.hidden_size) if to_TD is None else to_TD
        _sum(self.memory, self.results_at, returned, self.n_chosen, added, weights_TK, to_TD, adds_to)
        return to_TD


def _check_results(
    name: str,
    y: Tensor,
    shape: tuple[int, ...],
    tokens: int,
    n_chosen: int,
    weights_TK: Tensor | None,
    token_tensors: Mapping[str, Tensor | None],
) -> None:
    """Check the results of experts, the weights of the sums, and tensors [T, D] of their dtype that are added."""
    check_input_dtype(name, y)
    expected = {name: (y, shape, y.dtype), "weights_TK": (weights_TK, (tokens, n_chosen), torch.float32)}
    expected |= {other: (tensor, (tokens, shape[-1]), y.dtype) for other, tensor in token_tensors.items()}
    for other, (tensor, its_shape, dtype) in expected.items():
        if tensor is not None and tensor.shape != its_shape:
            raise ValueError(f"{other} must be {its_shape}, not {tuple(tensor.shape)}")
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{other} must be {dtype}, not {tensor.dtype}")


def _sum(
    memory: PeerMemory,
    results_at: int,
    returned: int,
    n_chosen: int,
    add: Tensor | None,
    weights_TK: Tensor | None,
    to_TD: Tensor,
    adds_to: bool,
) -> None:
    """Sum what all ranks have returned of each token, as `decode_rows.launch_sum` does, in to_TD's dtype."""
    from octile.kernels.triton import decode_rows

    results = memory.buffer[results_at:][: n_chosen * to_TD.numel() * to_TD.itemsize].view(to_TD.dtype)
    weights = None if weights_TK is None else weights_TK.contiguous()
    decode_rows.launch_sum(
        returned, memory.peers, results.view(-1, to_TD.shape[1]), n_chosen, add, weights, to_TD, adds_to
    )


def max_rank_tokens(ranks: int, n_chosen: int) -> int:
    """Return how many tokens a rank has at most in a `SortedExchange`."""
    return MAX_ENTRIES // (ranks * n_chosen)
