"""Tests of the kernels that are compiled ahead of a run's first step: they follow from its configuration."""

import json
import os

import pytest
import torch

from octile.train import config as configs
from octile.train.run import kernels_ahead
from octile.train.run.kernels_ahead import compile_ahead
from tests.fresh_python import run_python

# Planned in another process: here Triton's kernels run in its interpreter, and torch's compiler may be imported.
PLAN = """
import json, sys
from collections import Counter
from dataclasses import replace
import torch
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.jit.specialize import PlannedKernel
from octile.train.config import preset
from octile.train.run.kernels_ahead import plan_step
from octile.train.memory.saved_activations import saving_activations

before, config = torch.get_rng_state(), preset(sys.argv[1])
model = json.loads(sys.argv[2])
stage = "sparse" if "index_topk" in model else None
config = replace(config, model=replace(config.model, **model), indexer_stage=stage)
kernels = plan_step(config, saving_activations(config.load_recipe()), Chip(132))
print(json.dumps({
    "hopper": Counter(kernel.name for kernel in kernels if isinstance(kernel, PlannedKernel)),
    "triton": Counter(kernel.name for kernel in kernels if not isinstance(kernel, PlannedKernel)),
    "imports": [name for name in ("torch._dynamo", "sympy") if name in sys.modules],
    "same_generator": torch.equal(torch.get_rng_state(), before),
}))
"""
# Those of `octile train --preset small` on an H200 up to its first update, as its compilers report them
HOPPER_KERNELS_OF_SMALL = {
    "gemm": 11,
    "blocks": 5,
    "matrices": 2,
    "tiles": 2,
    "rms_norm": 3,
    "swiglu": 2,
    "swiglu_backward": 2,
    "dequantize": 1,
    "gate": 1,
    "count_experts": 2,
    "place_rows": 1,
    "balance_parts": 1,
    "balance_sums": 1,
}
TRITON_KERNELS_OF_SMALL = {
    "rms_norm", "rms_norm_backward", "rotate", "latent_keys", "latent_keys_backward",
    "permute", "unpermute", "cross_entropy", "cross_entropy_backward", "partial_sums", "align_groups",
    "balance_backward", "gate_backward", "gate_backward_gemms",
}  # fmt: skip


def plan(preset, **model):
    ran = run_python(PLAN, preset, json.dumps(model), environment={**os.environ, "TRITON_INTERPRET": "0"})
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def small():
    return plan("small")


@pytest.mark.slow
def test_the_kernels_of_small_are_those_of_its_first_step(small):
    assert small["hopper"] == HOPPER_KERNELS_OF_SMALL
    assert set(small["triton"]) == TRITON_KERNELS_OF_SMALL
    assert sum(small["triton"].values()) == 22  # as many as Triton compiles for these launches


@pytest.mark.slow
def test_a_plan_imports_no_compiler_and_draws_nothing(small):
    assert small["imports"] == []
    assert small["same_generator"]


@pytest.mark.slow
def test_tiny_has_kernels_of_all_kinds():
    planned = plan("tiny")
    assert set(planned["hopper"]) >= {"gemm", "blocks", "matrices", "tiles", "swiglu", "swiglu_backward", "place_rows"}
    assert planned["imports"] == []


@pytest.mark.slow
def test_sparse_attention_has_its_kernels():
    indexer = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    planned = plan("v3_671b", num_hidden_layers=4, **indexer)
    assert set(planned["hopper"]) >= {"mqa_logits", "top_keys", "sparse_mla", "sparse_mla_backward", "sparse_weights"}
    assert "torch._dynamo" not in planned["imports"]


@pytest.mark.slow
def test_a_process_may_exit_while_it_plans():
    program = """
import torch
from octile.kernels.compile_ahead import KernelsAhead
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.train.config import tiny
from octile.train.run.kernels_ahead import plan_step

config = tiny()
KernelsAhead(lambda: plan_step(config, config.load_recipe(), Chip(132)), torch.device("cuda", 0))
"""
    ran = run_python(program)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("why_not", ["they are written for Hopper (sm_90)", None])
def test_only_the_first_rank_of_a_machine_with_hopper_compiles(monkeypatch, why_not):
    monkeypatch.setattr(kernels_ahead, "why_not_on", lambda device: why_not)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compile_ahead(configs.tiny(), torch.device("cuda", 1), 0) is None
    if why_not is not None:
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert compile_ahead(configs.tiny(), torch.device("cuda", 0), 0) is None


def test_a_cpu_has_no_kernels_to_compile():
    assert compile_ahead(configs.tiny(), torch.device("cpu"), 0) is None


def test_the_plan_is_that_of_the_gpu(monkeypatch):
    planned = []

    class Ahead:
        def __init__(self, plan, device):
            self.plan, self.device = plan, device

    monkeypatch.setattr(kernels_ahead, "why_not_on", lambda device: None)
    monkeypatch.setattr(kernels_ahead, "KernelsAhead", Ahead)
    monkeypatch.setattr(kernels_ahead, "available_memory", lambda device: 140 * 10**9)
    monkeypatch.setattr(kernels_ahead, "chip", lambda device: f"chip of {device}")
    monkeypatch.setattr(kernels_ahead, "plan_step", lambda *arguments: planned.append(arguments) or [])
    config = configs.tiny()
    ahead = compile_ahead(config, torch.device("cuda", 0), 7)
    ahead.plan()
    [(planned_config, recipe, gpu, steps_done)] = planned
    assert (planned_config, gpu, steps_done, ahead.device) == (config, "chip of cuda:0", 7, torch.device("cuda", 0))
    assert recipe.norms == "kept"  # there is memory enough to save activations
