"""Tests of decode steps that continue each other: what they choose is what passes read by the host choose."""

import gc
import subprocess
import sys
import weakref
from array import array
from dataclasses import replace
from functools import partial
from operator import ne
from types import SimpleNamespace

import pytest
import torch

from octile.serve.engine.drafts import count_accepted
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row, choose, log_probabilities
from octile.serve.runner import decode_loop
from octile.serve.runner.batch import Batch, Chunk, DecodedTokens, DecodeRequest
from octile.serve.runner.decode_loop import DecodeLoop
from octile.serve.runner.model_runner import ModelRunner
from tests.serve.models import CONFIG, exact_model, new_model, text

N_PAGES, LENGTHS, END = 12, (70, 5, 33), 200
PAGES = [array("i", range(4 * i, 4 * i + 4)) for i in range(3)]
SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7))
TRUNCATED = (
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.5, top_k=9, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.4),
)


def new_runner(n_drafts=0):
    """A runner that has read the prompts but for their last tokens, and the prompts."""
    runner = ModelRunner(new_model(fp8=False), N_PAGES, batch_invariant=True, n_drafts=n_drafts)
    prompts = [text(n, seed=n) for n in LENGTHS]
    runner.run(Batch([Chunk(tokens[:-1], 0, pages, 0) for tokens, pages in zip(prompts, PAGES, strict=True)]))
    return runner, prompts


def request(i, tokens, source=-1, end=END, position=None, samplings=SAMPLINGS, n_drafts=None):
    position, s = LENGTHS[i] - 1 if position is None else position, samplings[i]
    n_drafts = max(0, len(tokens) - 1) if n_drafts is None else n_drafts
    return DecodeRequest(source, position, end, i, s.top_k, n_drafts, s.temperature, s.top_p, s.min_p, tokens, PAGES[i])


def chosen_by_host(runner, prompts, steps, samplings=SAMPLINGS):
    """The tokens that `run` and the sampler choose, one after the other."""
    texts = [list(tokens) for tokens in prompts]
    for _ in range(steps):
        for i, tokens in enumerate(texts):
            logits = runner.run(Batch([Chunk(tokens[-1:], len(tokens) - 1, PAGES[i], 1)])).logits
            tokens += choose(logits, [Row(samplings[i], i, len(tokens))]).tolist()
    return [tokens[len(prompt) :] for tokens, prompt in zip(texts, prompts, strict=True)]


def test_steps_choose_what_the_host_chooses():
    runner, prompts = new_runner()
    steps = [runner.decode([request(i, tokens[-1:]) for i, tokens in enumerate(prompts)], 0)]
    for n in range(3):
        continued = [request(i, [], source=i, position=LENGTHS[i] - 1 + n) for i in range(3)]
        steps.append(runner.decode(continued, 0))
    found = [[step.wait()[i].chosen[0] for step in steps] for i in range(3)]
    assert found == chosen_by_host(*new_runner(), 4)


def test_a_step_continues_the_tokens_of_a_pass_and_a_pass_those_of_a_step():
    runner, prompts = new_runner()
    chunks = [Chunk(tokens[-1:], n - 1, pages, 1) for tokens, n, pages in zip(prompts, LENGTHS, PAGES, strict=True)]
    rows = [Row(sampling, i, n) for i, (sampling, n) in enumerate(zip(SAMPLINGS, LENGTHS, strict=True))]
    chosen = choose(runner.run(Batch(chunks)).logits, rows)
    step = runner.decode([request(i, [], source=i) for i in (2, 0, 1)], 0, chosen=chosen)
    assert step.on_device is not None
    row_of = {2: 0, 0: 1, 1: 2}
    chunks = [Chunk([-1 - row_of[i]], n + 1, pages, 1) for i, (n, pages) in enumerate(zip(LENGTHS, PAGES, strict=True))]
    rows = [row._replace(position=row.position + 2) for row in rows]
    after = choose(runner.run(Batch(chunks, step.on_device)).logits, rows)
    found = [[chosen[i].item(), step.wait()[row_of[i]].chosen[0], after[i].item()] for i in range(3)]
    assert found == chosen_by_host(*new_runner(), 3)


