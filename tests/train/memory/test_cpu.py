"""Tests of the memory that a run on a CPU needs."""

from dataclasses import replace

import pytest
import torch

from octile.kernels import cpu
from octile.models.counts import count_parameters
from octile.models.meta import meta_model
from octile.ops.matmul import matmul_nt
from octile.optim import muon_update
from octile.plan.muon import matrices
from octile.train.config import ParallelConfig, TrainConfig, preset
from octile.train.memory import check as memory
from octile.train.memory import cpu as cpu_memory
from octile.train.memory.advice import USABLE_SHARE
from octile.train.memory.check import check_memory
from octile.train.memory.cpu import count_update
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, micro
from tests.train.conftest import estimate_once as estimate_need

CPU = torch.device("cpu")
ROUTED = sum(of["routed experts"] for of in (count_parameters(MICRO).main, count_parameters(MICRO).mtp))


def parameters() -> int:
    counts = count_parameters(MICRO)
    return counts.total + sum(counts.mtp.values())


def test_weights_and_their_best_copy_take_four_bytes_each_and_moments_two_each():
    need = estimate_need(micro())
    assert (need.weights, need.optimizer) == (8 * parameters(), 4 * parameters())


def test_gradients_and_cached_weights_stay():
    assert estimate_need(micro(recipe="float32")).gradients >= 4 * parameters()
    assert estimate_need(micro()).gradients > estimate_need(micro(recipe="float32")).gradients  # weights in FP8


def test_weights_that_operators_view_are_not_counted_as_gradients():
    assert estimate_need(micro(recipe="float32")).gradients == pytest.approx(4 * parameters(), rel=0.05)


@pytest.mark.slow
def test_an_update_converts_the_largest_tensor_if_moments_have_a_scale():
    largest = max(p.nbytes for p in meta_model(MICRO).parameters())
    need = estimate_need(micro(recipe="fp8_lm"))
    assert need.step - need.fixed >= need.update > 6 * largest
    assert estimate_need(micro()).update == 0


def test_a_resumed_run_reads_the_best_model_after_all_others():
    weights, moments = 4 * parameters(), 4 * parameters()
    assert estimate_need(micro()).read == weights + moments + max(weights + moments, 2 * weights)


@pytest.mark.one_case
@pytest.mark.parametrize(("recipe", "is_copied"), [("deepseek_v3", True), ("exact", True), ("float32", False)])
def test_a_processor_that_does_not_multiply_e4m3_copies_operands_and_result_to_fp32(monkeypatch, recipe, is_copied):
    needs = {}
    for can_multiply in (True, False):
        monkeypatch.setattr(cpu, "can_multiply", lambda can=can_multiply: can)
        needs[can_multiply] = estimate_need(micro(recipe=recipe, batch_size=1, sequence_length=16)).sequence
    experts = 4 * MICRO.n_routed_experts * MICRO.moe_intermediate_size * MICRO.hidden_size  # one weight of a layer's
    assert needs[False] - needs[True] >= (experts if is_copied else 0)
    assert is_copied or needs[False] == needs[True]


