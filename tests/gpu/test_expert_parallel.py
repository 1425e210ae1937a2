"""Experts spread over two GPUs, by NCCL, compared with one GPU, bit for bit."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import triton

from octile.kernels.cuda.jit import specialize
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.ranks.engine import ExpertParallelEngine
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import new_model
from tests.serve.ranks.test_engine import TOKENIZER
from tests.serve.ranks.test_experts import FIRST, N_PAGES, THREE_LAYERS, read, texts_of
from tests.serve.runner.test_warm_up import STEP_TOKENS
from tests.serve.runner.test_warm_up import texts_of as mixed_texts_of
from tests.serve.weights.test_routed_shared_experts import OF_ONE
from tests.worlds import Failures, assert_passed, run_cases, start_once, start_ranks

WHAT = "logits", "moving", "texts", "shared", "drafts", "graphs", "compiled"
CASES = [f"{what}-{dtype}" for what in WHAT for dtype in ("bf16", "fp8")]


def check(name: str, rank: int) -> None:
    what, _, dtype = name.partition("-")
    weights = ServedWeights.of_model(new_model(dtype == "fp8", torch.bfloat16, THREE_LAYERS).cuda())
    if what in ("graphs", "compiled"):
        (check_graphs if what == "graphs" else check_compiled)(weights, rank)
        return
    alone = ModelRunner(weights, N_PAGES, max_batch=0, max_step_tokens=0, batch_invariant=True)
    n_drafts = 2 if what == "drafts" else 0
    placement = OF_ONE if what == "shared" else torch.cat((FIRST, FIRST[:1])) if n_drafts else FIRST
    experts = ExpertParallelWeights(weights, placement, drafts=n_drafts > 0, routes_shared=what == "shared")
    together = ModelRunner(experts, N_PAGES, None, 2, batch_invariant=True, n_drafts=n_drafts, expert_window=8)
    if what in ("texts", "shared", "drafts"):
        assert together.max_ahead == 2
        assert texts_of(together, rank, seconds=0) == texts_of(alone, rank)
        return
    found = read(together, rank, experts if what == "moving" else None)
    assert all(torch.equal(a, b) for a, b in zip(found, read(alone, rank), strict=True))


def check_graphs(weights: ServedWeights, rank: int) -> None:
    """Logits of steps with prompts in CUDA graphs, of one micro-batch and of two."""
    alone = torch.cat(read(ModelRunner(weights, N_PAGES, max_batch=0, max_step_tokens=0), rank))
    for micro_batches in (1, 2):
        experts = ExpertParallelWeights(weights, FIRST)
        runner = ModelRunner(experts, N_PAGES, max_batch=2, max_step_tokens=256, micro_batches=micro_batches)
        assert runner.prefill_graphs is not None
        runner.max_rank_rows = 100  # of all steps on both ranks
        together = torch.cat(read(runner, rank))
        assert (together - alone).norm() < 0.05 * alone.norm()


def check_compiled(weights: ServedWeights, rank: int) -> None:
    """No kernel is compiled, or loaded, after the warm-up."""
    experts = ExpertParallelWeights(weights, torch.cat((FIRST, FIRST[:1])), drafts=True)
    runner = ModelRunner(experts, N_PAGES, max_batch=2, n_drafts=2, max_step_tokens=STEP_TOKENS)
    limits = EngineConfig(max_batch=2, max_step_tokens=STEP_TOKENS, n_drafts=2)
    engine = ExpertParallelEngine(Engine(runner, TOKENIZER, limits), runner)
    engine.warm_up()
    loaded, compiled = [*specialize._loaded], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["repr"]))
        mixed_texts_of(engine, rank)
    assert not compiled, compiled
    assert [*specialize._loaded] == loaded


def run(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/meeting", timedelta(seconds=40), 2, rank)
    run_cases({name: partial(check, name, rank) for name in CASES}, folder, rank)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Failures]:
    """What went wrong, by rank."""

    def start(world: int, folder: str) -> None:
        start_ranks(run, (folder,), world)

    return start_once(tmp_path_factory, "spread-experts-on-gpus", start)


@pytest.mark.parametrize("name", CASES)
def test_two_gpus(failures, name: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert_passed(failures(2), name)
