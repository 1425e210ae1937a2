"""Tests of a training step, the state of a trainer, and non-finite losses and gradients."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from octile.checkpoint.training import load_checkpoint, save_checkpoint
from octile.lab.rollout import compare as compare_log_probs
from octile.lab.rollout import roll_out
from octile.models.flops import train_flops_per_token
from octile.nn.rope import Rope
from octile.ops.high_precision import REDUCED_PRECISION
from octile.optim.state import load
from octile.recipe import Recipe
from octile.serve.engine.engine import Engine
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.live import LiveWeights
from octile.train.config import OptimConfig
from octile.train.data.batches import PreparedBatches
from octile.train.step.progress import schedule
from octile.train.strategy.single import Strategy
from octile.train.trainer import Trainer
from tests.train.conftest import STATELESS_RECIPES, every_recipe, micro


def run(trainer, steps):
    return [trainer.step()["loss"] for _ in range(steps)]


def copy_state(trainer):
    tensors, state = trainer.state()
    return {name: t.clone() for name, t in tensors.items()}, state


def weights(trainer):
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


def test_gradients_of_micro_batches_are_added_in_place(new_trainer, monkeypatch: pytest.MonkeyPatch):
    in_place, added = new_trainer(micro_batches=2), new_trainer(micro_batches=2)
    in_place.step()
    assert not any(hasattr(parameter, "main_grad") for parameter in in_place.model.parameters())
    monkeypatch.setattr(Strategy, "_adding", lambda _: nullcontext())
    added.step()
    for ours, theirs in zip(in_place.model.parameters(), added.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"deterministic": True}, "kernel by kernel: deterministic kernels wait for the host"),
        ({"recipe": "fp16_loss_scaling"}, "kernel by kernel: the host changes the loss scale"),
    ],
    ids=["deterministic", "loss scale"],
)
def test_a_run_on_a_gpu_says_why_its_steps_are_not_captured(new_trainer, settings, why):
    strategy = new_trainer(**settings).strategy
    assert strategy.descriptions() == []
    strategy.device = torch.device("cuda")
    (says,) = strategy.descriptions()
    assert says == f"steps are not captured in CUDA graphs, and launch {why}"


def test_a_run_on_a_gpu_says_nothing_where_its_steps_are_captured(new_trainer):
    strategy = new_trainer().strategy
    strategy.device = torch.device("cuda")
    assert strategy.descriptions() == []


def test_batches_are_prepared_while_the_host_waits_for_results(new_trainer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PreparedBatches, "prepare", lambda prepared: launched.append(len(trainer._launched)))
    trainer, launched = new_trainer(), list[int]()
    trainer.launch()
    trainer.launch()
    assert launched == []
    list(trainer.collect(leave=1))
    assert launched == [2]


@pytest.mark.slow
def test_micro_batches_of_a_step_share_rotary_tables(new_trainer, monkeypatch: pytest.MonkeyPatch):
    trainer, tables, compute = new_trainer(micro_batches=2), [], Rope.cos_sin
    monkeypatch.setattr(Rope, "cos_sin", lambda *arguments: tables.append(compute(*arguments)) or tables[-1])
    trainer.step()
    assert len(tables) == 1
    trainer.step()
    assert len(tables) == 2


@pytest.mark.one_case
@every_recipe()
def test_the_loss_falls_under_every_recipe(new_trainer, recipe):
    losses = run(new_trainer(recipe=recipe, steps=6), 6)
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("recipe", ["bf16", "deepseek_v3"])
def test_gemms_add_their_partial_sums_in_float32_in_training_and_validation(new_trainer, no_report, recipe):
    no_report.undo()
    trainer, seen = new_trainer(recipe=recipe), []
    before = {name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED_PRECISION}

    def look(*_: object) -> None:
        seen.extend(getattr(torch.backends.cuda.matmul, name) for name in REDUCED_PRECISION)

    trainer.model.lm_head.register_forward_hook(look)
    trainer.model.lm_head.weight.register_hook(look)
    for work in (
        trainer.step,
        trainer.evaluator.validate,
        trainer.evaluator.tile_scales,
        lambda: trainer.evaluator.token_losses(),
    ):
        seen.clear()
        work()
        assert seen
        assert not any(seen)
    assert before == {name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED_PRECISION}


@pytest.mark.slow
def test_two_runs_of_one_seed_are_bit_identical(new_trainer):
    assert run(new_trainer(), 3) == run(new_trainer(), 3)


@every_recipe()
def test_forward_passes_are_in_the_recipes_precision(new_trainer, monkeypatch, recipe):
    trainer = new_trainer(recipe=recipe)
    monkeypatch.setattr("octile.train.step.passes.forward_precision", lambda *given: given)
    assert trainer.passes.precision() == (trainer.device, Recipe.named(recipe).compute)


@pytest.mark.slow
def test_an_engine_over_the_model_reports_the_log_probabilities_of_training_after_steps(new_trainer, store):
    trainer = new_trainer(recipe="exact")
    runner = ModelRunner(LiveWeights(trainer.model), 4, batch_invariant=True)
    engine = Engine(runner, store.tokenizer)
    run(trainer, 2)
    engine.update_weights()
    texts = roll_out(engine, [[5, 6, 7]], new_tokens=5, seed=0)
    (_, decoded) = compare_log_probs(trainer.model, texts)
    assert (decoded.equal, decoded.tokens) == (5, 5)


def test_another_seed_gives_another_run(new_trainer):
    assert run(new_trainer(), 1) != run(new_trainer(seed=1), 1)


@pytest.mark.one_case
@every_recipe(further=STATELESS_RECIPES)
def test_a_run_continues_from_its_saved_state_bit_for_bit(new_trainer, tmp_path, recipe):
    straight = new_trainer(recipe=recipe)
    run(straight, 2)
    tensors, state = straight.state()
    path = save_checkpoint(tmp_path, 2, tensors, state)
    expected = run(straight, 2)

    resumed = new_trainer(recipe=recipe)
    resumed.load(*load_checkpoint(path))
    assert run(resumed, 2) == expected
    for name, t in weights(straight).items():
        assert torch.equal(t, resumed.model.state_dict()[name]), name


@pytest.mark.slow
def test_a_run_with_muon_continues_from_its_saved_state_bit_for_bit(new_trainer, tmp_path):
    straight, resumed = (new_trainer(optim=replace(micro().optim, name="muon")) for _ in range(2))
    run(straight, 2)
    path = save_checkpoint(tmp_path, 2, *straight.state())
    expected = run(straight, 2)
    resumed.load(*load_checkpoint(path))
    assert run(resumed, 2) == expected
    assert all(torch.equal(t, resumed.model.state_dict()[name]) for name, t in weights(straight).items())


def test_muon_updates_all_but_embedding_head_gates_and_norms(new_trainer):
    trainer = new_trainer(optim=replace(micro().optim, name="muon"))
    run(trainer, 1)
    state = trainer.optimizer.state
    others = {name for name, p in trainer.model.named_parameters() if "momentum_buffer" not in state[p]}
    gates = {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2)}
    assert {n for n in others if "norm" not in n} == {"model.embed_tokens.weight", "lm_head.weight", *gates}


SCHEDULED = {  # of 10 steps: ramp 0–3, warm-up 0, constant 1–3, cosine 4–5, tail 6–7, last tail 8–9
    "steps": 10,
    "initial_batch_size": 1,
    "batch_ramp": 0.4,
    "micro_batches": 2,
    "optim": OptimConfig(
        lr=3e-3, warmup=0.1, decay=0.2, tail=0.2, last_tail=0.2, last_lr=0.05, balance_end=0.7, mtp_change=0.5
    ),
}


@pytest.fixture(scope="module")
def scheduled(store):
    """The states before and after each of the 10 steps of a run with every phase of the schedule, and its lines."""
    trainer, lines = Trainer(micro(**SCHEDULED), store, torch.device("cpu")), []
    states = [copy_state(trainer)]
    for _ in range(10):
        lines.append(trainer.step())
        states.append(copy_state(trainer))
    return states, lines, weights(trainer)


@pytest.mark.slow
def test_the_values_of_each_phase(scheduled):
    columns = {key: [line[key] for line in scheduled[1]] for key in ("batch_size", "mtp_loss_weight", "balance_speed")}
    assert columns == {
        "batch_size": [1, 1, 2, 3, 4, 4, 4, 4, 4, 4],
        "mtp_loss_weight": [0.3] * 5 + [0.1] * 5,
        "balance_speed": [0.001] * 7 + [0.0] * 3,
    }
    rates = [line["lr"] / 3e-3 for line in scheduled[1]]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.55, 0.1, 0.1, 0.05, 0.05])


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [1, 3, 5, 7, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (2, 4, 6, 8, 9))]
)
def test_a_run_continues_bit_for_bit_in_each_phase(scheduled, store, step):
    """Three steps lead into the next phase, and to the state of the run that was not interrupted."""
    states, lines, _ = scheduled
    resumed = Trainer(micro(**SCHEDULED), store, torch.device("cpu"))
    resumed.load(*states[step])
    measured = ("loss", "main_loss", "lr", "grad_norm", "batch_size", "mtp_loss_weight", "balance_speed", "tokens")
    for line in lines[step : step + 3]:
        now = resumed.step()
        assert {key: now[key] for key in measured} == {key: line[key] for key in measured}
    tensors, state = resumed.state()
    expected, expected_state = states[min(step + 3, 10)]
    assert {**state, "seconds": 0} == {**expected_state, "seconds": 0}
    assert tensors.keys() == expected.keys()
    assert [name for name, t in expected.items() if not torch.equal(t, tensors[name])] == []


@pytest.mark.slow
def test_the_late_weight_of_multi_token_prediction_is_that_of_its_loss(scheduled):
    for line, weight in ((scheduled[1][4], 0.3), (scheduled[1][5], 0.1)):
        total = line["main_loss"] + weight * line["mtp_loss"] + line["balance_loss"]
        assert line["loss"] == pytest.approx(total, rel=1e-6)


@pytest.mark.slow
def test_the_bias_of_experts_stays_after_the_end_of_balancing(scheduled):
    states, _, last = scheduled
    names = [name for name in last if name.endswith("e_score_correction_bias")]
    assert names
    for name in names:
        assert torch.equal(states[7][0][f"model.{name}"], last[name])
        assert not torch.equal(states[6][0][f"model.{name}"], last[name])


def test_uneven_micro_batches_add_up_to_the_whole_batch(new_trainer):
    ramp = {"steps": 4, "initial_batch_size": 3, "batch_ramp": 1.0}
    whole = new_trainer(**ramp).step()
    in_parts = new_trainer(**ramp, micro_batches=2).step()
    assert (whole["batch_size"], in_parts["batch_size"]) == (3, 3)
    assert in_parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert in_parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.05)


@pytest.mark.slow
def test_the_moving_average_is_part_of_the_state(new_trainer, store, tmp_path):
    config = micro()
    config = replace(config, optim=replace(config.optim, ema_decay=0.9))
    first = Trainer(config, store, torch.device("cpu"))
    run(first, 2)
    path = save_checkpoint(tmp_path, 2, *first.state())
    second = Trainer(config, store, torch.device("cpu"))
    second.load(*load_checkpoint(path))
    assert "ema_val_loss" in first.evaluator.validate()
    ours, theirs = first.ema.state_dict(), second.ema.state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


def test_micro_batches_add_up_to_the_whole_batch(new_trainer):
    whole, split = new_trainer(recipe="float32"), new_trainer(recipe="float32", micro_batches=2)
    assert math.isclose(whole.step()["grad_norm"], split.step()["grad_norm"], rel_tol=1e-4)


@pytest.mark.parametrize("recipe", ["deepseek_v3", "fp8_lm"])
def test_a_step_follows_the_clipped_gradient(new_trainer, recipe):
    trainer = new_trainer(recipe=recipe, optim=OptimConfig(clip=1e-3))
    assert trainer.step()["grad_norm"] > 1e-2
    clipped = [load(state, "exp_avg").float() / (1 - 0.9) for state in trainer.optimizer.state.values()]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in clipped]))
    assert norm.item() == pytest.approx(1e-3, rel=0.05)  # moments are rounded


def test_a_state_of_another_shape_is_refused(new_trainer):
    trainer = new_trainer()
    tensors, state = trainer.state()
    tensors["model.lm_head.weight"] = tensors["model.lm_head.weight"][:-1]
    with pytest.raises(ValueError, match=r"lm_head\.weight is \(319, 64\) in the checkpoint but \(320, 64\) here"):
        new_trainer().load(tensors, state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps_done": "2"}, "state.steps_done must be a whole number, not '2'"),
        ({"steps_done": True}, "state.steps_done must be a whole number, not True"),
        ({"steps_done": -1}, "state.steps_done must be at least 0, not -1"),
        ({"tokens": 10**400}, "state.tokens must be at most 9,007,199,254,740,992, not 10\\^60 or more"),
        ({"skipped_in_a_row": 2**63}, "state.skipped_in_a_row must be at most"),
        ({"tokens": 1.5}, "state.tokens must be a whole number, not 1.5"),
        ({"seconds": float("nan")}, "state.seconds must be finite, not nan"),
        ({"skipped": None}, "state.skipped must be a whole number, not None"),
        ({"data": 7}, "state.data must be text or null, not 7"),
        ({"loss_scale": []}, r"state.loss_scale must be an object, not \[\]"),
        ({"loss_scale": {"value": 8.0}}, "state.loss_scale.good_steps is missing"),
        ({"step": 1}, "state.step is unknown"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_state_with_a_wrong_value_is_refused_by_name(new_trainer, changes, message):
    trainer = new_trainer()
    tensors, state = trainer.state()
    with pytest.raises(ValueError, match=message):
        trainer.load(tensors, state | changes)


def test_a_nan_weight_stops_the_run_and_is_named(new_trainer):
    trainer = new_trainer()
    with torch.no_grad():
        trainer.model.model.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"step 1; .* parameter model\.layers\.1\.self_attn\.o_proj\.weight"):
        trainer.step()


def test_the_first_layer_with_a_non_finite_value_is_named(new_trainer):
    trainer = new_trainer(recipe="float32")
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight.mul_(1e30)
        trainer.model.model.layers[0].mlp.gate_proj.weight.mul_(1e30)
    with pytest.raises(FloatingPointError, match=r"the first non-finite value is in model\.layers\.0\.mlp"):
        trainer.step()


def test_an_infinite_gradient_stops_the_run_before_the_weights_change(new_trainer):
    trainer = new_trainer(skip_limit=0)
    before = weights(trainer)
    trainer.model.lm_head.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(
        FloatingPointError, match=r"gradient is not finite at step 1; the nearest to the loss is lm_head\.weight"
    ):
        trainer.step()
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())


def test_overflow_at_the_smallest_loss_scale_stops_the_run(new_trainer):
    trainer = new_trainer(recipe="fp16_loss_scaling", skip_limit=0)
    trainer.loss_scale.value = 1.0
    trainer.model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(FloatingPointError, match=r"the nearest to the loss is lm_head\.weight"):
        trainer.step()


def test_a_nan_gradient_of_fp8_lm_is_named(new_trainer):
    trainer = new_trainer(recipe="fp8_lm", skip_limit=0)
    trainer.model.lm_head.weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(FloatingPointError, match=r"the nearest to the loss is lm_head\.weight"):
        trainer.step()


def test_begin_and_end_tokens_come_from_the_tokenizer(new_trainer, store):
    config = new_trainer().model.config
    assert (config.bos_token_id, config.eos_token_id) == (store.tokenizer.begin, store.tokenizer.end)


def test_a_loss_scale_that_overflows_skips_the_step_and_backs_off(new_trainer):
    trainer = new_trainer(recipe="fp16_loss_scaling")
    before, scale = weights(trainer), trainer.loss_scale.value
    handle = trainer.model.lm_head.weight.register_hook(lambda g: g * float("inf"))
    trainer.step()
    handle.remove()
    assert trainer.loss_scale.value == scale / 2
    assert torch.equal(trainer.model.lm_head.weight, before["lm_head.weight"])


@pytest.mark.one_case
@every_recipe(further=STATELESS_RECIPES)
def test_validation_and_diagnostics_change_nothing(new_trainer, no_report, recipe):
    no_report.undo()
    observed, unobserved = new_trainer(recipe=recipe), new_trainer(recipe=recipe)
    observed.step()
    unobserved.step()
    observed.evaluator.validate()
    observed.evaluator.tile_scales()
    assert observed.step()["loss"] == unobserved.step()["loss"]


def test_tile_scales_are_counted_for_all_three_operands(new_trainer, no_report):
    no_report.undo()
    assert set(new_trainer().evaluator.tile_scales()) == {"x", "w", "dy"}


def test_every_token_is_counted_in_the_expert_load(new_trainer):
    trainer = new_trainer()
    trainer.step()
    assert {sum(load) for load in trainer.expert_load().values()} <= {4 * 32 * 2, 4 * 31 * 2}  # MTP has one fewer


def test_the_expert_load_counts_all_micro_batches_of_a_step(new_trainer):
    trainer = new_trainer(micro_batches=2)
    trainer.step()
    assert {sum(load) for load in trainer.expert_load().values()} <= {4 * 32 * 2, 4 * 31 * 2}


def test_a_recipe_without_a_name_can_be_trained(store):
    changed = replace(Recipe.deepseek_v3(), attention_output=None)
    trainer = Trainer(micro(), store, torch.device("cpu"), changed)
    assert trainer.strategy.recipe == trainer.model.model.layers[0].self_attn.o_proj.recipe == changed


def test_the_balance_bias_changes_by_its_speed(new_trainer):
    trainer = new_trainer()
    trainer.step()
    for moe in trainer.strategy.moes.values():
        load = moe.last_load_E.float()
        assert torch.equal(moe.gate.e_score_correction_bias, 0.001 * torch.sign(load.mean() - load))


def test_the_schedule_ends_at_its_final_learning_rate():
    config = micro(steps=100)
    rates = schedule(config)
    assert rates(99) == pytest.approx(config.optim.lr * config.optim.final_lr, rel=0.05)


def test_the_speed_in_operations_is_that_in_tokens(new_trainer):
    trainer = new_trainer()
    line = trainer.step()
    per_token = train_flops_per_token(trainer.model.config, trainer.config.sequence_length)
    assert line["flops_per_s"] == pytest.approx(per_token * line["tokens_per_s"])
    assert "mfu" not in line  # a CPU has no peak in the table


def test_mfu_is_the_share_of_the_peak(new_trainer):
    trainer = new_trainer()
    trainer._peak = 1e12
    line = trainer.step()
    assert line["mfu"] == pytest.approx(line["flops_per_s"] / 1e12)
