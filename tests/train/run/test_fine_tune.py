"""Tests of runs that start from a checkpoint: FP8 weights bit for bit, BF16 weights, folders of transformers."""

import json
import os
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octile.checkpoint.hugging_face import load, load_weights, save
from octile.cli import main
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.models.names import to_hf
from octile.nn.observer import observe_quantization
from octile.options.parse import parse
from octile.scaled import ScaledTensor, quantize
from octile.signals import Stopped
from octile.train import command as train_command
from octile.train.config import TrainConfig, preset
from octile.train.data.token_store import TokenStore
from octile.train.evaluation.evaluator import Evaluator
from octile.train.loop import train
from octile.train.run.fine_tune import (
    INDEXER_SHAPE,
    OPTIM,
    SHAPE,
    check_shape,
    count_unchanged_weights,
    describe_initial_weights,
    fine_tuning,
)
from octile.train.run.folder import RunFolder
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, STATELESS_RECIPES, every_recipe, micro, micro_bf16, silent_console

CPU = torch.device("cpu")
WIDE = replace(MICRO, moe_intermediate_size=128)  # an expert's gate and up projections share no block


@pytest.fixture
def saved(store, tmp_path):
    """Return saved(weights, model): write a model folder with weights other than those of the run's seed."""

    def make(weights="fp8", model=WIDE) -> Path:
        config = replace(model, bos_token_id=store.tokenizer.begin, eos_token_id=store.tokenizer.end)
        torch.manual_seed(7)
        files = [store.folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
        save(DeepseekV3(config), tmp_path / weights, weights, files)
        return tmp_path / weights

    return make


@pytest.mark.slow
def test_the_model_has_the_chat_template_and_the_ends_of_texts_of_that_it_begins_with(saved, text, tmp_path):
    folder, run = saved(), tmp_path / "run"
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5], "top_p": 0.95}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    train(micro(data=str(text), model=WIDE, init_from=folder, steps=1, out=run), False, silent_console())
    assert json.loads((run / "model" / "generation_config.json").read_text()) == {"eos_token_id": [1, 5], "top_p": 0.95}
    assert (run / "model" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert (run / "model" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_a_model_of_another_shape_is_refused_before_anything_is_written(saved, tmp_path):
    folder = saved()
    config = fine_tuning(micro(out=tmp_path / "run"), folder)
    config = replace(config, model=replace(config.model, num_hidden_layers=3, max_position_embeddings=64))
    with pytest.raises(ValueError, match=r"weights in .*fp8: num_hidden_layers is 3, there 2$"):
        train(config, False, silent_console())
    assert not (tmp_path / "run").exists()


INDEXER = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}
ANOTHER = {  # settings that cannot be doubled, and another value
    "num_nextn_predict_layers": 0,
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "rope_scaling": None,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "extra": {"a": 1},
}


@pytest.mark.slow
def test_compared_settings_are_all_that_decide_the_shapes_of_weights():
    def shapes(config):
        return {name: tensor.shape for name, tensor in meta_model(config).state_dict().items()}

    usual = replace(ModelConfig.tiny(), num_nextn_predict_layers=1)
    of_indexers = (*INDEXER, "indexer_rope_interleave", "indexer_types")
    names = [f.name for f in fields(usual) if f.name not in (*ANOTHER, *of_indexers)]
    changed = {name: replace(usual, **{name: 2 * getattr(usual, name)}) for name in names}
    changed |= {name: replace(usual, **{name: value}) for name, value in ANOTHER.items()}
    assert {name for name, other in changed.items() if shapes(other) != shapes(usual)} == set(SHAPE)
    sparse = replace(usual, **INDEXER)
    changed = {name: replace(sparse, **{name: 2 * value}) for name, value in INDEXER.items()}
    changed["indexer_rope_interleave"] = glm = replace(sparse, indexer_rope_interleave=True)
    changed["indexer_types"] = replace(glm, indexer_types=("full", "shared"))
    assert {name for name, other in changed.items() if shapes(other) != shapes(sparse)} == set(INDEXER_SHAPE)


def test_a_model_with_indexers_begins_with_weights_of_dense_attention(saved, store):
    folder = saved()
    config = fine_tuning(micro(), folder)
    model = replace(config.model, index_n_heads=4, index_head_dim=16, index_topk=8)
    trainer = Trainer(replace(config, model=model, indexer_stage="sparse"), store, torch.device("cpu"))
    dense = Trainer(config, store, torch.device("cpu")).model.state_dict()
    assert all(torch.equal(trainer.model.state_dict()[name], tensor) for name, tensor in dense.items())


def test_new_indexers_are_named_and_not_counted_among_the_weights_of_the_folder(saved, store):
    folder = saved("fp8")
    model = replace(WIDE, index_n_heads=4, index_head_dim=16, index_topk=8)
    sparse = Trainer(micro(model=model, init_from=folder, indexer_stage="warm_up"), store, CPU).model
    dense = Trainer(micro(model=WIDE, init_from=folder), store, CPU).model
    expected = describe_initial_weights(dense, folder) + "; the indexers are new"
    assert describe_initial_weights(sparse, folder) == expected


def test_a_model_with_other_indexers_than_its_weights_is_refused(saved, tmp_path):
    model = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=8)
    save(DeepseekV3(model), tmp_path / "sparse")
    config = replace(micro(), model=replace(model, index_n_heads=8), indexer_stage="sparse")
    with pytest.raises(ValueError, match=r"index_n_heads is 8, there 4$"):
        check_shape(config, tmp_path / "sparse")


