"""One of two ranks of `octile train`, for test_bad_ranks.py: what torchrun starts, in a process that is forked."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from octile.cli import main
from octile.train import loop

OTHER_CODE = "other code on rank 1"


def run(rank: int, port: int, folder: str, arguments: Sequence[str]) -> None:
    """Run the command as a rank, with its output in files of the folder."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        file = os.open(Path(folder) / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, stream.fileno())
    if OTHER_CODE in arguments and rank == 1:
        loop.source_digest = lambda: "other"
    main(["train", *(argument for argument in arguments if argument != OTHER_CODE)])
