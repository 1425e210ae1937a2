"""The lines of tools/measure_exact.py, at sizes that a CPU computes at once."""

from dataclasses import replace

import pytest
import torch

from octile.bench.goals import PREFILL
from octile.train.config import preset
from tests.bench.serve.test_engine import SMALL
from tools.measure_exact import serve, train


def test_each_batch_and_prompts_run_in_both_modes():
    lines = [line for line in serve(SMALL, torch.device("cpu")) if not line.startswith(" ")]
    cases = [*(f"{SMALL.name}, {batch} requests" for batch in SMALL.batches), f"{SMALL.name}, {PREFILL}"]
    ratios = lines[-len(cases) :]
    assert [line.rpartition(": exact has ")[0] for line in ratios] == cases
    for mode in ("default", "exact"):
        shown = [line.rpartition(":")[0] for line in lines if f", {mode}:" in line]
        assert shown == [f"{case}, {mode}" for case in (SMALL.name, *cases)]


@pytest.mark.slow
def test_a_step_runs_under_both_recipes():
    config = replace(preset("tiny"), device="cpu", batch_size=1, micro_batches=1, sequence_length=64, val_sequences=1)
    lines = [line for line in train("tiny", config, torch.device("cpu")) if not line.startswith(" ")]
    assert [line.split(":")[0] for line in lines] == ["tiny, deepseek_v3", "tiny, exact", "tiny"]