def test_fine_tuning_of_sparse_attention_trains_it(tmp_path):
    save(DeepseekV3(replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=8)), tmp_path / "sparse")
    assert fine_tuning(micro(), tmp_path / "sparse").indexer_stage == "sparse"


def stored(folder: Path) -> set[bytes]:
    """Read every FP8 matrix of a folder, its data and scales, as bytes."""
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if f"{name}_scale_inv" in tensors]
    return {matrix(tensors[name], tensors[f"{name}_scale_inv"]) for name in names}


def matrix(data: torch.Tensor, scale: torch.Tensor) -> bytes:
    return data.contiguous().view(torch.uint8).numpy().tobytes() + b"|" + scale.contiguous().numpy().tobytes()


def matrices(q: ScaledTensor) -> list[bytes]:
    """Split a quantized weight into the matrices that a folder stores: one per expert, gate and up separately."""
    if q.data.dim() == 2:
        return [matrix(q.data, q.scale)]
    found = []
    for data, scale in zip(q.data, q.scale, strict=True):
        parts = 2 if len(data) == 2 * WIDE.moe_intermediate_size else 1
        found += [matrix(d, s) for d, s in zip(data.chunk(parts), scale.chunk(parts), strict=True)]
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_first_step_multiplies_the_fp8_values_of_the_folder(saved, store, micro_batches):
    folder = saved("fp8")
    config = micro(model=WIDE, init_from=folder, micro_batches=micro_batches)
    trainer, quantized = Trainer(config, store, CPU), []
    with observe_quantization(lambda operand, q: quantized.append(q) if operand == "w" else None):
        trainer.step()
    assert {m for q in quantized for m in matrices(q)} == stored(folder)
    assert count_unchanged_weights(Trainer(config, store, CPU).model)[0] == len(quantized) // micro_batches


def test_master_weights_are_the_dequantized_weights_in_float32(saved, store):
    folder = saved("fp8")
    trainer, expected = Trainer(micro(model=WIDE, init_from=folder), store, CPU), load(folder).state_dict()
    for name, t in trainer.model.state_dict().items():
        assert t.dtype == torch.float32
        assert t.equal(expected[name]), name


def test_a_run_can_start_from_bf16_weights(saved, store):
    folder = saved("bf16")
    trainer = Trainer(micro(model=WIDE, init_from=folder), store, CPU)
    found = to_hf(trainer.model.state_dict(), trainer.model.config)
    assert all(t.equal(found[name].to(t.dtype)) for name, t in load_file(folder / "model.safetensors").items())
    assert describe_initial_weights(trainer.model, folder) == f"weights: {folder}, not quantized"


