"""A rank of `octile serve`, for test_ranks.py: forked in place of what torchrun starts."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from octile.cli import main
from octile.serve.ranks.engine import ExpertParallelEngine
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder
from tests.train.run.own_process import write_output_to
from tests.worlds import fork_children


def run(rank: int, port: int, folder: str, arguments: list[str]) -> None:
    """Run the command as a rank of two; its output is in files of the folder."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    write_output_to(Path(folder), str(rank))
    fork_children()
    main(["serve", *arguments])


def run_and_fail(rank: int, port: int, folder: str, arguments: list[str]) -> None:
    """Run the command as a rank that warms up as on GPUs, which rank 1 cannot."""
    load_expert_parallel = Folder.load_expert_parallel

    def load_and_warm_up(*arguments: Any) -> tuple[ExpertParallelEngine, ModelRunner]:
        engine, runner = load_expert_parallel(*arguments)
        engine.warm_up()
        return engine, runner

    def fail(*arguments: Any) -> NoReturn:
        raise MemoryError("no memory for logits")

    patch = pytest.MonkeyPatch()
    patch.setattr(Folder, "load_expert_parallel", load_and_warm_up)
    if rank == 1:
        patch.setattr(ModelRunner, "_results", fail)
        patch.setattr("octile.parallel.ranks.PATIENCE", timedelta(seconds=0.3))  # rank 0 reports nothing
    # as if this were the command, whose own errors are explained in one line
    patch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    run(rank, port, folder, arguments)
