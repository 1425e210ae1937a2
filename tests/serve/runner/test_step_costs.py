"""The modelled times of decode steps with drafts: by their definition, and next to those that a GPU took."""

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.bench.serve.roofline import decode_bytes
from octile.models.config import ModelConfig
from octile.serve.engine.config import MAX_DRAFTS
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step_costs import BANDWIDTH, ROW, SMALL_BATCH_LATENCY, STEP, StepCosts
from tests.serve.models import CONFIG, new_model

RECORDS = Path(__file__).parents[3] / "benchmarks/history/serve"
SMALL = ModelConfig.small()
V2_LITE = replace(ModelConfig.v2_lite_16b(), num_nextn_predict_layers=1)


@pytest.mark.parametrize(("name", "config"), [("small", SMALL), ("v2_lite", V2_LITE)])
def test_the_costs_are_those_that_were_measured(name: str, config: ModelConfig):
    costs, errors = StepCosts(config, fp8=True, small_batch=8), list[float]()
    text = (RECORDS / f"tenth_draft_steps_{name}.txt").read_text()
    for requests, drafts, ratio in re.findall(r"requests (\d+) drafts (\d): [\d.]+ ms, ([\d.]+)", text):
        errors.append(abs(costs.relative(int(requests), 4)[int(drafts)] / float(ratio) - 1))
    assert len(errors) >= 25
    assert max(errors) < 0.07
    assert mean(errors) < 0.025


@given(st.integers(1, 300), st.sampled_from([SMALL, V2_LITE, CONFIG]), st.sampled_from([0, 1, 8]), st.booleans())
def test_each_further_draft_takes_time(requests: int, config: ModelConfig, small_batch: int, fp8: bool):
    costs = StepCosts(config, fp8, small_batch).relative(requests, MAX_DRAFTS)
    assert costs[0] == 1
    assert list(costs) == sorted(set(costs))


def test_a_row_without_drafts_reads_the_bytes_of_its_step():
    c = V2_LITE
    mixtures = c.num_hidden_layers - c.first_k_dense_replace
    found = decode_bytes(c, [1], mixtures * c.num_experts_per_tok)
    read = sum(n for kind, n in found.items() if kind not in ("embedding", "cache"))
    seconds = STEP + c.num_hidden_layers * SMALL_BATCH_LATENCY + read * (1 + ROW) / BANDWIDTH
    assert StepCosts(c, True, 8).seconds(1, 0) == pytest.approx(seconds)


def test_a_draft_costs_less_where_the_others_rows_read_the_experts_anyway():
    costs = StepCosts(V2_LITE, True, 8)
    assert costs.relative(32, 1)[1] < 1.2 < 1.4 < costs.relative(1, 1)[1]


def test_ranks_read_the_experts_that_they_share_once():
    alone, of_rank = StepCosts(V2_LITE, True, 0), StepCosts(V2_LITE, True, 0, ranks=8, groups=8)
    assert of_rank.seconds(1, 0) < alone.seconds(1, 0)
    assert of_rank.relative(1, 1)[1] < alone.relative(1, 1)[1]
    group = StepCosts(V2_LITE, True, 0, ranks=8, groups=1)  # whose ranks share their requests
    assert group.seconds(1, 1) < of_rank.seconds(1, 1)


@pytest.mark.parametrize(("batch_invariant", "small_batch"), [(False, 8), (True, 1)])
def test_a_runner_on_a_cpu_has_the_costs_of_one_on_a_gpu(batch_invariant: bool, small_batch: int):
    runner = ModelRunner(new_model(True), 4, batch_invariant=batch_invariant)
    assert runner.step_costs(2, 3) == StepCosts(CONFIG, True, small_batch).relative(2, 3)


def test_a_runner_with_weights_in_bf16_takes_no_small_batches():
    runner = ModelRunner(new_model(False, torch.bfloat16), 4)
    assert runner.step_costs(2, 3) == StepCosts(CONFIG, False, 0).relative(2, 3)
