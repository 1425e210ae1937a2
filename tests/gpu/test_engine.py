"""The engine on a GPU: a request's text does not depend on what else is in the batch, nor on drafts."""

import random
from array import array
from dataclasses import replace

import pytest
import torch

from octile.models.deepseek_v3 import DeepseekV3
from octile.ops.decode_step import FIELDS, continued_tokens, record_choices
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.draft_count import DraftCount
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row, choose, log_probabilities
from octile.serve.runner.batch import Batch, Chunk, DecodeRequest
from octile.serve.runner.decode_loop import DecodeLoop
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import Tokenizer
from tests.serve.models import CONFIG, new_model, text

HOW = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
)
SAMPLINGS = [Sampling(24, seed=seed, ignore_eos=True, **how) for seed, how in enumerate(2 * HOW)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["one two three"], 258)


@pytest.fixture(params=[False, True], ids=["bf16", "fp8"])
def model(request) -> DeepseekV3:
    return new_model(request.param, torch.bfloat16).to("cuda")


def texts_of(model, tokenizer, together, n_drafts=0, n_pages=64, n_new=24, ahead=True):
    """The tokens of each request, all in one batch or one after the other."""
    runner = ModelRunner(model, n_pages, max_batch=16, batch_invariant=True, n_drafts=n_drafts)
    runner.max_ahead *= ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=16, max_step_tokens=96, n_drafts=n_drafts))
    assert engine.steps.runs_ahead
    engine.steps.runs_ahead = ahead
    found: dict[int, tuple[int, ...]] = {}
    for i, sampling in enumerate(SAMPLINGS):
        engine.add(text(30 + 17 * i, seed=i), replace(sampling, max_new_tokens=n_new))
        while engine.has_work and (not together or i == len(SAMPLINGS) - 1):
            for output in engine.step():
                found[output.request_id] = found.get(output.request_id, ()) + output.tokens
    return found, engine.stats()


def test_a_text_is_the_same_alone_and_in_a_batch(model, tokenizer):
    alone, _ = texts_of(model, tokenizer, together=False)
    assert texts_of(model, tokenizer, together=True)[0] == alone


def test_a_text_is_the_same_after_preemption(model, tokenizer):
    alone, _ = texts_of(model, tokenizer, together=False, n_new=150)
    found, stats = texts_of(model, tokenizer, together=True, n_pages=14, n_new=150)
    assert stats.preemptions > 0
    assert found == alone


@pytest.mark.parametrize("n_drafts", [1, 3])
def test_a_text_is_the_same_with_drafts(model, tokenizer, n_drafts):
    without, _ = texts_of(model, tokenizer, together=True)
    found, stats = texts_of(model, tokenizer, together=True, n_drafts=n_drafts)
    assert stats.drafted_tokens > 0
    assert found == without


@pytest.mark.parametrize("n_drafts", [0, 1, 2])
def test_a_text_is_the_same_where_steps_are_launched_ahead(model, tokenizer, n_drafts):
    expected, stats = texts_of(model, tokenizer, True, n_drafts, n_new=80, ahead=False)
    found, stats_ahead = texts_of(model, tokenizer, True, n_drafts, n_new=80)
    assert found == expected
    assert stats_ahead.steps_ahead > stats.steps_ahead == 0
    # steps that are launched ahead choose their numbers of drafts a step later
    assert (stats.drafted_tokens > 0) == (stats_ahead.drafted_tokens > 0) == (n_drafts > 0)


