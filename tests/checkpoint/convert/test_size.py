import json

import pytest

from octile.checkpoint import convert_checkpoint, predict_size, save
from octile.checkpoint.shards import Shards
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3


def test_deepseek_v3_has_about_700_gb_in_fp8():
    prediction = predict_size(ModelConfig.v3_671b(), "fp8")
    assert prediction.nbytes == pytest.approx(688.6e9, rel=1e-3)  # total_size of the published weights
    assert prediction.share.parameters == pytest.approx(684.5e9, rel=1e-3)  # 671B, the MTP layer, its copies
    assert prediction.share.of_parameters > 0.99


@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_the_prediction_is_what_save_writes(tmp_path, to):
    config = ModelConfig.tiny()
    save(DeepseekV3(config), tmp_path / "model", weights=to)
    assert predict_size(config, to).nbytes == Shards(tmp_path / "model").nbytes


def test_a_bare_configuration_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.tiny().to_hf()))
    predictions = {predict_size(path).nbytes for path in (tmp_path, tmp_path / "config.json", ModelConfig.tiny())}
    assert len(predictions) == 1


def test_weights_of_any_model_are_measured_by_their_headers(tmp_path, hf_folder, moe_tensors, moe_config):
    folder = hf_folder(tmp_path / "src", moe_config | {"model_type": "other"}, moe_tensors)
    prediction = predict_size(folder, "fp8")
    report = convert_checkpoint(folder, tmp_path / "dst", "fp8")
    assert (prediction.nbytes, prediction.share) == (report.bytes_after, report.share)


def test_a_missing_configuration_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'config.json'} does not exist"):
        predict_size(tmp_path)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="to must be 'fp8', 'bf16' or 'float32', not 'int4'"):
        predict_size(ModelConfig.tiny(), "int4")
