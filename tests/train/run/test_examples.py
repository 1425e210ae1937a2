"""Tests of runs on examples: each label has the same weight, a resumed run has the same bits, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.flops import train_flops_per_token
from octile.ops.packed_attention import packed_attention
from octile.recipe import Recipe
from octile.train.config import ParallelConfig
from octile.train.data.packed_tokens import PackedTokens
from octile.train.data.prepare_examples import prepare_examples
from octile.train.loop import train
from octile.train.run.fine_tune import check_examples
from octile.train.run.recipe_check import check_recipe
from octile.train.run.results import sample_prompt
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, micro, silent_console

CPU = torch.device("cpu")


@pytest.fixture
def folder(store, tmp_path):
    """A model folder, and examples.jsonl in it."""
    model = DeepseekV3(replace(MICRO, bos_token_id=store.tokenizer.begin, eos_token_id=store.tokenizer.end))
    names = ("tokenizer.json", "tokenizer_config.json")
    save(model, tmp_path / "folder", "fp8", [store.folder / name for name in names])
    rows = [{"prompt": "x" * (i % 9), "completion": "def f" * (1 + i % 5)} for i in range(60)]
    (tmp_path / "folder" / "examples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "folder"


def on_examples(folder, **changes):
    return micro(data=str(folder / "examples.jsonl"), init_from=folder, **changes)


def first_step(folder, tmp_path, **changes) -> tuple[list[float], torch.Tensor]:
    """The loss of a step, its parts and what else is collected; and a gradient."""
    examples = prepare_examples(folder / "examples.jsonl", tmp_path / "data", 32, folder, held_out_sequences=4)
    trainer = Trainer(on_examples(folder, recipe="float32", **changes), examples, CPU)
    computation = trainer._computation
    computation.sequences = 4
    values = computation.compute(trainer.batches.batch(0)).values
    return values.tolist(), trainer.model.lm_head.weight.grad.clone()


@pytest.mark.slow
def test_micro_batches_change_neither_losses_nor_gradients(folder, tmp_path):
    whole, gradient = first_step(folder, tmp_path)
    parts, of_parts = first_step(folder, tmp_path, micro_batches=4)
    assert parts == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(of_parts, gradient, rtol=1e-4, atol=1e-7)
    assert whole[2] > 0  # multi-token prediction is trained, too


def test_attention_of_training_and_of_validation_gets_the_mean_length_of_the_data(folder, tmp_path, monkeypatch):
    examples = prepare_examples(folder / "examples.jsonl", tmp_path / "data", 32, folder, held_out_sequences=4)
    trainer = Trainer(on_examples(folder, steps=1), examples, CPU)
    means = []

    def spy(q, k, v, cu_seqlens, scale, mean_seqlen):
        means.append(mean_seqlen)
        return packed_attention(q, k, v, cu_seqlens, scale, mean_seqlen)

    monkeypatch.setattr("octile.nn.fused.text_attention.packed_attention", spy)
    trainer.step()
    in_training = len(means)
    trainer.evaluator.validate()
    assert len(means) > in_training > 0
    assert {*means} == {examples.manifest.text_statistics.mean_length}


def test_the_speed_in_operations_counts_the_keys_of_a_text_of_mean_length_without_padding(folder, tmp_path):
    examples = prepare_examples(folder / "examples.jsonl", tmp_path / "data", 32, folder, held_out_sequences=4)
    trainer = Trainer(on_examples(folder, steps=1), examples, CPU)
    line, length = trainer.step(), examples.manifest.mean_train_length
    assert examples.manifest.text_statistics.mean_length != length < 32
    assert line["flops_per_s"] == pytest.approx(train_flops_per_token(MICRO, length) * line["tokens_per_s"])


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder, tmp_path):
    lines = []
    for name, steps in (("whole", (6,)), ("parts", (4, 6))):
        config = on_examples(folder, out=tmp_path / name)
        for i, end in enumerate(steps):
            console = silent_console()
            train(replace(config, steps=end, optim=replace(config.optim, decay=0.0)), bool(i), console)
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        lines.append([line["loss"] for line in map(json.loads, metrics) if "loss" in line])
    assert len(lines[0]) == 6
    assert lines[0] == lines[1]
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["examples"]["texts"] == 60


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "xyz", "completion": "def f"}, "xyz"),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "f"}]},
            "User: hi\n\nAssist",
        ),
        ({"text": "def f"}, ""),
    ],
    ids=["completion", "messages", "text"],
)
def test_the_sample_continues_the_prompt_of_a_held_out_example(folder, tmp_path, row, prompt):
    other = {"prompt": "one", "completion": "two"}
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, [row, other])))
    store = prepare_examples(folder / "examples.jsonl", tmp_path / "data", 32, folder, held_out_sequences=1)
    if "one" in store.tokenizer.decode(store.val.tokens.tolist()):
        store = replace(store, val=store.train)
    found = sample_prompt(on_examples(folder), store)
    assert found.startswith(prompt)
    assert bool(found) == bool(prompt)
    assert sample_prompt(on_examples(folder, prompt="def "), store) == "def "  # also where it is that of texts


def test_the_prompt_is_that_of_a_held_out_example_which_has_one(folder, tmp_path):
    rows = [{"text": "def f" * 6}, {"prompt": "xyz", "completion": "f"}]  # packed by length: the text comes first
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = prepare_examples(folder / "examples.jsonl", tmp_path / "data", 32, folder, held_out_sequences=1)
    both = (np.concatenate([getattr(part, name) for part in (store.train, store.val)]) for name in ("tokens", "marks"))
    assert sample_prompt(on_examples(folder), replace(store, val=PackedTokens(*both, 32))) == "xyz"


@pytest.mark.slow
def test_a_run_says_that_no_held_out_example_has_a_prompt(folder, tmp_path):
    rows = [{"text": "def f" * n} for n in range(1, 60)]
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    console = silent_console()
    train(on_examples(folder, out=tmp_path / "run"), False, console)
    assert "no held-out example has a prompt" in console.console.file.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": None}, "add --init-from FOLDER"),
        ({"parallel": ParallelConfig(pp=2)}, "parallel.pp must be 1 for examples"),
        (
            {"model": replace(MICRO, index_n_heads=2, index_head_dim=32, index_topk=4), "indexer_stage": "sparse"},
            "sparse attention does not know the borders",
        ),
    ],
    ids=["weights", "pipeline", "sparse"],
)
def test_what_does_not_train_on_examples_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        check_examples(micro(**{"data": "x.jsonl", "init_from": tmp_path, **changes}))


EXAMPLE = {"prompt": "47 + 38 =", "completion": " 85"}


def check_folder(tmp_path, **files: object) -> None:
    """Check a folder of files, given by name with _ for the dot and content: a text, or what json.dumps gets."""
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "data" / name.replace("_", ".")).write_text(text)
    check_examples(micro(data=str(tmp_path / "data")))


def test_a_folder_of_examples_needs_weights_to_begin_with(tmp_path):
    with pytest.raises(ValueError, match=r"data '.*data' holds examples to fine-tune on: add --init-from FOLDER"):
        check_folder(tmp_path, p0_jsonl=EXAMPLE, p1_jsonl=EXAMPLE)


@pytest.mark.parametrize("name", ["README_md", "notes"])
def test_a_folder_of_examples_and_other_text_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"must hold either examples or other text, .* and '(README.md|notes)': name"):
        check_folder(tmp_path, **{"p0_jsonl": EXAMPLE, name: "About these chats.\n"})


def test_a_folder_in_which_examples_have_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data '.*data': p0.json would be read .*: rename it to p0.jsonl$"):
        check_folder(tmp_path, p0_json=EXAMPLE, a_txt="text")


@pytest.mark.parametrize("files", [{"a_jsonl": '{"step": 1}\n', "b_txt": "text"}, {"a_json": "[1]"}, {}])
def test_a_folder_without_examples_is_plain_text(tmp_path, files):
    check_folder(tmp_path, **files)


def test_a_folder_with_the_name_of_a_built_in_text_is_not_searched_for_examples(tmp_path, monkeypatch):
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "p0.jsonl").write_text(json.dumps(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    check_examples(micro(data="stdlib"))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("name", "lines"), [("chats.json", "chats.jsonl"), ("chats.jsonl", "chats.lines.jsonl")])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_json_array_of_examples_is_refused(tmp_path, indent, name, lines, is_folder):
    (tmp_path / name).write_text(json.dumps([EXAMPLE, EXAMPLE], indent=indent))
    with pytest.raises(ValueError, match=rf"one object a line: convert it with jq -c '.\[\]' .*{name} > .*{lines}$"):
        check_examples(micro(data=str(tmp_path if is_folder else tmp_path / name)))


def test_attention_of_serving_is_refused(tmp_path):
    assert Recipe.exact().batch_invariant
    with pytest.raises(ValueError, match=r"recipe exact does not train on examples \(data 'x.jsonl'\)"):
        check_recipe(micro(data="x.jsonl", init_from=tmp_path, recipe="exact"))


@pytest.mark.parametrize("name", ["chats.json", "chats.txt", "chats"])
def test_examples_by_another_name_are_refused(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "47 + 38 =", "completion": " 85"}\n')
    with pytest.raises(ValueError, match=r"its first line is an example: rename it to chats\.jsonl$"):
        check_examples(micro(data=str(tmp_path / name)))


def test_a_first_line_that_no_example_may_have_is_plain_text(tmp_path, monkeypatch):
    monkeypatch.setattr("octile.train.data.examples.MAX_LINE", 20)
    (tmp_path / "chats.txt").write_text('{"text": "hello, hello"}\n')
    check_examples(micro(data=str(tmp_path / "chats.txt")))


def test_a_file_without_an_end_is_not_searched_for_examples(monkeypatch):
    monkeypatch.setattr(
        "octile.train.run.fine_tune.begins_with_example", lambda path: pytest.fail(f"{path} was opened")
    )
    check_examples(micro(data="/proc/self/pagemap"))


@pytest.mark.parametrize("text", ["def f(): pass\n", '{"a": 1}\n', "[1]\n", ""])
def test_plain_text_is_no_file_of_examples(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    check_examples(micro(data=str(tmp_path / "a.txt")))