@pytest.mark.parametrize(
    ("operand", "block", "is_copied"),
    [(torch.float8_e4m3fn, 128, False), (torch.float8_e4m3fn, 256, True), (torch.float8_e5m2, 128, True)],
)
def test_a_processor_copies_what_it_cannot_multiply(monkeypatch, operand, block, is_copied):
    monkeypatch.setattr(cpu, "can_multiply", lambda: True)
    data, scale = torch.zeros(4, 256, device="meta", dtype=operand), torch.ones(4, 256 // block, device="meta")
    with cpu_memory.LiveTensors([data, scale]) as live:
        product = matmul_nt(data, scale, (1, block), data, scale, (1, block), torch.float32)
    assert live.peak - product.nbytes == (2 * 4 * data.numel() if is_copied else 0)


def of_length(length: int) -> TrainConfig:
    return micro(batch_size=1, sequence_length=length, model=replace(MICRO, max_position_embeddings=1024))


def test_the_scores_of_attention_grow_with_the_square_of_the_sequence():
    short, long = (estimate_need(of_length(length)).sequence for length in (512, 1024))
    scores = 2 * 4 * MICRO.num_attention_heads * 1024**2  # two matrices in FP32, here of the longer sequence
    assert long - 2 * short == pytest.approx(scores / 2, rel=0.4)


@pytest.mark.slow
def test_sparse_attention_grows_with_the_sequence(monkeypatch):
    monkeypatch.setattr("octile.nn.indexer.MAX_LOGITS", 2**14)  # bounds what longer sequences would reach
    sparse = replace(MICRO, max_position_embeddings=1024, index_n_heads=4, index_head_dim=16, index_topk=8)
    configs = [replace(of_length(length), model=sparse, indexer_stage="sparse") for length in (512, 1024)]
    short, long = (estimate_need(config).sequence for config in configs)
    assert long == pytest.approx(2 * short, rel=0.05)


def test_a_sequence_that_fits_is_advised(monkeypatch):
    config = replace(of_length(1024), batch_size=32)
    need = estimate_need(replace(config, sequence_length=300))
    monkeypatch.setattr(memory, "available_memory", lambda device: int(need.step / USABLE_SHARE))
    with pytest.raises(ValueError, match=r"use --sequence-length \d+ \(now 1024\)$") as refused:
        check_memory(config, CPU, is_train=False)
    assert 270 <= int(str(refused.value).split("--sequence-length ")[1].split()[0]) <= 300


@pytest.mark.parametrize(
    ("is_train", "choices"),
    [
        (
            True,
            "a smaller model, a device with more memory, or --recipe fp8_lm, which needs half the bytes per parameter",
        ),
        (False, "a smaller model or a device with more memory"),
    ],
)
def test_where_no_sequence_fits_the_model_is_too_large(monkeypatch, is_train, choices):
    config = of_length(1024)
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate_need(config).fixed + 1)
    with pytest.raises(ValueError, match=f"leave too little memory for a sequence of 16 tokens: choose {choices}$"):
        check_memory(config, CPU, is_train=is_train)


@pytest.mark.slow
@pytest.mark.parametrize("length", [600, 1100])
def test_no_sequence_is_advised_of_which_the_warm_up_of_indexers_would_choose_all_keys(monkeypatch, length):
    tiny = preset("tiny")
    indexer = replace(tiny.model, index_n_heads=4, index_head_dim=64, index_topk=512, max_position_embeddings=4096)
    config = replace(tiny, batch_size=1, sequence_length=length, model=indexer, indexer_stage="warm_up")
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate_need(config).fixed + 10**7)
    with pytest.raises(ValueError, match=r"^the run needs about .*: choose a smaller model"):
        check_memory(config, CPU)


@pytest.mark.slow
def test_the_dense_attention_of_the_warm_up_of_indexers_is_counted():
    tiny = preset("tiny")
    indexer = replace(tiny.model, index_n_heads=4, index_head_dim=64, index_topk=512, max_position_embeddings=4096)
    config = replace(tiny, batch_size=4, sequence_length=4096, model=indexer, indexer_stage="sparse")
    sparse, warm_up = (estimate_need(replace(config, indexer_stage=stage)).total for stage in ("sparse", "warm_up"))
    assert warm_up > 1.5 * sparse


@pytest.mark.slow
def test_a_run_whose_update_exceeds_the_memory_is_refused(monkeypatch):
    need = estimate_need(micro(recipe="fp8_lm"))
    monkeypatch.setattr(memory, "available_memory", lambda device: need.fixed + need.update - 1)
    with pytest.raises(ValueError, match=r"an update by the optimizer takes .* MB in addition to .*: choose a smaller"):
        check_memory(micro(recipe="fp8_lm"), CPU)


def test_a_moving_average_is_a_copy_of_the_weights():
    config = micro()
    averaged = replace(config, optim=replace(config.optim, ema_decay=0.9))
    assert estimate_need(averaged).weights == estimate_need(config).weights + 4 * parameters()


