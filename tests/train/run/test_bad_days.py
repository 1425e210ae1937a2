"""Tests of what docs/bad_days.md states: what a run does when something goes wrong, and which inputs are no problem."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pytest
import torch

from octile.checkpoint.training import load_checkpoint, save_checkpoint
from octile.exit_codes import explain
from octile.lab.run import capture_run
from octile.nn import MoE
from octile.nn.gate import Gate
from octile.nn.linear import Linear
from octile.recipe import Recipe
from octile.report.run import spikes
from octile.report.run.spikes import Spike, SpikeDetector
from octile.train.compare.run import train_compared_run
from octile.train.loop import train
from octile.train.run.folder import RunFolder
from octile.train.run.spikes import spikes_so_far, write_spike
from octile.train.step.passes import Passes
from octile.train.step.progress import schedule
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, every_recipe, micro, micro_bf16, silent_console

CPU = torch.device("cpu")


def break_gradients(trainer: Trainer, steps: set[int], factor: float = float("inf")) -> None:
    """Multiply the gradient of the head by `factor` (infinity by default) in `steps`, counted from 1."""
    trainer.model.lm_head.weight.register_hook(lambda g: g * (factor if trainer.steps_done + 1 in steps else 1.0))


def copy_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.state()[0].items()}


def have_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(_bits(t).equal(_bits(b[name])) for name, t in a.items())


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.flatten().view(torch.uint8)


# A gradient that is NaN or Inf


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@every_recipe(lambda recipe: recipe.loss_scale is None)
def test_a_step_with_a_broken_gradient_changes_only_its_number_and_the_count(new_trainer, recipe, factor):
    trainer = new_trainer(recipe=recipe)
    break_gradients(trainer, {2}, factor)
    trainer.step()
    before = {n: t for n, t in copy_state(trainer).items() if not n.startswith("history.")}  # the history only records
    line = trainer.step()
    after = {n: t for n, t in copy_state(trainer).items() if not n.startswith("history.")}
    assert all(t.equal(after[name]) for name, t in before.items())
    assert (line["step"], line["skipped"], trainer.steps_done) == (2, 1, 2)
    assert line["skipped_for"] == "a gradient is not finite; the nearest to the loss is lm_head.weight"
    later = trainer.step()
    assert later["skipped"] == 1
    assert "skipped_for" not in later
    assert not trainer.model.lm_head.weight.equal(before["model.lm_head.weight"])


def test_a_skipped_step_does_not_change_the_moving_average(store):
    config = micro()
    trainer = Trainer(replace(config, optim=replace(config.optim, ema_decay=0.9)), store, CPU)
    break_gradients(trainer, {1})
    before = {name: t.clone() for name, t in trainer.ema.state_dict().items()}
    trainer.step()
    assert all(t.equal(before[name]) for name, t in trainer.ema.state_dict().items())


def test_a_run_stops_when_too_many_steps_in_a_row_were_skipped(new_trainer):
    trainer = new_trainer(skip_limit=2)
    break_gradients(trainer, {1, 2, 3})
    trainer.step()
    trainer.step()
    message = r"not finite at step 3; the nearest to the loss is lm_head\.weight, after 2 in a row that were skipped"
    with pytest.raises(FloatingPointError, match=message):
        trainer.step()


@pytest.mark.slow
def test_a_step_that_is_not_skipped_resets_the_count_in_a_row(new_trainer):
    trainer = new_trainer(skip_limit=2)
    break_gradients(trainer, {1, 2, 4, 5})
    assert [trainer.step()["skipped"] for _ in range(6)] == [1, 2, 2, 3, 4, 4]


def test_steps_skipped_for_a_loss_scale_do_not_count_towards_the_limit(new_trainer):
    trainer = new_trainer(recipe="fp16_loss_scaling", skip_limit=0)
    break_gradients(trainer, {1, 2, 3})
    lines = [trainer.step() for _ in range(4)]
    assert [line["skipped"] for line in lines] == [1, 2, 3, 3]
    assert lines[1]["skipped_for"] == "the gradients overflowed under a loss scale of 32,768"
    assert trainer.loss_scale.value == 2.0**13


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["deepseek_v3", "delayed", "fp16_loss_scaling"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_with_skipped_steps_resumes_to_the_bit(new_trainer, tmp_path, recipe, after):
    settings = {"recipe": recipe, "skip_limit": 2}
    straight, first, second = (new_trainer(**settings) for _ in range(3))
    for trainer in (straight, first, second):
        break_gradients(trainer, {2, 3, 5})
    expected = [straight.step()["loss"] for _ in range(6)]
    found = [first.step()["loss"] for _ in range(after)]
    second.load(*load_checkpoint(save_checkpoint(tmp_path, after, *first.state())))
    found += [second.step()["loss"] for _ in range(6 - after)]
    assert found == expected
    assert have_same_bits(copy_state(straight), copy_state(second))
    assert (straight.skips.total, straight.skips.in_a_row) == (second.skips.total, second.skips.in_a_row) == (3, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
def test_skipped_steps_are_printed_and_reported(text, tmp_path, monkeypatch):
    original_init = Trainer.__init__

    def init_and_break(self, *arguments):
        original_init(self, *arguments)
        break_gradients(self, {2, 3})

    monkeypatch.setattr(Trainer, "__init__", init_and_break)
    screen, out = silent_console(), tmp_path / "run"
    train(micro(data=str(text), out=out), False, screen)
    message = screen.console.file.getvalue()
    assert "step 3 was skipped: a gradient is not finite; the nearest to the loss is lm_head.weight; 2 steps" in message
    assert "2 steps were skipped" in (out / "report.html").read_text()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines if "loss" in line] == [0, 1, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
def test_a_step_that_broke_can_be_captured(text, tmp_path, monkeypatch):
    original_init = Trainer.__init__

    def init_and_break(self, *arguments):
        original_init(self, *arguments)
        break_gradients(self, {3})

    monkeypatch.setattr(Trainer, "__init__", init_and_break)
    out = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="not finite at step 3"):
        train(micro(data=str(text), out=out, skip_limit=0), False, silent_console())
    assert (out / "report.html").exists()
    assert capture_run(out, 3, "model.layers.0.mlp.down_proj", say=lambda line: None).exists()


@pytest.mark.slow
def test_a_comparison_calls_a_recipe_broken_whose_gradients_break(store, monkeypatch):
    original_init = Trainer.__init__

    def init_and_break(self, *arguments):
        original_init(self, *arguments)
        break_gradients(self, {2})

    monkeypatch.setattr(Trainer, "__init__", init_and_break)
    assert train_compared_run(micro_bf16(), store, silent_console()).curve.diverged_at == 2


# A loss that jumps


@pytest.mark.usefixtures("short_report")
def test_a_spike_is_reported_with_the_text_of_the_sequence_of_largest_loss(text, tmp_path, monkeypatch):
    collect = Trainer.collect

    def jump(self, leave=0):
        for line in collect(self, leave):
            yield {**line, "main_loss": 50.0} if line["step"] == 6 else line

    monkeypatch.setattr(Trainer, "collect", jump)
    monkeypatch.setattr(spikes, "MIN_LOSSES", 4)
    screen, out = silent_console(), tmp_path / "run"
    train(micro_bf16(data=str(text), out=out, steps=7, validate_every=100, checkpoint_every=0), False, screen)
    message = screen.console.file.getvalue()
    assert "the loss jumped at step 6 to 50.000, where" in message
    assert re.search(r"sequence [1-4] of 4 has the largest loss now, \d\.\d+ \(the median is \d\.\d+\): ['\"]", message)
    assert "and was back after 1 step" in message
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "spike" in line]
    assert (line["step"], len(line["spike"]["sequence_losses"])) == (6, 4)
    assert "The loss jumped at step 6 to 50.000" in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["deepseek_v3", "delayed"])
def test_reporting_a_spike_changes_no_later_step(new_trainer, store, recipe):
    observed, unobserved = new_trainer(recipe=recipe), new_trainer(recipe=recipe)
    line, _ = observed.step(), unobserved.step()
    records = []
    write_spike(Spike(1, 50.0, 3.0, 0.1), observed, store, SimpleNamespace(write=records.append), line)
    assert observed.step()["loss"] == unobserved.step()["loss"]
    assert len(records) == 1


def test_a_resumed_run_continues_with_the_losses_before_it(tmp_path):
    run = RunFolder(tmp_path)
    lines = [{"step": n, "main_loss": 3.0 + 0.01 * (n % 3)} for n in range(1, 41)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert spikes_so_far(run).update(41, 9.0).step == 41
    assert SpikeDetector().update(41, 9.0) is None


# Memory that runs out

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to …"


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
@pytest.mark.parametrize("error", [RuntimeError(ALLOCATOR), torch.OutOfMemoryError("CUDA out of memory. Tried to …")])
def test_running_out_of_memory_names_what_to_change_and_how_to_continue(text, tmp_path, monkeypatch, error):
    backward = Passes.backward

    def fail(self, batch_BS, parts, labels_2=None):
        if self.progress.steps_done == 2 and len(batch_BS) > 2:
            raise error
        return backward(self, batch_BS, parts)

    monkeypatch.setattr(Passes, "backward", fail)
    monkeypatch.setattr("octile.train.memory.check.device_memory", lambda device: 10**9)
    out = tmp_path / "run"
    config = micro(data=str(text), out=out)
    with pytest.raises(
        MemoryError, match=r"out of memory at step 3 on the cpu: a sequence of 32 tokens takes"
    ) as caught:
        train(config, False, silent_console())
    assert explain(caught.value)[1] == 1
    assert (out / "report.html").exists()
    advised = re.search(rf"octile train --resume --out {out} --micro-batches (\d)", str(caught.value))
    assert "use --micro-batches 2 (now 1), 2 at a time instead of 4" in str(caught.value)

    screen = silent_console()
    saved = RunFolder.open(out).read_config()
    train(replace(saved, micro_batches=int(advised[1])), True, screen)
    assert "resumed at step 2" in screen.console.file.getvalue()
    assert "micro_batches: 1 before, 2 now" in screen.console.file.getvalue()


@pytest.mark.one_case
@pytest.mark.usefixtures("short_report")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to …"), "out of memory on the cpu"),
        (FloatingPointError("the model's logits are NaN"), "FloatingPointError: the model's logits are NaN"),
    ],
)
def test_a_run_whose_sample_fails_has_a_report_that_says_why(text, tmp_path, monkeypatch, error, reason):

    def fail(*args):
        raise error

    monkeypatch.setattr("octile.train.run.results.generate_from", fail)
    screen = silent_console()
    run = RunFolder(train(micro_bf16(data=str(text), out=tmp_path / "run", steps=2), False, screen))
    assert run.sample_file.read_text() == f"There is no sample: {reason}"
    assert reason in unescape((run.path / "report.html").read_text())
    assert reason in screen.console.file.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
def test_the_sample_finds_the_memory_of_training_free(text, tmp_path, monkeypatch):
    trainers, left = [], []

    def remember(trainer, run, metrics):
        trainers.append(trainer)
        return lambda step: nullcontext()

    def look(*args):
        left.extend([p for p in trainers[0].model.parameters() if p.grad is not None])
        left.extend(trainers[0].optimizer.state.values())
        return iter([])

    monkeypatch.setattr("octile.train.run.results.generate_from", look)
    train(micro_bf16(data=str(text), out=tmp_path / "run", steps=2), False, silent_console(), remember)
    assert not left


# Inputs that are no problem


def zero_some_tiles(trainer: Trainer) -> None:
    """Set weights to zero so that whole tiles of activations, gradients and weights are zero."""
    block = trainer.model.model.layers[0]
    with torch.no_grad():
        block.self_attn.o_proj.weight.zero_()
        block.mlp.up_proj.weight.zero_()
        trainer.model.model.embed_tokens.weight[:, :32] = 0


@pytest.mark.one_case
@every_recipe(further=["bf16"])
def test_training_works_with_tiles_of_zeros(new_trainer, recipe):
    trainer = new_trainer(recipe=recipe)
    zero_some_tiles(trainer)
    lines = [trainer.step() for _ in range(3)]
    assert all(torch.tensor([line["loss"], line["grad_norm"]]).isfinite().all() for line in lines)
    assert trainer.model.model.layers[0].self_attn.o_proj.weight.any()  # it learns: its gradient is not zero


def route_to_two_experts(trainer: Trainer) -> None:
    for moe in trainer.strategy.moes.values():
        bias = moe.gate.e_score_correction_bias
        bias.copy_(torch.tensor([1e4, 1e4 - 1, -1e4, -1e4]))


@pytest.mark.one_case
@every_recipe(lambda recipe: recipe.optimizer.master == "float32")
def test_all_tokens_may_be_routed_to_the_same_experts(new_trainer, recipe):
    trainer = new_trainer(recipe=recipe)
    route_to_two_experts(trainer)
    name, moe = next(iter(trainer.strategy.moes.items()))
    idle = moe.experts.gate_up[2:].clone()
    for _ in range(3):
        line = trainer.step()
        assert torch.tensor([line["loss"], line["grad_norm"]]).isfinite().all()
    load = trainer.expert_load()[name]
    assert load[0] == load[1] > 0
    assert load[2:] == [0, 0]  # no token is dropped: each went to both
    assert load[0] == 4 * 32
    decayed = idle * (1 - torch.tensor([schedule(trainer.config)(n) * 0.1 for n in range(3)])).prod()
    assert torch.allclose(moe.experts.gate_up[2:], decayed, rtol=1e-5, atol=0)  # their gradient is zero


@pytest.mark.parametrize("recipe", [name for name in Recipe.names() if not Recipe.named(name).batch_invariant])
def test_forward_and_backward_work_with_one_token(recipe):
    torch.manual_seed(0)
    moe = MoE(Gate(64, 4, 2), 64, 32, 32)
    for module in (moe.experts, moe.shared_experts):
        module.use_recipe(Recipe.named(recipe)) if hasattr(module, "use_recipe") else None
    layer = Linear(64, 64, recipe=Recipe.named(recipe))
    x = torch.randn(1, 1, 64, requires_grad=True)
    moe(layer(x)).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def test_one_token_has_logits_but_no_loss(new_trainer):
    model = new_trainer().model.eval()
    one = torch.tensor([[5]])
    assert model(one).shape == (1, 1, MICRO.vocab_size)
    with pytest.raises(ValueError, match="a loss needs sequences of at least 2 tokens, not 1"):
        model(one, one)


def test_a_batch_must_be_divisible_by_micro_batches_but_tokens_may_be_any_number(new_trainer):
    with pytest.raises(ValueError, match="batch_size 4 must be divisible by micro_batches 3"):
        micro(micro_batches=3)
    assert torch.isfinite(torch.tensor(new_trainer(batch_size=3, sequence_length=29).step()["grad_norm"]))


def test_held_out_windows_need_not_divide_into_batches(store):
    odd = Trainer(micro(batch_size=3, val_sequences=4), store, CPU)
    even = Trainer(micro(batch_size=2, val_sequences=4), store, CPU)
    assert odd.evaluator.validate()["val_loss"] == pytest.approx(even.evaluator.validate()["val_loss"], rel=1e-6)
