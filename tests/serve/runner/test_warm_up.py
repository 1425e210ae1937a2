"""Steps before the first request: their batches, and that no rank's later step needs an operator in another form."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from octile.ops.latent_cache import PAGE
from octile.parallel import decoding, experts, symmetric_memory
from octile.parallel.ranks import world
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model import attention, feed_forward, forward, gemms, top_k_keys
from octile.serve.model.attention import GEMM_ROWS
from octile.serve.ranks.engine import ExpertParallelEngine
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.tensor_parallel import ALONE, TensorParallel
from octile.serve.runner import attention_graphs, graphs, model_runner
from octile.serve.runner.graphs import FILL_ROWS, PrefillGraphs
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step import Layout, mixed_step
from octile.serve.runner.warm_up import warm_up_batches
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import EXCHANGED_ROWS, exchanges_on_cpu, new_model, text
from tests.serve.ranks.test_engine import TOKENIZER
from tests.serve.ranks.test_experts import THREE_LAYERS
from tests.serve.ranks.test_tensor_parallel import CHOOSING, MODEL, N_PAGES, TWO_RANKS
from tests.serve.weights.test_routed_shared_experts import OF_ONE
from tests.worlds import Outcomes, each_work

OF_PASSES = (
    attention, attention_graphs, top_k_keys, decoding, experts, feed_forward, forward, gemms, graphs, symmetric_memory,
)  # fmt: skip
PASSES = {module.__file__ for module in OF_PASSES}
TWO_LAYERS = replace(MODEL, num_hidden_layers=2)  # whose mixture stands for all: its steps are what is compared
STEP_TOKENS = 40  # of a step at most: a prompt of 30 or more begins in one step and continues in another


@pytest.mark.one_case
@pytest.mark.parametrize("max_position", [2, 17, 64, 512])
@pytest.mark.parametrize("max_step_tokens", [0, 1, 24, 300, 9000])
def test_batches_fit_into_a_step_and_name_one_page(max_position: int, max_step_tokens: int):
    sizes = set[int]()
    for batch in warm_up_batches(max_step_tokens, 6, 0, max_position, 50, None, 0):
        sizes.add(sum(len(chunk.tokens) for chunk in batch.chunks))
        for chunk in batch.chunks:
            assert 0 <= chunk.start < chunk.start + len(chunk.tokens) <= max_position
            assert [*chunk.pages] == [0] * -(-(chunk.start + len(chunk.tokens)) // PAGE)
            assert set(chunk.tokens) <= set(range(50))
    prompts = {1} if max_step_tokens == 1 else {min(256, max_step_tokens), max_step_tokens} - {0}
    assert prompts | {1, 2, 4, 6} <= sizes
    assert max(sizes) == max(6, max_step_tokens)


@pytest.mark.parametrize("max_step_tokens", [24, 1024, 9000])
def test_a_step_has_prompts_alone_with_all_of_its_rows(max_step_tokens: int):
    batches = [batch.chunks for batch in warm_up_batches(max_step_tokens, 6, 0, 512, 50, None, 0)]
    sizes = [[len(chunk.tokens) for chunk in chunks] for chunks in batches]
    assert max_step_tokens in [sum(size) for size in sizes if min(size) > 1]


def test_prompts_are_computed_next_to_as_many_rows_as_decode_at_once():
    batches = [batch.chunks for batch in warm_up_batches(300, 100, 0, 512, 50, None, 0)]
    mixed = [chunks for chunks in batches if len(chunks) > 1 and len(chunks[-1].tokens) > 1 == len(chunks[-2].tokens)]
    assert {2, 4, 8, 16, 32, 64, 100} <= {len(chunks) - 1 for chunks in mixed}


@pytest.mark.parametrize("index_topk", [None, 130])
def test_rows_of_many_short_prompts_are_computed_up_to_all_that_a_step_may_have(index_topk: int | None):
    def rows(max_short_rows: int) -> set[tuple[int, bool]]:
        batches = [batch.chunks for batch in warm_up_batches(2048, 64, max_short_rows, 512, 50, index_topk, 0)]
        short = [chunks for chunks in batches if {len(chunk.tokens) for chunk in chunks} == {8}]
        return {(8 * len(chunks), chunks[0].start == index_topk) for chunks in short}

    for beyond in {False, index_topk is not None}:  # more positions than top-k
        found = {of: {n for n, is_beyond in rows(of) if is_beyond == beyond} for of in (64, 300, 512)}
        assert found == {64: set(), 300: {128, 256, 296}, 512: {128, 256, 512}}  # 37 prompts of 8 tokens fit into 300


@pytest.mark.parametrize(
    ("max_batch", "max_step_tokens", "most"), [(2, 2048, 16), (64, 2048, 512), (64, 300, 300), (0, 2048, 512)]
)
def test_a_runner_computes_as_many_short_prompts_as_its_steps_may_have(
    monkeypatch, max_batch: int, max_step_tokens: int, most: int
):
    asked = []
    monkeypatch.setattr(model_runner, "warm_up_batches", lambda *of: asked.append(of[2]) or [])
    ModelRunner(new_model(False), N_PAGES, max_batch=max_batch, max_step_tokens=max_step_tokens).warm_up()
    assert asked == [most]


@pytest.mark.parametrize("in_graphs", [0, 512])
@pytest.mark.parametrize(("max_position", "index_topk"), [(1000, None), (2047, None), (4096, None), (4096, 600)])
def test_chunks_read_all_numbers_of_positions_that_gemms_outside_of_graphs_have(
    max_position: int, index_topk: int | None, in_graphs: int
):
    batches = warm_up_batches(300, 6, 0, max_position, 50, index_topk, in_graphs)
    layouts = (Layout.of(batch.chunks, False, False) for batch in batches)
    steps = [mixed_step(layout, 1, torch.device("cpu"), index_topk, False, FILL_ROWS) for layout in layouts]
    numbers = range(in_graphs + FILL_ROWS, in_graphs + GEMM_ROWS + 1, FILL_ROWS)
    found = {p.n_read for step in steps for p in step.prefills if p.max_positions <= (index_topk or max_position)}
    assert {*numbers} <= found  # of those that attend to top-k positions nothing is read so


def test_chunks_read_no_more_positions_than_a_step_has_texts():
    layouts = [Layout.of(batch.chunks, False, False) for batch in warm_up_batches(40, 6, 0, 100, 50, None, 0)]
    reading = [layout for layout in layouts if len(layout.prefill) > 1 and layout.chunks[0].start > 32]
    assert {len(layout.chunks) for layout in reading} == {3}  # six would have fewer than nine rows each


def test_texts_of_one_position_have_no_batches():
    assert not [*warm_up_batches(300, 6, 48, 1, 50, None, 0)]


def test_long_texts_have_more_positions_than_top_k():
    found = [*warm_up_batches(40, 2, 0, 512, 50, 130, 0)][-3:]
    assert [[chunk.start for chunk in batch.chunks] for batch in found] == [[130, 130], [130], [130, 130]]
    assert [len(batch.chunks[-1].tokens) for batch in found] == [32, 1, 1]
    assert {len(chunk.pages) for batch in found for chunk in batch.chunks} == {3}
    assert not any(chunk.start == 130 for batch in warm_up_batches(40, 2, 0, 140, 50, 130, 0) for chunk in batch.chunks)


def test_rows_of_short_prompts_are_computed_where_no_request_decodes(monkeypatch: pytest.MonkeyPatch):
    computed: list[Layout] = []
    monkeypatch.setattr(ModelRunner, "_compute_unwritten", lambda _, layout: computed.append(layout))
    ModelRunner(new_model(False), N_PAGES, max_batch=0, max_step_tokens=STEP_TOKENS).warm_up()
    assert {layout.n_decode for layout in computed if not layout.prefill} == {1, 2, 4, 8, 16, 32, 40}


@pytest.mark.parametrize("max_rows", [32, 64])
def test_decode_rows_attend_outside_of_graphs_too_where_a_step_may_have_more_rows_than_graphs(
    monkeypatch: pytest.MonkeyPatch, max_rows: int
):
    found = list[tuple[bool, int]]()
    monkeypatch.setattr(model_runner, "MAX_ROWS", max_rows)
    runner = ModelRunner(new_model(False), N_PAGES, max_batch=4, max_step_tokens=STEP_TOKENS)
    runner.prefill_graphs = PrefillGraphs(runner.forward, None, STEP_TOKENS, max_decode_rows=12)
    monkeypatch.setattr(
        ModelRunner,
        "_compute_unwritten",
        lambda runner, layout: found.append((runner.prefill_graphs._attention is not None, layout.n_decode)),
    )
    runner.warm_up()
    assert {rows for in_graphs, rows in found if in_graphs} >= {0, 1, 2, 4}
    outside = {rows for in_graphs, rows in found if not in_graphs}
    assert outside >= {0, 1, 2, 4} if max_rows < STEP_TOKENS else not outside
    assert runner.prefill_graphs._attention is not None


@pytest.mark.slow
def test_the_host_waits_with_its_timeout_before_it_chooses_tokens(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    monkeypatch.setattr(ModelRunner, "_wait_for", lambda *_: events.append("wait"))
    chosen = Mock(side_effect=lambda *_: events.append("choose") or Mock())
    monkeypatch.setattr(model_runner, "ChosenTokens", chosen)
    ModelRunner(new_model(False), N_PAGES, max_batch=1, n_drafts=1, max_step_tokens=STEP_TOKENS).warm_up()
    assert events == len(events) // 9 * ["wait", *8 * ["choose"]]  # in four ways, of a step and of its drafts
    assert events


class Recorder(TorchDispatchMode):
    """Records what a GPU may need kernels for: operators and kernels of Triton's interpreter.

    With each it records from which lines of a forward pass it is called, the formats of tensors and their last extents,
    and what else decides about kernels, but no numbers of rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = set[tuple[Any, ...]]()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        launch = GridExecutor.__call__

        def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            constants = {name: value for name, value in kwargs.items() if name in executor.constexprs}
            formats = [value.dtype for value in args if isinstance(value, Tensor)]
            self.found.add((executor.fn.__name__, _lines(), *formats, *constants.items()))
            launch(executor, *args, **kwargs)

        self._patch.setattr(GridExecutor, "__call__", recorded)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "octile":
            has_positions = func.name() == "octile::top_keys"  # as columns
            self.found.add((func.name(), _lines(), *(_form(value, has_positions) for value in args)))
        return func(*args, **(kwargs or {}))


