"""Tests of the model on the meta device."""

from dataclasses import replace

import pytest
import torch

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model

TINY = ModelConfig.tiny()


@pytest.mark.parametrize("predicts", [0, 1])
def test_its_tensors_are_those_of_the_model_without_values(predicts):
    config = replace(TINY, num_nextn_predict_layers=predicts)

    def forms(model):
        tensors = model.state_dict(keep_vars=True)
        return {name: (type(t), t.shape, t.dtype, t.requires_grad) for name, t in tensors.items()}

    model = meta_model(config)
    assert forms(model) == forms(DeepseekV3(config))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_initialization_afterwards_draws_again():
    meta_model(TINY)
    assert torch.zeros(8).normal_().count_nonzero() == 8
