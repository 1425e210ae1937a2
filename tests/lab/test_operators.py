"""Recorded operators, and `octile lab recompute`, which computes them again."""

import json
from pathlib import Path

import pytest
import torch

from octile.checkpoint.hugging_face import load, save
from octile.kernels import cpu
from octile.lab.operators import Recording, as_called, count_equal, log_probs, ordered, recompute, record
from octile.lab.pages.recompute import describe, operators_table
from octile.lab.rollout import Text
from octile.models.deepseek_v3 import DeepseekV3
from octile.tokenizer import Tokenizer
from tests.serve.models import exact_model, text
from tests.test_cli import call, refused

SIZES = {"vocab_size": 300, "num_nextn_predict_layers": 0}


@pytest.fixture(scope="module")
def model() -> DeepseekV3:
    return exact_model(**SIZES)


@pytest.fixture(scope="module")
def recording(model) -> Recording:
    found = []
    for seed in range(2):
        own = Text(text(9, seed, 300), text(20, 10 + seed, 300))
        values = model.log_probs(torch.tensor([own.prompt + own.tokens]))[0].tolist()
        own.read, own.decoded = values[:8], values[8:]
        found.append(own)
    return record(model, found)


def test_a_recording_is_read_as_it_was_written(recording, tmp_path):
    read = Recording.load(recording.save(tmp_path / "rollout.safetensors"))
    assert (read.device, read.weights, read.texts) == ("cpu", recording.weights, recording.texts)
    assert [vars(call) for call in read.calls] == [
        json.loads(json.dumps(vars(each), default=list)) for each in recording.calls
    ]
    assert read.tensors.keys() == recording.tensors.keys()
    assert all(
        torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in pairs(read, recording)
    )


def pairs(a: Recording, b: Recording):
    return [(a.tensors[name].contiguous(), b.tensors[name]) for name in a.tensors if a.tensors[name].dim()]


def test_every_part_of_the_model_is_recorded_and_weights_are_not_stored(recording, model):
    assert list(dict.fromkeys(call.place for call in recording.calls)) == [
        "positions", "embedding", "block 0", "block 1", "norm", "head",
    ]  # fmt: skip
    names = {call.name.split(".")[1] for call in recording.calls}
    assert names >= {"rms_norm_quantize", "gate", "paged_attention_with_lse", "row_invariant_matmul_nt"}
    assert ("matmul_nt" in names) == cpu.can_multiply()  # otherwise FP8 is dequantized, and multiplied row by row
    stored = [t for t in recording.tensors.values() if t.dtype == torch.float32]
    assert not any(t.shape == p.shape and torch.equal(t, p) for t in stored for p in model.parameters())


def test_the_same_machine_computes_the_recorded_bits(recording, model):
    found = recompute(recording, model)
    assert [each for each in found if each.equal < each.values or each.error is not None] == []
    assert describe("Hopper's sums", found) == "With Hopper's sums all operators have the recorded bits."


def test_an_operator_that_differs_is_found_with_the_place_of_its_first_call(recording, model):
    def compute(func, args, kwargs):
        result = func(*args, **kwargs)
        if str(func) == "octile.unpermute.default":
            result[3, 5] = torch.nextafter(result[3, 5], torch.tensor(torch.inf))
        return result

    found = {each.operator: each for each in recompute(recording, model, compute)}
    (different,) = [each for each in found.values() if each.equal < each.values]
    assert (different.operator, different.values - different.equal) == ("octile.unpermute", 1)
    assert different.near == different.values
    assert 0 < different.largest < 1e-6
    assert different.first is not None
    number, place = different.first
    assert (recording.calls[number].name, place) == ("octile.unpermute.default", "block 1")
    table = operators_table(["one", "two"], [list(found.values())] * 2)
    assert [row[0] for row in table.rows] == ["unpermute", f"{len(found) - 1} other results"]


