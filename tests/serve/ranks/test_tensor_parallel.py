"""Attention's heads and the rows of steps divided among two gloo ranks, or two groups of them, vs. one process."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from octile.checkpoint.hugging_face import save
from octile.checkpoint.tensor_file import TensorFile
from octile.ops.sample_tokens import NOT_A_NUMBER
from octile.scaled import ScaledTensor, quantize
from octile.serve.engine import drafts
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.ranks.engine import ExpertParallelEngine, LockstepEngine
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.tensor_parallel import ALONE, TensorParallel
from octile.serve.runner.graphs import PrefillGraphs
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.head_share import HeadShare
from octile.serve.weights.weights import ServedWeights
from tests.parallel.expert_cases import peers_on_cpu
from tests.serve import models
from tests.serve.models import EXCHANGED_ROWS, Texts, adding, exchanges_on_cpu, new_model, text
from tests.serve.ranks.test_engine import (
    CONFIG,
    SAMPLINGS,
    TOKENIZER,
    prompt_logprobs_of,
    texts_of,
    texts_of_one_process,
    with_front,
)
from tests.worlds import Outcomes, each_work

N_PAGES = 20
# heads of 128 channels for each rank of two, whole blocks of FP8 weights
MODEL = replace(models.CONFIG, num_hidden_layers=3, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
DIRECT = replace(MODEL, q_lora_rank=None)
CHOOSING = replace(MODEL, index_n_heads=2, index_head_dim=64, index_topk=24, indexer_rope_interleave=True)
CHOOSING = replace(CHOOSING, indexer_types=("full", "shared", "full"))
TWO_RANKS = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6, 7, 0], [7, 1, 5, 3, 4, 2, 7, 6, 0, 7]])
FOUR_RANKS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 4, 6], [7, 1, 5, 3, 4, 2, 7, 6, 0, 7, 2, 1]])
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # the terms of sums are added in another order
SIZES = ((21, 9), (1, 1), (1, 12), (30, 1))  # most steps have an odd number of rows


def weights_of(config, fp8: bool, heads: HeadShare | None = None) -> ServedWeights:
    return ServedWeights.of_model(new_model(fp8, config=config), heads or HeadShare())


def spread(config=MODEL, fp8: bool = False, drafts: bool = False) -> ExpertParallelWeights:
    tp = TensorParallel.of_consecutive(2)
    placement = TWO_RANKS if dist.get_world_size() == 2 else FOUR_RANKS
    placement = torch.cat((placement, placement[:1])) if drafts else placement
    return ExpertParallelWeights(weights_of(config, fp8, tp.share), placement, drafts=drafts, tp=tp)


def read(runner: ModelRunner, sizes: Sequence[tuple[int, int]] = SIZES) -> Tensor:
    """Logits of two texts, which are read in so many steps."""
    texts = Texts(runner, [text(60), text(40, 1)])
    for of_texts in sizes:
        texts.run(*of_texts)
    return torch.cat(texts.logits)


def check_logits(config, fp8: bool, batch_invariant: bool) -> None:
    """Compare logits with those of one process, and the latents of the two ranks with each other."""
    experts = spread(config, fp8)
    expected = read(ModelRunner(weights_of(config, fp8), N_PAGES, batch_invariant=batch_invariant))
    runner = ModelRunner(experts, N_PAGES, batch_invariant=batch_invariant)
    found = read(runner)
    if fp8:  # a number on the border of two encoded values is rounded to either
        assert (found - expected).norm() < 0.02 * expected.norm()
    else:
        torch.testing.assert_close(found, expected, **CLOSE)
    cached = torch.stack([*runner.cache.layers])  # which each rank computes, while it receives the logits
    of_ranks = [torch.empty_like(cached) for _ in range(2)]
    dist.all_gather(of_ranks, cached)
    assert cached.any()
    assert torch.equal(*of_ranks)


def logits_in_fp32(rank: int, folder: Path) -> None:
    check_logits(MODEL, False, True)


def logits_in_fp8(rank: int, folder: Path) -> None:
    check_logits(MODEL, True, True)


def logits_without_batch_invariance(rank: int, folder: Path) -> None:
    check_logits(MODEL, False, False)


def logits_of_queries_that_are_not_compressed(rank: int, folder: Path) -> None:
    check_logits(DIRECT, True, False)


def logits_of_top_k_positions(rank: int, folder: Path) -> None:
    check_logits(CHOOSING, False, False)


def bits_do_not_depend_on_the_batch(rank: int, folder: Path) -> None:
    runner = ModelRunner(spread(fp8=True), N_PAGES, batch_invariant=True)
    expected = read(runner)
    assert torch.equal(read(runner, ((32, 22), (21, 1))), expected)


def logits_of_graphs(rank: int, folder: Path) -> None:
    experts = spread(fp8=True)
    runner = ModelRunner(experts, N_PAGES)
    with peers_on_cpu(folder):
        runner.use_peers(experts.peer_dispatcher(128))
        runner.prefill_graphs = PrefillGraphs(runner._with_peers, None, 256)
        runner.max_rank_rows = 31
        found = [read(runner, ((20, 9), (19, 12)))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "_fills", True)  # as on a GPU
            found.append(read(runner, ((20, 9), (19, 12))))
    expected = read(ModelRunner(weights_of(MODEL, True), N_PAGES), ((20, 9), (19, 12)))
    for logits in found:
        assert (logits - expected).norm() < 0.02 * expected.norm()


def check_texts(
    rank: int,
    folder: Path,
    n_drafts: int = 0,
    ahead: bool = False,
    exchange: bool = False,
    n_requests: tuple[int, int] = (3, 2),
) -> None:
    """Compare texts with those of one process."""
    expected, found = [] if rank else texts_of_one_process(MODEL, False, n_requests), []
    with exchanges_on_cpu(folder) if exchange else nullcontext():
        experts = spread(MODEL, drafts=n_drafts > 0)
        runner = ModelRunner(experts, N_PAGES, None, 2, True, n_drafts, expert_window=8)
        if ahead:  # as on a GPU
            runner.max_ahead = 2
        if exchange:
            runner._decoding = runner.forward.with_feed_forward(
                exchange=experts.decoding_exchange(EXCHANGED_ROWS * (1 + n_drafts))
            )
        engine = with_front(rank, lambda front: found.extend(texts_of(front, *n_requests)), runner)
    assert found == expected
    assert (engine.stats().steps_ahead > 0) == ahead
    assert (engine.stats().drafted_tokens > 0) == (n_drafts > 0)


def texts_are_those_of_one_process(rank: int, folder: Path) -> None:
    check_texts(rank, folder)


def texts_with_drafts(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=2)


def texts_with_drafts_of_steps_that_are_launched_ahead(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=1, ahead=True)


def log_probabilities_of_steps_that_are_launched_ahead(rank: int, folder: Path) -> None:
    def logprobs_of(front: LockstepEngine) -> list[list[float]]:
        add = adding(front)
        found: dict[int, list[float]] = {
            add(text(20, i), Sampling(9, 1.0, seed=i, ignore_eos=True, logprobs=(0, None, 0)[i])).id: []
            for i in range(3)
        }
        while front.has_work:
            for output in front.step():
                found[output.request_id] += [entry.logprob for entry in output.logprobs]
        return [*found.values()]

    both = []
    for max_ahead in (0, 2):
        runner = ModelRunner(spread(), N_PAGES, batch_invariant=True, max_batch=2)
        runner.max_ahead = max_ahead
        engine = with_front(rank, lambda front: both.append(logprobs_of(front)), runner)
        assert (engine.stats().steps_ahead > 0) == (max_ahead > 0)
    if not rank:
        assert both[0] == both[1]
        assert list(map(len, both[0])) == [9, 0, 9]


def texts_with_the_exchanges_of_gpus(rank: int, folder: Path) -> None:
    check_texts(rank, folder, ahead=True, exchange=True, n_requests=(2, 1))  # Triton's interpreter takes its time


def prompts_share_a_beginning_and_pages_run_out(rank: int, folder: Path) -> None:
    """Two long texts of one beginning do not fit together: one is preempted, on both ranks alike."""
    prompts = [text(64) + text(61 + i, 7 + i) for i in range(2)]

    def tokens_of(engine: LockstepEngine | Engine) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        add = adding(engine)
        for i, prompt in enumerate(prompts):
            found[add(prompt, Sampling(8, seed=i, temperature=0.5, ignore_eos=True)).id] = []
        while engine.stats().finished < len(prompts):
            for output in engine.step():
                found[output.request_id] += output.tokens
        return [*found.values()]

    expected, found = [], []
    if not rank:
        expected = tokens_of(
            Engine(ModelRunner(weights_of(MODEL, False), N_PAGES, batch_invariant=True), TOKENIZER, CONFIG)
        )
    runner = ModelRunner(spread(), 4, batch_invariant=True, max_batch=2)
    stats = with_front(rank, lambda front: found.extend(tokens_of(front)), runner).stats()
    assert found == expected
    assert stats.shared_tokens > 0
    assert stats.preemptions > 0


def log_probabilities_of_prompts_are_those_of_one_process(rank: int, folder: Path) -> None:
    expected, found = [], []
    if not rank:
        single = ModelRunner(weights_of(MODEL, False), N_PAGES, batch_invariant=True)
        expected = prompt_logprobs_of(Engine(single, TOKENIZER, CONFIG))
    runner = ModelRunner(spread(), N_PAGES, batch_invariant=True, max_batch=2)
    with_front(rank, lambda front: found.extend(prompt_logprobs_of(front)), runner)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)  # heads are added in another order


def requests_go_to_the_group_that_has_the_fewest(rank: int, folder: Path) -> None:
    def use(front: LockstepEngine) -> None:
        add = adding(front)
        requests = [add(text(5, i), Sampling(20, seed=0, ignore_eos=True)) for i in range(3)]  # groups 0, 1, 0
        front.step()
        assert [front.cancel(requests[i].id) for i in (0, 2, 2)] == [True, True, False]
        add(text(5, 3), Sampling(1, seed=0, ignore_eos=True))  # group 0, which has none
        assert [output.request_id for output in front.step()] == [3, 1]  # group 0 first

    runner = ModelRunner(spread(), N_PAGES, batch_invariant=True, max_batch=2)
    stats = with_front(rank, use, runner).stats()
    assert (stats.requests, stats.canceled, stats.finished) == ((3, 2, 1), (1, 0, 0))[rank // 2]


def counts_are_those_of_groups(rank: int, folder: Path) -> None:
    runner = ModelRunner(spread(), N_PAGES, batch_invariant=True, max_batch=2, expert_window=8)
    found = []

    def use(front: LockstepEngine) -> None:
        texts_of(front)
        found.append(front.stats())

    with_front(rank, use, runner)
    groups = dist.get_world_size() // 2
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, runner.expert_tokens)
    if not rank:
        (stats,) = found
        assert (stats.requests, stats.finished, stats.n_pages) == (5, 5, groups * N_PAGES)
        assert stats.generated_tokens == sum(sampling.max_new_tokens for sampling in SAMPLINGS)
        total = tuple(map(sum, zip(*(tokens[1] for tokens in of_ranks), strict=True)))
        assert stats.expert_tokens[1] == total
        assert sum(total) > 0


def each_row_is_routed_once(rank: int, folder: Path) -> None:
    """Two experts are chosen for each row of a step of 21 + 9 rows, by one of the ranks."""
    runner = ModelRunner(spread(), N_PAGES, expert_window=8)
    texts = Texts(runner, [text(60), text(40, 1)]).run(21, 9)
    for _ in range(7):
        texts.run(1, 0)
    counts = torch.tensor(runner.expert_tokens[1]).sum()
    dist.all_reduce(counts)
    assert int(counts) == 2 * (21 + 9 + 7)


def check_that_a_difference_is_found(rank: int, n_drafts: int, ahead: bool) -> None:
    """A request ends on rank 1 alone. Both ranks say so before a pass of other rows, which others would wait for."""
    runner = ModelRunner(spread(drafts=n_drafts > 0), N_PAGES, None, 2, False, n_drafts)
    runner.max_ahead = 2 if ahead else 0
    config = EngineConfig(max_batch=2, max_step_tokens=24, batch_invariant=False, n_drafts=n_drafts)
    engine = Engine(runner, TOKENIZER, config)
    ranks = ExpertParallelEngine(engine, runner)
    for i in range(3):
        engine.add(text(9, i), Sampling(40, seed=i, ignore_eos=True))
    for _ in range(6):
        ranks.step()
    assert bool(engine.steps.launched) == ahead
    if ahead:
        engine.cancel(1)  # the next step reads what was launched, and schedules
    if rank:
        extend = engine._extend

        def end(request, *others):
            request.max_length = len(request.tokens) + 1
            return extend(request, *others)

        engine._extend = end
    n_steps = runner.n_steps
    with pytest.raises(RuntimeError, match="ranks 0 to 1, which share their requests, have chosen different tokens"):
        ranks.step()
    assert runner.n_steps == n_steps + (not ahead)


def a_difference_in_a_step_that_was_launched_ahead_is_found(rank: int, folder: Path) -> None:
    check_that_a_difference_is_found(rank, 0, ahead=True)


def a_difference_is_found_before_drafts(rank: int, folder: Path) -> None:
    check_that_a_difference_is_found(rank, 1, ahead=False)


def check_a_draft_that_one_rank_cannot_choose(
    rank: int, folder: Path, n_drafts: int, ahead: bool, on_rank_0: int | None = None
) -> None:
    """Rank 1 fails to choose the first draft of some steps; the texts are those of one process nevertheless.

    Rank 0 chooses that draft, or what is given in its place.
    """
    choose_each, calls = drafts.choose_each, itertools.count()

    def failing(logits, rows):
        chosen = choose_each(logits, rows)
        first = MemoryError("logits") if rank else on_rank_0
        return [first, *chosen[1:]] if next(calls) % 5 == 1 else chosen

    with pytest.MonkeyPatch.context() as patch:
        if rank or on_rank_0 is not None:
            patch.setattr(drafts, "choose_each", failing)
        with pytest.warns(RuntimeWarning, match="a draft cannot be chosen") if rank else nullcontext():
            check_texts(rank, folder, n_drafts, ahead, n_requests=(2, 1))


def one_rank_lacks_a_draft(rank: int, folder: Path) -> None:
    check_a_draft_that_one_rank_cannot_choose(rank, folder, 1, ahead=False)


def one_rank_lacks_a_draft_between_two_passes(rank: int, folder: Path) -> None:
    check_a_draft_that_one_rank_cannot_choose(rank, folder, 3, ahead=False)


def one_rank_lacks_a_draft_of_logits_that_have_a_nan_on_another(rank: int, folder: Path) -> None:
    check_a_draft_that_one_rank_cannot_choose(rank, folder, 3, ahead=False, on_rank_0=NOT_A_NUMBER)


def one_rank_lacks_a_draft_before_a_step_that_is_launched_ahead(rank: int, folder: Path) -> None:
    check_a_draft_that_one_rank_cannot_choose(rank, folder, 2, ahead=True)


def another_token_is_found_before_the_next_step(rank: int, folder: Path) -> None:
    runner = ModelRunner(spread(), N_PAGES, batch_invariant=True, max_batch=2)
    engine = Engine(runner, TOKENIZER, CONFIG)
    engine.add(text(9), Sampling(40, seed=0, ignore_eos=True))
    ranks, extend = ExpertParallelEngine(engine, runner), engine._extend
    engine._extend = lambda request, n, chosen, *others: extend(request, n, [chosen[0] ^ rank], *others)
    ranks.step()
    with pytest.raises(RuntimeError, match="ranks 0 to 1, which share their requests, have chosen different tokens"):
        ranks.step()


def only_the_weights_of_own_heads_are_read(rank: int, folder: Path) -> None:
    model = new_model(fp8=True, config=MODEL)
    if rank == 0:
        save(model, folder / "heads", weights="fp8")
    dist.barrier()
    read_bytes = 0

    def counted(method: Callable[..., Tensor], file: TensorFile, name: str, *where: int) -> Tensor:
        nonlocal read_bytes
        found = method(file, name, *where)
        read_bytes += found.nbytes if "self_attn.o_proj.weight" in name and not name.endswith("_inv") else 0
        return found

    tp = TensorParallel.of_consecutive(2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "rows", "columns"):
            method = partial(counted, getattr(TensorFile, name))
            patch.setattr(TensorFile, name, lambda *args, method=method: method(*args))
        found = ExpertParallelWeights.read(folder / "heads", TWO_RANKS, torch.float32, tp=tp)
    own = MODEL.num_attention_heads * MODEL.v_head_dim // 2
    assert read_bytes == MODEL.num_hidden_layers * own * MODEL.hidden_size
    expected = ServedWeights.of_model(model, tp.share)
    for a, b in zip(found.weights.blocks, expected.blocks, strict=True):
        for x, y in ((a.attention.o, b.attention.o), (a.attention.q_up, b.attention.q_up)):
            assert isinstance(x, ScaledTensor)
            assert torch.equal(x.dequantize(), y.dequantize())
        assert torch.equal(a.attention.w_k, b.attention.w_k)
        assert torch.equal(a.attention.w_v, b.attention.w_v)


def wrong_groups_are_refused(rank: int, folder: Path) -> None:
    with pytest.raises(ValueError, match="groups must divide the ranks, but 3 does not divide 2"):
        TensorParallel.of_consecutive(3)
    tp = TensorParallel.of_consecutive(2)
    with pytest.raises(ValueError, match=r"weights must have the heads of tp, HeadShare\(rank=., size=2\), not Head"):
        ExpertParallelWeights(weights_of(MODEL, False), TWO_RANKS, tp=tp)
    with pytest.raises(ValueError, match="micro_batches must be 1, not 2, if ranks share the rows"):
        ModelRunner(spread(), N_PAGES, micro_batches=2)
    weights = weights_of(MODEL, False, tp.share if rank else None)
    with pytest.raises(ValueError, match="tp must be the same on all ranks: rank 0 has 1, but rank 1 has 2"):
        ExpertParallelWeights(weights, TWO_RANKS, tp=tp if rank else ALONE)


def rows_are_exchanged(rank: int, folder: Path) -> None:
    tp = TensorParallel.of_consecutive(2)
    whole = torch.randn(7, 200, generator=torch.Generator().manual_seed(0))
    own = tp.own(whole)
    assert (tp.n_own(7), tp.n_padded(7)) == (4, 8)
    assert torch.equal(own, (whole[:4], torch.cat((whole[4:], whole.new_zeros(1, 200))))[rank])
    assert torch.equal(tp.gather(own), tp.pad(whole))
    q = quantize(tp.pad(whole), (1, 128))
    gathered = tp.gather_quantized(quantize(own, (1, 128)))
    assert torch.equal(gathered.data.view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(gathered.scale, q.scale)
    assert gathered.scale.stride() == q.scale.stride()
    terms = [torch.randn(8, 200, generator=torch.Generator().manual_seed(1 + i)) for i in range(2)]
    expected = own + terms[0][4 * rank :][:4] + terms[1][4 * rank :][:4]
    assert torch.equal(tp.add_sums_(own, terms[rank]), expected)


def nothing_is_exchanged_of_no_rows(rank: int, folder: Path) -> None:
    tp = TensorParallel.of_consecutive(2)
    empty = torch.empty(0, 128)
    assert tp.gather(empty).shape == (0, 128)
    assert len(tp.gather_quantized(quantize(empty, (1, 128))).data) == 0
    assert tp.add_sums_(empty, torch.empty(0, 128)).shape == (0, 128)


WORKS = [
    log_probabilities_of_prompts_are_those_of_one_process,
    logits_in_fp32,
    logits_in_fp8,
    logits_without_batch_invariance,
    logits_of_queries_that_are_not_compressed,
    logits_of_top_k_positions,
    bits_do_not_depend_on_the_batch,
    logits_of_graphs,
    texts_are_those_of_one_process,
    texts_with_drafts,
    texts_with_drafts_of_steps_that_are_launched_ahead,
    log_probabilities_of_steps_that_are_launched_ahead,
    texts_with_the_exchanges_of_gpus,
    prompts_share_a_beginning_and_pages_run_out,
    counts_are_those_of_groups,
    each_row_is_routed_once,
    a_difference_in_a_step_that_was_launched_ahead_is_found,
    a_difference_is_found_before_drafts,
    one_rank_lacks_a_draft,
    one_rank_lacks_a_draft_between_two_passes,
    one_rank_lacks_a_draft_of_logits_that_have_a_nan_on_another,
    one_rank_lacks_a_draft_before_a_step_that_is_launched_ahead,
    another_token_is_found_before_the_next_step,
    only_the_weights_of_own_heads_are_read,
    wrong_groups_are_refused,
    rows_are_exchanged,
    nothing_is_exchanged_of_no_rows,
]
OF_FOUR = [
    texts_are_those_of_one_process,
    texts_with_drafts_of_steps_that_are_launched_ahead,
    requests_go_to_the_group_that_has_the_fewest,
    counts_are_those_of_groups,
]
OF_A_DRAFT = (
    "one_rank_lacks_a_draft_of_logits_that_have_a_nan_on_another, whose drafts are several and whose steps are not "
    "launched ahead, and one_rank_lacks_a_draft_before_a_step_that_is_launched_ahead, whose rank 0 chooses the draft"
)
FURTHER = {  # with what shows the same
    texts_with_drafts: "the same two, and texts_with_drafts_of_steps_that_are_launched_ahead",
    one_rank_lacks_a_draft: OF_A_DRAFT,
    one_rank_lacks_a_draft_between_two_passes: OF_A_DRAFT,
}
FURTHER_OF_FOUR = {
    texts_with_drafts_of_steps_that_are_launched_ahead: "that of two ranks, and texts_are_those_of_one_process of four",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "serving-tensor-parallel", WORKS, further=FURTHER)


@pytest.fixture(scope="module")
def outcomes_of_four(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    name = "serving-tensor-parallel-in-groups"
    return Outcomes(tmp_path_factory, name, OF_FOUR, ranks=4, further=FURTHER_OF_FOUR)


@pytest.mark.slow
@each_work(WORKS, FURTHER)
def test_two_ranks(outcomes: Outcomes, work):
    outcomes.assert_passed(work)


@pytest.mark.slow
@each_work(OF_FOUR, FURTHER_OF_FOUR)
def test_two_groups_of_two_ranks(outcomes_of_four: Outcomes, work):
    outcomes_of_four.assert_passed(work)
