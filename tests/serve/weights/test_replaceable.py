"""Weights of a folder that others replace in place: with what, and where the tensors are."""

from pathlib import Path

import pytest
import torch

import octile
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.engine.engine import Engine
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.block_weights import tensors_of
from octile.serve.weights.replaceable import ReplaceableWeights
from octile.serve.weights.source import FolderSource
from octile.tokenizer import Tokenizer
from tests.serve.models import CONFIG, Texts, text

CPU = torch.device("cpu")


def saved(folder: Path, seed: int, weights: str) -> FolderSource:
    torch.manual_seed(seed)
    octile.save(DeepseekV3(CONFIG), folder, weights=weights)  # type: ignore[arg-type]
    return FolderSource(str(folder))


def logits_of(weights: ReplaceableWeights) -> torch.Tensor:
    return Texts(ModelRunner(weights, 16, n_drafts=1), [text(40)]).draft(39)


@pytest.mark.one_case
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_all_parts_are_replaced_where_they_are(tmp_path, weights):
    old, new = (saved(tmp_path / f"{seed}", seed, weights) for seed in range(2))
    served, expected = (ReplaceableWeights(source.path, torch.float32, CPU, drafts=True) for source in (old, new))
    addresses = [t.data_ptr() for t in tensors_of(served.weights.parts)]
    assert not torch.equal(logits_of(served), logits_of(expected))
    served.new = served.open(new)
    served.check()
    served.update()
    assert torch.equal(logits_of(served), logits_of(expected))
    assert [t.data_ptr() for t in tensors_of(served.weights.parts)] == addresses
    assert served.new is None


def test_the_prediction_layer_is_not_read_where_nothing_is_drafted(tmp_path):
    old, new = (saved(tmp_path / f"{seed}", seed, "fp8") for seed in range(2))
    served = ReplaceableWeights(old.path, torch.float32, CPU, drafts=False)
    served.new = served.open(new)
    served.update()
    assert served.weights.mtp is None
    assert torch.equal(
        served.weights.embedding, ReplaceableWeights(new.path, torch.float32, CPU, False).weights.embedding
    )


def test_weights_in_fp32_replace_those_of_a_bf16_folder_and_none_of_an_fp8_folder(tmp_path):
    folders = {weights: saved(tmp_path / weights, 0, weights) for weights in ("bf16", "float32", "fp8")}
    served = ReplaceableWeights(folders["bf16"].path, torch.float32, CPU, drafts=True)
    assert served.open(folders["float32"]).nbytes > 1.9 * served.open(folders["bf16"]).nbytes
    with pytest.raises(ValueError, match="must have weights without FP8, as the served ones, not of the recipe"):
        served.open(folders["fp8"])
    served = ReplaceableWeights(folders["fp8"].path, torch.float32, CPU, drafts=True)
    with pytest.raises(ValueError, match=r"must have weights of the recipe 'deepseek_v3' .* not without FP8"):
        served.open(folders["float32"])


def test_an_update_without_new_weights_is_refused(tmp_path, tokenizer):
    source = saved(tmp_path / "model", 0, "fp8")
    runner = ModelRunner(ReplaceableWeights(source.path, torch.float32, CPU, drafts=False), 16)
    with pytest.raises(ValueError, match=r"^weights must be given by ReplaceableWeights\.new before they are updated$"):
        Engine(runner, tokenizer).update_weights()


def test_one_weight_in_another_format_is_refused(tmp_path):
    served = ReplaceableWeights(saved(tmp_path / "old", 0, "fp8").path, torch.float32, CPU, drafts=True)
    folder = saved(tmp_path / "new", 1, "fp8")
    name = "model.layers.0.mlp.down_proj.weight"
    served._is_fp8[name] = False
    with pytest.raises(ValueError, match=rf"^{name} in .* must be F32 or BF16 or F16, as the served one, not F8_E4M3$"):
        served.open(folder)


def test_a_folder_with_another_tokenizer_is_refused(tmp_path, tokenizer):
    old, same, other, without = (saved(tmp_path / name, 0, "bf16") for name in ("old", "same", "other", "without"))
    for source in (old, same):
        tokenizer.save(source.path)
    Tokenizer.train(["other texts"], 270).save(other.path)
    served = ReplaceableWeights(old.path, torch.float32, CPU, drafts=True)
    for source in (same, without):
        served.open(source)
    with pytest.raises(ValueError, match="other must have the tokenizer of the model that is served"):
        served.open(other)
