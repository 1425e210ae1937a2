"""The engines of two gloo ranks behind rank 0, compared with one process; and the choice of a rank."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from octile.models.config import ModelConfig
from octile.parallel.ranks import FOREVER, Ranks, world
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import FinishReason, Request, RequestFactory, Sampling
from octile.serve.ranks.engine import ExpertParallelEngine, LockstepEngine, follow
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import Tokenizer
from tests.serve import models
from tests.serve.models import EXCHANGED_ROWS, adding, exchanges_on_cpu, new_model, text
from tests.serve.ranks.test_experts import FIRST, N_PAGES, THREE_LAYERS, spread
from tests.worlds import Outcomes, each_work

SAMPLINGS = [
    Sampling(3 + 3 * (i % 2), temperature=0.7 * (i % 2), top_p=0.5 if i == 3 else 1.0, seed=i, ignore_eos=True)
    for i in range(5)
]
CONFIG = EngineConfig(max_batch=2, max_step_tokens=24, batch_invariant=True)
TOKENIZER = Tokenizer.train(["one two three"], 258)


def with_front(rank: int, use: Callable[[LockstepEngine], None], runner: ModelRunner | None = None) -> Engine:
    """Use the engine of rank 0, which the other ranks follow; return this rank's own one."""
    runner = runner or ModelRunner(spread()[1], N_PAGES, batch_invariant=True, max_batch=2)
    config = replace(CONFIG, n_drafts=runner.n_drafts)
    engine, ranks = Engine(runner, TOKENIZER, config), Ranks(rank, dist.get_world_size(), None, FOREVER)
    stepped = ExpertParallelEngine(engine, runner, control=world())
    if rank:
        follow(stepped, ranks, world())
    else:
        lost: list[Exception] = []
        front = LockstepEngine(stepped, ranks, world(), lost.append)
        try:
            use(front)
        finally:
            front.close()
        assert not lost
    return engine


def texts_of(engine: LockstepEngine | Engine, first: int = 3, later: int = 2) -> list[tuple[int, ...]]:
    """The tokens of some requests, the last of which are added later."""
    add = adding(engine)
    found = {add(text(30, i), SAMPLINGS[i]).id: () for i in range(first)}
    ended, steps = 0, 0
    while ended < first + later:
        for output in engine.step():
            found[output.request_id] += output.tokens
            ended += output.finish_reason is not None
        if steps == 3:
            found |= {add(text(30, i), SAMPLINGS[i]).id: () for i in range(first, first + later)}
        steps += 1
    return [found[i] for i in sorted(found)]


@cache
def texts_of_one_process(
    config: ModelConfig, fp8: bool, n_requests: tuple[int, int], batch_invariant: bool = True
) -> list[tuple[int, ...]]:
    """The texts of requests in one process, in which nothing is drafted. Rank 0 computes them once for its cases."""
    weights = ServedWeights.of_model(new_model(fp8, config=config))
    runner = ModelRunner(weights, N_PAGES, batch_invariant=batch_invariant)
    return texts_of(Engine(runner, TOKENIZER, CONFIG), *n_requests)


def check_texts(rank: int, folder: Path, n_drafts: int, ahead: bool, exchange: bool = False, fp8: bool = False) -> None:
    """Compare texts with those of one process."""
    n_requests = (2, 1) if exchange else (3, 2)  # Triton's interpreter takes its time
    config = models.CONFIG if exchange and n_drafts else THREE_LAYERS  # two mixtures, of which one may be the drafts'
    weights = ServedWeights.of_model(new_model(fp8, config=config))
    expected, found = [] if rank else texts_of_one_process(config, fp8, n_requests), []
    placement = torch.cat((FIRST, FIRST[:1])) if n_drafts and config is THREE_LAYERS else FIRST
    with exchanges_on_cpu(folder) if exchange else nullcontext():
        experts = ExpertParallelWeights(weights, placement, drafts=n_drafts > 0)
        runner = ModelRunner(experts, N_PAGES, batch_invariant=True, max_batch=2, n_drafts=n_drafts)
        if ahead:  # as on a GPU
            runner.max_ahead = 2
        if exchange:
            rows = experts.decoding_exchange(EXCHANGED_ROWS * (1 + n_drafts))
            runner._decoding = runner.forward.with_feed_forward(exchange=rows)
            if fp8:  # in one of two tests, since it takes its time
                runner.use_peers(experts.peer_dispatcher(256))
        engine = with_front(rank, lambda front: found.extend(texts_of(front, *n_requests)), runner)
    assert found == expected
    assert (engine.stats().steps_ahead > 0) == ahead
    assert (engine.stats().drafted_tokens > 0) == (n_drafts > 0)


