"""Tests of `octile eval`: losses are those of the trainer's validation, and what it refuses before any work."""

import io
import json
import math
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.hugging_face import load, save
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.report.console import Console
from octile.tokenizer import Tokenizer
from octile.train.data.prepare import prepare
from octile.train.data.token_store import TokenStore
from octile.train.evaluation import folders
from octile.train.evaluation.command import Options
from octile.train.evaluation.evaluate import evaluate
from octile.train.evaluation.evaluate import run as run_command
from octile.train.evaluation.folders import ModelFolder
from octile.train.evaluation.text import Sequences, open_text
from octile.train.loop import train
from octile.train.run.folder import RunFolder
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, micro, silent_console

CPU = torch.device("cpu")
WIDE = replace(MICRO, moe_intermediate_size=128, initializer_range=0.08)  # which `exact` takes, and which FP8 changes


@pytest.fixture(scope="module")
def saved(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model that is not trained, with its tokenizer, in a folder of each format."""
    root = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    save(DeepseekV3(WIDE), root / "bf16", weights="bf16")
    store.tokenizer.save(root / "bf16")
    convert_checkpoint(root / "bf16", root / "fp8", "fp8")
    save(apply_recipe(DeepseekV3(WIDE), Recipe.exact()), root / "exact", weights="fp8")
    store.tokenizer.save(root / "exact")
    return lambda name: root / name


@pytest.fixture(scope="module")
def run(text: Path, saved: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step that begins with the BF16 folder."""
    out = tmp_path_factory.mktemp("eval") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octile.train.run.results.write_run_report", lambda folder: folder / "report.html")
        patch.setattr("octile.train.run.results.sample_text", lambda *_: "")
        config = micro(data=str(text), model=WIDE, init_from=saved("bf16"), steps=1, out=out)
        train(config, False, silent_console())
    return out


def evaluated(folder: Path, **options: object) -> str:
    """Evaluate on a CPU, a few sequences unless options say otherwise; return what is printed."""
    console = Console(file=io.StringIO(), width=400)
    evaluate(Options(folder, **{"device": "cpu", "sequences": 7, **options}), console)
    return console.file.getvalue()


def results(folder: Path, tmp_path: Path, **options: object) -> dict:
    """Evaluate on a CPU; return what is written as JSON."""
    evaluated(folder, json=tmp_path / "eval.json", **options)
    return json.loads((tmp_path / "eval.json").read_text())


def refused(folder: Path, error: type[Exception] = ValueError, **options: object) -> str:
    """Return the message with which an evaluation is refused, before weights are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "load", lambda *_: pytest.fail("weights were read"))
        with pytest.raises(error) as refusal:
            evaluated(folder, **options)
    return str(refusal.value)


@pytest.mark.one_case
@pytest.mark.parametrize("recipe", ["bf16", "deepseek_v3", "exact"])
def test_losses_are_those_of_the_trainer_s_validation(saved, store, recipe):
    config = micro(model=WIDE, init_from=saved("bf16"), recipe=recipe, val_sequences=5)
    expected = Trainer(config, store, CPU).evaluator.sequence_losses
    folder = ModelFolder.open(saved("bf16"))
    with open_text(str(store.folder), folder.tokenizer) as held_out:
        sequences = Sequences.of(held_out, 32, 5)
        (windows,) = sequences.read(5)
        (found,) = folder.evaluate(sequences, {recipe: folder.recipe(recipe)}, CPU, lambda n: None)
    np.testing.assert_allclose(found.loss_sum_N / found.labels_N, expected(windows).numpy(), rtol=1e-6)


def test_an_fp8_folder_computes_in_its_own_recipe(saved, store, tmp_path):
    found = results(saved("fp8"), tmp_path, data=str(store.folder), recipes="own,deepseek_v3,bf16")["results"]
    assert [each["recipe"] for each in found] == ["deepseek_v3", "deepseek_v3", "bf16"]
    assert [each["is_own_recipe"] for each in found] == [True, False, False]
    assert found[0]["loss"] == found[1]["loss"] != found[2]["loss"]


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "recipe"), [("bf16", "bf16"), ("fp8", "deepseek_v3"), ("exact", "exact")])
def test_without_recipes_it_is_the_folder_s_own(saved, store, tmp_path, name, recipe):
    (found,) = results(saved(name), tmp_path, data=str(store.folder))["results"]
    assert (found["recipe"], found["is_own_recipe"], found["compared_with"]) == (recipe, True, None)


def test_layers_that_a_folder_has_in_bf16_stay_so_in_its_own_recipe(saved, store, tmp_path):
    convert_checkpoint(saved("bf16"), tmp_path / "kept", "fp8", keep=["*.self_attn.*"])
    options = {"data": str(store.folder), "recipes": "own,deepseek_v3"}
    own, all_layers = results(tmp_path / "kept", tmp_path, **options)["results"]
    assert own["loss"] != all_layers["loss"]


def test_equal_folders_have_the_difference_0(saved, store, tmp_path):
    first, other = results(saved("fp8"), tmp_path, data=str(store.folder), against=saved("fp8"))["results"]
    assert first["compared_with"]["difference"] == 0
    assert first["compared_with"]["interval_over_text"] == [0, 0]
    assert other["compared_with"] is None


def test_an_fp8_folder_differs_from_the_bf16_folder_that_was_converted(saved, store, tmp_path):
    fp8, bf16 = results(saved("fp8"), tmp_path, data=str(store.folder), against=saved("bf16"))["results"]
    assert (fp8["recipe"], bf16["recipe"]) == ("deepseek_v3", "bf16")
    assert fp8["compared_with"]["folder"] == str(saved("bf16"))
    assert fp8["compared_with"]["difference"] == pytest.approx(fp8["loss"] / bf16["loss"] - 1) != 0


def test_recipes_of_a_folder_are_compared_with_bf16(saved, store, tmp_path):
    options = {"data": str(store.folder), "recipes": "deepseek_v3,bf16"}
    fp8, bf16 = results(saved("bf16"), tmp_path, **options)["results"]
    assert bf16["compared_with"] is None
    assert fp8["compared_with"]["recipe"] == "bf16"
    assert fp8["compared_with"]["difference"] == pytest.approx(fp8["loss"] / bf16["loss"] - 1) != 0


def test_a_text_has_the_tokens_of_a_run_s_validation_data(saved, text, tmp_path):
    held_out, others = tmp_path / "held-out.txt", tmp_path / "others"
    held_out.write_text("".join(f"line {n}\n" for n in range(400)))
    shutil.copytree(text, others)
    tokenizer = Tokenizer.load(saved("bf16"))
    expected = prepare(others, 320, tmp_path / "store", 31, val_source=held_out, tokenizer=saved("bf16"))
    with open_text(str(held_out), tokenizer) as found:
        assert found.tokens.tolist() == expected.val.tolist()
        assert found.n_bytes == expected.manifest.bytes["val"] == held_out.stat().st_size


def test_bits_per_byte_are_those_of_the_text(saved, store, tmp_path):
    found = results(saved("bf16"), tmp_path, data=str(store.folder))
    loss, bits = found["results"][0]["loss"], found["results"][0]["bits_per_byte"]
    assert bits == pytest.approx(loss / math.log(2) / store.manifest.bytes_per_token)


@pytest.mark.slow
def test_a_run_is_evaluated_on_its_held_out_text_in_its_sequences(run, tmp_path):
    found = results(run, tmp_path)
    assert found["text"]["name"] == f"the held-out text of {run / 'data'}"
    assert found["text"]["sequence_length"] == 32
    assert found["results"][0]["recipe"] == "deepseek_v3"


@pytest.mark.slow
def test_a_model_is_compared_on_the_held_out_text_of_the_other_s_run(saved, run, tmp_path):
    found = results(saved("bf16"), tmp_path, against=run / "model")
    assert found["text"]["name"] == f"the held-out text of {run / 'data'}"
    assert [each["folder"] for each in found["results"]] == [str(saved("bf16")), str(run / "model")]


@pytest.mark.slow
def test_packed_examples_have_the_loss_of_the_trainer_s_validation(saved, tmp_path):
    rows = [{"prompt": f"{n} + 1 = ", "completion": f"{n + 1}{' and' * (n % 7)}"} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = micro(
        data=str(tmp_path / "rows.jsonl"), model=WIDE, init_from=saved("bf16"), steps=1, out=tmp_path / "run"
    )
    train(config, False, silent_console())
    found = results(saved("bf16"), tmp_path, data=str(tmp_path / "run"), recipes="deepseek_v3")
    store = TokenStore.open(RunFolder(tmp_path / "run").data)
    trainer = Trainer(replace(config, val_sequences=10**6), store, CPU)
    assert found["results"][0]["loss"] == pytest.approx(trainer.evaluator.validate()["val_loss"], rel=1e-6)
    assert found["results"][0]["bits_per_byte"] is None
    assert found["text"]["tokens"] == store.manifest.tokens["val"]  # without padding
    refusal = refused(saved("exact"), data=str(tmp_path / "run"))
    assert refusal.endswith("recipe exact does not know the borders of texts that share a sequence")


def test_sequences_are_evenly_spaced(store):
    with open_text(str(store.folder), store.tokenizer) as text:
        found = Sequences.of(text, 32, 3)
        assert found.number_N.tolist() == [n * found.n_all // 3 for n in range(3)]


def test_all_sequences_are_chosen_where_no_number_is_given(store):
    with open_text(str(store.folder), store.tokenizer) as text:
        assert Sequences.of(text, 32, None).number_N.tolist() == [*range((len(store.val) - 1) // 31)]


@pytest.mark.slow
def test_two_evaluations_print_the_same(saved, store):
    options = {"data": str(store.folder), "against": saved("bf16")}
    assert evaluated(saved("fp8"), **options) == evaluated(saved("fp8"), **options)


def test_what_is_printed_says_what_the_numbers_are_of(saved, store):
    printed = evaluated(saved("fp8"), data=str(store.folder), against=saved("bf16"))
    for words in (
        "parameters",
        "stored in",
        f"the held-out text of {store.folder}",
        "deepseek_v3 (own)",
        "bf16 (own)",
        "on the CPU, where what is not quantized is in FP32",
        "its standard error",
        f"difference: from the loss of {saved('bf16')} in bf16",
        "not over training seeds",
    ):
        assert words in printed


@pytest.mark.parametrize(("name", "says"), [("fp8", "--against FOLDER"), ("bf16", "--recipes bf16,deepseek_v3")])
def test_a_loss_alone_is_followed_by_how_to_compare_it(saved, store, name, says):
    assert says in evaluated(saved(name), data=str(store.folder), sequences=2).splitlines()[-1]


def test_what_is_left_out_of_a_text_is_printed(saved, text, tmp_path):
    shutil.copytree(text, tmp_path / "text")
    (tmp_path / "text" / "copy.txt").write_text((text / "part0.txt").read_text())
    (tmp_path / "text" / "image.png").write_bytes(b"\0\1")
    printed = evaluated(saved("bf16"), data=str(tmp_path / "text"), sequence_length=32, sequences=1)
    assert "left out of the text: 1 not text, 1 duplicate\n" in printed


def test_one_batch_of_a_large_text_is_in_memory_at_a_time(saved, store, monkeypatch):
    monkeypatch.setattr(folders, "TOKENS_AT_ONCE", 64)
    sizes, losses = [], folders.token_losses

    def recorded(model, batch, *rest):
        sizes.append(len(batch))
        return losses(model, batch, *rest)

    monkeypatch.setattr(folders, "token_losses", recorded)
    evaluated(saved("bf16"), data=str(store.folder), sequences=5)
    assert sizes == [2, 2, 1]


@pytest.mark.slow
def test_one_model_is_in_memory_at_a_time(saved, store, monkeypatch):
    models = []

    def loaded(*arguments):
        assert [model for model in models if model() is not None] == []
        model = load(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(folders, "load", loaded)
    evaluated(saved("fp8"), data=str(store.folder), against=saved("bf16"), recipes="own,bf16,per_tensor")
    assert len(models) == 2


def test_a_loss_that_is_not_finite_is_an_error(saved, store, tmp_path):
    model = DeepseekV3(WIDE)
    model.lm_head.weight.data.fill_(float("inf"))
    save(model, tmp_path, weights="bf16")
    store.tokenizer.save(tmp_path)
    with pytest.raises(FloatingPointError, match="not finite under recipe bf16: a weight is damaged"):
        evaluated(tmp_path, data=str(store.folder))


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    assert refused(tmp_path / "none", FileNotFoundError).startswith(f"no checkpoint at {tmp_path / 'none'}")


def test_a_folder_without_a_tokenizer_is_refused(saved, tmp_path):
    shutil.copytree(saved("bf16"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert "there is no file" in refused(tmp_path / "model", FileNotFoundError, data="stdlib")


def test_a_model_of_another_family_is_refused_as_by_the_loader(saved, tmp_path):
    shutil.copytree(saved("bf16"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="'llama'") as expected:
        load(tmp_path / "model")
    assert refused(tmp_path / "model", data="stdlib") == str(expected.value)


def test_a_missing_tensor_is_refused_before_a_text_is_read(saved, tmp_path):
    shutil.copytree(saved("bf16"), tmp_path / "model")
    (tmp_path / "model" / "octile.json").unlink()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors")
    assert "lacks model.embed_tokens.weight" in refused(tmp_path / "model", data=str(tmp_path / "none"))


def test_a_text_shorter_than_a_sequence_is_refused_with_what_is_needed(saved, tmp_path):
    (tmp_path / "short.txt").write_text("a b c\n")
    refusal = refused(saved("bf16"), data=str(tmp_path / "short.txt"))
    tokens = 2 + len(Tokenizer.load(saved("bf16")).encode("a b c\n"))
    assert f"short.txt has {tokens} tokens" in refusal
    assert "but a sequence has 128: name more text, or use a smaller --sequence-length" in refusal


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipes": "bf17"}, "unknown recipe 'bf17'; there are deepseek_v3, bf16"),
        ({"recipes": "bf16,bf16"}, "recipes must differ, but 'bf16,bf16' names bf16 twice"),
        ({"recipes": ","}, "recipes is empty"),
        ({"recipes": "delayed"}, "recipes has delayed, whose scales come from past steps of training"),
        ({"sequence_length": 129}, "sequence_length 129 exceeds the context of "),
        ({"data": ""}, "data is empty"),
        ({"data": "rows.jsonl"}, "data 'rows.jsonl' holds examples: name the folder of the run"),
        ({"data": "model"}, "data 'model' is the folder of a model: name a text, or the run"),
        ({"data": "rows.jsonl", "json": Path("rows.jsonl")}, "json 'rows.jsonl' is a file of data 'rows.jsonl'"),
        ({"data": "model", "json": Path("model", "model.safetensors")}, "json 'model/model.safetensors' "),
        ({"data": None}, "data is not given, and "),
    ],
    ids=repr,
)
def test_bad_input_is_refused_before_any_work(saved, store, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    assert says in refused(saved("bf16"), **{"data": str(store.folder), **options})


def test_a_recipe_that_a_model_cannot_have_is_refused(store, tmp_path):
    save(DeepseekV3(MICRO), tmp_path, weights="bf16")
    store.tokenizer.save(tmp_path)
    assert "moe_intermediate_size must be a multiple of 128" in refused(tmp_path, data="stdlib", recipes="exact")


def test_another_tokenizer_is_refused(saved, store, tmp_path):
    shutil.copytree(saved("bf16"), tmp_path / "model")
    Tokenizer.train(["other text " * 9], 280).save(tmp_path / "model")
    assert "against must have the tokenizer of" in refused(saved("bf16"), data="stdlib", against=tmp_path / "model")
    assert "was encoded by another tokenizer" in refused(tmp_path / "model", data=str(store.folder))


def test_a_model_that_exceeds_the_memory_is_refused(saved, store, monkeypatch):
    monkeypatch.setattr(folders, "available_memory", lambda device: 10**5)
    assert "but 100 kB are available on the cpu" in refused(saved("bf16"), data=str(store.folder))


@pytest.mark.parametrize(("n", "says"), [(64, "the model is too large for it"), (8192, "a smaller --sequence-length")])
def test_advice_for_lack_of_memory_is_such_that_it_helps(saved, n, says):
    class Text:
        sequence_length = n

    with pytest.raises(MemoryError, match=says), folders._explaining_memory(CPU, Text()):
        raise torch.OutOfMemoryError


def test_weights_that_a_recipe_quantizes_are_in_memory_twice(saved, store, monkeypatch):
    parameters = sum(parameter.numel() for parameter in DeepseekV3(WIDE).parameters())
    monkeypatch.setattr(folders, "available_memory", lambda device: 9 * parameters // 2)
    assert "are available on the cpu" in refused(saved("bf16"), data=str(store.folder), recipes="bf16,deepseek_v3")
    assert "bf16" in evaluated(saved("fp8"), data=str(store.folder), recipes="bf16", sequences=1)


def test_results_that_cannot_be_written_are_refused(saved, store, tmp_path):
    assert "is a folder: name a file" in refused(
        saved("bf16"), IsADirectoryError, data=str(store.folder), json=tmp_path
    )


def test_it_runs_in_one_process(monkeypatch, saved):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="octile eval runs in one process"):
        run_command(Options(saved("bf16")))