def test_no_step_with_drafts_continues_a_pass():
    runner, _ = new_runner(n_drafts=2)
    with pytest.raises(ValueError, match="chosen must be None in decode steps with drafts, and n_drafts is 2"):
        runner.decode([request(1, [], source=0)], 0, chosen=torch.tensor([5]))


@pytest.mark.slow
def test_steps_leave_out_the_tokens_that_the_host_leaves_out():
    runner, prompts = new_runner()
    steps = [runner.decode([request(i, tokens[-1:], samplings=TRUNCATED) for i, tokens in enumerate(prompts)], 0)]
    for n in range(5):
        continued = [request(i, [], source=i, position=LENGTHS[i] - 1 + n, samplings=TRUNCATED) for i in range(3)]
        steps.append(runner.decode(continued, 0))
    found = [[step.wait()[i].chosen[0] for step in steps] for i in range(3)]
    assert found == chosen_by_host(*new_runner(), 6, TRUNCATED)
    not_truncated = [Sampling(temperature=sampling.temperature) for sampling in TRUNCATED]
    assert all(map(ne, found, chosen_by_host(*new_runner(), 6, not_truncated)))


@pytest.mark.parametrize("i", range(3))
def test_drafts_leave_out_the_tokens_that_the_host_leaves_out(i):
    runner, prompts = new_runner(n_drafts=2)
    decoded = runner.decode([request(i, prompts[i][-1:], samplings=TRUNCATED)], 2).wait()[0]
    runner, prompts = new_runner(n_drafts=2)
    results = runner.run(Batch([Chunk(prompts[i][-1:], LENGTHS[i] - 1, PAGES[i], 1)]))
    tokens = choose(results.logits, [Row(TRUNCATED[i], i, LENGTHS[i])]).tolist()
    assert decoded.chosen[:1] == tokens
    for n in range(2):
        results = runner.draft(Batch([Chunk(tokens[-1:], LENGTHS[i] - 1 + n, PAGES[i], 1)]), results.hidden)
        tokens += choose(results.logits, [Row(TRUNCATED[i], i, LENGTHS[i] + 1 + n)]).tolist()
    assert decoded.drafts == tokens[1:]


def assert_equal_bits(found, expected):
    assert torch.equal(*(torch.tensor(values).view(torch.int32) for values in (found, expected)))


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
def test_log_probabilities_have_the_bits_of_those_that_the_host_asks_for(monkeypatch, exact, dtype):
    monkeypatch.setattr(decode_loop, "BLOCK_ROWS", 1)  # GEMMs of as many rows as `run` has
    model = exact_model(dtype) if exact else new_model(False, dtype)

    def reads(i, tokens):
        return Batch([Chunk(tokens, 0, PAGES[i], len(tokens))])

    runners = [ModelRunner(model, N_PAGES, batch_invariant=exact) for _ in range(2)]
    texts = [text(n, seed=n) for n in LENGTHS]
    for runner in runners:
        for i, tokens in enumerate(texts):
            runner.run(reads(i, tokens[:-1]))
    found, expected = [], []
    steps = [runners[0].decode([request(i, tokens[-1:]) for i, tokens in enumerate(texts)], 0, log_probs=True)]
    for n in range(3):
        continued = [request(i, [], source=i, position=LENGTHS[i] - 1 + n) for i in range(3)]
        steps.append(runners[0].decode(continued, 0, log_probs=n != 1))
    for n, step in enumerate(steps):
        logits = runners[1].run(Batch([Chunk(t[-1:], len(t) - 1, PAGES[i], 1) for i, t in enumerate(texts)])).logits
        results = step.wait()
        rows = [Row(replace(SAMPLINGS[i], logprobs=0), i, len(tokens)) for i, tokens in enumerate(texts)]
        chosen = choose(logits, rows).tolist()
        assert [decoded.chosen for decoded in results] == [[token] for token in chosen]
        if n == 2:
            assert [decoded.log_prob for decoded in results] == [None] * 3
        else:
            found += [decoded.log_prob for decoded in results]
            expected += [entry.logprob for entry in log_probabilities(logits, chosen, rows)]
        for tokens, token in zip(texts, chosen, strict=True):
            tokens.append(token)
    assert_equal_bits(found, expected)