def prompt_logprobs_of(engine: LockstepEngine | Engine) -> list[list[float]]:
    """The log-probabilities of prompts that are longer than a step, while another text is decoded."""
    add, sampling = adding(engine), Sampling(3, seed=0, ignore_eos=True, prompt_logprobs=1)
    add(text(5), Sampling(9, seed=0, ignore_eos=True))
    found: dict[int, list[float]] = {add(text(40, i), sampling).id: [] for i in range(2)}
    while engine.has_work:
        for output in engine.step():
            if output.prompt_logprobs:
                found[output.request_id] = [entry.logprob for entry in output.prompt_logprobs]
    return [*found.values()]


def log_probabilities_of_prompts_are_those_of_one_process(rank: int, folder: Path) -> None:
    expected, found = [], []
    if not rank:
        weights = ServedWeights.of_model(new_model(False, config=THREE_LAYERS))
        single = Engine(ModelRunner(weights, N_PAGES, batch_invariant=True), TOKENIZER, CONFIG)
        expected = prompt_logprobs_of(single)
    with_front(rank, lambda front: found.extend(prompt_logprobs_of(front)))
    assert found == expected
    assert [len(each) for each in found] == ([] if rank else [39, 39])


def texts_are_those_of_one_process(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=0, ahead=False)


def texts_of_steps_that_are_launched_ahead(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=0, ahead=True)


def texts_with_drafts(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=2, ahead=False)


def texts_with_the_exchanges_of_gpus(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=0, ahead=True, exchange=True)


def texts_with_drafts_and_the_exchanges_of_gpus_in_fp8(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=1, ahead=True, exchange=True, fp8=True)


def a_request_goes_to_the_rank_that_has_the_fewest(rank: int, folder: Path) -> None:
    def use(front: LockstepEngine) -> None:
        add = adding(front)
        requests = [add(text(5, i), Sampling(20, seed=0, ignore_eos=True)) for i in range(3)]  # ranks 0, 1, 0
        front.step()
        assert front.cancel(requests[0].id)
        assert front.cancel(requests[2].id)
        assert not front.cancel(requests[2].id)
        add(text(5, 3), Sampling(1, seed=0, ignore_eos=True))  # rank 0
        outputs = front.step()
        assert {o.request_id: o.finish_reason for o in outputs} == {1: None, 3: FinishReason.LENGTH}
        add(text(5, 4), Sampling(1, seed=0, ignore_eos=True))  # rank 0 again, which has none
        front.step()

    stats = with_front(rank, use).stats()
    assert (stats.requests, stats.canceled, stats.finished) == ((4, 2, 2), (1, 0, 0))[rank]


def a_request_with_the_id_of_one_that_runs_is_refused(rank: int, folder: Path) -> None:
    def use(front: LockstepEngine) -> None:
        sampling = Sampling(2, seed=0, ignore_eos=True)
        adding(front)(text(5), sampling)
        with pytest.raises(ValueError, match=r"^request\.id must differ from .*, not 0, "):
            adding(front)(text(5, 1), sampling)
        while front.has_work:
            front.step()

    stats = with_front(rank, use).stats()
    assert (stats.requests, stats.finished) == ((1, 1), (0, 0))[rank]


