"""The table of architectures is that of its record, and the record is what octile does."""

import importlib.metadata
import json

import pytest
import torch
from torch import nn

from octile.checkpoint.convert.engines import LOADER_WARNINGS
from tools.architectures.loading import what_is_left
from tools.write_architectures import PAGE, RECORD, differences, table, with_table

RECORDED = json.loads(RECORD.read_text("utf-8"))


def test_the_page_has_the_table_of_the_record():
    page = PAGE.read_text("utf-8")
    assert with_table(page, RECORDED) == page


def test_engines_have_loaded_every_folder_as_it_is_now():
    assert "not run" not in table(RECORDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "qwen3" else pytest.param(n, marks=pytest.mark.exhaustive) for n in RECORDED["models"]]
)
def test_the_record_is_what_octile_and_transformers_do(name, tmp_path):
    from tools.architectures.models import examine, write_folders

    write_folders(name, tmp_path)
    found, recorded = examine(name, tmp_path), dict(RECORDED["models"][name])
    if importlib.metadata.version("transformers") != RECORDED["transformers"]:  # which may have named weights anew
        del found["digest"], recorded["digest"]
    assert found == recorded, "write the record anew: python -m tools.write_architectures --run FOLDER --engines"


def test_octile_convert_warns_of_the_models_that_engines_load_otherwise_in_fp8():
    loaded = [
        (RECORDED["models"][name]["model_type"], any(differences(found)))
        for engine in ("vllm", "sglang")
        for name, found in RECORDED[engine]["models"].items()
        if "error" not in found["bf16"]
    ]
    assert {kind for kind, differs in loaded if differs} == LOADER_WARNINGS.keys()


class Loader(nn.Linear):
    """An engine's model that loads the tensors with the names of its parameters, and ignores others."""

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                parameters[name].data.copy_(tensor)


def test_what_a_loader_leaves_is_found():
    tensors = {"weight": torch.ones(2, 3), "layers.0.weight_scale_inv": torch.ones(1)}
    found = what_is_left(Loader(3, 2), tensors)
    assert found == {"class": "Loader", "unset": ["bias"], "unread": ["layers.*.weight_scale_inv"]}


def test_what_is_left_in_bf16_too_is_no_difference():
    left = {"class": "Loader", "unset": ["bias"], "unread": []}
    assert not list(differences({"bf16": left, "fp8": left}))
    assert list(differences({"bf16": left, "fp8": {**left, "unset": ["bias", "scale"]}})) == [
        "`scale` is left unset, without an error"
    ]