@pytest.mark.slow
def test_micro_batches_divide_the_activations():
    whole, divided = estimate_need(micro(batch_size=64)), estimate_need(micro(batch_size=64, micro_batches=4))
    assert divided.at_once * divided.sequence < 0.3 * whole.at_once * whole.sequence


def test_twice_the_sequences_take_twice_the_activations():
    one, two = (n.at_once * n.sequence for n in (estimate_need(micro(batch_size=b)) for b in (64, 128)))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_fp8_saves_less_than_fp32():
    fp8, fp32 = (estimate_need(micro(batch_size=64, recipe=name)).sequence for name in ("deepseek_v3", "float32"))
    assert fp8 < 0.8 * fp32


@pytest.mark.slow
def test_a_batch_of_any_size_is_estimated_from_a_smaller_one(monkeypatch):
    whole = estimate_need(micro(batch_size=256))
    monkeypatch.setattr(cpu_memory, "MAX_TOKENS", 64 * 32)
    assert estimate_need(micro(batch_size=256)).total == pytest.approx(whole.total, rel=0.02)


@pytest.mark.slow
def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    config = micro(batch_size=8, parallel=ParallelConfig(dp=4))
    monkeypatch.setattr(memory, "available_memory", lambda device: 2 * estimate_need(config).total)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(config, CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"the 4 ranks here need about .* GB are available: "):
        check_memory(config, CPU)


