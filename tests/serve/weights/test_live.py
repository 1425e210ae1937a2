"""The weights of a model in training: what an update writes, where, and which models are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import tensors_of
from octile.serve.weights.live import LiveWeights
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import exact_model, new_model

MODELS: dict[str, Any] = {  # the sides of CONFIG are no multiples of 128
    "BF16": lambda: new_model(fp8=False, dtype=torch.bfloat16),
    "FP8": lambda: new_model(fp8=True),
    "FP8, whole blocks": exact_model,
    "powers of two": lambda: exact_model(recipe=Recipe.deepseek_v3().with_weight_scale("power_of_2")),
}


@torch.no_grad()
def step(model: DeepseekV3) -> None:
    """Change all weights as an optimizer does, in place, and the biases of gates."""
    for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("correction_bias"))):
        tensor += 0.1 * torch.randn_like(tensor)


def bits(weights: ServedWeights) -> list[Tensor]:
    return [t.view(torch.uint8).clone() for t in tensors_of(weights.parts)]


def are_equal(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(*each) for each in zip(a, b, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_an_update_writes_all_weights_as_the_model_has_them_and_nothing_else_does(name):
    model = MODELS[name]()
    live = LiveWeights(model)
    before, addresses = bits(live.weights), [t.data_ptr() for t in tensors_of(live.weights.parts)]
    assert all(are_equal(before, bits(ServedWeights.of_model(model))))
    step(model)
    assert all(are_equal(before, bits(live.weights)))
    live.update()
    assert all(are_equal(bits(live.weights), bits(ServedWeights.of_model(model))))
    same = are_equal(before, bits(live.weights))
    assert not any(t.numel() > 64 and is_same for t, is_same in zip(tensors_of(live.weights.parts), same, strict=True))
    assert [t.data_ptr() for t in tensors_of(live.weights.parts)] == addresses


def test_parameters_in_float32_can_be_served_in_bfloat16():
    live = LiveWeights(exact_model(), torch.bfloat16)
    assert live.weights.dtype == live.weights.head.dtype == live.weights.blocks[0].attention.w_k.dtype == torch.bfloat16
    assert live.weights.norm.dtype == torch.float32


def test_blocks_that_are_still_those_of_a_checkpoint_have_the_scales_of_training():
    model, name = exact_model(), "model.layers.0.self_attn.o_proj.weight"
    weight = model.get_parameter(name)
    weight.data = weight.data.to(torch.float8_e4m3fn).float()  # which scales of 1 represent, too
    expected = bits(LiveWeights(model).weights)
    model.stored_scales[name] = torch.ones(1, 1)
    assert all(are_equal(bits(LiveWeights(model).weights), expected))
    assert not all(are_equal(bits(ServedWeights.of_model(model)), expected))


def no_layer(model: DeepseekV3) -> None:
    model.model.layers[1] = nn.Identity()


def half_of_the_experts(model: DeepseekV3) -> None:
    experts = model.moe_layers()["model.layers.1.mlp"].experts
    experts.down = nn.Parameter(experts.down[:4].detach())


def no_number(model: DeepseekV3) -> None:
    model.model.norm.weight.data[3] = torch.nan


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_layer, "whole in this process, but model.layers.1.input_layernorm.weight is spread over ranks"),
        (half_of_the_experts, "whole in this process, but model.layers.1.mlp.experts.down is spread over ranks"),
        (no_number, "finite weights, but model.norm.weight holds NaN or Inf"),
        (lambda model: apply_recipe(model, Recipe.deepseek_v3()), "the recipes that it had"),
    ],
)
def test_a_model_that_cannot_be_served_any_more_is_refused(change, why):
    model = exact_model(num_nextn_predict_layers=0)
    runner = ModelRunner(LiveWeights(model), 4)
    change(model)
    with pytest.raises(ValueError, match=f"^model must .*{why}"):
        runner.check_weights()


def test_what_is_not_the_model_of_a_trainer_is_refused():
    with pytest.raises(TypeError, match=r"^model must be a DeepseekV3, not Linear"):
        LiveWeights(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"activations must be bfloat16 or float32, not torch\.float16"):
        LiveWeights(exact_model(), torch.float16)


def test_weights_that_are_no_copy_of_a_model_in_training_cannot_be_updated():
    runner = ModelRunner(exact_model(), 4)
    for refuse in (runner.check_weights, runner.update_weights):
        with pytest.raises(ValueError, match=r"^runner must be of LiveWeights .* are of another kind"):
            refuse()
