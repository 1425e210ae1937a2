"""The routed experts that a step of `octile bench serve` reads, on a CPU and a miniature model."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from octile.bench.serve.engine import random_weights
from octile.bench.serve.roofline import experts_read
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model.expert_load import ExpertLoad
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.prefill_graphs import PrefillGraphs
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from tests.bench.serve.test_engine import SMALL


def decoding(requests: int) -> tuple[ModelRunner, Engine]:
    """A runner whose steps have graphs, and an engine in which all requests decode."""
    runner = ModelRunner(random_weights(SMALL.config, torch.device("cpu")), n_pages=16)
    runner.graphs = SimpleNamespace(run=lambda layout: pytest.fail("a graph counts nothing"))  # type: ignore
    runner.prefill_graphs = PrefillGraphs(runner.forward, None, 256)
    runner._max_rows = 8
    engine = Engine(runner, Tokenizer.train([], MIN_VOCAB_SIZE), EngineConfig(max_batch=8))
    for seed in range(requests):
        engine.add([seed, 7, 9], Sampling(max_new_tokens=9, seed=seed, ignore_eos=True))
    graphs, runner.graphs = runner.graphs, None
    while len(engine.step()) < requests:
        pass
    runner.graphs = graphs
    return runner, engine


def test_the_experts_of_one_row_are_those_that_a_row_chooses():
    mixtures = sum(SMALL.config.is_moe(layer) for layer in range(SMALL.config.num_hidden_layers))
    assert experts_read(*decoding(1)) == mixtures * SMALL.config.num_experts_per_tok


def test_an_expert_that_several_rows_choose_is_read_once(monkeypatch: pytest.MonkeyPatch):
    runner, engine = decoding(6)
    chosen, count = list[tuple[int, int]](), ExpertLoad.count

    def collect(load: ExpertLoad, layer: int, experts_TK: Tensor, slots_T: Tensor) -> None:
        chosen.extend((layer, expert) for expert in experts_TK[slots_T >= 0].flatten().tolist())
        count(load, layer, experts_TK, slots_T)

    monkeypatch.setattr(ExpertLoad, "count", collect)
    n_read = experts_read(runner, engine)
    assert n_read == len(set(chosen)) < len(chosen)
    assert isinstance(runner.prefill_graphs, PrefillGraphs)


def test_a_gate_that_is_not_counted_is_no_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ExpertLoad, "count", lambda *arguments: None)
    with pytest.raises(RuntimeError, match=r"chooses 2 experts of each layer, but \[0\] were counted"):
        experts_read(*decoding(2))