def test_a_text_is_the_same_where_a_prompt_is_computed_in_a_decode_graph(model, tokenizer):
    """A prompt whose beginning is cached joins while a pass is in flight; its last token is a decode row."""
    found = []
    for ahead in (False, True):
        runner = ModelRunner(model, 64, max_batch=16, batch_invariant=True)
        runner.max_ahead *= ahead
        engine = Engine(runner, tokenizer, EngineConfig(max_batch=16, max_step_tokens=96))
        engine.steps.runs_ahead = ahead
        requests = [engine.add(text(129, seed=0), SAMPLINGS[0]), engine.add(text(40, seed=1), SAMPLINGS[1])]
        for i in range(2, 6):
            engine.step()
            requests.append(engine.add(text(129, seed=0), SAMPLINGS[i]))
        while engine.has_work:
            engine.step()
        found.append([request.tokens for request in requests])
    assert engine.stats().shared_tokens >= 3 * 128
    assert found[0] == found[1]


def test_a_text_is_the_same_where_requests_join_one_by_one(model, tokenizer):
    """Decode steps and passes with prompts follow each other, in both directions, before tokens are collected."""
    found, alone = [], []
    for ahead in (False, True):
        runner = ModelRunner(model, 64, max_batch=16, batch_invariant=True)
        runner.max_ahead *= ahead
        engine = Engine(runner, tokenizer, EngineConfig(max_batch=16, max_step_tokens=96))
        engine.steps.runs_ahead = ahead
        requests = []
        for i in range(6):
            sampling = replace(SAMPLINGS[i % len(SAMPLINGS)], max_new_tokens=40, logprobs=None)
            requests.append(engine.add(text(40 + i, seed=i), sampling))
            for _ in range(5):
                engine.step()
        while engine.has_work:
            engine.step()
        found.append([request.tokens for request in requests])
        alone.append(engine.stats().steps - engine.stats().steps_ahead)
    assert found[0] == found[1]
    assert alone[1] == 1  # the first one


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_text_is_the_same_where_passes_are_launched_before_the_text_that_its_tokens_depend_on(tokenizer, fp8):
    """Beside plain requests; each joins while others decode."""
    pytest.importorskip("llguidance", reason="octile[serve] is not installed")
    model = new_model(fp8, torch.bfloat16, replace(CONFIG, vocab_size=264)).to("cuda")
    changes = (
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "logprobs": 2},
        {"bad_words": ((65,), (66, 67)), "min_tokens": 3, "logit_bias": ((70, 2.0),)},
        {"grammar": "start: /[a-f]{1,30}(g|h)/"},
        {},
        {"logprobs": 0},
    )
    found, steps = [], []
    for ahead in (False, True):
        engine = Engine(ModelRunner(model, 64, max_batch=16, batch_invariant=True), tokenizer, EngineConfig(16, 96))
        engine.steps.runs_ahead, engine.compiles_in_background = ahead, False
        texts: dict[int, list] = {}
        for i, fields in enumerate(2 * changes):
            sampling = Sampling(40, float(i % 2), seed=i, ignore_eos=True, **fields)
            texts[engine.add(text(40 + i, seed=i), sampling).id] = []
            for _ in range(3):
                for output in engine.step():
                    texts[output.request_id].append((output.tokens, output.logprobs, output.error))
        while engine.has_work:
            for output in engine.step():
                texts[output.request_id].append((output.tokens, output.logprobs, output.error))
        found.append(texts)
        steps.append(engine.stats())
    assert found[0] == found[1]
    assert all(error is None for entries in found[0].values() for *_, error in entries)
    assert steps[1].steps_ahead > 0.9 * steps[1].steps


