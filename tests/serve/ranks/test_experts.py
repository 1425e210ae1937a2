"""Experts on two gloo ranks, with redundant copies, compared with one process, bit for bit."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from octile.checkpoint.hugging_face import save
from octile.checkpoint.shards import Shards
from octile.ops.cross_entropy import log_probabilities
from octile.parallel import shard_experts
from octile.serve import rebalance_experts
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.ranks import engine as engine_of_ranks
from octile.serve.ranks.engine import ExpertParallelEngine
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.runner.graphs import PrefillGraphs
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import MoEWeights
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import Tokenizer
from tests.parallel.expert_cases import peers_on_cpu
from tests.serve.models import CONFIG, Texts, exact_model, new_model, text
from tests.worlds import Outcomes, each_work

N_PAGES = 20
THREE_LAYERS = replace(CONFIG, num_hidden_layers=3)  # two of them with experts, and a prediction layer, not served
FIRST = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6, 7, 0], [7, 1, 5, 3, 4, 2, 7, 6, 0, 7]])
SECOND = torch.tensor([[6, 1, 2, 5, 7, 6, 5, 0, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 5, 2]])
ALONE = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6], FIRST[1].tolist()])  # rank 0 alone has five experts of a layer
SAMPLINGS = [
    Sampling(6, temperature=0.8, top_k=40, top_p=0.5, seed=1, ignore_eos=True),
    Sampling(9, seed=2, ignore_eos=True),
]


def spread(fp8: bool = False, num_active: int | None = None) -> tuple[ServedWeights, ExpertParallelWeights]:
    weights = ServedWeights.of_model(new_model(fp8, config=THREE_LAYERS))
    return weights, ExpertParallelWeights(weights, FIRST, num_active=num_active)


def read(runner: ModelRunner, rank: int, moved: ExpertParallelWeights | None = None) -> list[Tensor]:
    """Logits of two texts, of which rank 1 reads less in the first step; experts are moved after two steps."""
    texts = Texts(runner, [text(60, 10 * rank), text(40, 10 * rank + 1)])
    for step, sizes in enumerate([(20, 9), (1, 1), (1, 12), (30, 1)]):
        texts.run(sizes[0] - 5 * rank if step == 0 else sizes[0], sizes[1])
        if moved is not None and step == 1:
            moved.move(SECOND)
        if moved is not None:
            moved.move_layer()
    return texts.logits


def check_logits(fp8: bool, rank: int, moves: bool, num_active: int | None = None) -> None:
    weights, experts = spread(fp8, num_active)
    expected = read(ModelRunner(weights, N_PAGES, batch_invariant=True), rank)
    found = read(ModelRunner(experts, N_PAGES, batch_invariant=True), rank, experts if moves else None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def logits_in_fp32(rank: int, folder: Path) -> None:
    check_logits(False, rank, moves=False)


def logits_in_fp8(rank: int, folder: Path) -> None:
    check_logits(True, rank, moves=False)


def log_probabilities_of_training(rank: int, folder: Path) -> None:
    model = exact_model()
    experts = ExpertParallelWeights(ServedWeights.of_model(model), FIRST[:1])
    found = read(ModelRunner(experts, N_PAGES, batch_invariant=True), rank)
    for seed, logits in zip((10 * rank, 10 * rank + 1), found, strict=True):
        tokens = torch.tensor([text(len(logits), seed)])
        served = log_probabilities(logits[:-1]).gather(1, tokens[0, 1:, None])[:, 0]
        with torch.no_grad():
            assert torch.equal(model.log_probs(tokens)[0], served)


def log_probabilities_of_training_with_spread_experts(rank: int, folder: Path) -> None:
    """Texts are sampled over both ranks; models with all experts and with those of this rank compute them again."""
    whole = exact_model()
    spread_model = copy.deepcopy(whole)
    shard_experts(spread_model)
    experts = ExpertParallelWeights(ServedWeights.of_model(whole), FIRST[:1])
    runner = ModelRunner(experts, N_PAGES, batch_invariant=True)
    engine = Engine(runner, Tokenizer.train(["one two three"], 258), EngineConfig(max_batch=3, max_step_tokens=40))
    prompts = [text(n, 10 * rank + n) for n in (1, 30, 75, 20)]
    texts: dict[int, tuple[list[int], list[float]]] = {}
    for i, prompt in enumerate(prompts):
        sampling = Sampling(8 + 4 * rank, seed=i, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        texts[engine.add(prompt, sampling).id] = (prompt, [])
    ranks = ExpertParallelEngine(engine, runner)
    while (outputs := ranks.step()) is not None:
        for output in outputs:
            tokens, served = texts[output.request_id]
            tokens += output.tokens
            served += [each.logprob for each in (*output.prompt_logprobs, *output.logprobs)]
    for tokens, served in texts.values():
        expected, found = (model.log_probs(torch.tensor([tokens]))[0] for model in (whole, spread_model))
        assert torch.equal(found, expected)
        assert torch.equal(torch.tensor(served), expected)


def logits_while_experts_move(rank: int, folder: Path) -> None:
    check_logits(True, rank, moves=True)


def logits_with_dynamic_redundancy(rank: int, folder: Path) -> None:
    check_logits(True, rank, moves=True, num_active=4)


def logits_without_batch_invariance(rank: int, folder: Path) -> None:
    weights, experts = spread()
    found, expected = (torch.cat(read(ModelRunner(model, N_PAGES), rank)) for model in (experts, weights))
    torch.testing.assert_close(found, expected)


def logits_of_graphs_with_two_micro_batches(rank: int, folder: Path) -> None:
    weights, experts = spread(fp8=True)
    runner = ModelRunner(experts, N_PAGES)
    with peers_on_cpu(folder):
        runner.use_peers(experts.peer_dispatcher(256))
        runner.prefill_graphs = PrefillGraphs(runner._with_peers, None, 256, micro_batches=2)
        texts = Texts(runner, [text(60, 10 * rank), text(40, 10 * rank + 1)])
        for sizes in ((20 - 5 * rank, 9), (1, 12)):
            runner.max_rank_rows = 29
            texts.run(*sizes)
    alone = Texts(ModelRunner(weights, N_PAGES), texts.texts)
    for sizes in ((20 - 5 * rank, 9), (1, 12)):
        alone.run(*sizes)
    torch.testing.assert_close(torch.cat(texts.logits), torch.cat(alone.logits), rtol=1e-3, atol=1e-3)


def texts_of(runner: ModelRunner, rank: int, seconds: float = 600) -> dict[int, list[int]]:
    """The tokens of rank 0's two requests, or of one that rank 1 has; together with the other rank, or alone."""
    config = EngineConfig(max_batch=2, max_step_tokens=24, batch_invariant=True, n_drafts=runner.n_drafts)
    engine = Engine(runner, Tokenizer.train(["one two three"], 258), config)
    for i, sampling in enumerate(SAMPLINGS[rank:]):
        engine.add(text(20 + 30 * i, 7 * rank + i), sampling)
    together = None if runner.expert_parallel is None else ExpertParallelEngine(engine, runner, seconds)
    found: dict[int, list[int]] = {}
    while True:
        outputs = together.step() if together else engine.step() if engine.has_work else None
        if outputs is None:
            return found
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.tokens)