def _lines() -> tuple[tuple[str, int], ...]:
    """The lines of forward passes from which something is called."""
    found, frame = list[tuple[str, int]](), sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename in PASSES:
            found.append((frame.f_code.co_name, frame.f_lineno))
    return tuple(found)


def _form(value: Any, has_positions: bool) -> Any:
    if isinstance(value, Tensor):
        has_columns = value.dim() > 1 and value.is_floating_point() and not has_positions
        return value.dtype, value.dim(), value.shape[-1] if has_columns else None
    return value if isinstance(value, bool | str | float) or value is None else type(value)


def engine_of(
    tp: TensorParallel, n_drafts: int = 0, fp8: bool = True, routed: bool = False, config=TWO_LAYERS, **how
) -> ExpertParallelEngine:
    weights = ServedWeights.of_model(new_model(fp8, config=config), tp.share)
    placement = OF_ONE if routed else TWO_RANKS[: 1 + (n_drafts > 0)]  # of the mixture, and of that of the drafts
    experts = ExpertParallelWeights(weights, placement, drafts=n_drafts > 0, routes_shared=routed, tp=tp)
    runner = ModelRunner(
        experts, N_PAGES, None, 2, n_drafts=n_drafts, expert_window=8, max_step_tokens=STEP_TOKENS, **how
    )
    limits = EngineConfig(max_batch=2, max_step_tokens=STEP_TOKENS, n_drafts=n_drafts)
    return ExpertParallelEngine(Engine(runner, TOKENIZER, limits), runner, control=world())