@pytest.mark.one_case
@every_recipe(further=STATELESS_RECIPES)
def test_any_recipe_trains_from_fp8_weights(saved, store, recipe):
    trainer = Trainer(micro(model=WIDE, init_from=saved("fp8"), recipe=recipe, steps=8), store, CPU)
    losses = [trainer.step()["loss"] for _ in range(8)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_weights_that_are_not_bit_identical_are_reported(saved, store):
    def description(folder, model, recipe="deepseek_v3"):
        return describe_initial_weights(
            Trainer(micro(model=model, init_from=folder, recipe=recipe), store, CPU).model, folder
        )

    folder = saved("fp8")
    total = count_unchanged_weights(Trainer(micro(model=WIDE), store, CPU).model)[1]
    assert f"{total} of {total} quantized weights have the folder's FP8 values" in description(folder, WIDE)
    assert description(folder, WIDE, "bf16").endswith("FP8, dequantized")

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:  # as UE8M0 checkpoints have them
        q = quantize(torch.randn(tensors[name].shape), (128, 128), scale="power_of_2")
        tensors[name], tensors[f"{name}_scale_inv"] = q.data, q.scale
    save_file(tensors, folder / "model.safetensors")
    (folder / "octile.json").unlink()
    unchanged = count_unchanged_weights(Trainer(micro(model=WIDE, init_from=folder), store, CPU).model)[0]
    assert unchanged < total // 2  # those whose largest value in every block is 448 by chance
    assert f"; {unchanged} of {total} quantized" in description(folder, WIDE)
    announced = replace(WIDE, extra={"quantization_config": {"scale_fmt": "ue8m0"}})
    assert f"; {total} of {total} quantized" in description(folder, announced)

    shutil.rmtree(folder)
    shared = 2  # weights of experts: gate and up share a block of 128 rows, as each has 32
    assert f"{total - shared} of {total} quantized weights" in description(saved("fp8", MICRO), MICRO)


@pytest.mark.slow
def test_a_run_starts_where_the_other_ended(text, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train(micro(data=str(text), out=first, steps=12), False, silent_console())
    config = fine_tuning(micro(data=str(text), out=second, steps=2, batch_size=2), first)
    screen = silent_console()
    train(config, False, screen)
    assert f"weights: {first}, FP8" in screen.console.file.getvalue()
    assert (second / "model" / "tokenizer.json").read_bytes() == (first / "model" / "tokenizer.json").read_bytes()

    def first_loss(run):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return next(line["main_loss"] for line in lines if "main_loss" in line)

    def val_loss(run):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [line["val_loss"] for line in lines if "val_loss" in line][-1]

    assert val_loss(second) == pytest.approx(val_loss(first), rel=5e-3)
    assert first_loss(second) < first_loss(first) - 0.3


def test_fine_tuning_uses_the_shape_of_the_folder_and_a_small_learning_rate(saved):
    config = fine_tuning(preset("tiny"), saved("fp8"))
    assert (config.model.hidden_size, config.model.moe_intermediate_size) == (64, 128)
    assert (config.optim, config.batch_size) == (OPTIM, preset("tiny").batch_size)
    assert TrainConfig.from_json(config.to_json()) == config


def read_options(*words: str) -> train_command.Options:
    given = parse(train_command.Options, ["--init-from", *words], "train")
    with given.naming_options():
        return train_command.read(given)


@pytest.mark.parametrize(
    ("options", "warmup", "decay"),
    [
        ((), 0.0, 1.0),
        (("--optim.warmup", "0.1"), 0.1, 0.9),
        (("--optim.warmup", "0.1", "--optim.decay", "0.5"), 0.1, 0.5),
        (("--optim.decay", "0.5"), 0.0, 0.5),
    ],
)
def test_a_warmup_alone_leaves_the_other_steps_to_the_decay(saved, options, warmup, decay):
    optim = read_options(str(saved("fp8")), *options).optim
    assert optim == replace(OPTIM, warmup=warmup, decay=decay)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optim.warmup", "0.1", "--optim.decay", "1"), "warmup 0.1 and --optim.decay 1.0 are together more than"),
        (("--optim.warmup", "1.5"), "--optim.warmup must be at most 1, not 1.5"),
    ],
)
def test_shares_of_steps_that_contradict_each_other_are_refused(saved, options, message):
    with pytest.raises(ValueError, match=message):
        read_options(str(saved("fp8")), *options)


def test_sequences_are_at_most_as_long_as_the_context_of_the_folder(saved):
    context = fine_tuning(preset("tiny"), saved("fp8")).model.max_position_embeddings
    assert fine_tuning(preset("v3_671b"), saved("fp8")).sequence_length == context < 4096


