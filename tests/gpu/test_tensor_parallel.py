"""Attention's heads and the rows of steps divided among two GPUs: texts in CUDA graphs and without, logits vs. FP32."""

import gc
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.tensor_parallel import TensorParallel
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import new_model
from tests.serve.ranks.test_experts import texts_of
from tests.serve.ranks.test_tensor_parallel import MODEL, N_PAGES, TWO_RANKS, read
from tests.worlds import Failures, assert_passed, run_cases, start_once, start_ranks

ALL_CHOSEN = replace(MODEL, num_experts_per_tok=8, n_group=1, topk_group=1)  # else rounding chooses other experts
CASES = [f"{what}-{dtype}" for what in ("texts", "drafts", "logits", "graphs") for dtype in ("fp8", "bf16")]


def check(name: str, rank: int) -> None:
    what, _, dtype = name.partition("-")
    model = new_model(dtype == "fp8", torch.bfloat16, ALL_CHOSEN).cuda()
    tp, n_drafts = TensorParallel.of_consecutive(2), 2 if what == "drafts" else 0
    placement = torch.cat((TWO_RANKS, TWO_RANKS[:1])) if n_drafts else TWO_RANKS
    weights = ServedWeights.of_model(model, tp.share)

    def together(max_batch: int, batch_invariant: bool = True) -> ModelRunner:
        experts = ExpertParallelWeights(weights, placement, drafts=n_drafts > 0, tp=tp)
        of_steps = {"max_batch": max_batch, "max_step_tokens": 256 if max_batch else 0}
        return ModelRunner(experts, N_PAGES, batch_invariant=batch_invariant, n_drafts=n_drafts, **of_steps)

    if what in ("texts", "drafts"):  # of both ranks, which have the same requests
        captured = together(2)
        assert captured.max_ahead == 2
        assert texts_of(captured, 0) == texts_of(together(0), 0)
        return
    alone = read(ModelRunner(ServedWeights.of_model(model), N_PAGES, max_batch=0, max_step_tokens=0))
    in_fp32 = read(ModelRunner(ServedWeights.of_model(model.cpu().float()), N_PAGES))  # of the same weights
    runner = together(2 if what == "graphs" else 0, batch_invariant=False)
    if what == "graphs":
        assert runner.prefill_graphs is not None
        runner.max_rank_rows = 100
    found = read(runner)
    assert (found - in_fp32).norm() < 1.2 * (alone - in_fp32).norm()  # rounding alone


def run(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/meeting", timedelta(seconds=40), 2, rank)
    run_cases({name: partial(check, name, rank) for name in CASES}, folder, rank)
    gc.collect()  # NCCL ends no communicator whose collectives a graph has
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(run, (folder,), world)

    return start_once(tmp_path_factory, "tensor-parallel-on-gpus", start)


@pytest.mark.parametrize("name", CASES)
def test_two_gpus(failures, name: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert_passed(failures(2), name)