def engines_of_unequal_work(rank: int, folder: Path) -> None:
    weights, experts = spread()
    expected = texts_of(ModelRunner(weights, N_PAGES, batch_invariant=True), rank)
    assert texts_of(ModelRunner(experts, N_PAGES, batch_invariant=True), rank) == expected
    assert [len(tokens) for tokens in expected.values()] == [s.max_new_tokens for s in SAMPLINGS[rank:]]


def placed_anew(rank: int, folder: Path) -> None:
    weights, experts = spread()
    expected = texts_of(ModelRunner(weights, N_PAGES, batch_invariant=True), rank)
    runner = ModelRunner(experts, N_PAGES, batch_invariant=True, expert_window=8)
    assert texts_of(runner, rank, seconds=0) == expected
    assert not torch.equal(experts.physical_to_logical, FIRST)
    load = torch.tensor([*runner.expert_tokens.values()])
    dist.all_reduce(load)
    engine = ExpertParallelEngine(Engine(runner, Tokenizer.train(["one two three"], 258)), runner, seconds=0)
    for _ in range(3):
        assert engine.step() is None  # no rank has a request; a layer moves with each
    assert torch.equal(experts.physical_to_logical, rebalance_experts(load, 10, CONFIG.n_group, 1, 2)[0])


def engine_of(experts: ExpertParallelWeights, seconds: float = 0) -> ExpertParallelEngine:
    """An engine whose ranks have counted some tokens."""
    runner = ModelRunner(experts, N_PAGES, expert_window=8)
    for _ in range(8):
        Texts(runner, [text(9)]).run(9)
    return ExpertParallelEngine(Engine(runner, Tokenizer.train(["one two three"], 258)), runner, seconds)


