"""A rank of `octile train` that hangs on one of two GPUs, while the host of the other waits for its own GPU."""

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.train.strategy.test_bad_ranks import train
from tests.train.strategy.test_torchrun import OPTIONS, PIPELINE

HANGS = {  # options, how rank 1 hangs, where it was last seen, and where rank 0 waits
    "capture of a data-parallel step": ([], "hang", "step 3: passes of micro-batch 0", r"step \d+.*"),
    "agreement of a pipeline": (
        PIPELINE,
        "hang before a step",
        "step 2",  # which is launched, and not collected
        "step 3: agreement on the micro-batches",
    ),
}


@pytest.mark.parametrize(("options", "fault", "hangs", "waits"), HANGS.values(), ids=HANGS)
def test_a_hang_names_the_rank_and_the_operation(text, tmp_path: Path, options, fault, hangs, waits):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = [*OPTIONS, f"--data={text}", "--device=cuda", "--recipe=bf16", "--steps=8", "--checkpoint-every=0"]
    ended = train(tmp_path, *arguments, *options, "--parallel.timeout=10", f"--out={tmp_path / 'run'}", fault=fault)
    assert ended.statuses == [1, -signal.SIGKILL]
    line = next(line for line in ended.lines[0] if "waited" in line)
    # not in a line of the thread that asks NCCL
    more = r"( \(Timed out waiting [^()]*\))?(; nothing is saved before the first checkpoint)?"
    where = f"at {waits}; last seen: rank 1 at {hangs}{more}"
    assert re.fullmatch(f"octile: rank 0 waited 10 s for the other ranks, {where}", line)