@pytest.mark.slow
def test_ranks_share_moments_spread_experts_and_the_batch():
    alone = estimate_need(micro(batch_size=8))
    need = estimate_need(micro(batch_size=8, parallel=ParallelConfig(dp=4, ep=2)))
    spread = alone.weights - 8 * ROUTED // 2
    assert (need.weights, need.optimizer, need.data) == (spread, alone.optimizer // 4, alone.data // 4)
    assert (need.at_once, need.collected) == (2, alone.weights // 2)


def with_muon(config: TrainConfig) -> TrainConfig:
    return replace(config, optim=replace(config.optim, name="muon"))


@pytest.mark.slow
def test_muons_state_is_that_of_a_trained_optimizer(store):
    config = with_muon(micro(recipe="float32"))
    trainer = Trainer(config, store, CPU)
    trainer.step()
    state = trainer.optimizer.state.values()
    stored = sum(t.nbytes for of_one in state for name, t in of_one.items() if name != "step")
    assert estimate_need(config).optimizer == stored == trainer.optimizer.state_bytes()


def test_an_update_by_muon_takes_the_tensors_of_a_batch_of_matrices_or_of_those_that_a_rank_owns(monkeypatch):
    assert estimate_need(micro()).update == 0
    config = with_muon(micro(batch_size=8))
    alone = estimate_need(config).update
    assert alone > 2 * 4 * ROUTED // 3  # a batch of matrices in BF16, and more
    monkeypatch.setattr(muon_update, "BATCH", 1)
    one = count_update(config)
    assert one < alone / 2
    sharded = replace(config, parallel=ParallelConfig(dp=2))
    others = (kind for name, kind in matrices(config.model).items() if name != "routed experts")
    owned = sum(n * k * count for kind in others for (n, k), count in kind.items()) // 2
    assert count_update(sharded) >= 6 * owned > one


def pipeline(schedule: str, micro_batches: int = 4, pp: int = 2) -> TrainConfig:
    model = replace(MICRO, num_hidden_layers=4, num_nextn_predict_layers=1)
    parallel = ParallelConfig(pp=pp, schedule=schedule if pp > 1 else "1f1b")
    return micro(model=model, batch_size=64, micro_batches=micro_batches, parallel=parallel)


@pytest.mark.slow
def test_the_ranks_of_a_pipeline_have_the_weights_of_their_stages():
    whole, (first, last) = estimate_need(pipeline("1f1b", pp=1)), (estimate_need(pipeline("1f1b"), [r]) for r in (0, 1))
    embedding = 8 * MICRO.vocab_size * MICRO.hidden_size  # multi-token prediction reads it in the last stage, too
    assert first.weights + last.weights == whole.weights + embedding
    assert first.optimizer + last.optimizer == whole.optimizer + embedding // 2
    assert 0.8 * whole.gradients < first.gradients + last.gradients < 1.2 * whole.gradients


@pytest.mark.slow
def test_both_directions_of_a_pipeline_have_all_weights():
    assert estimate_need(pipeline("dualpipe"), [0]).weights == estimate_need(pipeline("1f1b", pp=1)).weights


def passes(config: TrainConfig) -> int:
    need = estimate_need(config, [0])
    return need.at_once * need.sequence


@pytest.mark.slow
def test_gpipe_holds_all_micro_batches_and_1f1b_one_a_stage(monkeypatch):
    monkeypatch.setattr(cpu, "can_multiply", lambda: True)  # otherwise copies of weights count, too
    assert passes(pipeline("gpipe", 16)) > 0.9 * passes(pipeline("gpipe", 4))
    assert passes(pipeline("1f1b", 16)) < 0.3 * passes(pipeline("1f1b", 4))
    assert passes(pipeline("1f1b", 4)) < 0.7 * passes(pipeline("gpipe", 4))


@pytest.mark.slow
def test_a_rank_of_a_pipeline_is_not_refused_for_the_whole_model(monkeypatch):
    config = pipeline("1f1b", 16)
    config = replace(config, model=replace(config.model, num_nextn_predict_layers=0))  # two layers on each rank
    alone = replace(config, parallel=ParallelConfig())
    monkeypatch.setattr(cpu, "can_multiply", lambda: True)  # otherwise copies of weights count, too
    monkeypatch.setattr(cpu_memory, "RESERVE", 0)
    monkeypatch.setattr(memory, "available_memory", lambda device: 0.85 * estimate_need(alone).total)
    check_memory(config, CPU)
    with pytest.raises(ValueError, match=r"the run needs about .* are available: "):
        check_memory(alone, CPU)


@pytest.mark.slow
def test_more_micro_batches_are_advised_only_where_a_schedule_holds_less_of_them(monkeypatch):
    monkeypatch.setattr(cpu_memory, "RESERVE", 0)
    monkeypatch.setattr(memory, "available_memory", lambda device: 0.6 * estimate_need(config).total)
    for schedule, change in {
        "1f1b": r"use --micro-batches (8|16) \(now 4\)",
        "chimera": r"use --micro-batches (8|16) \(now 4\)",
        "gpipe": r"use --sequence-length \d+ \(now 32\)$",
    }.items():
        config = pipeline(schedule)
        with pytest.raises(ValueError, match=change):
            check_memory(config, CPU)


@pytest.mark.slow
def test_the_whole_model_at_the_start_and_the_end_counts(monkeypatch):
    config = pipeline("1f1b", 16)
    need = estimate_need(config)
    assert need.made == need.collected == estimate_need(pipeline("1f1b", pp=1)).weights // 2
    monkeypatch.setattr(memory, "available_memory", lambda device: need.step)
    monkeypatch.setattr(memory, "estimate_need", lambda config, ranks: replace(need, collected=need.step))
    with pytest.raises(ValueError, match=r"rank 0 collects .* GB at the end: choose a smaller model"):
        check_memory(config, CPU)


@pytest.mark.slow
def test_a_run_that_exceeds_the_memory_is_refused_with_what_to_reduce(monkeypatch):
    config = micro(batch_size=256)
    monkeypatch.setattr(cpu_memory, "RESERVE", 0)
    need = estimate_need(config)
    monkeypatch.setattr(memory, "available_memory", lambda device: need.fixed + 100 * need.sequence)
    with pytest.raises(ValueError, match=r"the run needs about .* are available: .* use --micro-batches 4 \(now 1\)"):
        check_memory(config, CPU)
    check_memory(replace(config, micro_batches=4), CPU)


def test_a_batch_whose_tokens_exceed_the_memory_is_refused(monkeypatch):
    config = micro(batch_size=10**7)
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate_need(config).data)
    with pytest.raises(ValueError, match=r"token ids of a step take .*: use a smaller --batch-size"):
        check_memory(config, CPU)