def a_placement_with_too_few_active_slots_leaves_experts_where_they_are(rank: int, folder: Path) -> None:
    _, experts = spread(num_active=4)
    engine = engine_of(experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_of_ranks, "rebalance_experts", lambda *_, **__: (ALONE,))
        with pytest.warns(RuntimeWarning, match="experts stay where they are: num_active must be larger than 4: "):
            engine.step()
    assert torch.equal(experts.physical_to_logical, FIRST)


def other_errors_of_a_placement_are_raised(rank: int, folder: Path) -> None:
    engine = engine_of(spread()[1])
    for wrong, message in ((FIRST[:1], "a row for each layer with experts"), ((FIRST, SECOND)[rank], "on all ranks")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_of_ranks, "rebalance_experts", lambda *_, wrong=wrong, **__: (wrong,))
            with pytest.raises(ValueError, match=message):
                engine.step()


def placed_with(num_active: int | None) -> list[int]:
    """How many different experts the ranks have in each layer, placed anew by a load of which EPLB puts one twice."""
    _, experts = spread(num_active=num_active)
    engine, load_LE = engine_of(experts), torch.tensor([[4, 20, 9, 18, 20, 5, 10, 4]] * 2)

    def place(_: Tensor, *sizes: int, **options: bool) -> tuple[Tensor, Tensor, Tensor]:
        return rebalance_experts(load_LE, *sizes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_of_ranks, "rebalance_experts", place)
        for _ in range(2):  # a layer moves with each
            engine.step()
    return [len(set(of_rank)) for of_rank in experts.physical_to_logical.view(4, 5).tolist()]


def a_rank_may_get_two_copies_of_an_expert(rank: int, folder: Path) -> None:
    assert placed_with(num_active=None) == [5, 4, 5, 4]


def with_dynamic_redundancy_no_rank_gets_two_copies_of_an_expert(rank: int, folder: Path) -> None:
    assert placed_with(num_active=4) == [5, 5, 5, 5]


def each_placement_is_reached_before_the_next_one(rank: int, folder: Path) -> None:
    _, experts = spread()
    engine = engine_of(experts)
    in_turn = iter(range(4))

    def place(*_: object, **__: object) -> tuple[Tensor]:
        return (torch.stack((SECOND[0].roll(next(in_turn)), SECOND[1])),)  # the first layer differs each time

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_of_ranks, "rebalance_experts", place)
        for _ in range(2):
            engine.step()
    assert torch.equal(experts.physical_to_logical, SECOND)


def ranks_that_disagree_are_refused(rank: int, folder: Path) -> None:
    weights, _ = spread()
    own = replace(weights, config=replace(THREE_LAYERS, n_group=(2, 4)[rank]))
    deeper = replace(weights, config=replace(THREE_LAYERS, num_hidden_layers=3 + rank))
    for model, options, message in (
        (weights, {"num_active": (4, None)[rank]}, "num_active must be .* rank 0 has 4, but rank 1 has None"),
        (weights, {"num_active": 4 + rank}, "num_active must be the same on all ranks: rank 0 has 4, but rank 1 has 5"),
        (weights, {"num_nodes": 1 + rank}, "num_nodes must be the same on all ranks: rank 0 has 1, but rank 1 has 2"),
        (own, {}, "the model's experts must be the same on all ranks: rank 0 has 8 in 2 groups"),
        (deeper, {}, r"the model's experts must be .* has 8 in 2 groups in layers \[1, 2\], but rank 1 has"),
    ):
        with pytest.raises(ValueError, match=message):
            ExpertParallelWeights(model, FIRST, **options)


