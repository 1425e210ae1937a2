"""Tests of steps that are launched before the steps before them are collected, as on a GPU with a captured step.

The device is a CPU here: it finishes a step when it is launched, but the host looks at the result as late as on a GPU.
"""

import itertools
import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.lab.run import observer
from octile.nn.observer import has_observers
from octile.report.run import spikes
from octile.signals import Stopped
from octile.train.compare.run import train_compared_run
from octile.train.loop import train
from octile.train.run.folder import RunFolder
from octile.train.step import clock, launched
from octile.train.strategy import single as module
from octile.train.strategy.single import Strategy
from octile.train.trainer import Trainer
from tests.train.conftest import (
    STATELESS_RECIPES,
    collect_steps_by,
    every_recipe,
    micro,
    micro_bf16,
    silent_console,
    write_no_report,
)
from tests.train.run.test_bad_days import break_gradients, copy_state, have_same_bits
from tests.train.test_loop import RULES

CPU = torch.device("cpu")
COMPARED = [*(f"{part}loss" for part in ("", "main_", "mtp_", "balance_")), "step", "lr", "grad_norm", "tokens"]
COMPARED += ["skipped", "skipped_for"]
COLLECT_EVERY = 3


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host read late, as on a GPU, but fewer steps at a time."""
    monkeypatch.setattr(module, "why_eager", lambda *_: None)
    collect_steps_by(monkeypatch, COLLECT_EVERY)


def new(store, **changes) -> Trainer:
    return Trainer(micro_bf16(steps=40, **changes), store, CPU)


def measured(lines) -> list[str]:
    return [repr([line.get(key) for key in COMPARED]) for line in lines]  # NaN is not equal to itself


def collect_late(trainer: Trainer, steps: int) -> list[dict]:
    """Launch all steps before the first one is collected."""
    for _ in range(steps):
        trainer.launch()
    return list(trainer.collect())


def break_loss(trainer: Trainer, step: int) -> None:
    """Make the loss of a step NaN, without a change of the model."""
    trainer.model.lm_head.register_forward_hook(
        lambda module, inputs, y: y * float("nan") if trainer.steps_done + 1 == step else None
    )


@pytest.mark.one_case
@every_recipe(lambda recipe: recipe.loss_scale is None, further=STATELESS_RECIPES)
def test_steps_that_are_collected_late_are_those_that_are_collected_at_once(store, recipe):
    at_once, late = new(store, recipe=recipe), new(store, recipe=recipe)
    for trainer in (at_once, late):
        break_gradients(trainer, {2, 3})
    expected = [at_once.step() for _ in range(4)]
    assert measured(collect_late(late, 4)) == measured(expected)
    assert have_same_bits(copy_state(late), copy_state(at_once))
    assert (late.skips.total, late.skips.in_a_row) == (at_once.skips.total, at_once.skips.in_a_row) == (2, 0)


@pytest.mark.slow
def test_a_moving_average_leaves_out_a_step_that_is_skipped(store):
    optim = replace(micro_bf16().optim, ema_decay=0.9)
    at_once, late = new(store, optim=optim), new(store, optim=optim)
    for trainer in (at_once, late):
        break_gradients(trainer, {2})
    for _ in range(4):
        at_once.step()
    collect_late(late, 4)
    assert have_same_bits(late.ema.state_dict(), at_once.ema.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("deepseek_v3", marks=pytest.mark.exhaustive), "delayed", "fp8_lm"])
def test_a_loss_that_is_nan_leaves_the_weights_before_its_step(store, recipe):
    before, broken = new(store, recipe=recipe), new(store, recipe=recipe)
    break_loss(broken, 3)
    for _ in range(2):
        before.step()
    with pytest.raises(FloatingPointError, match="the loss is nan at step 3; the first non-finite value is in lm_head"):
        collect_late(broken, 6)
    assert (broken.steps_done, broken.progress.tokens) == (2, before.progress.tokens)
    ours, theirs = (
        {name: t for name, t in copy_state(trainer).items() if not name.startswith("history.")}
        for trainer in (broken, before)
    )
    assert have_same_bits(ours, theirs)


def test_the_steps_before_a_loss_that_is_nan_are_collected(store):
    trainer = new(store)
    break_loss(trainer, 3)
    for _ in range(6):
        trainer.launch()
    lines = trainer.collect()
    assert [next(lines)["step"] for _ in range(2)] == [1, 2]
    with pytest.raises(FloatingPointError, match="at step 3"):
        next(lines)


def test_too_many_steps_without_finite_gradients_leave_the_weights_before_the_first(store):
    before, broken = new(store), new(store, skip_limit=2)
    break_gradients(broken, {2, 3, 4})  # 5 and 6 are finite, but the run has stopped
    before.step()
    message = r"not finite at step 4; the nearest to the loss is lm_head\.weight, after 2 in a row that were skipped"
    with pytest.raises(FloatingPointError, match=message):
        collect_late(broken, 6)
    assert broken.steps_done == 3
    assert have_same_bits(copy_state(broken), copy_state(before))


@pytest.mark.slow
def test_after_a_stop_the_step_can_be_tried_again(store):
    trainer, straight = new(store, skip_limit=0), new(store)
    handle = trainer.model.lm_head.weight.register_hook(
        lambda g: g * (float("nan") if trainer.steps_done + 1 == 2 else 1.0)
    )
    with pytest.raises(FloatingPointError, match="at step 2"):
        collect_late(trainer, 4)
    handle.remove()
    expected = [straight.step()["loss"] for _ in range(3)]
    assert [trainer.step()["loss"] for _ in range(2)] == expected[1:]


SKIPPED = {2, 3, 5}


@pytest.fixture(scope="module")
def with_skipped_steps(store):
    """with_skipped_steps(recipe): what six steps measure that are collected at once, and the state after them."""

    @cache
    def straight(recipe):
        trainer = new(store, recipe=recipe, skip_limit=2)
        break_gradients(trainer, SKIPPED)
        return measured(trainer.step() for _ in range(6)), copy_state(trainer)

    return straight


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", ["deepseek_v3", "delayed"])
def test_a_run_with_skipped_steps_resumes_to_the_bit(store, with_skipped_steps, tmp_path, recipe, after):
    first, second = (new(store, recipe=recipe, skip_limit=2) for _ in range(2))
    for trainer in (first, second):
        break_gradients(trainer, SKIPPED)
    found = measured(collect_late(first, after))
    second.load(*load_checkpoint(save_checkpoint(tmp_path, after, *first.state())))
    found += measured(collect_late(second, 6 - after))
    expected, state = with_skipped_steps(recipe)
    assert found == expected
    assert have_same_bits(state, copy_state(second))


@pytest.mark.slow
def test_a_resumed_run_counts_the_steps_that_were_skipped_before(store, tmp_path):
    first, second = new(store, skip_limit=2), new(store, skip_limit=2)
    for trainer in (first, second):
        break_gradients(trainer, {2, 3, 4})
    collect_late(first, 3)
    second.load(*load_checkpoint(save_checkpoint(tmp_path, 3, *first.state())))
    before = copy_state(second)
    with pytest.raises(FloatingPointError, match=r"at step 4; .* after 2 in a row"):
        collect_late(second, 3)  # steps 5 and 6 are finite
    assert have_same_bits(copy_state(second), before)


def test_a_state_cannot_be_taken_while_steps_are_uncollected(store):
    trainer = new(store)
    trainer.launch()
    for work in (trainer.state, trainer.step, lambda: trainer.load({}, {})):
        with pytest.raises(RuntimeError, match=r"needs every launched step collected, but 1 are not: call collect\(\)"):
            work()


def test_more_steps_than_the_buffer_holds_are_refused_before_they_change_anything(store, monkeypatch):
    monkeypatch.setattr(launched, "COLLECT_EVERY", 1)
    trainer = new(store)
    trainer.launch()
    trainer.launch()
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"2 steps were launched and not collected: call collect\(\)"):
        trainer.launch()
    assert have_same_bits(trainer.model.state_dict(), before)
    assert trainer.steps_done == 2


@pytest.mark.slow
def test_the_host_collects_some_steps_while_as_many_are_in_flight(store, late):
    trainer = new(store)
    counts = [len(list(trainer.advance())) for _ in range(3 * COLLECT_EVERY)]
    assert [number for number, count in enumerate(counts, 1) if count] == [2 * COLLECT_EVERY, 3 * COLLECT_EVERY]
    assert set(counts) == {0, COLLECT_EVERY}
    assert [line["step"] for line in trainer.collect()] == list(range(2 * COLLECT_EVERY + 1, 3 * COLLECT_EVERY + 1))


def test_an_eager_step_is_collected_at_once(store):
    trainer = new(store)
    assert [[line["step"] for line in trainer.advance()] for _ in range(3)] == [[1], [2], [3]]


def test_an_eager_step_after_others_collects_them_all(store, monkeypatch):
    trainer, reasons = new(store), itertools.chain([None, None], itertools.repeat("it is observed"))
    monkeypatch.setattr(module, "why_eager", lambda *_: next(reasons))
    assert [[line["step"] for line in trainer.advance()] for _ in range(4)] == [[], [], [1, 2, 3], [4]]


def test_each_of_the_steps_that_are_collected_together_has_its_own_time(store, monkeypatch):
    trainer = new(store, initial_batch_size=1, batch_ramp=0.1)
    times = iter([10.0, 14.0, 15.0, 16.0, 18.0])  # when each step begins, and the last one ends
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    lines = collect_late(trainer, 4)  # of 1, 1, 2 and 3 sequences of 32 tokens
    assert [line["batch_size"] for line in lines] == [1, 1, 2, 3]
    assert [line["tokens_per_s"] for line in lines] == [32 / 4.0, 32 / 1.0, 64 / 1.0, 96 / 2.0]
    assert [line["seconds"] for line in lines] == [4.0, 5.0, 6.0, 8.0]


def test_the_speed_of_a_step_does_not_depend_on_when_the_host_collects_it(store, late, monkeypatch):
    """The device takes a second a step, and the host, which had to wait for data, finds all steps finished."""
    trainer, begins = new(store), itertools.count(100.0)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(begins))
    lines = [line for _ in range(2 * COLLECT_EVERY) for line in trainer.advance()]
    lines += trainer.collect()
    assert [line["tokens_per_s"] for line in lines] == [4 * 32.0] * (2 * COLLECT_EVERY)


def test_the_time_between_two_collections_is_not_that_of_a_step(store, monkeypatch):
    trainer, times = new(store), iter([10.0, 12.0, 50.0, 53.0])  # a validation comes between them
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    assert [line["seconds"] for _ in range(2) for line in collect_late(trainer, 1)] == [2.0, 5.0]


@pytest.mark.slow
def test_the_time_of_discarded_steps_is_that_of_the_one_that_is_launched_again(store, late, monkeypatch):
    trainer, losses, given = new(store), Strategy.losses, []

    def too_many_once(self, passes, *arguments):
        if passes.progress.steps_done == 2 and not given:
            given.append("step 3")
            self.too_many_rows.fill_(1)
        return losses(self, passes, *arguments)

    monkeypatch.setattr(Strategy, "losses", too_many_once)
    times = iter([10.0, 11.0, 12.0, 13.0, 14.0, 21.0, 23.0])  # step 3 begins again without a mark of its own
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    lines = [*collect_late(trainer, 4), *collect_late(trainer, 2)]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["seconds"] for line in lines] == [1.0, 2.0, 11.0, 13.0]


# Whole runs


def metrics(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out) -> list[int]:
    return [line["step"] for line in metrics(out) if "loss" in line]


TIMES = ("seconds", "tokens_per_s", "flops_per_s")
RUN = {"steps": 7, "validate_every": 4, "checkpoint_every": 5}


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run whose steps are collected at once, as on a CPU."""
    out = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        train(micro_bf16(data=str(text), out=out, **RUN), False, silent_console())
    return out


