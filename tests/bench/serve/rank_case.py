"""One of the ranks whose speed test_ranks.py measures."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from octile.bench.serve.ranks import rows
from tests.bench.serve.test_engine import SMALL

# each of two ranks has whole blocks of FP8 weights
DIVISIBLE = replace(
    SMALL.config,
    num_attention_heads=4,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    moe_intermediate_size=128,
)


def measure(rank: int, folder: str, port: int) -> None:
    """Measure a miniature model on a CPU, and write the rows."""
    torch.set_num_threads(1)
    of_torchrun = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in of_torchrun.items()}
    measured = rows(replace(SMALL, config=DIVISIBLE, batches=(2,)), torch.device("cpu"))
    found = [(row.case, row.what, row.value, row.against and row.against.peer) for row in measured]
    torch.save(found, Path(folder) / f"{rank}.pt")