@pytest.mark.parametrize("n_drafts", [1, 2])
def test_a_text_with_drafts_is_the_same_where_its_tokens_are_chosen_between_the_graphs_of_a_step(tokenizer, n_drafts):
    """Beside plain requests, which end first and last: steps in two graphs follow those in one, and these them."""
    pytest.importorskip("llguidance", reason="octile[serve] is not installed")
    model = new_model(False, torch.bfloat16, replace(CONFIG, vocab_size=264)).to("cuda")
    changes = (
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"bad_words": ((65,), (66, 67)), "min_tokens": 3, "logit_bias": ((70, 2.0),), "logprobs": 2},
        {"grammar": "start: /[a-f]{1,30}(g|h)/"},
        {"logprobs": 0},
        {},
    )
    found = []
    for ahead in (False, True):
        runner = ModelRunner(model, 64, max_batch=16, batch_invariant=True, n_drafts=n_drafts)
        runner.max_ahead *= ahead
        engine = Engine(runner, tokenizer, EngineConfig(max_batch=16, max_step_tokens=96, n_drafts=n_drafts))
        engine.compiles_in_background = False
        texts: dict[int, list] = {}
        for i, fields in enumerate(2 * changes):
            sampling = Sampling(30 + 9 * (i % 5), float(i % 2), seed=i, ignore_eos=True, **fields)
            texts[engine.add(text(40 + i, seed=i), sampling).id] = [(), (), None]
        while engine.has_work:
            for output in engine.step():
                tokens, logprobs, error = texts[output.request_id]
                texts[output.request_id] = [tokens + output.tokens, logprobs + output.logprobs, error or output.error]
        found.append(texts)
    assert found[0] == found[1]
    assert all(error is None for *_, error in found[0].values())
    assert engine.stats().steps_ahead > 20


def logprobs_of(model, tokenizer, batch_invariant: bool, ahead: bool):
    """The log-probabilities of texts of which two of three ask for them, and the steps launched ahead."""
    runner = ModelRunner(model, 64, max_batch=16, batch_invariant=batch_invariant)
    assert runner.loop is not None
    assert [*runner.loop._graphs] == [(0, False, False), (0, False, True)]
    runner.max_ahead *= ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=16, max_step_tokens=1024))
    samplings = [replace(sampling, logprobs=(0, 0, None)[i % 3]) for i, sampling in enumerate(SAMPLINGS)]
    found = {engine.add(text(30 + 17 * i, seed=i), sampling).id: [] for i, sampling in enumerate(samplings)}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.logprobs
    assert [len(entries) for entries in found.values()] == [0 if s.logprobs is None else 24 for s in samplings]
    return [*found.values()], engine.stats().steps_ahead


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_log_probabilities_in_graphs_have_the_bits_of_those_that_the_host_asks_for(model, tokenizer, batch_invariant):
    expected, steps_ahead = logprobs_of(model, tokenizer, batch_invariant, ahead=False)
    assert steps_ahead == 0
    found, steps_ahead = logprobs_of(model, tokenizer, batch_invariant, ahead=True)
    assert steps_ahead == 23
    assert found == expected


def test_no_graph_has_log_probabilities_of_drafts(model):
    runner = ModelRunner(model, 16, max_batch=2, n_drafts=1)
    assert runner.loop is not None
    assert [*runner.loop._graphs] == [(1, False, False), (0, False, False)]


def test_texts_are_the_same_while_their_drafts_become_right_and_wrong(model, tokenizer, monkeypatch):
    """Steps of 2, 1 and 0 drafts follow each other in all orders, as a draw says and not the drafts."""
    draw = random.Random(5)
    monkeypatch.setattr(DraftCount, "record", lambda self, *_: setattr(self, "count", draw.randint(0, 2)))
    expected, _ = texts_of(model, tokenizer, together=True, n_new=80)
    found, stats = texts_of(model, tokenizer, together=True, n_drafts=2, n_new=80)
    assert found == expected
    assert stats.steps_ahead > 0
    assert stats.drafted_tokens > 0


def test_a_certain_token_has_the_log_probability_0_and_not_minus_0_in_a_graph(model):
    runner, pages = ModelRunner(model, 16, max_batch=1), array("i", [0])
    hidden_TD = runner.run(Batch([Chunk([5], 0, pages, 1)])).hidden
    runner.forward.weights.head.zero_()
    runner.forward.weights.head[7] = 1e6 * hidden_TD[0]
    (decoded,) = runner.decode([DecodeRequest(-1, 0, 8, 0, 0, 0, 0.0, 1.0, 0.0, [5], pages)], 0, True).wait()
    assert (decoded.chosen, str(decoded.log_prob)) == ([7], "0.0")


