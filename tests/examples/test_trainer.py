"""Tests that transformers' Trainer works with converted models: accumulation, autocast, checkpoints."""

import argparse
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Trainer, TrainerCallback, TrainingArguments

from octile.nn.conversion import apply_recipe
from octile.nn.linear import Linear
from octile.nn.observer import observe_quantization
from tests.models_of_transformers import small_model

TEXT = Path(argparse.__file__).read_bytes()
EXAMPLES = [{"input_ids": list(TEXT[n : n + 48]), "labels": list(TEXT[n : n + 48])} for n in range(0, 48 * 16, 48)]
TOKENS = torch.tensor([example["input_ids"] for example in EXAMPLES[:4]])


def build(config_class=LlamaConfig):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    return apply_recipe(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def fit(model, out, resume=False, stop=4, **changes):
    """Four steps of four sequences; returns the trainer."""
    settings = {
        "output_dir": str(out),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(**{**settings, **changes})
    trainer = Trainer(model=model, args=args, train_dataset=EXAMPLES, callbacks=[StopAfter(stop)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(a, b):
    return all(t.equal(b.state_dict()[name]) for name, t in a.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("config_class", [pytest.param(LlamaConfig, marks=pytest.mark.exhaustive), Qwen3Config])
def test_a_run_that_resumes_from_the_trainers_checkpoint_ends_with_the_same_bits(tmp_path, config_class):
    settings = {"bf16": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    straight, stopped, resumed = (build(config_class) for _ in range(3))
    fit(straight, tmp_path / "straight", **settings)
    fit(stopped, tmp_path / "stopped", stop=2, **settings)
    fit(resumed, tmp_path / "stopped", resume=True, **settings)
    assert same(straight, resumed)
    assert not same(stopped, resumed)


def mixture():
    torch.manual_seed(0)
    return apply_recipe(small_model("qwen3_moe"))


@pytest.mark.slow
def test_a_mixture_that_is_made_of_the_checkpoint_resumes_with_the_same_bits(tmp_path):
    straight = mixture()
    fit(straight, tmp_path)
    with pytest.raises(ValueError, match="would leave them as they are: make the model with from_pretrained"):
        fit(mixture(), tmp_path, resume=str(tmp_path / "checkpoint-2"))
    resumed = apply_recipe(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2"))
    assert not same(straight, resumed)
    fit(resumed, tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert same(straight, resumed)


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_bit(tmp_path):
    plain, checkpointed = build(), build()
    fit(plain, tmp_path / "plain", bf16=True)
    checkpointed.gradient_checkpointing_enable()
    fit(checkpointed, tmp_path / "checkpointed", bf16=True)
    assert same(plain, checkpointed)


def second_step(model, out, **changes):
    """The gradients of the second step, as the optimizer finds them, and what was cast for it: operand → the casts.

    In the first step no optimizer has stepped yet, so that weights are not cached from one micro-batch to the next.
    """
    gradients, casts = {}, {"x": [], "w": [], "dy": []}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 0:
                for seen in casts.values():
                    seen.clear()
            else:
                gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})

    settings = {"max_steps": 2, "learning_rate": 0.0, "max_grad_norm": 0.0, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(output_dir=str(out), **settings, **changes)
    trainer = Trainer(model=model, args=args, train_dataset=EXAMPLES, callbacks=[Look()])
    with observe_quantization(lambda operand, q: casts.setdefault(operand, []).append(q)):
        trainer.train()
    return gradients, casts


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_whole_batch_and_weights_are_quantized_once(tmp_path):
    whole, once = second_step(build(), tmp_path / "whole", per_device_train_batch_size=4)
    pieces, twice = second_step(
        build(), tmp_path / "pieces", per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    for name, dw in whole.items():
        assert (pieces[name] - dw).norm() <= 0.05 * dw.norm(), name  # tiles along the tokens end elsewhere
    assert len(twice["x"]) == 2 * len(once["x"])
    layers = sum(isinstance(module, Linear) for module in build().modules())
    assert len({id(q) for q in twice["w"]}) == len({id(q) for q in once["w"]}) == layers


@pytest.mark.slow
def test_autocast_makes_gemms_bf16_and_leaves_parameters_in_float32(tmp_path):
    model, seen = build(), set()
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    fit(model, tmp_path, bf16=True)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_the_trainer_saves_loads_in_transformers_and_computes_the_same_when_converted(tmp_path):
    model = build()
    fit(model, tmp_path).save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not any(isinstance(module, Linear) for module in loaded.modules())
    assert same(model, loaded)
    with torch.no_grad():
        assert apply_recipe(loaded).eval()(TOKENS).logits.equal(model.eval()(TOKENS).logits)
