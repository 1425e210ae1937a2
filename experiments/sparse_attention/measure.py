"""What the indexers of runs choose: held-out losses, and the recall of dense attention's keys.

    python -m experiments.sparse_attention.measure FOLDER

Of each query with more than K keys, its K keys with the largest mean weight over dense attention's heads are compared
with the K that the indexer chooses. Recall is the share of the former among the latter, mass the share of attention's
weight that the chosen keys have. The queries are those of dense attention in all layers: of the same hidden states.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import octile
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.fused.top_k_attention import attention_distribution, top_k_mask
from octile.nn.indexer import Indexer, IndexInput
from octile.train.data.batches import validation_windows
from octile.train.data.token_store import TokenStore

LENGTH, WINDOWS, AT_ONCE = 256, 32, 4
RUNS = ("dense", "dense_continued", "untrained", "warm_up", "sparse")


def agreement(top_k_BSK: Tensor, p_BST: Tensor) -> tuple[float, float]:
    """Return recall and mass, the means over the queries that see more keys than are chosen.

    Args:
        top_k_BSK: the keys that were chosen.
        p_BST: attention's weights, of the keys that each query sees.
    """
    k, t = top_k_BSK.shape[2], p_BST.shape[2]
    in_top_k = top_k_mask(top_k_BSK, t)[:, k:]
    p_BST = p_BST[:, k:]
    largest = torch.zeros_like(in_top_k).scatter_(-1, p_BST.topk(k).indices, True)
    recall = (in_top_k & largest).sum(-1) / k
    mass = (p_BST * in_top_k).sum(-1)
    return float(recall.mean()), float(mass.mean())


@torch.no_grad()
def held_out_loss(model: DeepseekV3, windows: Tensor) -> float:
    """Return the held-out loss of the next token, in nats."""
    losses = [model(tokens, tokens).item() for tokens in windows.split(AT_ONCE)]
    return sum(losses) / len(losses)


@torch.no_grad()
def measure(model: DeepseekV3, windows: Tensor) -> tuple[float, float]:
    """Return recall and mass, the means over all layers."""
    found: list[tuple[float, float]] = []

    def observe(indexer: Indexer, topk: int) -> Any:
        def align(index: IndexInput, q: Tensor, k: Tensor, scale: float) -> Tensor:
            indexer.warm_up, indexer.topk = False, topk
            chosen = indexer.top_k_keys(*index)
            indexer.warm_up = True
            assert chosen is not None
            seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[None]
            found.append(agreement(chosen, attention_distribution(q, k, seen, scale)))
            return q

        return align

    model.warm_up_indexers(True)
    model.train()
    for indexer in model.indexers():
        indexer.align = observe(indexer, indexer.topk)  # type: ignore[method-assign]
    for tokens in windows.split(AT_ONCE):
        model(tokens, tokens)
    recalls, masses = zip(*found, strict=True)
    return sum(recalls) / len(found), sum(masses) / len(found)


def main(folder: Path) -> None:
    """Print a line for each run in a folder."""
    windows = validation_windows(TokenStore.open(folder / "dense" / "data").val, LENGTH - 1, WINDOWS)
    print("run              held-out loss   recall     mass")
    for run in RUNS:
        model = octile.load(folder / run)
        line = f"{run:<15} {held_out_loss(model, windows):14.4f}"
        if model.indexers():
            line += " {:8.3f} {:8.3f}".format(*measure(model, windows))
        print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
