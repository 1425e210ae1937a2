"""Shared by the tests of a peer: a stand-in for vLLM, and a folder that octile serves."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octile.bench.serve.peer.random_folder import write_random_folder
from octile.bench.serve.peer.vllm import Vllm
from tests.train.conftest import MICRO

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture
def vllm(monkeypatch) -> Vllm:
    """The stand-in, which the interpreter of the tests imports in other processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), *sys.path]))
    return Vllm(Path(sys.executable), "0.0")


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory) -> Path:
    """A folder of a miniature model in FP8."""
    folder = tmp_path_factory.mktemp("models") / "micro"
    write_random_folder(folder, replace(MICRO, num_nextn_predict_layers=0), "fp8")
    return folder