def test_a_certain_token_has_the_log_probability_0_and_not_minus_0():
    runner, prompts = new_runner()
    hidden_TD = runner.run(Batch([Chunk(prompts[0][-1:], LENGTHS[0] - 1, PAGES[0], 1)])).hidden
    runner.forward.weights.head.zero_()
    runner.forward.weights.head[7] = 1e6 * hidden_TD[0]
    (decoded,) = runner.decode([request(0, prompts[0][-1:])], 0, log_probs=True).wait()
    assert decoded.chosen == [7]
    assert_equal_bits([decoded.log_prob], [0.0])


def test_log_probabilities_of_drafts_are_refused():
    runner, prompts = new_runner(n_drafts=2)
    with pytest.raises(ValueError, match="log_probs must be False in decode steps with drafts, and n_drafts is 2"):
        runner.decode([request(1, prompts[1][-1:])], 2, log_probs=True)


def choose_divided(runner, requests, n_drafts, advanced):
    """Launch a step in two parts, between which the sampler chooses; advanced: tokens of each request so far."""
    logits = runner.decode_logits(requests, n_drafts)
    rows = [
        Row(SAMPLINGS[r.seed], r.seed, LENGTHS[r.seed] + n + i)
        for r, n in zip(requests, advanced, strict=True)
        for i in range(1 + n_drafts)
    ]
    return runner.decode_chosen(choose(logits, rows))