def texts_of(engine: ExpertParallelEngine, rank: int) -> dict[int, list[int]]:
    """Texts of requests of all kinds; each rank, or group, has other ones, and none in some steps."""
    asked = (
        (70, Sampling(4, temperature=0.7, seed=1, ignore_eos=True)),
        (3, Sampling(3, ignore_eos=True)),
        (30, Sampling(2, temperature=0.7, top_p=0.5, seed=2, logprobs=2, ignore_eos=True)),
    )
    own = asked[rank // engine.group_size :]
    found: dict[int, list[int]] = {engine.engine.add(text(n, n), sampling).id: [] for n, sampling in own}
    while (outputs := engine.step()) is not None:
        for output in outputs:
            found[output.request_id] += output.tokens
    assert [len(tokens) for tokens in found.values()] == [sampling.max_new_tokens for _, sampling in own]
    return found


def check(rank: int, make: Callable[[], ExpertParallelEngine], engine: ExpertParallelEngine | None = None) -> None:
    """Compare an engine after its warm-up with one that has none, which `make` makes."""
    expected = texts_of(make(), rank)
    engine = engine or make()
    runner, stats, of_warm_up, of_requests = engine._runner, engine.engine.stats(), Recorder(), Recorder()
    with of_warm_up:
        engine.warm_up()
    assert not any(layer.any() for layer in runner.cache.layers)
    assert (runner.n_steps, runner.n_draft_passes, runner.max_rank_rows) == (0, 0, 0)
    assert engine.engine.stats() == stats
    for _ in range(8):
        runner._end_step()  # what was counted is read after so many steps
    assert not any(map(sum, runner.expert_tokens.values()))
    with of_requests:
        assert texts_of(engine, rank) == expected
    new = of_requests.found - of_warm_up.found
    assert not new, new
    assert len(of_requests.found) > 10


def ranks_with_requests_of_their_own(rank: int, folder: Path) -> None:
    check(rank, partial(engine_of, ALONE, fp8=False))


def drafts(rank: int, folder: Path) -> None:
    check(rank, partial(engine_of, ALONE, n_drafts=2))


def groups_that_share_their_requests(rank: int, folder: Path) -> None:
    tp = TensorParallel.of_consecutive(2)
    check(rank, partial(engine_of, tp, n_drafts=1))


def batch_invariant_steps(rank: int, folder: Path) -> None:
    check(rank, partial(engine_of, ALONE, n_drafts=1, batch_invariant=True))


def routed_shared_experts(rank: int, folder: Path) -> None:
    check(rank, partial(engine_of, ALONE, routed=True, config=THREE_LAYERS))


def top_k_positions(rank: int, folder: Path) -> None:
    config = replace(CHOOSING, num_hidden_layers=2, indexer_types=("full", "shared"), index_topk=66)
    check(rank, partial(engine_of, ALONE, fp8=False, config=config))


def steps_as_on_gpus(rank: int, folder: Path) -> None:
    """Rows are exchanged by kernels, padded as for CUDA graphs, and decode steps are launched ahead."""

    make = partial(engine_of, ALONE, n_drafts=1)
    with exchanges_on_cpu(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "ROWS", (48, 1024))  # an interpreter takes its time for each row
        patch.setattr(model_runner, "FILL_ROWS", 48)
        engine = make()
        runner, experts = engine._runner, engine._weights
        runner.use_peers(experts.peer_dispatcher(48))
        runner.prefill_graphs = PrefillGraphs(runner._with_peers, None, 48, max_decode_rows=12)
        runner._decoding = runner.forward.with_feed_forward(exchange=experts.decoding_exchange(2 * EXCHANGED_ROWS))
        runner.max_ahead = 2
        patch.setattr(ModelRunner, "_fills", property(lambda self: self is runner))
        check(rank, make, engine)


WORKS = [
    steps_as_on_gpus,
    ranks_with_requests_of_their_own,
    drafts,
    groups_that_share_their_requests,
    batch_invariant_steps,
    routed_shared_experts,
    top_k_positions,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "warm-up", WORKS)


@pytest.mark.slow
@each_work(WORKS)
def test_two_ranks(outcomes: Outcomes, work):
    outcomes.assert_passed(work)