def test_an_operator_that_cannot_be_computed_is_named(recording, model):
    def compute(func, args, kwargs):
        if str(func) == "octile.gate.default":
            raise NotImplementedError("no gate")
        return func(*args, **kwargs)

    (failed,) = [each for each in recompute(recording, model, compute) if each.error is not None]
    assert (failed.operator, failed.error) == ("octile.gate", "NotImplementedError: no gate")


def test_log_probabilities_have_activations_in_bf16(recording, model):
    first = recording.texts[0]
    exact = torch.tensor([*first.read, *first.decoded])
    dtypes = set()

    def compute(func, args, kwargs):
        if str(func).startswith("octile.rms_norm"):
            dtypes.add(args[0].dtype)
        return func(*args, **kwargs)

    found = log_probs(model, first, compute)
    assert dtypes == {torch.bfloat16}
    assert torch.equal(found, log_probs(model, first, as_called))
    n, n_equal, mean, _ = count_equal([exact], [found])
    assert n == len(exact) == 28
    assert n_equal < n
    assert 0 < mean < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_neighbors_are_one_apart(dtype: torch.dtype):
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    positive = torch.arange(0, 100, dtype=bits).view(dtype)
    values = torch.cat((-positive.float().flip(0), positive.float())).to(dtype)
    assert (ordered(values).diff() == 1).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recompute")
    words = " ".join(f"word{i % 97} of {i}" for i in range(12_000))
    (root / "text.txt").write_text(words)
    tokenizer = Tokenizer.train([words[:20_000]], 300)
    for name, initializer_range in (("exact", 0.08), ("other", 0.07)):
        save(exact_model(vocab_size=tokenizer.vocab_size, initializer_range=initializer_range), root / name)
        tokenizer.save(root / name)
    return root


@pytest.mark.slow
def test_the_commands_record_and_recompute(capsys, folders, monkeypatch):
    monkeypatch.chdir(folders)
    options = ("--tokens", "6", "--new-tokens", "2", "--text", "text.txt", "--record", "r.safetensors")
    code, out, _ = call(capsys, "lab", "rollout", "exact", *options)
    assert code == 0
    assert "octile lab recompute exact r.safetensors" in out
    code, out, _ = call(capsys, "lab", "recompute", "exact", "r.safetensors")
    assert code == 0
    assert "recorded on cpu: 3 texts" in out
    found = "the first operator with other bits is matmul_nt, in block 0."
    if not cpu.can_multiply():  # no FP8 GEMM is recorded, whose sums Hopper has others
        found = "all operators have the recorded bits."
    assert f"With Hopper's sums {found}" in out.replace("\n", " ")
    code, out, _ = call(capsys, "lab", "recompute", "exact", "r.safetensors", "--json")
    found = json.loads(out)
    assert code == 0
    assert [each["sums"] for each in found["log_probs"]] == ["this CPU's", "Hopper's sums"] == list(found["operators"])
    own = found["operators"]["this CPU's"]
    assert all(each["equal"] == each["values"] and each["error"] is None for each in own)
    log_probs_here = found["log_probs"][0]
    assert log_probs_here["equal"] == log_probs_here["tokens"] > 0


def test_a_recording_of_other_weights_is_refused(capsys, folders, monkeypatch, recording):
    monkeypatch.chdir(folders)
    recording.save(Path("foreign.safetensors"))
    assert "is not of other: the weights are others" in refused(
        capsys, "lab", "recompute", "other", "foreign.safetensors"
    )
    assert "does not exist" in refused(capsys, "lab", "recompute", "other", "missing.safetensors")
    assert "is no recording" in refused(capsys, "lab", "recompute", "other", "other/model.safetensors")


def test_weights_of_a_folder_are_those_of_the_recorded_model(folders):
    a, b = (load(folders / "exact") for _ in range(2))
    own = Text(text(5, 0, 300), text(5, 1, 300))
    assert record(a, [own]).weights == record(b, [own]).weights != record(load(folders / "other"), [own]).weights