@pytest.mark.one_case
@pytest.mark.parametrize("divided", [(True, True, True, True), (False, True, False, True), (True, False, False, True)])
@pytest.mark.parametrize("n_drafts", [2, 1, 0])
def test_a_step_in_two_parts_is_that_in_one_and_both_continue_each_other(divided, n_drafts):
    found = []
    for ways in ((False,) * 4, divided):
        runner, prompts = new_runner(n_drafts=2)
        steps, before, advanced, last = [], None, [0, 0, 0], [0, 0, 0]
        for is_divided in ways:
            requests = [
                request(i, tokens[-1:])
                if before is None
                else request(i, [], source=i, position=LENGTHS[i] - 1 + advanced[i] - last[i], n_drafts=n_drafts)
                for i, tokens in enumerate(prompts)
            ]
            if is_divided:
                step = choose_divided(runner, requests, n_drafts, advanced)
            else:
                step = runner.decode(requests, n_drafts)
            before = step.wait()
            last = [decoded.accepted + 1 for decoded in before]
            advanced = [n + more for n, more in zip(advanced, last, strict=True)]
            steps.append([(d.chosen[: d.accepted + 1], d.accepted, d.drafts) for d in before])
        found.append((steps, torch.stack(runner.cache.layers)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_a_step_whose_second_part_is_not_launched_changes_no_other():
    found = []
    for begins in (False, True):
        runner, prompts = new_runner(n_drafts=2)
        steps = [runner.decode([request(1, prompts[1][-1:])], 2)]
        for _ in range(3):
            if begins:
                runner.decode_logits([request(0, prompts[0][-1:])], 2)
            steps.append(runner.decode([request(1, [], source=0, n_drafts=2)], 2))
        found.append([step.wait() for step in steps])
    assert found[0] == found[1]


def test_a_request_continues_its_own_tokens_at_another_place():
    runner, prompts = new_runner()
    runner.decode([request(i, tokens[-1:]) for i, tokens in enumerate(prompts)], 0)
    moved = runner.decode([request(2, [], source=2), request(0, [], source=0)], 0).wait()
    expected = chosen_by_host(*new_runner(), 2)
    assert [row.chosen[0] for row in moved] == [expected[2][1], expected[0][1]]


@pytest.mark.one_case
@pytest.mark.parametrize("n_accepted", [0, 1, 2])
def test_drafts_are_accepted_up_to_the_first_that_is_not_chosen(n_accepted):
    expected = chosen_by_host(*new_runner(), 5)[1]
    runner, prompts = new_runner(n_drafts=2)
    drafts = [*expected[:n_accepted], *[(expected[i] + 1) % CONFIG.vocab_size for i in range(n_accepted, 2)]]
    first = runner.decode([request(1, [prompts[1][-1], *drafts])], 2).wait()[0]
    assert (first.accepted, first.chosen[: n_accepted + 1]) == (n_accepted, expected[: n_accepted + 1])
    second = runner.decode([request(1, [], source=0, n_drafts=2)], 2).wait()[0]
    assert second.chosen[0] == expected[n_accepted + 1]
    assert second.accepted == count_accepted(first.drafts, expected[n_accepted + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 1, 0, 2, 2), (0, 2, 1, 1, 2), (1, 0, 0, 0, 1)])
def test_steps_of_other_numbers_of_drafts_choose_the_same_tokens(counts):
    expected = chosen_by_host(*new_runner(), 15)[1]
    runner, prompts = new_runner(n_drafts=2)
    found, n_verified, before = [], [], None
    for n in counts:
        tokens, made = (prompts[1][-1:], 0) if before is None else ([], before)
        position = LENGTHS[1] - 1 + max(len(found) - n_verified[-1] - 1, 0) if found else None
        own = min(n, made)
        given = request(1, tokens, source=-1 if before is None else 0, position=position, n_drafts=own)
        (decoded,) = runner.decode([given], n).wait()
        assert (len(decoded.chosen), len(decoded.drafts)) == (1 + n, n)
        assert decoded.accepted <= own
        found += decoded.chosen[: decoded.accepted + 1]
        n_verified.append(decoded.accepted)
        before = n
    assert found == expected[: len(found)]


@pytest.mark.parametrize("n_drafts", [0, 1])
def test_a_step_writes_the_latents_of_multi_token_prediction_with_drafts_and_without(n_drafts):
    runner, prompts = new_runner(n_drafts=2)
    for source in (-1, 0):
        runner.decode([request(1, prompts[1][-1:] if source < 0 else [], source)], n_drafts)
    host, prompts = new_runner(n_drafts=2)
    tokens, start = list(prompts[1]), LENGTHS[1] - 1
    for position in (start, start + 1):
        results = host.run(Batch([Chunk(tokens[-1:], position, PAGES[1], 1)]))
        tokens += choose(results.logits, [Row(SAMPLINGS[1], 1, len(tokens))]).tolist()
        host.draft(Batch([Chunk(tokens[-1:], position, PAGES[1], 0)]), results.hidden)
    found, expected = (r.cache.layers[-1][PAGES[1][0], start : start + 2] for r in (runner, host))
    assert expected.abs().amax(-1).min() > 0
    assert torch.equal(found, expected)


def test_more_drafts_than_there_are_rows_for_are_refused():
    runner, prompts = new_runner(n_drafts=2)
    with pytest.raises(ValueError, match="n_drafts must be from 0 to 2, the runner's, not 3"):
        runner.decode([request(1, prompts[1][-1:])], 3)


def test_a_missing_draft_is_not_accepted():
    runner, prompts = new_runner(n_drafts=2)
    assert runner.decode([request(1, prompts[1][-1:])], 2).wait()[0].accepted == 0


@pytest.mark.parametrize("n_drafts", [0, 2])
def test_nothing_is_written_from_the_end_of_a_text_on(n_drafts):
    runner, prompts = new_runner(n_drafts)
    before = torch.stack(runner.cache.layers).flatten(1, 2)
    end = LENGTHS[1]  # the last token is read, and no draft
    runner.decode([request(1, [prompts[1][-1], *[0] * n_drafts], end=end)], n_drafts)
    runner.decode([request(1, [], source=0, end=end, n_drafts=n_drafts)], n_drafts)
    after = torch.stack(runner.cache.layers).flatten(1, 2)
    changed = (before != after).any(-1).any(0).nonzero()[:, 0].tolist()
    assert changed == [64 * PAGES[1][0] + end - 1]


def test_logits_with_nan_choose_no_token():
    runner, prompts = new_runner()
    runner.forward.weights.head[0] = float("nan")
    runner.decode([request(1, prompts[1][-1:])], 0)
    for log_probs in (False, True):
        assert runner.decode([request(1, [], source=0)], 0, log_probs).wait()[0].chosen == [-1]


@pytest.mark.parametrize("n_drafts", [0, 1, 3])
def test_no_row_is_longer_than_the_reach_of_its_request(monkeypatch, n_drafts):
    longest, rows = [], DecodeLoop._rows

    def counted(self, *arguments):
        step = rows(self, *arguments)
        longest.append(int(step.lengths.max()))
        return step

    monkeypatch.setattr(DecodeLoop, "_rows", counted)
    runner, prompts = new_runner(n_drafts)
    first = request(1, [prompts[1][-1], *range(n_drafts)])
    runner.decode([first], n_drafts)
    reach = runner.loop._reach(first, n_drafts)
    assert LENGTHS[1] + n_drafts <= max(longest) <= reach
    longest.clear()
    continued = request(1, [], source=0, n_drafts=n_drafts)
    runner.decode([continued], n_drafts)
    assert max(longest) <= runner.loop._reach(continued, n_drafts) == reach + 1 + n_drafts
    assert runner.loop._reach(continued._replace(end=LENGTHS[1]), n_drafts) == LENGTHS[1]


def test_a_gpu_that_waits_for_another_rank_is_not_waited_for_forever():
    decoded = DecodedTokens(torch.zeros(1, 2), SimpleNamespace(query=lambda: False), 0, timeout=0.01)
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 s"):
        decoded.wait()


class Event:
    """A stand-in for CUDA's events, to which a busy GPU has not come."""

    def __init__(self, gpu):
        self.gpu, self.is_recorded = gpu, False
        gpu.events.append(self)

    def record(self, stream):
        self.is_recorded = True

    def query(self):
        return not self.gpu.is_busy

    def synchronize(self):
        pass


class Graphs:
    """A stand-in for the memory of CUDA graphs: a graph computes its step at once, and after an error there is none."""

    def __init__(self, error=None):
        self.error = error

    def capture_sizes(self, sizes, step):
        return {size: self.capture(partial(step, size)) for size in sizes}

    def capture(self, compute):
        result = compute()
        if self.error is not None:
            raise self.error

        def replay():
            """Compute again, and write the result where it was."""
            for old, new in zip(_tensors(result), _tensors(compute()), strict=True):
                old.copy_(new)

        return replay, result


def _tensors(result):
    """The tensors of a result, which may be a tuple of tuples."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in _tensors(part)] if isinstance(result, tuple) else []


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for a GPU: whether it is busy, and its events."""
    found, zeros = SimpleNamespace(is_busy=False, events=[]), torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sides, pin_memory=False, **kind: zeros(*sides, **kind))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", partial(Event, found))
    yield found
    found.is_busy = False
    decode_loop._drop_computed()


