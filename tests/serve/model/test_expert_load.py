"""Live statistics: the tokens of each expert in a moving window of steps."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octile.serve import rebalance_experts
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model.expert_load import ExpertLoad
from octile.serve.model.feed_forward import FeedForward
from octile.serve.runner.model_runner import ModelRunner
from tests.serve.models import CONFIG, Texts, new_model, text

N_PAGES = 20
K, E = CONFIG.num_experts_per_tok, CONFIG.n_routed_experts


@pytest.fixture
def chosen(monkeypatch) -> Iterator[list[Tensor]]:
    """The experts that the gates choose, [T, K] each."""
    found: list[Tensor] = []
    choose = FeedForward._choose

    def recording(*arguments):
        result = choose(*arguments)
        found.append(result[1])
        return result

    monkeypatch.setattr(FeedForward, "_choose", recording)
    return found


def counted(load: ExpertLoad, experts: list[list[int]], slots: list[int] | None = None) -> None:
    """Count the experts of rows in layer 3, and end the step."""
    load.count(3, torch.tensor(experts), torch.tensor(slots or [0] * len(experts)))
    load.end_step()


def test_the_chosen_experts_of_every_row_are_counted(chosen):
    texts = Texts(ModelRunner(new_model(fp8=False), N_PAGES, expert_window=8), [text(100), text(90, 1)])
    for sizes in ((50, 3), (1, 20), (9, 1), (1, 1), (1, 1), (1, 1), (1, 0), (1, 1)):
        texts.run(*sizes)
    expected = torch.cat(chosen).flatten().bincount(minlength=E).tolist()
    assert texts.runner.expert_tokens == {1: tuple(expected), 2: (0,) * E}


def test_rows_that_pad_a_step_are_not_counted():
    texts = Texts(ModelRunner(new_model(fp8=False), N_PAGES, batch_invariant=True, expert_window=8), [text(100)])
    for _ in range(8):
        texts.run(3)
    assert sum(texts.runner.expert_tokens[1]) == 8 * 3 * K


def of_an_engine(tokenizer, n_drafts: int) -> dict[int, int]:
    """The tokens of all experts of each layer after a prompt of 30 tokens and 7 steps of decoding, over K."""
    runner = ModelRunner(new_model(fp8=False), N_PAGES, max_batch=2, n_drafts=n_drafts, expert_window=8)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=2, n_drafts=n_drafts, expert_window=8))
    engine.add(text(30), Sampling(max_new_tokens=40, ignore_eos=True))
    while engine.stats().steps < 8:
        engine.step()
    return {layer: sum(tokens) // K for layer, tokens in engine.stats().expert_tokens.items()}


def test_the_tokens_of_decode_steps_are_counted(tokenizer):
    assert of_an_engine(tokenizer, 0) == {1: 30 + 7, 2: 0}


def test_the_tokens_of_drafts_and_of_the_prediction_layer_are_counted(tokenizer):
    found = of_an_engine(tokenizer, 1)
    assert found[1] == 30 + 2 * 7
    assert found[2] >= 30


def test_the_window_moves_by_an_eighth():
    load = ExpertLoad([3], 2, 16, torch.device("cpu"))
    for step in range(16):
        counted(load, [[0]] if step < 4 else [[1]])
    assert load.in_window == {3: (4, 12)}
    counted(load, [[1]])
    assert load.in_window == {3: (4, 12)}
    counted(load, [[1]])
    assert load.in_window == {3: (2, 14)}
    for _ in range(16):
        counted(load, [[0], [0]])
    assert load.in_window == {3: (32, 0)}


def test_a_row_without_a_slot_is_padding():
    load = ExpertLoad([3], 4, 8, torch.device("cpu"))
    counted(load, [[0, 1], [2, 3], [0, 2]], [5, -1, 0])
    assert load.in_window == {3: (2, 1, 1, 0)}


def test_nothing_is_counted_before_the_first_eighth():
    assert ExpertLoad([3, 5], 2, 8, torch.device("cpu")).in_window == {3: (0, 0), 5: (0, 0)}


def test_without_a_window_nothing_is_counted(tokenizer):
    engine = Engine(ModelRunner(new_model(fp8=False), N_PAGES), tokenizer)
    assert engine.stats().expert_tokens is None


def test_experts_are_placed_by_the_counts():
    texts = Texts(ModelRunner(new_model(fp8=False), N_PAGES, expert_window=8), [text(100)])
    for _ in range(8):
        texts.run(10)
    load = torch.tensor([texts.runner.expert_tokens[1]])
    count = rebalance_experts(load, E + 2, 1, 1, 2)[2]
    assert count[0, load.argmax()] == 2


@pytest.mark.parametrize("window", [-8, 4, 12])
def test_a_window_that_is_no_multiple_of_8_is_refused(window):
    with pytest.raises(ValueError, match=f"expert_window must be a multiple of 8, not {window}"):
        ModelRunner(new_model(fp8=False), N_PAGES, expert_window=window)
