"""Batches of each kind, for a server to compute before its first request: a new kind of step may need new kernels.

    prompts      of all numbers of rows that graphs have, next to a row that decodes: they begin, or continue
    all rows     of a step, of prompts alone: flash-attn-4 computes those of many rows only
    rows         that decode alone, or next to a prompt, of powers of two: attention and the choice of tokens have other
                 kernels for more rows, and outside of graphs; and those of many short prompts, which attend like them
    positions    that chunks in the middle of their texts read, of all numbers that their GEMM has outside of graphs: as
                 kernels do not overlap there, it has others than in them
    long texts   of both, with more positions than `index_topk`

All chunks name page 0 for all their positions: what computes them writes nothing to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import cycle, islice

from octile.ops.latent_cache import PAGE
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row
from octile.serve.model.attention import GEMM_ROWS
from octile.serve.runner.batch import Batch, Chunk
from octile.serve.runner.graphs import FILL_ROWS, MAX_ROWS, graph_rows, graph_sizes
from octile.serve.runner.step import MAX_DECODE_TOKENS

# How tokens are chosen: with the most kernels, without log-probabilities and with those of the token and of others, and
# from rows that no top_k or top_p truncates.
SAMPLED = (
    *(Row(Sampling(temperature=1.0, top_p=0.9, top_k=50, logprobs=n), 0, 0) for n in (None, 0, 1)),
    Row(Sampling(temperature=1.0), 0, 0),
)


def warm_up_batches(
    max_step_tokens: int,
    max_decode_rows: int,
    max_short_rows: int,
    max_position: int,
    vocab_size: int,
    index_topk: int | None,
    positions_in_graphs: int,
) -> Iterator[Batch]:
    """Yield the batches.

    Args:
        max_step_tokens: tokens of a step with prompts at most; 0: no prompt is prefilled.
        max_decode_rows: rows of a step that only decodes, at most; 0: none does.
        max_short_rows: rows of short prompts of a step, at most.
        max_position: positions of a text.
        vocab_size: tokens of the model. They differ, and so the experts that they choose.
        index_topk: positions to which a row attends at most, if the model has an indexer; None: to all.
        positions_in_graphs: up to so many positions are read in graphs.
    """
    n = min(PAGE, max_position) // 2  # tokens of a chunk
    if not n:
        return  # a text of one position has no prompt to which a token is added

    tokens = cycle(range(vocab_size))

    def chunk(start: int, size: int, n_logits: int) -> Chunk:
        pages = array("i", [0] * -(-(start + size) // PAGE))
        return Chunk([*islice(tokens, size)], start, pages, n_logits)

    def chunks(start: int, rows: int) -> list[Chunk]:
        whole, rest = divmod(rows, n)
        return [chunk(start, size, 1) for size in [n] * whole + [rest] if size]

    def prompts(start: int, rows: int) -> Batch:
        return Batch([chunk(start, 1, 1), *chunks(start, rows - 1)])

    sizes = sorted({min(rows, max_step_tokens) for rows in (*graph_rows(MAX_ROWS), max_step_tokens)} - {0})
    decoding = graph_sizes(max_decode_rows) if max_decode_rows else []
    for start in (0, n):
        yield from (prompts(start, rows) for rows in sizes)
    if max_step_tokens:
        yield Batch(chunks(0, max_step_tokens))
    longest = min(max_position, index_topk or max_position)  # which attends to all positions before each
    for beyond in range(FILL_ROWS, GEMM_ROWS + 1, FILL_ROWS):
        total = positions_in_graphs + beyond
        texts = -(-total // longest)
        size = min(n, max_step_tokens // texts)
        if size <= MAX_DECODE_TOKENS:
            break
        ends = ((i + 1) * total // texts - i * total // texts for i in range(texts))
        yield Batch([chunk(end - size, size, 1) for end in ends])
    yield from (Batch([chunk(n, 1, 1)] * rows) for rows in decoding)
    together = [rows for rows in decoding if 1 < rows <= max_step_tokens - n]
    yield from (Batch([*[chunk(n, 1, 1)] * rows, chunk(0, n, 1)]) for rows in together)
    short = min(MAX_DECODE_TOKENS, n)  # tokens of prompts, of which a step may have many
    sizes_of_short = graph_sizes(max_short_rows) if max_short_rows else []
    many = [rows for rows in sizes_of_short if rows > max_decode_rows]
    yield from (Batch([chunk(n, short, 1)] * (rows // short)) for rows in many)
    if index_topk is not None and index_topk + n <= max_position:
        yield from (Batch([chunk(index_topk, short, 1)] * (rows // short)) for rows in many)
        yield from (prompts(index_topk, min(1 + n, max_step_tokens)) for _ in sizes[:1])
        yield from (Batch([chunk(index_topk, 1, 1)] * rows) for rows in decoding)
