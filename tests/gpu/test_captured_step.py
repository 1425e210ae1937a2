"""A training step that is captured in CUDA graphs does what the eager step does."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.quantize import launcher
from octile.kernels.cuda.quantize.launcher import Form
from octile.kernels.triton import tensor_table
from octile.nn.delayed_scaling import amax_histories
from octile.nn.observer import Observer, observe
from octile.recipe import Recipe
from octile.train.config import OptimConfig
from octile.train.data.token_store import TokenStore
from octile.train.loop import train
from octile.train.step.captured import WARM_UP_STEPS
from octile.train.step.clock import StepClock
from octile.train.step.launched import COLLECT_EVERY
from octile.train.strategy import single as module
from octile.train.trainer import Trainer
from tests.train.conftest import micro, silent_console

STEPS = WARM_UP_STEPS + 5
CAPTURED = [name for name in Recipe.names() if name not in ("global_scale", "fp16_loss_scaling", "fp8_lm", "float32")]
SOME_CAPTURED = [  # for what the recipe hardly changes
    name if name in ("deepseek_v3", "delayed", "bf16") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in CAPTURED
]


@pytest.fixture
def trainer_of(store: TokenStore) -> Callable[..., Trainer]:
    def new(recipe: str = "deepseek_v3", **changes) -> Trainer:
        return Trainer(micro(recipe=recipe, **changes), store, torch.device("cuda"))

    return new


def test_the_time_of_a_step_is_that_of_the_gpu_also_if_the_host_is_late():
    clock, begin, end = StepClock(torch.device("cuda")), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    clock.mark()
    begin.record()
    torch.cuda._sleep(10**8)  # some 50 ms
    end.record()
    clock.mark()
    time.sleep(1.0)  # the host comes back when the GPU has finished
    assert clock.lap() == pytest.approx(begin.elapsed_time(end) / 1e3, rel=0.1)


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_eager", lambda *_: "the test compares with it")


def is_captured(trainer: Trainer) -> bool:
    return trainer.captured is not None and trainer.captured.is_captured


@pytest.mark.parametrize(
    ("recipe", "micro_batches"), [*((recipe, 1) for recipe in CAPTURED), ("bf16", 2), ("deepseek_v3", 2)]
)
def test_captured_steps_have_the_losses_of_eager_steps(trainer_of, recipe: str, micro_batches: int, monkeypatch):
    captured = trainer_of(recipe, micro_batches=micro_batches)
    ours = [captured.step() for _ in range(STEPS)]
    assert is_captured(captured)
    eager(monkeypatch)
    uncaptured = trainer_of(recipe, micro_batches=micro_batches)
    for line in ours:
        theirs = uncaptured.step()
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(theirs[key], rel=2e-3), (key, line["step"])


def test_the_weights_follow_the_learning_rate_of_each_step(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.progress.learning_rate = lambda: 0.0
    trainer.step()
    assert [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])] == []


def test_the_gate_is_balanced_by_the_load_of_the_step(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    (name, moe), *_ = trainer.strategy.moes.items()
    before = moe.gate.e_score_correction_bias.clone()
    trainer.step()
    load_E = trainer.last_load[name].float()
    speed = trainer.config.optim.balance_speed
    torch.testing.assert_close(
        moe.gate.e_score_correction_bias, before + speed * torch.sign(load_E.mean() - load_E), rtol=0, atol=1e-6
    )


def test_a_captured_step_without_finite_gradients_is_skipped(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    weight = trainer.model.model.norm.weight
    weight.data[0] = 3e38
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    try:
        line = trainer.step()
    except FloatingPointError:  # the loss itself was not finite: nothing was updated either
        line = {"skipped": 1}
    assert line["skipped"] == 1
    assert [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])] == []


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_all_weights_of_a_captured_step_are_quantized_by_one_launch(trainer_of, micro_batches: int, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs the kernels for Hopper")
    launch, forms = launcher._launch, []

    def recorded(name: str, constants: dict[str, int], *args, **kwargs) -> None:
        if torch.cuda.is_current_stream_capturing():
            forms.append((name, constants.get("form")))
        launch(name, constants, *args, **kwargs)

    monkeypatch.setattr(launcher, "_launch", recorded)
    trainer = trainer_of(micro_batches=micro_batches)
    for _ in range(STEPS):
        trainer.step()
    of_weights = [name for name, form in forms if form in (Form.WEIGHT, Form.BLOCK)]
    assert of_weights == ["matrices"]


def test_an_observed_step_runs_eagerly_between_captured_ones(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    seen: list[str] = []
    with observe(Observer(quantization=lambda name, values: seen.append(name))):
        observed = trainer.step()
    assert {"x", "w", "dy"} <= set(seen)
    assert trainer.step()["loss"] == pytest.approx(observed["loss"], rel=0.05)


def test_a_validation_between_captured_steps_reads_the_new_weights(trainer_of, monkeypatch):
    captured = trainer_of()
    for _ in range(STEPS):
        captured.step()
    captured.evaluator.validate()
    captured.step()
    found = captured.evaluator.validate()["val_loss"]
    eager(monkeypatch)
    uncaptured = trainer_of()
    for _ in range(STEPS + 1):
        uncaptured.step()
    assert found == pytest.approx(uncaptured.evaluator.validate()["val_loss"], rel=2e-3)


def test_another_recipe_of_a_layer_is_captured_again(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    layer = trainer.model.model.layers[0].mlp.down_proj
    layer.use_recipe(replace(Recipe.deepseek_v3().without("wgrad")))
    trainer.step()
    assert not is_captured(trainer)
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    assert is_captured(trainer)


@pytest.mark.parametrize("changes", [{"mtp_change": 0.5}, {"balance_end": 0.5}], ids=str)
def test_a_value_that_changes_during_the_run_is_captured_again(trainer_of, changes, monkeypatch):
    steps = 2 * STEPS
    config = {"steps": steps, "optim": OptimConfig(lr=3e-3, **changes)}
    captured = trainer_of(**config)
    ours = [captured.step() for _ in range(steps)]
    assert is_captured(captured)
    eager(monkeypatch)
    uncaptured = trainer_of(**config)
    for line in ours:
        assert line["loss"] == pytest.approx(uncaptured.step()["loss"], rel=2e-3), line["step"]
    for name, moe in captured.strategy.moes.items():
        before = moe.gate.e_score_correction_bias.clone()
        captured.step()
        assert torch.equal(before, moe.gate.e_score_correction_bias) == ("balance_end" in changes), name


def test_a_growing_batch_is_trained_eagerly_until_it_has_its_size(trainer_of):
    trainer = trainer_of(steps=2 * STEPS, initial_batch_size=1, batch_ramp=0.5)
    sizes = [trainer.step()["batch_size"] for _ in range(2 * STEPS)]
    assert (sizes[0], sizes[-1]) == (1, trainer.config.batch_size)
    assert is_captured(trainer)


def test_the_second_trainer_of_a_process_leaves_no_memory_behind(trainer_of):
    """What the first one leaves are workspaces, as cuBLAS' for the stream of captures."""
    allocated = []
    for _ in range(2):
        trainer = trainer_of()
        for _ in range(STEPS):
            trainer.step()
        assert is_captured(trainer)
        trainer.close()
        del trainer
        tensor_table._cached.cache_clear()  # of addresses: the last 32 stay
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] <= allocated[0]


