"""Shared experts that decode steps choose like routed ones, on two gloo ranks, vs. one process, bit for bit."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from octile.checkpoint.hugging_face import save
from octile.serve.ranks.experts import ExpertParallelWeights
from octile.serve.ranks.placement import rebalance_experts
from octile.serve.ranks.tensor_parallel import TensorParallel
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import MoEWeights
from octile.serve.weights.routed_shared_experts import check_shared, divide_shared, with_shared, with_shared_load
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, EXCHANGED_ROWS, exchanges_on_cpu, new_model
from tests.serve.ranks.test_engine import texts_of, texts_of_one_process, with_front
from tests.serve.ranks.test_tensor_parallel import MODEL
from tests.worlds import Outcomes, each_work

N_PAGES = 20
ONE = replace(CONFIG, num_hidden_layers=3)  # one shared expert, expert 8
TWO = replace(ONE, n_shared_experts=2, moe_intermediate_size=128)  # one MLP of experts 8 and 9
OF_ONE = torch.tensor([[8, 0, 1, 2, 3, 7, 4, 5, 6, 8], [8, 0, 1, 2, 3, 4, 8, 5, 6, 7]])  # a copy on each rank
ALONE = torch.tensor([[8, 0, 1, 2, 3, 7, 4, 5, 6, 3], [8, 0, 1, 2, 3, 4, 1, 5, 6, 7]])  # a copy on rank 0
OF_TWO = torch.tensor([[8, 0, 1, 2, 3, 9, 7, 4, 5, 6], [8, 0, 1, 9, 3, 4, 2, 5, 6, 7]])


def check_texts(
    rank: int,
    folder: Path,
    config=ONE,
    placement=OF_ONE,
    fp8: bool = True,
    n_drafts: int = 0,
    exchange: bool = False,
    tp: bool = False,
    invariant: bool = True,
) -> None:
    """Compare texts, of which decode steps route the shared experts, with those of one process."""
    n_requests = (2, 1) if exchange else (3, 2)  # Triton's interpreter takes its time
    expected, found = [] if rank else texts_of_one_process(config, fp8, n_requests, invariant), []
    group = TensorParallel.of_consecutive(2 if tp else 1)
    placement = torch.cat((placement, placement[:1])) if n_drafts else placement
    with exchanges_on_cpu(folder) if exchange else nullcontext():
        weights = ServedWeights.of_model(new_model(fp8, config=config), group.share)
        experts = ExpertParallelWeights(weights, placement, drafts=n_drafts > 0, routes_shared=True, tp=group)
        runner = ModelRunner(experts, N_PAGES, None, 2, invariant, n_drafts, expert_window=8)
        if exchange:
            rows = experts.decoding_exchange(EXCHANGED_ROWS * (1 + n_drafts))
            runner._decoding = runner._decoding.with_feed_forward(exchange=rows)
        engine = with_front(rank, lambda front: found.extend(texts_of(front, *n_requests)), runner)
    assert engine.stats().steps_ahead > 0
    assert found == expected


def texts_in_fp8(rank: int, folder: Path) -> None:
    check_texts(rank, folder)


def texts_in_fp32(rank: int, folder: Path) -> None:
    check_texts(rank, folder, fp8=False)


def texts_of_a_copy_on_one_rank(rank: int, folder: Path) -> None:
    check_texts(rank, folder, placement=ALONE)


def texts_of_two_shared_experts(rank: int, folder: Path) -> None:
    check_texts(rank, folder, TWO, OF_TWO, fp8=False, invariant=False)


def texts_with_drafts(rank: int, folder: Path) -> None:
    check_texts(rank, folder, n_drafts=1)


def texts_with_the_exchanges_of_gpus(rank: int, folder: Path) -> None:
    check_texts(rank, folder, exchange=True)


def texts_of_a_group_of_ranks(rank: int, folder: Path) -> None:
    check_texts(rank, folder, MODEL, tp=True)


def logits_of_decode_steps(rank: int, folder: Path) -> None:
    """What decode steps compute of a mixture has the bits of the shared expert computed where the row is."""
    model = new_model(True, config=ONE)
    weights = ServedWeights.of_model(model)
    experts = ExpertParallelWeights(weights, OF_ONE, routes_shared=True)
    runner = ModelRunner(experts, N_PAGES, batch_invariant=True)
    alone = ModelRunner(weights, N_PAGES, batch_invariant=True).forward
    x_TD = torch.randn(32, ONE.hidden_size, generator=torch.Generator().manual_seed(rank))
    slots = torch.arange(32)
    found = [
        forward.feed_forward.add(x_TD.clone(), 1, block, slots)
        for forward, block in ((runner._decoding, experts.weights.blocks[1]), (alone, weights.blocks[1]))
    ]
    assert torch.equal(*found)


def moved_weights(rank: int, folder: Path) -> None:
    """The shared expert moves like the others."""
    weights = ServedWeights.of_model(new_model(True, config=ONE))
    experts = ExpertParallelWeights(weights, OF_ONE, routes_shared=True)
    experts.move(ALONE)
    assert [experts.move_layer() for _ in range(3)] == [True, True, False]
    for layer, row in zip((1, 2), ALONE[:, 5 * rank : 5 * rank + 5], strict=True):
        whole, local = with_shared(weights.blocks[layer].mlp, 1), experts.mixture(layer)
        for of_all, of_rank in zip((*whole.x.weights, whole.down), (*local.x.weights, local.down), strict=True):
            assert torch.equal(of_rank.dequantize(), of_all.dequantize()[row])


def a_folder_is_read_with_shared_experts_in_slots(rank: int, folder: Path) -> None:
    model = new_model(True, config=TWO)
    if rank == 0:
        save(model, folder / "shared", weights="fp8")
    dist.barrier()
    found = ExpertParallelWeights.read(folder / "shared", OF_TWO, torch.float32, routes_shared=True)
    expected = ExpertParallelWeights(ServedWeights.of_model(model), OF_TWO, routes_shared=True)
    for layer in (1, 2):
        a, b = found.mixture(layer), expected.mixture(layer)
        for x, y in zip((*a.x.weights, a.down), (*b.x.weights, b.down), strict=True):
            assert torch.equal(x.dequantize(), y.dequantize())


def what_does_not_fit_is_refused(rank: int, folder: Path) -> None:
    weights = ServedWeights.of_model(new_model(False, config=ONE))
    with pytest.raises(ValueError, match="num_active must be None, not 4, if shared experts are routed"):
        ExpertParallelWeights(weights, OF_ONE, num_active=4, routes_shared=True)
    with pytest.raises(ValueError, match="must have the experts from 0 to 8 and no others in each layer"):
        ExpertParallelWeights(weights, OF_ONE.clamp(max=7), routes_shared=True)
    with pytest.raises(ValueError, match="routes_shared must be the same on all ranks: rank 0 has False"):
        ExpertParallelWeights(weights, OF_ONE, routes_shared=bool(rank))
    two = ExpertParallelWeights(ServedWeights.of_model(new_model(False, config=TWO)), OF_TWO, routes_shared=True)
    with pytest.raises(ValueError, match=r"batch_invariant must be False, not True, if shared"):
        ModelRunner(two, N_PAGES, batch_invariant=True)


WORKS = [
    texts_in_fp8,
    texts_in_fp32,
    texts_of_a_copy_on_one_rank,
    texts_of_two_shared_experts,
    texts_with_drafts,
    texts_with_the_exchanges_of_gpus,
    texts_of_a_group_of_ranks,
    logits_of_decode_steps,
    moved_weights,
    a_folder_is_read_with_shared_experts_in_slots,
    what_does_not_fit_is_refused,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "routed-shared-experts", WORKS)


@pytest.mark.slow
@each_work(WORKS)
def test_two_ranks(outcomes: Outcomes, work):
    outcomes.assert_passed(work)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_shared_experts_are_the_parts_of_one_mlp(fp8, n):
    config = replace(CONFIG, n_shared_experts=n, moe_intermediate_size=128)
    mixture = ServedWeights.of_model(new_model(fp8, config=config)).blocks[1].mlp
    assert isinstance(mixture, MoEWeights)

    def mlp(x, gate, up, down):
        gate, up, down = (w.dequantize() if fp8 else w for w in (gate, up, down))
        return torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T

    x = torch.randn(5, config.hidden_size)
    whole = divide_shared(mixture.shared, 1)
    assert len(whole) == 1
    parts = divide_shared(mixture.shared, n)
    assert [part[2].shape for part in parts] == n * [(config.hidden_size, 128)]
    torch.testing.assert_close(sum(mlp(x, *part) for part in parts), mlp(x, *whole[0]))


def test_shared_experts_have_the_load_of_all_tokens():
    load = with_shared_load(torch.tensor([[6, 2, 3, 1], [0, 0, 0, 0]]), 2, 2)
    assert load.tolist() == [[6, 2, 3, 1, 6, 6], [0, 0, 0, 0, 0, 0]]
    placement, _, count = rebalance_experts(load[:1], 8, 1, 1, 2)
    assert count.tolist() == [[2, 1, 1, 1, 2, 1]]
    assert all(len(set(slots)) == 4 for slots in placement.view(2, 4).tolist())


def test_shared_experts_whose_blocks_would_be_divided_are_refused():
    check_shared(CONFIG, True, True)  # one expert is whole
    check_shared(replace(CONFIG, n_shared_experts=2), False, False)
    with pytest.raises(ValueError, match=r"2 shared experts are one MLP in FP8, .* a multiple of 128, not 64"):
        check_shared(replace(CONFIG, n_shared_experts=2), True, True)


def test_shared_experts_in_another_format_than_the_routed_ones_are_refused():
    for formats, what in (
        ((False, True), "in high precision, and its other ones in FP8"),
        ((True, False), "in FP8, and"),
    ):
        with pytest.raises(ValueError, match=f"must be replicated, not routed: the model's shared experts are {what}"):
            check_shared(CONFIG, *formats)
    fp8, high_precision = (ServedWeights.of_model(new_model(fp8)).blocks[1].mlp for fp8 in (True, False))
    with pytest.raises(ValueError, match="shared experts that are routed must be in FP8 if the other experts are"):
        with_shared(replace(fp8, shared=high_precision.shared), 1)


def test_shared_experts_in_another_format_than_the_others_do_not_become_some_of_them():
    in_fp8, in_fp32 = (ServedWeights.of_model(new_model(fp8)).blocks[1].mlp for fp8 in (True, False))
    with pytest.raises(ValueError, match="shared experts that are routed must be in FP8 if the other experts are"):
        with_shared(replace(in_fp8, shared=in_fp32.shared), 1)