@pytest.mark.parametrize("n_drafts", [0, 1])
def test_results_stay_where_later_steps_have_been_launched(model, n_drafts):
    expected, found = [], []
    for waits_at_once, chosen in ((True, expected), (False, found)):
        runner, pages = ModelRunner(model, 16, max_batch=2, n_drafts=n_drafts), array("i", [0, 1])
        request, steps = DecodeRequest(-1, 0, 90, 0, 0, 0, 0.0, 1.0, 0.0, [5], pages), []
        for n in range(6):
            steps.append(runner.decode([request], n_drafts, log_probs=not n_drafts))
            if waits_at_once:
                steps[-1].wait()
            request = request._replace(source=0, position=n, tokens=[])
        chosen += [step.wait() for step in steps]
    assert found == expected
    assert len({step[0].chosen[0] for step in expected}) > 1


def test_kernels_read_and_write_the_memory_of_the_host():
    numbers = torch.arange(2 * (FIELDS + 1) * 200).view(2, FIELDS + 1, 200)
    numbers[:, 0] = -1
    results, parity = torch.zeros(2, 200, 2, dtype=torch.int64).pin_memory(), torch.tensor([1, 0], device="cuda")
    last, advance = (torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((200, 1), (200,)))
    with pytest.raises(ValueError, match="host must be on cuda:0, where last is, or in pinned memory, not on cpu"):
        continued_tokens(numbers, parity, last, advance)
    tokens, *_, fields = continued_tokens(numbers.pin_memory(), parity, last, advance)
    assert torch.equal(fields.cpu(), numbers[1, :FIELDS])
    record_choices(tokens, tokens, tokens[:, :0], parity, last, advance, results)
    torch.cuda.synchronize()
    assert results.tolist() == [200 * [[0, 0]], [[token, 0] for token in numbers[1, FIELDS].tolist()]]
    assert parity.tolist() == [0, 0]


def test_a_gpu_that_is_not_the_current_one_is_waited_for(model, tokenizer, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected, _ = texts_of(model, tokenizer, True)
    fill = DecodeLoop._fill

    def slow(*arguments):
        with torch.cuda.device(1):
            torch.cuda._sleep(10**7)  # clock cycles, some 5 ms, before each step
        return fill(*arguments)

    monkeypatch.setattr(DecodeLoop, "_fill", slow)
    assert torch.cuda.current_device() == 0
    found, stats = texts_of(model.to("cuda:1"), tokenizer, True)
    assert stats.steps_ahead > 0
    assert found == expected


def test_rows_choose_the_same_tokens_in_any_batch_on_the_gpu():
    torch.manual_seed(0)
    logits = 3 * torch.randn(90, CONFIG.vocab_size, device="cuda")
    rows = [Row(SAMPLINGS[i % 8], i, i) for i in range(90)]
    alone = [choose(logits[i : i + 1], rows[i : i + 1]).item() for i in range(90)]
    assert choose(logits, rows).tolist() == alone


def test_the_gpu_chooses_the_tokens_of_the_cpu():
    torch.manual_seed(0)
    logits = 3 * torch.randn(2000, 1000)
    rows = [Row(SAMPLINGS[i % 8], i, i) for i in range(2000)]
    same = choose(logits.cuda(), rows).cpu() == choose(logits, rows)
    assert same.float().mean() > 0.999  # logarithms differ in their last bits


def test_log_probabilities_on_the_gpu_are_those_of_the_cpu():
    logits = torch.randn(3, 50)
    rows = [Row(Sampling(logprobs=n), 0, 0) for n in (0, 1, 5)]
    for ours, theirs in zip(
        log_probabilities(logits.cuda(), [1, 2, 3], rows), log_probabilities(logits, [1, 2, 3], rows), strict=True
    ):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
