"""The lines of tools/measure_exact.py, at sizes that a CPU computes at once."""

from dataclasses import replace

import torch

from octile.train.config import preset
from tests.bench.serve.test_engine import SMALL
from tools.measure_exact import decode, train


def test_each_batch_decodes_in_both_modes():
    lines = [line for line in decode(SMALL, torch.device("cpu")) if not line.startswith(" ")]
    assert len(lines) == 3 * len(SMALL.batches)
    assert lines[-1].startswith(f"{SMALL.name}, {SMALL.batches[-1]} requests: exact has ")


def test_a_step_runs_under_both_recipes():
    config = replace(preset("tiny"), device="cpu", batch_size=1, micro_batches=1, sequence_length=64, val_sequences=1)
    lines = [line for line in train("tiny", config, torch.device("cpu")) if not line.startswith(" ")]
    assert [line.split(":")[0] for line in lines] == ["tiny, deepseek_v3", "tiny, exact", "tiny"]