def without_a_window_experts_stay(rank: int, folder: Path) -> None:
    _, experts = spread()
    texts_of(ModelRunner(experts, N_PAGES, batch_invariant=True), rank, seconds=0)
    assert torch.equal(experts.physical_to_logical, FIRST)


def moved_weights(rank: int, folder: Path) -> None:
    weights, experts = spread(fp8=True)
    experts.move(SECOND)
    assert [experts.move_layer() for _ in range(3)] == [True, True, False]
    assert torch.equal(experts.physical_to_logical, SECOND)
    own = slice(5 * rank, 5 * rank + 5)
    for layer, row in zip((1, 2), SECOND[:, own], strict=True):
        whole, local = weights.blocks[layer].mlp, experts.weights.blocks[layer].mlp
        assert isinstance(whole, MoEWeights)
        assert isinstance(local, MoEWeights)
        for of_all, of_rank in zip((*whole.x.weights, whole.down), (*local.x.weights, local.down), strict=True):
            assert torch.equal(of_rank.dequantize(), of_all.dequantize()[row])


def a_layer_that_is_not_served_has_no_pages_and_no_load(rank: int, folder: Path) -> None:
    _, experts = spread()
    runner = ModelRunner(experts, N_PAGES, expert_window=8)
    assert len(runner.cache.layers) == 3
    assert N_PAGES * ModelRunner.bytes_per_page(experts.weights, "float32", runner.max_position) == runner.cache.nbytes
    assert runner.expert_tokens is not None
    assert list(runner.expert_tokens) == experts.layers == [1, 2]


def only_own_experts_are_held(rank: int, folder: Path) -> None:
    _, experts = spread()
    mlp = experts.weights.blocks[1].mlp
    assert isinstance(mlp, MoEWeights)
    assert [len(weight) for weight in (*mlp.x.weights, mlp.down)] == [5] * (1 + len(mlp.x.weights))


def a_folder_is_read_without_the_experts_of_other_ranks(rank: int, folder: Path) -> None:
    model = new_model(fp8=True, config=THREE_LAYERS)
    if rank == 0:
        save(model, folder / "model", weights="fp8")
    dist.barrier()
    whole = ServedWeights.read(folder / "model", torch.float32)
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        read_shard = Shards.read
        patch.setattr(Shards, "read", lambda shards, name: (names.append(name), read_shard(shards, name))[1])
        experts = ExpertParallelWeights.read(folder / "model", FIRST, torch.float32)
    found = {int(name.split(".")[5]) for name in names if name.startswith("model.layers.1.mlp.experts.")}
    assert found == set(FIRST[0, 5 * rank : 5 * rank + 5].tolist())
    assert not any(name.startswith("model.layers.3.") for name in names)  # the prediction layer
    expected = read(ModelRunner(whole, N_PAGES, batch_invariant=True), rank)
    logits = read(ModelRunner(experts, N_PAGES, batch_invariant=True), rank, experts)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def copies_take_turns(rank: int, folder: Path) -> None:
    _, experts = spread()
    slots = experts.slots(1, torch.tensor([[0, 1]] * 6))
    assert slots[:, 1].tolist() == [1] * 6
    assert sorted(slots[:, 0].tolist()) == [0, 0, 5, 5, 9, 9]


def active_copies_share_the_tokens_of_all_ranks(rank: int, folder: Path) -> None:
    _, experts = spread(num_active=4)
    slots = experts.slots(1, torch.tensor([[0, 1]] * 6 if rank else [[0, 7]] * 2))
    assert torch.equal(FIRST[0][slots], torch.tensor([[0, 1]] * 6 if rank else [[0, 7]] * 2))
    counts = slots.flatten().bincount(minlength=10)
    dist.all_reduce(counts)
    assert counts.view(2, 5).sum(1).tolist() == [8, 8]  # expert 1 has 6 on rank 0, expert 7 has 2 on rank 1, 0 has 8


def placements_with_too_few_active_slots_are_refused(rank: int, folder: Path) -> None:
    weights, experts = spread(num_active=4)
    with pytest.raises(ValueError, match="num_active must be larger than 4: with so few active slots of a GPU, 5"):
        experts.move(ALONE)
    with pytest.raises(ValueError, match="num_active must be larger than 3: with so few active slots of a GPU, 5"):
        ExpertParallelWeights(weights, FIRST, num_active=3)


