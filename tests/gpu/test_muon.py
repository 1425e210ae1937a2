"""Muon on a GPU: the steps of a CPU, captured steps, and the host, which waits for nothing."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from octile.optim import Muon
from octile.optim.muon_update import newton_schulz
from octile.train.data.token_store import TokenStore
from octile.train.step.captured import WARM_UP_STEPS
from octile.train.strategy import single
from octile.train.trainer import Trainer
from tests.train.conftest import micro

SHAPES = [(5, 48, 96), (130, 70), (70, 130), (130, 70), (1, 8)]
STEPS = WARM_UP_STEPS + 5


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).cuda() / 50) for shape in SHAPES]


def muon(params: list[nn.Parameter]) -> Muon:
    return Muon([{"params": params, "use_muon": True}], torch.tensor(1e-2, dtype=torch.float64, device="cuda"))


@pytest.mark.parametrize("shape", [(8, 64, 64), (3, 200, 128), (3, 128, 200), (1, 1024, 512)])
def test_newton_schulz_is_that_of_the_cpu_but_for_roundings(shape: tuple[int, int, int]):
    u_BNK = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = newton_schulz(u_BNK.cuda()).cpu().float(), newton_schulz(u_BNK).float()
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_captured_steps_have_the_bits_of_eager_steps_and_follow_skip_rate_and_gradients():
    eager, captured = parameters(), parameters()
    optimizers = muon(eager), muon(captured)
    skip, scale = torch.zeros((), dtype=torch.bool, device="cuda"), torch.full((), 0.5, device="cuda")

    def draw(step: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(step)
        for p, q in zip(eager, captured, strict=True):
            drawn = torch.randn(p.shape, generator=generator, device="cuda")
            p.grad = drawn if p.grad is None else p.grad.copy_(drawn)
            q.grad = drawn.clone() if q.grad is None else q.grad.copy_(drawn)

    draw(0)
    for optimizer in optimizers:
        optimizer.step(skip=skip, gradient_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step(skip=skip, gradient_scale=scale)
    for step, skips in enumerate((False, True, False), 1):
        draw(step)
        if skips:
            captured[0].grad[0] = eager[0].grad[0] = math.nan
        before = copy.deepcopy(captured)
        skip.fill_(skips)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"].fill_(1e-2 / step)
        graph.replay()
        optimizers[0].step(skip=skip, gradient_scale=scale)
        assert all(torch.equal(p, q) for p, q in zip(eager, captured, strict=True)), f"step {step}"
        assert [torch.equal(p, q) for p, q in zip(before, captured, strict=True)] == [skips] * len(captured)


@pytest.fixture
def trainer_of(store: TokenStore) -> Callable[[], Trainer]:
    config = micro(optim=replace(micro().optim, name="muon"))
    return lambda: Trainer(config, store, torch.device("cuda"))


def test_captured_training_has_the_losses_of_eager_steps(trainer_of, monkeypatch: pytest.MonkeyPatch):
    captured = trainer_of()
    ours = [captured.step() for _ in range(STEPS)]
    assert captured.captured.is_captured
    monkeypatch.setattr(single, "why_eager", lambda *_: "the test compares with it")
    uncaptured = trainer_of()
    for line in ours:
        assert line["loss"] == pytest.approx(uncaptured.step()["loss"], rel=2e-3), line["step"]


def test_the_host_waits_for_nothing_when_it_launches_captured_steps(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            trainer.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [line["step"] for line in trainer.collect()] == list(range(STEPS + 1, STEPS + 6))