# Steps that are launched before the steps before them are collected


@pytest.fixture
def captured_of(trainer_of) -> Callable[..., Trainer]:
    """Make a trainer that has captured its step; what `prepare` does to it is captured too."""

    def new(recipe: str = "deepseek_v3", prepare: Callable[[Trainer], object] = id, **changes) -> Trainer:
        trainer = trainer_of(recipe, **changes)
        prepare(trainer)
        for _ in range(STEPS):
            trainer.step()
        assert is_captured(trainer)
        return trainer

    return new


@pytest.fixture
def factor() -> Tensor:
    """A number on the GPU by which a test multiplies a gradient or a logit in a captured step."""
    return torch.ones((), device="cuda")


def scale_gradient(factor: Tensor) -> Callable[[Trainer], object]:
    return lambda trainer: trainer.model.lm_head.weight.register_hook(lambda g: g * factor)


def scale_logits(factor: Tensor) -> Callable[[Trainer], object]:
    return lambda trainer: trainer.model.lm_head.register_forward_hook(lambda module, inputs, y: y * factor)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copy weights, biases, moments, step counts and amax histories on the GPU; the host does not wait."""
    state = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    for i, moments in enumerate(trainer.optimizer.state.values()):
        state |= {f"{i}.{name}": t.clone() for name, t in moments.items()}
    histories = {name: history.amax_OH for name, history in amax_histories(trainer.model).items()}
    return state | {name: amax_OH[:, 1:].clone() for name, amax_OH in histories.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name, t in a.items() if not torch.equal(t, b[name])]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the GPU inside the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", CAPTURED)
def test_the_host_waits_for_nothing_when_it_launches_captured_steps(captured_of, recipe: str):
    trainer = captured_of(recipe)
    with no_waiting():
        for _ in range(5):
            trainer.launch()
    assert [line["step"] for line in trainer.collect()] == list(range(STEPS + 1, STEPS + 6))


@pytest.mark.parametrize("recipe", SOME_CAPTURED)
def test_steps_that_are_collected_late_have_the_losses_of_eager_steps(trainer_of, recipe: str, monkeypatch):
    late, steps = trainer_of(recipe), 2 * COLLECT_EVERY
    for _ in range(steps):
        late.launch()
    ours = list(late.collect())
    assert is_captured(late)
    eager(monkeypatch)
    uncaptured = trainer_of(recipe)
    for line in ours:
        assert line["loss"] == pytest.approx(uncaptured.step()["loss"], rel=1e-2), line["step"]


@pytest.mark.parametrize("recipe", CAPTURED)
def test_a_step_is_skipped_on_the_device(captured_of, factor, recipe: str):
    trainer = captured_of(recipe, scale_gradient(factor))
    states = []
    for value in (float("inf"), float("nan"), 1.0):
        states.append(state_of(trainer))
        factor.fill_(value)
        trainer.launch()
    states.append(state_of(trainer))
    lines = list(trainer.collect())
    assert [line["skipped"] for line in lines] == [1, 2, 2]
    reason = "a gradient is not finite; the nearest to the loss is lm_head.weight"
    assert [line.get("skipped_for") for line in lines] == [reason, reason, None]
    assert differing(states[0], states[1]) == differing(states[1], states[2]) == []
    assert "lm_head.weight" in differing(states[2], states[3])


@pytest.mark.parametrize("recipe", SOME_CAPTURED)
def test_a_loss_that_is_nan_leaves_the_weights_before_its_step(captured_of, factor, recipe: str):
    trainer = captured_of(recipe, scale_logits(factor))
    trainer.launch()
    before = state_of(trainer)
    factor.fill_(float("nan"))
    for _ in range(4):
        trainer.launch()
    lines = trainer.collect()
    assert next(lines)["step"] == STEPS + 1
    message = f"the loss is nan at step {STEPS + 2}; the first non-finite value is in lm_head"
    with pytest.raises(FloatingPointError, match=message):
        next(lines)
    assert differing(before, state_of(trainer)) == []
    assert trainer.steps_done == STEPS + 1
    factor.fill_(1.0)
    assert trainer.step()["step"] == STEPS + 2
    assert "lm_head.weight" in differing(before, state_of(trainer))


def test_too_many_skipped_steps_leave_the_weights_before_the_first(captured_of, factor):
    trainer = captured_of(prepare=scale_gradient(factor), skip_limit=2)
    before = state_of(trainer)
    for value in (float("nan"),) * 3 + (1.0,) * 3:
        factor.fill_(value)
        trainer.launch()
    lines = trainer.collect()
    assert [next(lines)["skipped"] for _ in range(2)] == [1, 2]
    with pytest.raises(FloatingPointError, match=f"not finite at step {STEPS + 3}; .* after 2 in a row that were"):
        next(lines)
    assert differing(before, state_of(trainer)) == []


def test_a_resumed_trainer_has_the_bits_of_the_one_that_skipped_a_step(captured_of, trainer_of, factor):
    trainer = captured_of(prepare=scale_gradient(factor))
    factor.fill_(float("inf"))
    trainer.launch()
    list(trainer.collect())
    tensors, state = trainer.state()
    resumed = trainer_of()
    resumed.load(tensors, state)
    assert differing(tensors, resumed.state()[0]) == []
    assert (resumed.skips.total, resumed.skips.in_a_row) == (1, 1)
    factor.fill_(1.0)
    assert resumed.step()["loss"] == pytest.approx(trainer.step()["loss"], rel=1e-3)


def test_a_moving_average_follows_captured_steps_and_leaves_out_a_skipped_one(captured_of, factor):
    trainer = captured_of(prepare=scale_gradient(factor), optim=OptimConfig(lr=3e-3, ema_decay=0.9))
    expected = {name: t.clone() for name, t in trainer.ema.state_dict().items()}
    for value in (1.0, float("inf"), 1.0, 1.0):
        factor.fill_(value)
        trainer.launch()
        if value == 1.0:
            for name, p in trainer.model.named_parameters():
                expected[name] = expected[name].lerp(p.detach().cpu(), 1 - 0.9)
    assert [line["skipped"] for line in trainer.collect()] == [0, 1, 1, 1]
    for name, average in trainer.ema.state_dict().items():
        torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_run_writes_every_step_in_order(text, tmp_path):
    out, steps = tmp_path / "run", 3 * COLLECT_EVERY + 5
    config = micro(data=str(text), out=out, device="cuda", steps=steps, validate_every=12, checkpoint_every=15)
    train(config, False, silent_console())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert all(line["tokens_per_s"] > 0 for line in lines if "loss" in line)