@pytest.fixture(scope="module")
def forward():
    return ModelRunner(new_model(fp8=False), N_PAGES).forward


def new_loop(forward, error=None):
    return DecodeLoop(forward, 2, 4, 0, Graphs(error))


def end_of_launched_loop(forward):
    """Launch two steps, end their loop, and return weak references to the buffers that the steps use."""
    loop = new_loop(forward)
    for _ in range(2):
        loop.run([request(0, [5])], 0)
    buffers = [weakref.ref(buffer) for buffer in (loop._host, loop._results)]
    del loop
    gc.collect()  # graphs of the stand-in refer to their loop
    return buffers


def are_held(buffers):
    gc.collect()
    found = {buffer() is not None for buffer in buffers}
    assert len(found) == 1
    return found.pop()


def test_no_buffer_of_an_ended_loop_is_held_if_its_steps_are_computed(gpu, forward):
    assert not are_held(end_of_launched_loop(forward))


def test_buffers_of_an_ended_loop_are_held_until_another_one_starts_after_its_steps(gpu, forward):
    gpu.is_busy = True
    buffers = end_of_launched_loop(forward)
    loops = [new_loop(forward)]
    assert are_held(buffers)
    gpu.is_busy = False
    assert are_held(buffers)
    loops.append(new_loop(forward))
    assert not are_held(buffers)


