"""Catalog of the indexer's kernels that are compiled without a GPU: DeepSeek-V3.2's, and the other supported shapes."""

from functools import partial

import torch

from octile.kernels.cuda.attention import mqa_logits
from octile.kernels.cuda.attention.mqa_logits import KEYS
from octile.kernels.cuda.jit.mapped import MappedLaunch

SMS = 132


def plans() -> dict[str, MappedLaunch]:
    """Return the launch of each case, by the name of the case."""
    empty = partial(torch.empty, device="meta")
    fp8 = torch.float8_e4m3fn
    found = {}
    for heads in mqa_logits.HEADS:
        for head_dim in mqa_logits.HEAD_DIMS:
            q, k, weights = (
                empty(2048, heads, head_dim, dtype=fp8),
                empty(65536, head_dim, dtype=fp8),
                empty(2048, heads),
            )
            name = f"{heads} heads of {head_dim}"
            found[f"indexer, {name}"] = mqa_logits.plan(q, k, weights, len(k), False, True, False, SMS)
            found[f"indexer, {name}, compressed"] = mqa_logits.plan(q, k, weights, 8192, True, False, True, SMS)
            for next_n in (1, 2):
                cache = empty(1024, KEYS * (head_dim + 4), dtype=torch.uint8)
                queries = q.view(-1, next_n, heads, head_dim)
                made = mqa_logits.plan_paged(queries, cache, weights, 128, 8192, False, SMS)
                found[f"indexer in pages, {name}, {next_n} tokens"] = made
    return found
