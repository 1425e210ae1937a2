"""Shared by the tests of serving: a tokenizer of a few hundred tokens, and the folder of a model."""

import argparse
import inspect
from pathlib import Path

import pytest
import torch

from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.tokenizer import Tokenizer
from tests.train.conftest import MICRO


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(argparse)], MICRO.vocab_size)


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory) -> Path:
    """The folder of a model that is not trained, as `octile serve` reads it."""
    folder = tmp_path_factory.mktemp("served") / "micro"
    torch.manual_seed(0)
    save(DeepseekV3(MICRO), folder, weights="fp8")
    tokenizer.save(folder)
    return folder