def test_buffers_of_an_ended_loop_are_held_until_another_one_ends_after_its_steps(gpu, forward):
    gpu.is_busy = True
    loop = new_loop(forward)
    buffers = end_of_launched_loop(forward)
    gpu.is_busy = False
    assert are_held(buffers)
    del loop
    assert not are_held(buffers)


def test_buffers_outlast_the_steps_before_a_capture_that_fails(gpu, forward, monkeypatch):
    found, finalize = [], weakref.finalize

    def observed(loop, *arguments):
        found.extend(weakref.ref(buffer) for buffer in (loop._host, loop._results))
        return finalize(loop, *arguments)

    gpu.is_busy = True
    with monkeypatch.context() as patch:
        patch.setattr(weakref, "finalize", observed)
        with pytest.raises(RuntimeError, match="out of memory"):
            new_loop(forward, RuntimeError("out of memory"))
    assert are_held(found)
    gpu.is_busy = False
    new_loop(forward)
    assert not are_held(found)


def test_a_step_makes_no_event_and_no_memory_of_the_host(gpu, forward, monkeypatch):
    loop = new_loop(forward)
    assert all(event.is_recorded for event in gpu.events)  # torch makes CUDA's event when it is recorded first

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "Event", fail)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sides, **kind: fail() if "pin_memory" in kind else empty(*sides, **kind)
    )
    steps = [loop.run([request(0, [5])], 0, log_probs=True) for _ in range(3)]
    assert len({step.wait()[0].log_prob for step in steps}) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [2, 1, 0])
def test_graphs_of_both_parts_of_a_step_compute_what_the_graph_of_all_computes(gpu, n_drafts):
    found = []
    for is_divided in (False, True):
        forward = ModelRunner(new_model(fp8=False), N_PAGES, batch_invariant=True).forward
        loop = DecodeLoop(forward, 2, 4, 2, Graphs(), divides_steps=True)
        given, position = [5, *range(n_drafts)], LENGTHS[0] - 1
        for length in (0, 1):
            requests = [request(0, given, position=position)] + [request(1, [6], position=0)] * length
            if is_divided:
                logits = loop.logits(requests, n_drafts)
                rows = [
                    Row(SAMPLINGS[r.seed], r.seed, r.position + 1 + i) for r in requests for i in range(1 + n_drafts)
                ]
                step = loop.record(choose(logits, rows))
            else:
                step = loop.run(requests, n_drafts)
            found.append([(d.chosen[: d.accepted + 1], d.drafts) for d in step.wait()])
    assert found[:2] == found[2:]


def test_steps_are_captured_in_two_parts_only_where_they_are_launched_so(gpu, forward):
    for n_drafts, divides_steps in ((0, True), (2, False)):
        loop = DecodeLoop(forward, 2, 4, n_drafts, Graphs(), divides_steps)
        assert not loop._parts


EXIT = """
from types import SimpleNamespace
from octile.serve.runner.decode_loop import DecodeLoop

class LaunchedStep:
    @property
    def is_computed(self):
        print("looks at the step")
        return False

loop = DecodeLoop(SimpleNamespace(weights=SimpleNamespace(device="cpu"), tp=SimpleNamespace(size=1)), 1, 1, 0)
loop._launched.steps[0] = LaunchedStep()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ends_before", "printed"), [(True, "looks at the step\n"), (False, "")])
def test_steps_are_looked_at_when_their_loop_ends_but_not_at_the_exit_of_the_interpreter(ends_before, printed):
    code = EXIT + "del loop\n" * ends_before
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == (printed, "")
