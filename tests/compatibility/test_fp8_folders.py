"""transformers loads the folders that `octile convert` writes, each layer in the precision in which it is stored.

transformers' own loader builds the model from config.json. Its check for a GPU is left out, without which it would
dequantize. A layer that it makes FP8 without its weight being so has a scale that is missing; one that it does not make
FP8 leaves a scale in the folder that nobody reads.
"""

import pytest
import torch
from transformers import PreTrainedModel
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.fp8_layout import dequantize_weight
from tests.models_of_transformers import every_architecture, small_model


@pytest.fixture(autouse=True)
def loads_without_a_gpu(monkeypatch):
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)


def loaded(model: PreTrainedModel, folder, keep=()) -> PreTrainedModel:
    """What transformers loads of a model that `octile convert` has converted to FP8."""
    model.save_pretrained(folder / "bf16")
    convert_checkpoint(folder / "bf16", folder / "fp8", "fp8", keep=keep)
    result, info = type(model).from_pretrained(folder / "fp8", output_loading_info=True)
    assert not any(info.values()), info
    return result


@pytest.mark.one_case
@every_architecture
def test_every_layer_is_loaded_in_the_precision_in_which_it_is_stored(name, tmp_path):
    model = loaded(small_model(name).bfloat16(), tmp_path)
    assert any(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters())


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"hidden_size": 200, "intermediate_size": 300}),
        ("qwen3_moe", {"hidden_size": 200, "moe_intermediate_size": 256}),
        ("qwen3_next", {"hidden_size": 200, "moe_intermediate_size": 128}),
    ],
)
def test_weights_of_many_blocks_have_the_values_that_were_converted(name, sizes, tmp_path):
    model = small_model(name, **sizes).bfloat16()
    expected, found = model.state_dict(), loaded(model, tmp_path).state_dict()
    scales = [scale for scale in found if scale.endswith("_scale_inv") and found[scale].numel() > 1]
    assert len(scales) >= 10
    for scale in scales:
        weight = scale.removesuffix("_scale_inv")
        matrices = (t.unflatten(0, (-1, t.shape[-2])) if t.dim() == 2 else t for t in (found[weight], found[scale]))
        values = torch.stack([dequantize_weight(*pair, torch.float32) for pair in zip(*matrices, strict=True)])
        exact = expected[weight].float().view_as(values)
        torch.testing.assert_close(values, exact, rtol=2**-4, atol=float(exact.abs().max()) / 448 * 2**-9)


def test_a_model_in_float32_is_loaded_in_bf16(tmp_path):
    state = loaded(small_model("llama"), tmp_path).state_dict()
    dtypes = {tensor.dtype for name, tensor in state.items() if not name.endswith("_scale_inv")}
    assert dtypes == {torch.float8_e4m3fn, torch.bfloat16}


def test_experts_that_a_pattern_leaves_out_are_no_fp8_experts(tmp_path):
    model = loaded(small_model("qwen3_moe").bfloat16(), tmp_path, keep=["*.experts"])
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["model.layers.0.mlp.experts.gate_up_proj"] == torch.bfloat16
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == torch.float8_e4m3fn
