"""The second half of a block compared with the model's layers, for a SwiGLU layer and a mixture."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve import rebalance_experts
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model import feed_forward as feed_forward_module
from octile.serve.model.feed_forward import PARTS, ExpertLoad, FeedForward
from octile.serve.model.gemms import Gemms
from octile.serve.ranks.tensor_parallel import ALONE
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, Texts, new_model, text

DENSE, MIXTURE = 0, 1  # layers
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
K, E = CONFIG.num_experts_per_tok, CONFIG.n_routed_experts


@cache
def model_of(fp8: bool) -> tuple[DeepseekV3, ServedWeights]:
    """A model and its weights."""
    model = new_model(fp8)
    return model, ServedWeights.of_model(model)


def feed_forward(weights: ServedWeights, batch_invariant: bool = False, load: ExpertLoad | None = None) -> FeedForward:
    gemms = Gemms(weights.dtype, weights.power_of_2, batch_invariant)
    return FeedForward(CONFIG, gemms, None, ALONE, load, None)


def rows(n: int) -> Tensor:
    return torch.randn(n, CONFIG.hidden_size, generator=torch.Generator().manual_seed(n))


@pytest.mark.one_case
@FP8
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("layer", [DENSE, MIXTURE])
@given(n=st.integers(1, 40))
@torch.no_grad()
def test_rows_get_what_the_models_layer_adds_to_them(fp8: bool, batch_invariant: bool, layer: int, n: int):
    model, weights = model_of(fp8)
    block, x_TD = model.model.layers[layer], rows(n)
    expected = block.mlp(block.post_attention_layernorm(x_TD[None]))[0]
    into = x_TD.clone()
    found = feed_forward(weights, batch_invariant).add(into, layer, weights.blocks[layer], torch.zeros(n).long())
    assert found is into
    # a mixture in FP8 multiplies by the weights of experts before it quantizes, and this layer of the model afterwards
    most = 0.08 if fp8 and layer == MIXTURE else 1e-5
    assert (found - x_TD - expected).norm() <= most * expected.norm()


@FP8
@pytest.mark.parametrize("layer", [DENSE, MIXTURE])
def test_the_bits_of_a_row_do_not_depend_on_others_in_batch_invariant_mode(fp8: bool, layer: int):
    _, weights = model_of(fp8)
    of, w, x_TD = feed_forward(weights, batch_invariant=True), weights.blocks[layer], rows(33)
    together = of.add(x_TD.clone(), layer, w, torch.zeros(33).long())
    for part in (slice(0, 1), slice(7, 23), slice(32, 33)):
        alone = of.add(x_TD[part].clone(), layer, w, torch.zeros(len(x_TD[part])).long())
        assert torch.equal(alone, together[part])


def test_rows_that_are_written_nowhere_are_computed_and_not_counted():
    _, weights = model_of(False)
    load = ExpertLoad([MIXTURE], E, PARTS, torch.device("cpu"))
    of, w = feed_forward(weights, load=load), weights.blocks[MIXTURE]
    slots = torch.tensor([3, -1, 0, -1, 7])
    found = of.add(rows(5), MIXTURE, w, slots)
    load.end_step()
    assert sum(load.in_window[MIXTURE]) == 3 * K
    assert torch.equal(found, feed_forward(weights).add(rows(5), MIXTURE, w, slots))


GPU = torch.device("cuda", 0)


class Stream:
    """A CUDA stream that records what it waits for."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events = name, events

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams of a GPU with 132 SMs wait for, and where something is computed."""
    happened: list[str] = []
    now: Any = SimpleNamespace(stream=Stream("main", happened))

    class On(nullcontext[None]):
        def __init__(self, stream: Stream):
            self.stream = stream

        def __enter__(self) -> None:
            self.before, now.stream = now.stream, self.stream
            happened.append(f"on {now.stream.name}")

        def __exit__(self, *of: object) -> None:
            now.stream = self.before
            happened.append(f"on {now.stream.name}")

    side = Stream("side", happened)
    monkeypatch.setattr(feed_forward_module, "_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(num_sms, "multiprocessors", lambda device: 132)
    return happened


def test_a_result_is_computed_after_the_current_streams_work_and_waited_for_by_it(events: list[str]):
    left: list[int] = []

    def compute() -> Tensor:
        left.append(num_sms.left_free)
        events.append("computed")
        return torch.ones(2)

    result, wait = feed_forward_module.begin_shared_experts(compute, GPU)
    assert events == ["side waits for main", "on side", "computed", "on main"]
    assert torch.equal(result, torch.ones(2))
    assert wait is not None
    wait()
    assert events[4:] == ["main waits for side"]
    assert (left, num_sms.left_free) == ([66], 0)


def test_gemms_get_their_sms_back_after_an_error(events: list[str]):
    def fail() -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        feed_forward_module.begin_shared_experts(fail, GPU)
    assert num_sms.left_free == 0
    assert events[-1] == "on main"


def test_a_cpu_has_no_stream(events: list[str]):
    result, wait = feed_forward_module.begin_shared_experts(lambda: torch.ones(2), torch.device("cpu"))
    assert torch.equal(result, torch.ones(2))
    assert wait is None
    assert events == []


N_PAGES = 20


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


def of_an_engine(tokenizer, n_drafts: int) -> tuple[dict[int, int], int]:
    """The tokens of all experts of each layer after a prompt of 30 tokens and 7 decode steps, over K; and drafts."""
    runner = ModelRunner(new_model(fp8=False), N_PAGES, max_batch=2, n_drafts=n_drafts, expert_window=8)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=2, n_drafts=n_drafts, expert_window=8))
    engine.add(text(30), Sampling(max_new_tokens=40, ignore_eos=True))
    while engine.stats().steps < 8:
        engine.step()
    stats = engine.stats()
    return {layer: sum(tokens) // K for layer, tokens in stats.expert_tokens.items()}, stats.drafted_tokens


def test_the_tokens_of_decode_steps_are_counted(tokenizer):
    assert of_an_engine(tokenizer, 0) == ({1: 30 + 7, 2: 0}, 0)


def test_the_tokens_of_drafts_and_of_the_prediction_layer_are_counted(tokenizer):
    found, n_drafts = of_an_engine(tokenizer, 1)
    assert n_drafts > 0
    assert found[1] == 30 + 7 + n_drafts
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