def a_request_that_is_canceled_before_a_step_is_not_added(rank: int, folder: Path) -> None:
    def use(front: LockstepEngine) -> None:
        assert front.cancel(adding(front)(text(5), SAMPLINGS[0]).id)
        assert front.step() == []

    assert with_front(rank, use).stats().requests == 0


def counts_are_those_of_both_ranks(rank: int, folder: Path) -> None:
    def use(front: LockstepEngine) -> None:
        texts_of(front)
        stats = front.stats()
        assert (stats.requests, stats.finished, stats.n_pages) == (5, 5, 2 * N_PAGES)
        assert stats.generated_tokens == sum(s.max_new_tokens for s in SAMPLINGS)
        assert stats.used_pages == stats.running == stats.waiting == 0

    with_front(rank, use)


def tokens_of_experts_travel_when_they_have_changed(rank: int, folder: Path) -> None:
    runner = ModelRunner(spread()[1], N_PAGES, batch_invariant=True, max_batch=2, expert_window=32)
    steps, found = [], []

    def use(front: LockstepEngine) -> None:
        take_part = front._rank.round

        def counted(commands):
            reports = take_part(commands)
            if reports is not None:
                steps.append([report.stats.expert_tokens is not None for report in reports])
            return reports

        front._rank.round = counted
        texts_of(front)
        found.append(front.stats().expert_tokens)

    with_front(rank, use, runner)
    of_both: list = [None, None]
    dist.all_gather_object(of_both, runner.expert_tokens)
    if not rank:
        sums = {
            layer: tuple(map(sum, zip(*(of_rank[layer] for of_rank in of_both), strict=True))) for layer in of_both[0]
        }
        assert found == [sums]
        assert sum(sums[1]) > 0
        assert steps == [2 * [i in (0, 3, 7, 11, 15)] for i in range(len(steps))]  # at first, and after 4 steps each


def a_request_keeps_its_id_and_its_seed_on_its_rank(rank: int, folder: Path) -> None:
    seeds: list[int] = []
    runner = ModelRunner(spread()[1], N_PAGES, batch_invariant=True, max_batch=2)
    taken: list[tuple[int, int]] = []

    def use(front: LockstepEngine) -> None:
        factory = RequestFactory(200, 10_000)
        factory.make(text(5), *[Sampling()] * 7)  # so that ids do not begin at 0
        for request in factory.make(text(5), *[Sampling(1, seed=None)] * 2):
            front.submit(request)
            seeds.append(request.seed)
        front.step()

    submit = Engine.submit

    def recorded(engine: Engine, request: Request) -> None:
        taken.append((request.id, request.seed))
        submit(engine, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "submit", recorded)
        with_front(rank, use, runner)
    of_both: list = [None, None]
    dist.all_gather_object(of_both, taken)
    if not rank:
        assert of_both == [[(7, seeds[0])], [(8, seeds[1])]]


WORKS = [
    log_probabilities_of_prompts_are_those_of_one_process,
    texts_are_those_of_one_process,
    texts_of_steps_that_are_launched_ahead,
    texts_with_drafts,
    texts_with_the_exchanges_of_gpus,
    texts_with_drafts_and_the_exchanges_of_gpus_in_fp8,
    a_request_goes_to_the_rank_that_has_the_fewest,
    a_request_with_the_id_of_one_that_runs_is_refused,
    a_request_that_is_canceled_before_a_step_is_not_added,
    counts_are_those_of_both_ranks,
    tokens_of_experts_travel_when_they_have_changed,
    a_request_keeps_its_id_and_its_seed_on_its_rank,
]
FURTHER = {  # with what shows the same
    texts_with_the_exchanges_of_gpus: (
        "texts_with_drafts_and_the_exchanges_of_gpus_in_fp8, and texts_of_steps_that_are_launched_ahead without drafts"
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "front-engine", WORKS, further=FURTHER)


@each_work(WORKS, FURTHER)
def test_two_ranks(outcomes: Outcomes, work):
    outcomes.assert_passed(work)