def wrong_placements_are_refused(rank: int, folder: Path) -> None:
    weights, experts = spread()
    missing = FIRST.clone()
    missing[1, 3] = 0
    for error, placement, message in (
        (TypeError, FIRST.float(), "physical_to_logical must be an int64 tensor, not torch.float32"),
        (TypeError, FIRST.tolist(), "physical_to_logical must be an int64 tensor, not list"),
        (ValueError, FIRST[:1], r"physical_to_logical must be \[2, slots\], a row for each layer with experts"),
        (ValueError, missing, r"must have the experts from 0 to 7 and no others .* \[0, 1, 2, 4, 5, 6, 7\] in layer 2"),
        (ValueError, FIRST[:, [*range(10), 1]], "multiple of the 2 ranks, not 11"),
        (ValueError, (FIRST, SECOND)[rank], "physical_to_logical must be the same on all ranks"),
    ):
        with pytest.raises(error, match=message):
            ExpertParallelWeights(weights, placement)
    with pytest.raises(ValueError, match="physical_to_logical must have 10 slots as before, not 12"):
        experts.move(FIRST[:, [*range(10), 1, 2]])


def wrong_engines_are_refused(rank: int, folder: Path) -> None:
    weights, experts = spread()
    runner = ModelRunner(experts, N_PAGES)
    engine = Engine(runner, Tokenizer.train(["one two three"], 258))
    with pytest.raises(
        ValueError, match="runner must be of ExpertParallelWeights: its experts are not spread over ranks"
    ):
        ExpertParallelEngine(engine, ModelRunner(weights, N_PAGES))
    for wrong, message in (
        (3, "num_nodes must divide the 2 ranks, but is 3"),
        (0, "num_nodes must be at least 1, not 0"),
        (2.0, "num_nodes must be a whole number, not 2.0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ExpertParallelWeights(weights, FIRST, num_nodes=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ranks must be a process group, not DeviceMesh"):
        ExpertParallelWeights(weights, FIRST, ranks=init_device_mesh("cpu", (1, 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds must be at least 0, not nan"):
        ExpertParallelEngine(engine, runner, seconds=float("nan"))
    with pytest.raises(ValueError, match="timeout must be above 0, not 0"):
        ExpertParallelEngine(engine, runner, timeout=0)
    with pytest.raises(ValueError, match=r"runner must be of LiveWeights .* which are spread over ranks"):
        engine.update_weights()
    with pytest.raises(ValueError, match=r"engine.n_drafts must be 0, not 1"):
        Engine(runner, Tokenizer.train(["one two three"], 258), EngineConfig(n_drafts=1))


WORKS = [
    logits_in_fp32,
    logits_in_fp8,
    log_probabilities_of_training,
    log_probabilities_of_training_with_spread_experts,
    logits_while_experts_move,
    logits_with_dynamic_redundancy,
    logits_without_batch_invariance,
    logits_of_graphs_with_two_micro_batches,
    engines_of_unequal_work,
    placed_anew,
    a_placement_with_too_few_active_slots_leaves_experts_where_they_are,
    other_errors_of_a_placement_are_raised,
    a_rank_may_get_two_copies_of_an_expert,
    with_dynamic_redundancy_no_rank_gets_two_copies_of_an_expert,
    each_placement_is_reached_before_the_next_one,
    ranks_that_disagree_are_refused,
    without_a_window_experts_stay,
    moved_weights,
    a_layer_that_is_not_served_has_no_pages_and_no_load,
    only_own_experts_are_held,
    a_folder_is_read_without_the_experts_of_other_ranks,
    copies_take_turns,
    active_copies_share_the_tokens_of_all_ranks,
    placements_with_too_few_active_slots_are_refused,
    wrong_placements_are_refused,
    wrong_engines_are_refused,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "spread-experts", WORKS)


@pytest.mark.slow
@each_work(WORKS)
def test_two_ranks(outcomes: Outcomes, work):
    outcomes.assert_passed(work)


def test_without_a_process_group_the_error_says_so():
    assert not dist.is_initialized()
    weights = ServedWeights.of_model(new_model(fp8=False, config=THREE_LAYERS))
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialized"):
        ExpertParallelWeights(weights, FIRST)
