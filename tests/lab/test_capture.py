"""Tests of captures: the recorded operands, and files that are rejected."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from octile.checkpoint.tensor_file import TensorFile, TensorSpec, writing
from octile.lab.capture import FORMAT_VERSION, METADATA, capturing, load, parse_gemm_names
from octile.lab.layers import layer_weights
from octile.nn.conversion import apply_recipe
from octile.nn.functional import grouped_linear
from octile.nn.moe import Experts
from octile.recipe import GEMMS, Recipe
from tests.serve.models import exact_model

D = 40
OFFS = torch.tensor([6, 6, 20], dtype=torch.int32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(D, D, bias=False), Experts(3, D, 24)

    def forward(self, x):
        self.seen = self.first(x)
        return self.experts(self.seen, OFFS)


def batch(seed=0):
    return torch.randn(20, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def captured(tmp_path, *batches, recipe="deepseek_v3", **options):
    """Return the model and the capture of a step, written to a file and read back."""
    model = apply_recipe(Block(), Recipe.named(recipe))
    with capturing(model, **options) as recorder:
        for x in batches or (batch(),):
            model(x).square().sum().backward()
    path = recorder.save(tmp_path / "deep" / "c.safetensors", 7, recipe, "my-run", torch.arange(20)[None])
    return model, load(path), path


def gemms_by_name(capture):
    return {(p.layer, p.gemm): p for p in capture.gemms}


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16", "float32"])
def test_the_operands_are_those_of_the_gemms(tmp_path, recipe):
    model, capture, _ = captured(tmp_path, recipe=recipe)
    x = batch()
    y = model.first(x)
    dy = torch.autograd.grad(model.experts(y, OFFS).square().sum(), y)[0]
    found = gemms_by_name(capture)
    assert torch.equal(found["first", "fprop"].a, x) and torch.equal(found["first", "fprop"].b, model.first.weight)  # noqa: PT018
    assert torch.equal(found["first", "dgrad"].a, dy)
    assert torch.equal(found["first", "dgrad"].b, model.first.weight.mT)
    assert torch.equal(found["first", "wgrad"].a, dy.mT)
    assert torch.equal(found["first", "wgrad"].b, x.mT)


def test_a_gemm_of_the_operands_equals_the_layers(tmp_path):
    model, capture, _ = captured(tmp_path, recipe="float32")
    found = gemms_by_name(capture)["first", "wgrad"]
    torch.testing.assert_close(found.a @ found.b.mT, model.first.weight.grad)


def test_experts_with_tokens_are_separate_gemms(tmp_path):
    model, capture, _ = captured(tmp_path, layers="experts.down", gemms=["fprop"])
    found = gemms_by_name(capture)
    assert set(found) == {("experts.down.0", "fprop"), ("experts.down.2", "fprop")}
    assert found["experts.down.2", "fprop"].a.shape == (14, 24)
    assert torch.equal(found["experts.down.2", "fprop"].b, model.experts.down[2])


def test_a_capture_names_its_source(tmp_path):
    _, capture, _ = captured(tmp_path)
    assert (capture.step, capture.recipe, capture.run) == (7, "deepseek_v3", "my-run")
    assert capture.tokens.tolist() == [list(range(20))]


def test_only_the_first_micro_batch_is_stored(tmp_path):
    _, capture, _ = captured(tmp_path, batch(1), batch(2))
    assert torch.equal(gemms_by_name(capture)["first", "fprop"].a, batch(1))


def test_a_forward_pass_alone_is_not_stored(tmp_path):
    model = apply_recipe(Block())
    with capturing(model) as recorder:
        model(batch(1))
        model(batch(2)).sum().backward()
    assert torch.equal(recorder.tensors["first.x"], batch(2))


@pytest.mark.parametrize(
    ("product", "operands"), [("fprop", {"x", "w"}), ("dgrad", {"dy", "w"}), ("wgrad", {"dy", "x"})]
)
def test_a_file_holds_the_operands_of_its_gemms_and_no_more(tmp_path, product, operands):
    *_, path = captured(tmp_path, layers="first", gemms=[product])
    assert set(TensorFile(path).specs) == {f"first.{operand}" for operand in operands} | {"tokens"}


def test_operands_that_gemms_share_are_stored_once(tmp_path):
    *_, path = captured(tmp_path, layers="first")
    assert set(TensorFile(path).specs) == {"first.x", "first.w", "first.dy", "tokens"}


def test_any_reader_of_safetensors_opens_it(tmp_path):
    model, _, path = captured(tmp_path)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("first.w"), model.first.weight)
        assert json.loads(file.metadata()[METADATA])["version"] == FORMAT_VERSION


def test_an_empty_capture_cannot_be_saved(tmp_path):
    with capturing(apply_recipe(Block()), "first") as recorder:
        pass
    with pytest.raises(RuntimeError, match="dgrad of first did not run"):
        recorder.save(tmp_path / "c.safetensors", 1, "deepseek_v3", "run")
    assert not list(tmp_path.iterdir())


def change_metadata(path, change):
    """Writes the file anew with other metadata."""
    file = TensorFile(path)
    about = change(json.loads(file.metadata[METADATA]))
    metadata = {} if about is None else {METADATA: about if isinstance(about, str) else json.dumps(about)}
    tensors = {name: file.read(name) for name in file.specs}
    with writing(path, {n: TensorSpec.of(t.dtype, tuple(t.shape)) for n, t in tensors.items()}, metadata) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)


BAD = {
    "no capture": (lambda about: None, "is not a capture: write one with octile lab capture"),
    "version": (
        lambda about: about | {"version": 99, "octile": "9.0"},
        "a capture of version 99, written by octile 9.0",
    ),
    "no JSON": (lambda about: "{", "is damaged: its metadata octile_capture cannot be read"),
    "list": (lambda about: "[]", "is damaged: its metadata octile_capture cannot be read"),
    "layer": (lambda about: about | {"products": [["last", "fprop"]]}, "is damaged: it has no last.x"),
    "field": (lambda about: {k: v for k, v in about.items() if k != "step"}, "is damaged: it has no step"),
    "step": (lambda about: about | {"step": "x"}, "is damaged: its step is 'x'"),
    "products": (lambda about: about | {"products": 3}, "is damaged: its products is 3"),
    "pair": (lambda about: about | {"products": [["first"]]}, "is damaged: its products hold \\['first'\\]"),
    "product": (lambda about: about | {"products": [["first", "gelu"]]}, "which is not a pair of layer and GEMM"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_capture_or_version_is_refused(tmp_path, case):
    *_, path = captured(tmp_path, layers="first")
    change, message = BAD[case]
    change_metadata(path, change)
    with pytest.raises(ValueError, match=message) as refusal:
        load(path)
    assert str(path) in str(refusal.value)


def test_a_changed_bit_is_noticed(tmp_path):
    *_, path = captured(tmp_path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its tensors do not match their checksum"):
        load(path)


def test_a_truncated_file_is_noticed(tmp_path):
    *_, path = captured(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        load(path)


def test_under_a_batch_invariant_recipe_all_gemms_but_the_absorbed_ones_are_captured(tmp_path):
    model, tokens_BS = exact_model().train(), torch.arange(60).view(2, 30)
    with capturing(model) as recorder:
        model(tokens_BS, tokens_BS).backward()
    found = load(recorder.save(tmp_path / "c.safetensors", 1, "exact", "my-run"))
    layers = {name for name in layer_weights(model).weights if not name.endswith("kv_b_proj")}
    assert {g.layer if g.expert is None else g.layer.rpartition(".")[0] for g in found.gemms} == layers
    with pytest.raises(ValueError, match=r"other layers than model\.layers\.1\.self_attn\.kv_b_proj: a batch"):
        capturing(model, "model.layers.1.*.kv_b_proj").__enter__()


def test_names_of_gemms():
    assert parse_gemm_names("wgrad, fprop") == ("fprop", "wgrad")
    with pytest.raises(ValueError, match="products must be some of fprop, dgrad, wgrad, not 'bprop'"):
        parse_gemm_names("fprop,bprop")


def test_a_capture_under_autocast_has_the_dtype_of_the_operands():
    w = nn.Parameter(torch.randn(2, 8, D))
    model = nn.Module()
    model.recipe, model.weight = Recipe.deepseek_v3(), w
    with capturing(model, gemms=GEMMS) as recorder:
        x = batch().bfloat16()
        grouped_linear(x, w, torch.tensor([5, 20], dtype=torch.int32), model.recipe).sum().backward()
    assert recorder.tensors["weight.x"].dtype == torch.bfloat16
    assert recorder.tensors["weight.w"].dtype == torch.float32