@pytest.mark.slow
def test_a_run_writes_what_one_writes_that_collects_at_once(straight, text, tmp_path, late):
    out = tmp_path / "late"
    train(micro_bf16(data=str(text), out=out, **RUN), False, silent_console())
    for key in ("loss", "val_loss", "expert_load"):
        ours, theirs = ([(line["step"], line[key]) for line in metrics(run) if key in line] for run in (out, straight))
        assert ours == theirs
    order = [line["step"] for line in metrics(out)]
    assert order == sorted(order)  # each validation stands after the steps before it


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, pytest.param(4, marks=pytest.mark.exhaustive), 7])
def test_a_run_goes_on_after_steps_that_were_discarded(straight, text, tmp_path, late, monkeypatch, at):
    """More rows than the capacity, which one process never has, are found when the step is collected."""
    losses, grown = Strategy.losses, []

    def too_many_once(self, passes, *arguments):
        if passes.progress.steps_done + 1 == at and not grown:
            self.too_many_rows.fill_(1)
        return losses(self, passes, *arguments)

    monkeypatch.setattr(Strategy, "losses", too_many_once)
    monkeypatch.setattr(Strategy, "grow_capacity", lambda self, where: grown.append(where))
    out = tmp_path / "run"
    train(micro_bf16(data=str(text), out=out, **RUN), False, silent_console())
    assert grown == [f"step {at}"]
    for key in ("loss", "val_loss"):
        ours, theirs = ([(line["step"], line[key]) for line in metrics(run) if key in line] for run in (out, straight))
        assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_a_stopped_run_has_every_step_that_it_launched_and_resumes_to_the_bit(
    straight, text, tmp_path, late, monkeypatch, stop_at
):
    stopped, stop, launch = tmp_path / "stopped", [], Trainer.launch

    def launch_and_stop(self):
        launch(self)
        if self.steps_done == stop_at:
            stop.append(15)

    class Requests:
        __enter__ = lambda self: stop  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "launch", launch_and_stop)
        patch.setattr("octile.train.loop.stop_requests", lambda acknowledge: Requests())
        with pytest.raises(Stopped, match=f"stopped after step {stop_at}"):
            train(micro_bf16(data=str(text), out=stopped, **RUN), False, silent_console())
    assert numbers(stopped) == list(range(1, stop_at + 1))
    train(RunFolder.open(stopped).read_config(), True, silent_console())
    assert numbers(stopped) == numbers(straight)
    ours, theirs = (load_checkpoint(latest_checkpoint(run / "checkpoints"))[0] for run in (stopped, straight))
    assert have_same_bits(ours, theirs)