@pytest.mark.slow
def test_a_resumed_run_does_not_need_the_folder_and_is_bit_identical(saved, text, tmp_path):
    def losses(run):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    folder, straight, resumed = saved("fp8"), tmp_path / "straight", tmp_path / "resumed"
    config = micro(data=str(text), model=WIDE, init_from=folder, steps=4)
    train(replace(config, out=straight), False, silent_console())
    train(replace(config, out=resumed), False, silent_console())
    for step in (3, 4):  # as if it had been killed after the second step
        shutil.rmtree(resumed / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
    shutil.rmtree(folder)
    train(RunFolder.open(resumed).read_config(), True, silent_console())
    assert losses(resumed) == losses(straight)


def measurements(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_held_out_loss_is_measured_before_the_first_step(saved, store, text, tmp_path):
    config, screen = (
        micro(data=str(text), model=WIDE, init_from=saved(), steps=2, out=tmp_path / "run"),
        silent_console(),
    )
    train(config, False, screen)
    lines = measurements(tmp_path / "run")
    trainer = Trainer(config, TokenStore.open(tmp_path / "run" / "data"), CPU)
    expected = trainer.evaluator.validate()
    assert lines[0] == {"step": 0, **expected}
    printed = screen.console.file.getvalue()
    assert f"held-out loss before the first step: {expected['val_loss']:.4f} nats per token\n" in printed
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["initial_val_loss"] == expected["val_loss"]
    alone = Trainer(config, TokenStore.open(tmp_path / "run" / "data"), CPU)  # which measures nothing before its steps
    assert [line["loss"] for line in lines if "loss" in line] == [alone.step()["loss"] for _ in range(2)]


REFUSED = (
    "warning: model/ is going to be in FP8, and vLLM 0.26 and SGLang 0.5.23 refuse this checkpoint: model.layers.*."
)


@pytest.mark.one_case
@pytest.mark.parametrize(("recipe", "is_refused"), [("deepseek_v3", True), ("bf16", False)])
def test_an_fp8_model_that_other_engines_refuse_is_warned_of_before_the_first_step(
    saved, text, tmp_path, recipe, is_refused
):
    config, screen = micro(data=str(text), model=WIDE, init_from=saved(), recipe=recipe, steps=1), silent_console()
    train(replace(config, out=tmp_path / "run"), False, screen)
    before_the_first_step = screen.console.file.getvalue().partition("held-out loss before the first step")[0]
    assert (f"{REFUSED}self_attn.q_a_proj has 32 rows" in before_the_first_step) == is_refused


def test_a_run_from_scratch_begins_with_its_first_step(text, tmp_path):
    train(micro_bf16(data=str(text), steps=1, out=tmp_path / "run"), False, silent_console())
    assert min(line["step"] for line in measurements(tmp_path / "run")) == 1


@pytest.mark.one_case
@pytest.mark.parametrize(("checkpoint_every", "measured"), [(1, 1), (0, 2)])
def test_a_resumed_run_measures_the_initial_weights_only_if_it_has_no_checkpoint(
    saved, text, tmp_path, monkeypatch, checkpoint_every, measured
):
    begun, advance, validate = [], Trainer.advance, Evaluator.validate

    def recorded(self):
        begun.extend([0] * (self.progress.steps_done == 0))
        return validate(self)

    def killed(self):
        if self.steps_done == 1:
            raise RuntimeError("killed")
        return advance(self)

    monkeypatch.setattr(Evaluator, "validate", recorded)
    monkeypatch.setattr(Trainer, "advance", killed)
    out = tmp_path / "run"
    config = micro(data=str(text), model=WIDE, init_from=saved(), steps=2, checkpoint_every=checkpoint_every, out=out)
    with pytest.raises(RuntimeError, match="killed"):
        train(config, False, silent_console())
    initial = measurements(out)[0]["val_loss"]
    monkeypatch.setattr(Trainer, "advance", advance)
    train(RunFolder.open(out).read_config(), True, silent_console())
    assert len(begun) == measured
    assert [line["val_loss"] for line in measurements(out) if line["step"] == 0] == [initial]
    assert json.loads((out / "summary.json").read_text())["initial_val_loss"] == initial


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_first_step_goes_on(saved, text, tmp_path, monkeypatch):
    validate, out = Evaluator.validate, tmp_path / "run"

    def stopped(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(self)

    monkeypatch.setattr(Evaluator, "validate", stopped)
    with pytest.raises(Stopped, match="stopped after step 0; to continue"):
        train(micro(data=str(text), model=WIDE, init_from=saved(), steps=1, out=out), False, silent_console())
    monkeypatch.setattr(Evaluator, "validate", validate)
    train(RunFolder.open(out).read_config(), True, silent_console())
    assert [line["step"] for line in measurements(out) if "val_loss" in line] == [0, 1]


@pytest.mark.slow
def test_a_warm_up_of_indexers_warns_of_no_held_out_loss(saved, text, tmp_path):
    model = replace(WIDE, index_n_heads=4, index_head_dim=16, index_topk=8)
    config, screen = micro(data=str(text), model=model, indexer_stage="warm_up", steps=1), silent_console()
    train(replace(config, init_from=saved(), out=tmp_path / "run"), False, screen)
    assert "held-out loss before the first step: " in screen.console.file.getvalue()
    assert "initial_val_loss" not in json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.slow
def test_the_command_of_a_resumed_run_names_the_folder_that_it_began_with(saved, text, tmp_path):
    folder, run = saved("fp8"), tmp_path / "run"
    train(micro(data=str(text), model=WIDE, init_from=folder, steps=1, out=run), False, silent_console())
    train(RunFolder.open(run).read_config(), True, silent_console())
    assert f"--init-from {folder} " in json.loads((run / "summary.json").read_text())["command"]


def test_the_moving_average_starts_from_the_weights_of_the_folder(saved, store):
    config = micro(model=WIDE, init_from=saved("fp8"))
    trainer = Trainer(replace(config, optim=replace(config.optim, ema_decay=0.9)), store, CPU)
    assert trainer.ema.average["lm_head.weight"].equal(trainer.model.lm_head.weight)


@pytest.mark.slow
def test_the_loss_of_the_averaged_weights_is_that_of_the_last_step(text, tmp_path):
    config, screen, out = micro_bf16(data=str(text), steps=4, out=tmp_path / "run"), silent_console(), tmp_path / "run"
    train(replace(config, optim=replace(config.optim, ema_decay=0.5)), False, screen)
    last = [line for line in measurements(out) if "val_loss" in line][-1]
    assert json.loads((out / "summary.json").read_text())["ema_val_loss"] == last["ema_val_loss"] != last["val_loss"]
    assert f"ema:    {out / 'model_ema'}, the weights averaged up to step 4: " in screen.console.file.getvalue()
    assert (out / "model_ema" / "model.safetensors").exists()


def test_fine_tuning_from_the_command_line(saved, text, tmp_path, capsys):
    folder, out = saved("fp8"), tmp_path / "run"
    options = {"data": text, "out": out, "init-from": folder, "steps": 2, "batch-size": 2, "sequence-length": 32}
    main(["train", "--val-sequences", "2", *(str(x) for n, v in options.items() for x in (f"--{n}", v))])
    output = " ".join(capsys.readouterr().out.split())
    assert "quantized weights have the folder's FP8 values in the first step" in output
    saved_config = RunFolder.open(out).read_config()
    assert (saved_config.init_from, saved_config.model.hidden_size, saved_config.optim) == (folder, 64, OPTIM)


@pytest.mark.slow
def test_a_transformers_model_without_a_prediction_layer_can_be_trained(store, tmp_path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    without = replace(WIDE, num_nextn_predict_layers=0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**without.to_hf())).save_pretrained(tmp_path)
    config = fine_tuning(micro(), tmp_path)
    trainer = Trainer(replace(config, optim=micro().optim, steps=8), store, CPU)
    losses = [trainer.step()["loss"] for _ in range(8)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_loading_weights_of_another_shape_changes_nothing(saved):
    folder, model = saved("fp8"), DeepseekV3(MICRO)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"gate_proj\.weight in .* is \[128, 64\], but \[32, 64\] in the model"):
        load_weights(model, folder)
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())


def test_a_folder_without_a_tokenizer_is_refused_before_training(saved, text, tmp_path):
    folder = saved("fp8")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer .* there is no file"):
        train(micro(data=str(text), model=WIDE, init_from=folder, out=tmp_path / "run"), False, silent_console())
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_missing_checkpoint_is_reported_in_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["train", "--init-from", str(tmp_path / "nothing")])
    assert end.value.code == 2
    assert "no checkpoint at" in capsys.readouterr().err
