"""accelerate, peft, torchao, bitsandbytes and Lightning with converted models.

transformers' Trainer has its tests in tests/examples/test_trainer.py. What the tests' extra does not install is tested
with the exhaustive tests, and skipped without the extra `trainers`.
"""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from octile.nn.conversion import apply_recipe, convert
from octile.nn.fused import quantize as fused_quantize
from octile.nn.linear import Linear
from octile.optim import AdamW, Muon, muon_groups
from tests.models_of_transformers import small_model

TOKENS = torch.randint(160, (2, 12), generator=torch.Generator().manual_seed(0))
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0, "init_lora_weights": False}


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return small_model("llama")


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, backward=torch.Tensor.backward) -> list[float]:
    found = []
    for _ in range(8):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.slow
def test_accelerate_trains_as_a_loop_does():
    alone, prepared = apply_recipe(llama()), apply_recipe(llama())
    accelerator = Accelerator(cpu=True)
    expected = losses(alone, AdamW(alone.parameters(), lr=1e-2))
    model, optimizer = accelerator.prepare(prepared, AdamW(prepared.parameters(), lr=1e-2))
    assert losses(model, optimizer, accelerator.backward) == expected


@pytest.mark.slow
def test_muon_trains_a_converted_mixture():
    torch.manual_seed(0)
    model = apply_recipe(small_model("qwen3_moe"))
    groups = muon_groups(model, 0.1)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    kinds = [{name_of[p].removesuffix(".weight").split(".")[-1] for p in group["params"]} for group in groups]
    experts = {"gate_up_proj", "down_proj"}
    assert kinds[:2] == [experts | {f"{name}_proj" for name in "qkvo"}, {"embed_tokens", "gate", "lm_head"}]
    found = losses(model, Muon(groups, lr=1e-2))
    assert found[-1] < found[0] - 1


@pytest.mark.one_case
@pytest.mark.parametrize("first", ["convert", "peft"])
def test_lora_trains_adapters_in_high_precision_over_fp8_layers(first: str):
    model = apply_recipe(llama()) if first == "convert" else llama()
    model = get_peft_model(model, LoraConfig(**LORA))
    if first == "peft":
        apply_recipe(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    found = losses(model, AdamW(trainable(model), lr=1e-2))
    adapters = {
        type(module) for name, module in model.named_modules() if "lora_" in name and isinstance(module, nn.Linear)
    }
    layers = [module for name, module in model.named_modules() if name.endswith("base_layer")]
    assert found[-1] < found[0] - 0.1
    assert adapters == {nn.Linear}
    assert {type(layer) for layer in layers} == {Linear}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name in before)


def test_weights_below_adapters_are_quantized_once(monkeypatch: pytest.MonkeyPatch):
    calls = []
    quantize_once = fused_quantize._quantize_one_layout
    monkeypatch.setattr(
        fused_quantize, "_quantize_one_layout", lambda w, fmt: calls.append(w.shape) or quantize_once(w, fmt)
    )
    model = get_peft_model(apply_recipe(llama()), LoraConfig(**LORA))
    model.enable_input_require_grads()
    losses(model, AdamW(trainable(model), lr=1e-2))
    assert len(calls) == sum(isinstance(module, Linear) for module in model.modules())


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits.detach()


def test_merged_adapters_count_although_the_weight_was_quantized_before():
    model = get_peft_model(apply_recipe(llama()), LoraConfig(**LORA))
    model.enable_input_require_grads()
    expected = logits(model)  # with gradients, so that the weights below the adapters are cached
    model.merge_adapter()
    assert (logits(model) - expected).norm() <= 0.1 * expected.norm()


def test_adapters_that_are_taken_out_again_count():
    model = get_peft_model(apply_recipe(llama()), LoraConfig(**LORA))
    model.enable_input_require_grads()
    expected = logits(model)
    model.merge_adapter()
    logits(model)
    model.unmerge_adapter()
    assert (logits(model) - expected).norm() <= 1e-3 * expected.norm()  # (w + d) − d is rounded


@pytest.mark.slow
def test_adapters_are_saved_loaded_and_merged(tmp_path: Path):
    model = get_peft_model(apply_recipe(llama()), LoraConfig(**LORA))
    losses(model, AdamW(trainable(model), lr=1e-2))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(apply_recipe(llama()), tmp_path)
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
        assert torch.equal(again(input_ids=TOKENS).logits, expected)
        merged = again.merge_and_unload()
        assert {type(m) for name, m in merged.named_modules() if name.endswith("q_proj")} == {Linear}
        difference = merged(input_ids=TOKENS).logits - expected  # the correction is quantized with the weight now
    assert difference.norm() <= 0.1 * expected.norm()


def needs(package: str):
    """Return a package that is in the extra `trainers`, or skip."""
    return pytest.importorskip(package, reason="octile[trainers] is not installed")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 128))


def rows() -> torch.Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.exhaustive
def test_weights_that_torchao_quantizes_after_octile_are_refused():
    quantization = needs("torchao.quantization")
    model = apply_recipe(layers())
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    message = (
        r"^a weight of shape \(256, 128\) is torchao's Int8Tensor, but octile's layers quantize weights themselves: "
    )
    with pytest.raises(TypeError, match=message):
        model(rows())


@pytest.mark.exhaustive
def test_layers_that_torchao_has_quantized_are_left_out():
    quantization = needs("torchao.quantization")
    model = layers()
    quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
    convert(model)
    assert type(model[0]) is nn.Linear
    assert "skipped 1: 1 × quantized by torchao (Int8Tensor)" in model.conversion_summary
    assert model(rows()).isfinite().all()


@pytest.mark.exhaustive
def test_accelerates_fp8_replaces_converted_layers_but_the_first_and_the_last():
    replaced = needs("torchao.float8.float8_linear").Float8Linear
    AcceleratorState._reset_state(reset_partial_state=True)  # of the tests before
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model = accelerator.prepare(apply_recipe(layers()))
    assert [type(module) for module in model if isinstance(module, nn.Linear)] == [Linear, replaced, Linear]


@pytest.mark.exhaustive
def test_an_8_bit_optimizer_of_bitsandbytes_trains_a_converted_model():
    optim = needs("bitsandbytes.optim")
    model = apply_recipe(llama())
    found = losses(model, optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=1))
    assert found[-1] < found[0] - 0.1


@pytest.mark.exhaustive
def test_4_bit_layers_of_bitsandbytes_are_left_out():
    bnb = needs("bitsandbytes.nn")
    model = layers()
    model[0] = bnb.Linear4bit(128, 256, compute_dtype=torch.float32)
    convert(model.to("cpu"))  # which quantizes
    assert "skipped 1: 1 × Linear4bit (a subclass of nn.Linear)" in model.conversion_summary
    assert model(rows()).isfinite().all()


@pytest.mark.exhaustive
def test_lightning_trains_as_a_loop_does(tmp_path: Path):
    lightning = needs("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = apply_recipe(layers()), []

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = self.model(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> AdamW:
            return AdamW(self.parameters(), lr=1e-2)

    module, alone = Module(), Module()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows()), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, batches)
    optimizer = alone.configure_optimizers()
    for batch in [*batches, *batches]:
        alone.training_step(batch)
        optimizer.zero_grad()
        alone.model(batch[0]).square().mean().backward()
        optimizer.step()
    assert module.losses == alone.losses