def test_a_run_that_fails_has_the_steps_before(text, tmp_path, late, monkeypatch):
    out, launch = tmp_path / "run", Trainer.launch
    monkeypatch.setattr(Trainer, "launch", lambda self: launch(self) if self.steps_done < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(micro_bf16(data=str(text), out=out, **RUN), False, silent_console())
    assert numbers(out) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
def test_a_nan_loss_stops_a_run_after_the_lines_before_it(text, tmp_path, late, monkeypatch):
    out, init = tmp_path / "run", Trainer.__init__

    def init_and_break(self, *arguments, **named):
        init(self, *arguments, **named)
        break_loss(self, 7)

    monkeypatch.setattr(Trainer, "__init__", init_and_break)
    config = micro_bf16(data=str(text), out=out, **RUN | {"steps": 40, "validate_every": 100})
    with pytest.raises(FloatingPointError, match="the loss is nan at step 7; the first non-finite value is in lm_head"):
        train(config, False, silent_console())
    assert numbers(out) == list(range(1, 7))
    assert latest_checkpoint(out / "checkpoints").name == "step_00000005"
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_a_spike_has_the_number_of_its_step(text, tmp_path, late, monkeypatch):
    collect = Trainer.collect

    def jump(self, leave=0):
        for line in collect(self, leave):
            yield {**line, "main_loss": 50.0} if line["step"] == 6 else line

    monkeypatch.setattr(Trainer, "collect", jump)
    monkeypatch.setattr(spikes, "MIN_LOSSES", 4)
    screen, out = silent_console(), tmp_path / "run"
    train(micro_bf16(data=str(text), out=out, steps=10, validate_every=100, checkpoint_every=0), False, screen)
    assert "the loss jumped at step 6 to 50.000, where" in screen.console.file.getvalue()
    (line,) = [line for line in metrics(out) if "spike" in line]
    assert (line["step"], line["spike"]["measured_after"]) == (6, 3 * COLLECT_EVERY)


@pytest.mark.slow
def test_a_comparison_names_the_step_at_which_a_recipe_diverged(store, late, monkeypatch):
    init = Trainer.__init__

    def init_and_break(self, *arguments):
        init(self, *arguments)
        break_gradients(self, {2})

    monkeypatch.setattr(Trainer, "__init__", init_and_break)
    assert train_compared_run(micro(), store, silent_console()).curve.diverged_at == 2


@pytest.mark.slow
def test_guards_and_telemetry_are_those_of_steps_that_are_collected_at_once(text, tmp_path, monkeypatch):
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES, encoding="utf-8")  # fires at step 4, and changes later steps
    observed = {"telemetry_every": 2, "telemetry_layers": "*.down_proj", "guards": rules}
    runs = []
    for name, reason in (("at_once", "it is compared"), ("late", None)):
        monkeypatch.setattr(
            module, "why_eager", lambda *_, reason=reason: "an observer reads this step" if has_observers() else reason
        )
        config = micro(data=str(text), out=tmp_path / name, validate_every=5, **observed)
        train(config, False, silent_console(), observer(config))
        runs.append(tmp_path / name)
    at_once, late = ([{k: v for k, v in line.items() if k not in TIMES} for line in metrics(run)] for run in runs)
    assert late == at_once
    assert any("guard" in line for line in late)
    assert (runs[0] / "telemetry.jsonl").read_text() == (runs[1] / "telemetry.jsonl").read_text()
